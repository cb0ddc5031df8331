"""Weights held only in 8 bits train like weights that are quantised beside their values."""

from __future__ import annotations

import numpy as np
import pytest
from mt_testing import KillAt, RankDied

PRIMARY = "precision.primary_weights=true"
SEQUENCE_PARALLEL = "parallel.sequence_parallel=true"
COMMON = ["model.num_layers=2", "training.steps=3", "training.micro_batch_size=2"]
COMMON += ["evaluation.max_windows=4", "optimizer.warmup=1", "optimizer.schedule=constant"]
SIZES = ["model.hidden_size=64", "model.head_dim=32", "model.num_kv_heads=4"]
SIZES += ["training.sequence_length=64"]
# Blocks of 128 in each rank's part.
LARGE = ["model.hidden_size=256", "model.head_dim=64", "model.num_kv_heads=4"]
LARGE += ["model.ffn_size=256", "training.sequence_length=256"]
MIXTURE = "model.moe={{num_experts: 4, top_k: 2, ffn_size: {width}}}"
KEPT_EXPERT = "precision.keep=[layers.1.feed_forward.experts.up.3]"
# By name the processes and what is different.
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "tp2-sp": (2, ["parallel.tp=2", SEQUENCE_PARALLEL]),
    "pp2": (2, ["parallel.pp=2"]),
    "dualpipe": (2, ["parallel.pp=2", "pipeline.schedule=dualpipe"]),
    "cp2": (2, ["parallel.cp=2", "training.sequence_length=512"]),
    "dp2": (2, []),
    "optimizer": (2, ["data_parallel.strategy=optimizer"]),
    "optimizer_gradients": (2, ["data_parallel.strategy=optimizer_gradients"]),
    "full": (2, ["data_parallel.strategy=full"]),
    "full-recompute": (2, ["data_parallel.strategy=full", "training.recompute=full"]),
    "offload": (2, ["data_parallel.strategy=full", "data_parallel.offload=true"]),
    "muon": (2, ["data_parallel.strategy=optimizer_gradients", "optimizer.name=muon"]),
    "hybrid": (4, ["data_parallel.strategy=optimizer", "data_parallel.replicas=2"]),
    "tp2-sp-optimizer": (
        4,
        ["parallel.tp=2", SEQUENCE_PARALLEL, "data_parallel.strategy=optimizer"],
    ),
    "ep2-optimizer": (2, ["parallel.ep=2", MIXTURE, "data_parallel.strategy=optimizer"]),
    "edp2-full": (4, ["parallel.ep=2", MIXTURE, "data_parallel.strategy=full"]),
    "kept-expert": (2, [MIXTURE, KEPT_EXPERT, "data_parallel.strategy=optimizer"]),
    "tp2-etp2": (2, ["parallel.tp=2", SEQUENCE_PARALLEL, MIXTURE]),
}
RECIPES = ("tensorwise", "delayed", "blockwise")
IN_CI = {
    ("tensorwise", "tp2-sp-optimizer"),
    ("delayed", "full"),
}
GRID = [
    pytest.param(recipe, layout, marks=() if (recipe, layout) in IN_CI else pytest.mark.campaign)
    for recipe in RECIPES
    for layout in LAYOUTS
]


def options(recipe: str, layout: str) -> tuple[int, list[str]]:
    nproc, overrides = LAYOUTS[layout]
    sizes, width = (LARGE, 256) if recipe == "blockwise" else (SIZES, 64)
    own = [each.format(width=width) if each == MIXTURE else each for each in overrides]
    return nproc, [*sizes, *COMMON, f"precision.recipe={recipe}", *own]


@pytest.mark.parametrize(("recipe", "layout"), GRID)
def test_a_run_is_that_of_weights_with_values(
    recipe, layout, tiny, tmp_path, losses, held_out, arrays
) -> None:
    nproc, given = options(recipe, layout)
    primary, values = (
        tiny.train(tmp_path / name, *given, "training.dtype=fp64", *more, nproc=nproc)
        for name, more in (("primary", [PRIMARY]), ("values", []))
    )
    found = np.array([*losses(primary).values(), held_out(primary)])
    np.testing.assert_allclose(found, [*losses(values).values(), held_out(values)], rtol=1e-12)
    found, expected = (arrays(each, 3, prefix="") for each in (primary, values))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-14, err_msg=name)


@pytest.mark.parametrize(
    ("recipe", "saved", "resumed"),
    [
        ("delayed", "optimizer", "optimizer"),
        pytest.param("delayed", "full", "full", marks=pytest.mark.campaign),
        pytest.param("tensorwise", "tp2-sp", "tp2-sp", marks=pytest.mark.campaign),
        pytest.param("blockwise", "ep2-optimizer", "ep2-optimizer", marks=pytest.mark.campaign),
    ],
)
def test_a_killed_run_goes_on_with_the_bits_of_one_that_was_not_disturbed(
    recipe, saved, resumed, tiny, tmp_path, losses, arrays
) -> None:
    nproc, given = options(recipe, saved)
    given += [PRIMARY, "training.dtype=bf16", "checkpoint.every=2", "training.steps=4"]
    whole = tiny.train(tmp_path / "whole", *given, nproc=nproc)
    kill = KillAt("train.update", rank=nproc - 1, nth=4)
    with pytest.raises(RankDied, match=f"rank {nproc - 1}"):
        tiny.train(tmp_path / "run", *given, nproc=nproc, on_event=kill)
    run = tiny.train(tmp_path / "run", *given, nproc=nproc)
    assert losses(run) == losses(whole)
    found, expected = (arrays(each, 4, prefix="") for each in (run, whole))
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ("optimizer_gradients", "one"),
        pytest.param("one", "full", marks=pytest.mark.campaign),
        pytest.param("tp2-sp-optimizer", "pp2", marks=pytest.mark.campaign),
    ],
)
def test_a_checkpoint_goes_on_with_values_or_codes_on_any_layout(
    saved, resumed, tiny, tmp_path, losses
) -> None:
    more = ["training.dtype=fp64", "checkpoint.every=2", "training.steps=4"]
    nproc, given = options("delayed", saved)
    first = tiny.train(tmp_path / "first", *given, *more, PRIMARY, nproc=nproc)
    load = f"checkpoint.load={first / 'checkpoints' / 'step_00000002'}"
    nproc, given = options("delayed", resumed)
    for name, own in (("values", []), ("codes", [PRIMARY])):
        run = tiny.train(tmp_path / name, *given, *more, load, *own, nproc=nproc)
        expected = losses(first)
        assert losses(run) == pytest.approx({step: expected[step] for step in (3, 4)}, rel=1e-10)
