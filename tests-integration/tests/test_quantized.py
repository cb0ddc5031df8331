"""Recipes of mt-fp8 in whole runs: the layout changes no code, and a run resumes bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

SEQUENCE_PARALLEL = "parallel.sequence_parallel=true"
# Blocks of 32 in each rank's part of the model and of the sequence; of 128 for blockwise.
SIZES = ["model.hidden_size=64", "model.head_dim=32", "model.num_kv_heads=4"]
SIZES += ["model.num_layers=2", "training.sequence_length=64", "training.micro_batch_size=2"]
LARGE = ["model.hidden_size=256", "model.head_dim=64", "model.num_kv_heads=4"]
LARGE += ["model.ffn_size=256", "model.num_layers=2", "training.sequence_length=256"]
LARGE += ["training.micro_batch_size=2"]
COMMON = ["training.steps=3", "evaluation.max_windows=4", "optimizer.warmup=1"]
# By name the processes and what is different.
LAYOUTS = {
    "tp2-sp": (2, ["parallel.tp=2", SEQUENCE_PARALLEL]),
    "tp2": (2, ["parallel.tp=2"]),
    "pp2": (2, ["parallel.pp=2"]),
    "cp2": (2, ["parallel.cp=2", "training.sequence_length=128"]),
    "dp2": (2, []),
    "optimizer": (2, ["data_parallel.strategy=optimizer"]),
    "optimizer_gradients": (2, ["data_parallel.strategy=optimizer_gradients"]),
    "full": (2, ["data_parallel.strategy=full"]),
    "recompute-full": (1, ["training.recompute=full"]),
    "recompute-selective": (1, ["training.recompute=selective"]),
    "zb-v": (2, ["parallel.pp=2", "pipeline.schedule=zb-v", "model.num_layers=4"]),
    "dualpipe": (2, ["parallel.pp=2", "pipeline.schedule=dualpipe"]),
    "tp2-sp-pp2-recompute": (
        4,
        ["parallel.tp=2", "parallel.pp=2", SEQUENCE_PARALLEL, "training.recompute=full"],
    ),
    "tp2-sp-optimizer": (
        4,
        ["parallel.tp=2", SEQUENCE_PARALLEL, "data_parallel.strategy=optimizer"],
    ),
}
# By dtype, of losses, relative: in fp64 a code that differs would tell; where the order of a sum
# rounds otherwise, a code now and then becomes the next one. As published in docs/mt-train.md.
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-3, "bf16": 5e-3}
RECIPES = ("tensorwise", "rowwise", "delayed", "mxfp8", "blockwise", "nvfp4")
IN_CI = {
    ("tensorwise", "tp2-sp", "fp64"),
    ("rowwise", "tp2-sp-pp2-recompute", "fp64"),
    ("rowwise", "cp2", "fp64"),
    ("delayed", "tp2-sp-optimizer", "fp64"),
    ("delayed", "dualpipe", "fp64"),
    ("delayed", "tp2", "bf16"),
    ("mxfp8", "tp2-sp", "fp64"),
    ("mxfp8", "full", "fp64"),
    ("mxfp8", "recompute-selective", "fp32"),
}


def options(recipe: str, dtype: str, *more: str) -> tuple[str, ...]:
    sizes = LARGE if recipe == "blockwise" else SIZES
    return (*sizes, *COMMON, f"precision.recipe={recipe}", f"training.dtype={dtype}", *more)


@pytest.fixture(scope="module")
def reference(tiny, tmp_path_factory):
    """One process with the same recipe, and the same micro-batches."""
    made: dict[tuple[str, ...], Path] = {}

    def get(*given: str) -> Path:
        if given not in made:
            made[given] = tiny.train(tmp_path_factory.mktemp("one"), *given)
        return made[given]

    return get


@pytest.mark.parametrize(
    ("recipe", "layout", "dtype"),
    [
        pytest.param(*row, id="-".join(row), marks=() if row in IN_CI else pytest.mark.campaign)
        for row in [(r, name, d) for r in RECIPES for name in LAYOUTS for d in TOLERANCE]
    ],
)
def test_every_layout_trains_like_one_process_with_the_same_recipe(
    recipe, layout, dtype, tiny, reference, tmp_path, losses, held_out
) -> None:
    nproc, overrides = LAYOUTS[layout]
    if recipe == "blockwise" and layout == "cp2":
        overrides = ["parallel.cp=2", "training.sequence_length=512"]
    sizes = [x for x in overrides if x.startswith(("model.", "training.sequence"))]
    run = tiny.train(tmp_path, *options(recipe, dtype, *overrides), nproc=nproc)
    one = reference(*options(recipe, dtype, *sizes))
    # Random rounding has bits of its own on each rank.
    rtol = 2e-2 if recipe == "nvfp4" else TOLERANCE[dtype]
    ours, theirs = losses(run), losses(one)
    assert list(ours) == list(theirs) == [1, 2, 3]
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=rtol)
    np.testing.assert_allclose(held_out(run), held_out(one), rtol=rtol)


def test_a_recipe_is_no_name_alone(tiny, reference, tmp_path, losses) -> None:
    plain = tiny.train(tmp_path, *SIZES, *COMMON, "training.dtype=fp64")
    for recipe in ("delayed", "mxfp8"):
        quantised = losses(reference(*options(recipe, "fp64")))
        assert quantised[1] != losses(plain)[1]
        np.testing.assert_allclose(quantised[3], losses(plain)[3], rtol=2e-2)


@pytest.mark.parametrize(
    ("nproc", "overrides"),
    [
        (2, ["parallel.tp=2", SEQUENCE_PARALLEL]),
        pytest.param(2, ["parallel.pp=2"], marks=pytest.mark.campaign),
        pytest.param(2, ["data_parallel.strategy=optimizer"], marks=pytest.mark.campaign),
        pytest.param(2, ["data_parallel.strategy=full"], marks=pytest.mark.campaign),
        pytest.param(
            2, ["parallel.pp=2", "pipeline.schedule=dualpipe"], marks=pytest.mark.campaign
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else str(value),
)
def test_delayed_scaling_resumes_bit_for_bit_and_on_another_layout(
    nproc, overrides, tiny, tmp_path, losses, arrays
) -> None:
    delayed = ["precision.history=3", "precision.largest=max", "optimizer.schedule=constant"]
    given = options("delayed", "fp64", *delayed, "checkpoint.every=2")
    whole = tiny.train(tmp_path / "whole", *given, *overrides, nproc=nproc)
    saved = whole / "checkpoints" / "step_00000002"
    state = arrays(whole, 2, "scaling/")
    assert state["scaling/layers.0.mixer.qkv.history"].shape == (3, 3)
    assert len(state) == 2 * 4 * 2  # of each of the linear layers
    same = tiny.train(
        tmp_path / "same", *given, *overrides, f"checkpoint.load={saved}", nproc=nproc
    )
    expected = losses(whole)
    assert losses(same) == {3: expected[3]}
    for name, value in arrays(same, 3, "scaling/").items():
        np.testing.assert_array_equal(value, arrays(whole, 3, "scaling/")[name], err_msg=name)
    other = tiny.train(tmp_path / "other", *given, f"checkpoint.load={saved}")
    np.testing.assert_allclose(losses(other)[3], expected[3], rtol=1e-10)


def test_a_run_takes_up_a_recipe_and_leaves_it(tiny, tmp_path, losses) -> None:
    plain = [*SIZES, *COMMON, "training.dtype=fp32", "optimizer.schedule=constant"]
    first = tiny.train(tmp_path / "first", *plain, "training.steps=1")
    load = f"checkpoint.load={first}"
    second = tiny.train(
        tmp_path / "second", *plain, load, "precision.recipe=delayed", "training.steps=2"
    )
    load = f"checkpoint.load={second}"
    longer = ["precision.recipe=delayed", "precision.history=8", "training.steps=3"]
    third = tiny.train(tmp_path / "third", *plain, load, *longer)
    longer = ["training.steps=4", f"checkpoint.load={third}"]
    fourth = tiny.train(tmp_path / "fourth", *plain, *longer)
    assert [list(losses(run)) for run in (second, third, fourth)] == [[2], [3], [4]]
