"""Recipes of mt-fp8 in whole runs: the layout changes no code, and a run resumes bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from mt_testing import KillAt, RankDied

SEQUENCE_PARALLEL = "parallel.sequence_parallel=true"
# Blocks of 32 in each rank's part of the model and of the sequence; of 128 for blockwise.
SIZES = ["model.hidden_size=64", "model.head_dim=32", "model.num_kv_heads=4"]
SIZES += ["model.num_layers=2", "training.sequence_length=64", "training.micro_batch_size=2"]
LARGE = ["model.hidden_size=256", "model.head_dim=64", "model.num_kv_heads=4"]
LARGE += ["model.ffn_size=256", "model.num_layers=2", "training.sequence_length=256"]
LARGE += ["training.micro_batch_size=2"]
COMMON = ["training.steps=3", "evaluation.max_windows=4", "optimizer.warmup=1"]
# By name the processes and what is different.
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
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
# Of mixtures, likewise, and the sequences of a micro-batch of one process that is the same: experts
# multiply at once what ranks of dp send them, and then other layers are kept, as they do not.
KEEP = "precision.keep=[layers.*.mixer.*]"
ONE = "training.micro_batch_size=1"
MIXTURES: dict[str, tuple[int, list[str], int]] = {
    "ep2": (2, ["parallel.ep=2", KEEP, ONE], 2),
    "ep2-edp2": (4, ["parallel.ep=2", KEEP, ONE], 2),
    "ep2-pp2": (4, ["parallel.pp=2", "parallel.ep=2", KEEP, ONE], 2),
    "ep2-optimizer": (2, ["parallel.ep=2", "data_parallel.strategy=optimizer", KEEP, ONE], 2),
    "ep2-recompute": (2, ["parallel.ep=2", "training.recompute=full", KEEP, ONE], 2),
    "ep2-zb-v": (4, ["parallel.pp=2", "parallel.ep=2", "pipeline.schedule=zb-v", KEEP, ONE], 2),
    "ep4-tp2": (4, ["parallel.tp=2", "parallel.ep=4", SEQUENCE_PARALLEL, KEEP, ONE], 2),
    "tp2-ep2": (2, ["parallel.tp=2", "parallel.ep=2", SEQUENCE_PARALLEL, ONE], 1),
    "tp2-ep2-dp2": (4, ["parallel.tp=2", "parallel.ep=2", SEQUENCE_PARALLEL, ONE], 1),
    "tp2-etp2": (2, ["parallel.tp=2", SEQUENCE_PARALLEL, ONE], 1),
    "tp2-ep2-etp2": (4, ["parallel.tp=2", "parallel.ep=2", "parallel.etp=2", KEEP, ONE], 2),
}
MIXTURES_IN_CI = {
    ("delayed", "ep2-pp2"),
    ("nvfp4", "ep2-optimizer"),
}
# By dtype, of losses, relative: in fp64 a code that differs would tell; where the order of a sum
# rounds otherwise, a code now and then becomes the next one. As published in docs/mt-fp8.md.
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-3, "bf16": 5e-3}
RECIPES = ("tensorwise", "rowwise", "delayed", "mxfp8", "blockwise", "nvfp4")
IN_CI = {
    ("tensorwise", "tp2-sp", "fp64"),
    ("delayed", "dualpipe", "fp64"),
    ("mxfp8", "full", "fp64"),
}


def rows(chosen: set[tuple[str, ...]], *columns: Sequence[str]) -> list:
    """Return a whole grid, with campaign marks on all rows except the chosen ones."""
    grid = list(itertools.product(*columns))
    assert chosen <= set(grid)
    marks = [() if row in chosen else pytest.mark.campaign for row in grid]
    return [
        pytest.param(*row, id="-".join(row), marks=mark)
        for row, mark in zip(grid, marks, strict=True)
    ]


def allowed(recipe: str, layout: str, dtype: str) -> float:
    """Return the largest relative difference from one process, as docs/mt-fp8.md has it."""
    if layout.startswith("recompute"):
        return 0
    # Random rounding has bits of its own for each part of a tensor, and for each direction.
    is_cut = layout.startswith(("tp", "cp", "dualpipe"))
    return 5e-3 if recipe == "nvfp4" and is_cut else TOLERANCE[dtype]


def layout_of(name: str, recipe: str) -> tuple[int, list[str]]:
    """Return the number of processes and the overrides; parts of a sequence have whole blocks."""
    nproc, overrides = LAYOUTS[name]
    if recipe == "blockwise" and name == "cp2":
        return nproc, ["parallel.cp=2", "training.sequence_length=512"]
    return nproc, overrides


def options(recipe: str, dtype: str, *more: str) -> tuple[str, ...]:
    sizes = LARGE if recipe == "blockwise" else SIZES
    return (*sizes, *COMMON, f"precision.recipe={recipe}", f"training.dtype={dtype}", *more)


def mixture(recipe: str, layout: str) -> tuple[int, list[str], list[str]]:
    """Return the number of processes, the options of the run, and those of one process."""
    nproc, overrides, size = MIXTURES[layout]
    width, layers = 256 if recipe == "blockwise" else 64, 4 if "zb-v" in layout else 2
    model = [f"model.moe={{num_experts: 4, top_k: 2, ffn_size: {width}}}", "model.qk_norm=none"]
    model.append(f"model.num_layers={layers}")
    one = [x for x in overrides if x == KEEP] + [f"training.micro_batch_size={size}"]
    return nproc, [*model, *overrides], [*model, *one]


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
    rows(IN_CI, RECIPES, [name for name in LAYOUTS if name != "one"], list(TOLERANCE)),
)
def test_every_layout_trains_like_one_process_with_the_same_recipe(
    recipe, layout, dtype, tiny, reference, tmp_path, losses, held_out, record_property
) -> None:
    nproc, overrides = layout_of(layout, recipe)
    sizes = [x for x in overrides if x.startswith(("model.", "training.sequence"))]
    run = tiny.train(tmp_path, *options(recipe, dtype, *overrides), nproc=nproc)
    one = reference(*options(recipe, dtype, *sizes))
    ours, theirs = losses(run), losses(one)
    assert list(ours) == list(theirs) == [1, 2, 3]
    found, expected = ([*each.values()] for each in (ours, theirs))
    pairs = zip([*found, held_out(run)], [*expected, held_out(one)], strict=True)
    difference = max(abs(a - b) / b for a, b in pairs)
    record_property("difference", difference)
    assert difference <= allowed(recipe, layout, dtype)


@pytest.mark.parametrize(("recipe", "layout"), rows(MIXTURES_IN_CI, RECIPES, list(MIXTURES)))
def test_every_layout_trains_experts_like_one_process_with_the_same_recipe(
    recipe, layout, tiny, reference, tmp_path, losses, held_out, record_property
) -> None:
    nproc, own, other = mixture(recipe, layout)
    run = tiny.train(tmp_path, *options(recipe, "fp64", *own), nproc=nproc)
    one = reference(*options(recipe, "fp64", *other))
    pairs = zip(
        [*losses(run).values(), held_out(run)], [*losses(one).values(), held_out(one)], strict=True
    )
    difference = max(abs(a - b) / b for a, b in pairs)
    record_property("difference", difference)
    assert difference <= (5e-3 if recipe == "nvfp4" and "tp2" in layout else 1e-10)


def test_experts_are_quantised_or_kept_by_name(tiny, tmp_path, losses) -> None:
    common = [*SIZES, *COMMON, *mixture("tensorwise", "tp2-ep2")[2], "training.dtype=fp64"]
    keeps = ["layers.*.mixer.*", "layers.0.*", "layers.1.feed_forward.experts.up"]
    one_more = [*keeps, "layers.1.feed_forward.experts.down.3"]
    first = {losses(tiny.train(tmp_path / "plain", *common, "training.steps=1"))[1]}
    for index, keep in enumerate((keeps, one_more)):
        given = ["precision.recipe=tensorwise", f"precision.keep=[{', '.join(keep)}]"]
        run = tiny.train(tmp_path / str(index), *common, "training.steps=1", *given)
        first.add(losses(run)[1])
    assert len(first) == 3
    assert max(first) == pytest.approx(min(first), rel=1e-2)


def test_a_recipe_is_no_name_alone(tiny, reference, tmp_path, losses) -> None:
    plain = tiny.train(tmp_path, *SIZES, *COMMON, "training.dtype=fp64")
    for recipe in ("delayed", "mxfp8"):
        quantised = losses(reference(*options(recipe, "fp64")))
        assert quantised[1] != losses(plain)[1]
        np.testing.assert_allclose(quantised[3], losses(plain)[3], rtol=2e-2)


@pytest.mark.parametrize(
    ("recipe", "layout", "how"),
    rows(
        {("delayed", "ep2", "killed")},
        RECIPES,
        [
            *("tp2-sp", "pp2", "zb-v", "dualpipe", "cp2", "optimizer", "full", "tp2-sp-optimizer"),
            *("ep2", "tp2-ep2-dp2", "ep2-optimizer"),
        ],
        ["stopped", "killed"],
    ),
)
def test_a_run_goes_on_with_the_bits_of_one_that_was_not_disturbed(
    recipe, layout, how, tiny, tmp_path, losses, arrays
) -> None:
    of_experts = layout in MIXTURES
    nproc, overrides = mixture(recipe, layout)[:2] if of_experts else layout_of(layout, recipe)
    given = options(recipe, "bf16", *overrides, "optimizer.schedule=constant", "checkpoint.every=2")
    whole = tiny.train(tmp_path / "whole", *given, "training.steps=4", nproc=nproc)
    run = tmp_path / "run"
    if how == "killed":
        kill = KillAt("train.update", rank=nproc - 1, nth=4)
        with pytest.raises(RankDied, match=f"rank {nproc - 1}"):
            tiny.train(run, *given, "training.steps=4", nproc=nproc, on_event=kill)
    else:
        tiny.train(run, *given, "training.steps=2", nproc=nproc)
    assert not (run / "checkpoints" / "step_00000004").exists()
    tiny.train(run, *given, "training.steps=4", nproc=nproc)
    assert losses(run) == losses(whole)
    found, expected = (arrays(each, 4, prefix="") for each in (run, whole))
    assert found.keys() == expected.keys()
    assert any(name.startswith("scaling/") for name in found) == (recipe == "delayed")
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def assert_meant(state: Mapping[str, np.ndarray], before: Mapping[str, np.ndarray]) -> None:
    """Check the state after two steps of a history of three: what it says of the weights is true.

    `before` are the weights of the second step.
    """
    largest = np.array([448, 448, 57344], dtype=np.float32) / 2  # of input, weight, grad; margin 1
    layers = {name.removesuffix(".factor") for name in state if name.endswith(".factor")}
    assert len(layers) == 2 * 4
    for layer in layers:
        history, factor = state[f"{layer}.history"], state[f"{layer}.factor"]
        assert history.shape == (3, 3)
        np.testing.assert_array_equal(history[0], [-1, -1, -1])  # of the third step nothing
        weight = before[f"{layer.replace('scaling/', 'model/')}.weight"]
        assert history[2, 1] == np.float32(np.abs(weight).max())
        assert (history[1:] > 0).all()
        np.testing.assert_allclose(factor * history[1:].max(0), largest, rtol=1e-6)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    rows(
        {("pp2", "full")},
        ["one", "tp2-sp", "pp2", "full", "tp2-sp-optimizer"],
        ["one", "tp2-sp-pp2-recompute", "dualpipe", "optimizer", "full"],
    ),
)
def test_the_state_of_delayed_scaling_means_the_same_on_another_layout(
    saved, resumed, tiny, reference, tmp_path, losses, arrays
) -> None:
    delayed = ["precision.history=3", "precision.largest=max", "precision.margin=1"]
    given = options("delayed", "fp64", *delayed, "optimizer.schedule=constant")
    given = (*given, "checkpoint.every=1", "training.steps=4")
    nproc, overrides = LAYOUTS[saved]
    first = tiny.train(tmp_path / "saved", *given, *overrides, nproc=nproc)
    assert_meant(arrays(first, 2, "scaling/"), arrays(first, 1))
    nproc, overrides = LAYOUTS[resumed]
    load = f"checkpoint.load={first / 'checkpoints' / 'step_00000002'}"
    run = tiny.train(tmp_path / "resumed", *given, *overrides, load, nproc=nproc)
    one = reference(*given)
    expected = losses(one)
    assert list(losses(run)) == [3, 4]
    assert losses(run) == pytest.approx({step: expected[step] for step in (3, 4)}, rel=1e-10)
    for step in (3, 4):
        state, wanted = (arrays(each, step, "scaling/") for each in (run, one))
        assert state.keys() == wanted.keys()
        for name, value in state.items():
            np.testing.assert_allclose(value, wanted[name], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    rows(
        {("one", "ep2-pp2")},
        ["one", "ep2", "ep2-edp2"],
        ["one", "ep2-pp2", "ep4-tp2"],
    ),
)
def test_the_state_of_experts_is_under_their_numbers_on_every_layout(
    saved, resumed, tiny, reference, tmp_path, losses, arrays
) -> None:
    delayed = ["precision.history=3", "precision.largest=max", "optimizer.schedule=constant"]
    given = options("delayed", "fp64", *delayed, "checkpoint.every=1", "training.steps=4")

    def train(out: Path, layout: str, *more: str) -> Path:
        nproc, own, other = mixture("delayed", "ep2" if layout == "one" else layout)
        if layout == "one":
            return tiny.train(out, *given, *other, *more)
        return tiny.train(out, *given, *own, *more, nproc=nproc)

    first = train(tmp_path / "saved", saved)
    load = f"checkpoint.load={first / 'checkpoints' / 'step_00000002'}"
    run = train(tmp_path / "resumed", resumed, load)
    one = reference(*given, *mixture("delayed", "ep2")[2])
    assert list(losses(run)) == [3, 4]
    assert losses(run) == pytest.approx({step: losses(one)[step] for step in (3, 4)}, rel=1e-10)
    for step in (3, 4):
        state, wanted = (arrays(each, step, "scaling/") for each in (run, one))
        assert state.keys() == wanted.keys()
        assert len(state) == 2 * 2 * 2  # up and down of two layers
        for name, value in state.items():
            assert len(value) == 4
            np.testing.assert_allclose(value, wanted[name], rtol=1e-6, err_msg=name)


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
