"""Every layout with fused kernels against one process with plain ones, from one YAML."""

from __future__ import annotations

import random

import pytest
from test_parity import LAYOUTS, ROWS, SCHEDULES, SEQUENCE_PARALLEL, assert_same_run

FUSED = "model.kernels=fused"


def sampled(cases: list[tuple[str, object]], number: int) -> list[object]:
    """The rows as parameters of pytest: CI runs so many of them, by a fixed seed."""
    chosen = set(random.Random(3).sample(range(len(cases)), number))
    return [
        pytest.param(*row, id=name, marks=() if index in chosen else pytest.mark.campaign)
        for index, (name, *row) in enumerate(cases)
    ]


def named(*words: object) -> str:
    return "-".join(str(word) for word in words if word)


def choice(dtype: str, tied: bool) -> list[str]:
    return [f"training.dtype={dtype}", f"model.tied={str(tied).lower()}"]


def layout_cases() -> list[tuple[object, ...]]:
    """All rows of the grid of layouts: name, ranks, options, dtype, tied."""
    cases = []
    for layout, sequence_parallel in ROWS:
        nproc, dp, overrides = LAYOUTS[layout]
        more = [SEQUENCE_PARALLEL] if sequence_parallel else []
        for dtype in ("fp32", "fp64"):
            for tied in (True, False):
                for accumulation in (1, 4):
                    size = f"training.micro_batch_size={8 // dp // accumulation}"
                    head = "tied" if tied else "untied"
                    name = named(layout, "sp" if more else "", dtype, head, accumulation)
                    cases.append((name, nproc, [*overrides, *more, size], dtype, tied))
    return cases


def algorithm_cases() -> list[tuple[object, ...]]:
    cases = []
    for algorithm in ("all_gather", "ulysses", "hierarchical", "[ring,ulysses,hierarchical,ring]"):
        options = ["parallel.cp=4", "parallel.cp_inner=2", f"parallel.cp_algorithm={algorithm}"]
        for dtype in ("fp32", "fp64"):
            for tied in (True, False):
                name = named(algorithm, dtype, "tied" if tied else "untied")
                cases.append((name, 4, options, dtype, tied))
    return cases


def schedule_cases() -> list[tuple[object, ...]]:
    cases = []
    for index, (name, stages, microbatches, more) in enumerate(SCHEDULES):
        options = [f"training.micro_batch_size={8 // microbatches}", *more]
        options += [f"pipeline.schedule={name}", f"pipeline.stages={stages}"]
        options += [f"pipeline.microbatches={microbatches}"]
        for tied in (True, False):
            case = named(name, stages, "tied" if tied else "untied", index)
            cases.append((case, stages, options, "fp64", tied))
    return cases


def recomputation_cases() -> list[tuple[object, ...]]:
    size = "training.micro_batch_size=2"
    rows = [
        ("tp4", ["parallel.tp=4"]),
        ("tp4-sp", ["parallel.tp=4", SEQUENCE_PARALLEL]),
        ("zb-h1", ["parallel.tp=2", "parallel.pp=2", "pipeline.schedule=zb-h1", SEQUENCE_PARALLEL]),
        ("zb-v", ["parallel.tp=2", "parallel.pp=2", "pipeline.schedule=zb-v"]),
        ("cp2", ["parallel.tp=2", "parallel.cp=2"]),
    ]
    return [
        (
            named(name, recompute),
            4,
            [*options, size, f"training.recompute={recompute}"],
            "fp64",
            True,
        )
        for name, options in rows
        for recompute in ("none", "selective", "full")
    ]


# What changes the model is in the one process too.
MODELS = {
    "dropout": ["model.dropout=0.1"],
    "learned": ["model.positions=learned"],
    "plain": ["model.gated=false"],
    "table": [
        "model.positions=none",
        "model.score_bias={type: relative, buckets: 8, max_distance: 20}",
    ],
    "rope": [
        "model.rope={fraction: 0.5, scaling: {type: dynamic, factor: 2.0, original_length: 8}}"
    ],
    "layer-norm": ["model.norm=layer", "model.qk_norm=none"],
}
PLACES = {
    "cp2": (4, ["parallel.tp=2", "parallel.cp=2", SEQUENCE_PARALLEL]),
    "pp2": (4, ["parallel.tp=2", "parallel.pp=2", SEQUENCE_PARALLEL]),
    "zb-v": (2, ["parallel.pp=2", "pipeline.schedule=zb-v"]),
    "dualpipe-full": (
        2,
        ["parallel.pp=2", "pipeline.schedule=dualpipe", "training.recompute=full"],
    ),
    "optimizer": (4, ["parallel.pp=2", "data_parallel.strategy=optimizer"]),
    "gradients": (2, ["data_parallel.strategy=optimizer_gradients"]),
    "full": (2, ["data_parallel.strategy=full"]),
}
MODEL_CASES = [(named(model, place), model, place) for model in MODELS for place in PLACES]


@pytest.fixture(scope="module")
def alone(tiny, tmp_path_factory):
    """Runs of one process with plain kernels, the whole batch in one micro-batch."""
    made = {}

    def get(*options: str):
        if options not in made:
            plain = "model.kernels=reference"
            made[options] = tiny.train(tmp_path_factory.mktemp("alone"), plain, *options)
        return made[options]

    return get


@pytest.mark.parametrize(
    ("nproc", "options", "dtype", "tied"),
    [
        *sampled(layout_cases(), 1),
        *sampled(algorithm_cases(), 0),
        *sampled(schedule_cases(), 1),
        *sampled(recomputation_cases(), 0),
    ],
)
def test_every_layout_trains_with_fused_kernels_like_one_process_without(
    nproc, options, dtype, tied, tiny, alone, tmp_path, losses, held_out, arrays
) -> None:
    common = choice(dtype, tied)
    run = tiny.train(tmp_path, FUSED, *common, *options, nproc=nproc)
    assert_same_run(run, alone(*common), dtype, losses, held_out, arrays)


@pytest.mark.parametrize(("model", "place"), sampled(MODEL_CASES, 0))
def test_every_model_trains_with_fused_kernels_like_one_process_without(
    model, place, tiny, alone, tmp_path, losses, held_out, arrays
) -> None:
    nproc, options = PLACES[place]
    common = [*choice("fp64", True), *MODELS[model]]
    options = [*common, *options, "training.micro_batch_size=2"]
    run = tiny.train(tmp_path, FUSED, *options, nproc=nproc)
    assert_same_run(run, alone(*common), "fp64", losses, held_out, arrays)
