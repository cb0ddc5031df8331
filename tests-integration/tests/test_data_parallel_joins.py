"""Strategies among themselves: the same bits as DDP, and checkpoints that wander between them."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from mt_testing import pairwise

STRATEGIES = ("none", "optimizer", "optimizer_gradients", "full")
OPTIMIZERS = ("adamw", "lion", "sgd", "muon", "adaptive_muon")
# name: (processes, data-parallel size, overrides)
LAYOUTS = {
    "one": (1, 1, []),
    "dp2": (2, 2, []),
    "dp4": (4, 4, []),
    "tp2-dp2": (4, 2, ["parallel.tp=2", "parallel.sequence_parallel=true"]),
    "pp2-dp2": (4, 2, ["parallel.pp=2"]),
    "dp2-cp2": (4, 2, ["parallel.cp=2"]),
    "zb-v-dp2": (4, 2, ["parallel.pp=2", "pipeline.schedule=zb-v"]),
}
LR = {"lion": "1e-3", "sgd": "1e-3"}


def options_of(optimizer):
    return [f"optimizer.name={optimizer}", f"optimizer.lr={LR.get(optimizer, '3e-3')}"]


def assert_same_arrays(found, expected, **bounds):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        if bounds:
            np.testing.assert_allclose(value, expected[name], err_msg=name, **bounds)
        else:
            assert value.tobytes() == expected[name].tobytes(), name


# One micro-batch for each of two replicas: sums of two, which have one order. No clipping, as the
# last bit of a norm depends on how its rows are cut.
BITS = [f"training.{setting}" for setting in ("micro_batch_size=4", "grad_clip=1e6", "steps=4")]
BIT_ROWS = [
    pytest.param(*row, marks=() if quick else pytest.mark.campaign)
    for quick, *row in [
        (False, "fp32", "adamw", "dp2"),
        (False, "bf16", "muon", "dp2"),
        (True, "bf16", "adamw", "pp2-dp2"),
        (False, "fp32", "muon", "tp2-dp2"),
        (False, "fp32", "lion", "pp2-dp2"),
        (False, "bf16", "sgd", "tp2-dp2"),
        (False, "bf16", "adaptive_muon", "tp2-dp2"),
        (False, "fp32", "adaptive_muon", "pp2-dp2"),
    ]
]


@pytest.mark.parametrize(("dtype", "optimizer", "layout"), BIT_ROWS)
def test_sharded_runs_end_with_the_bits_of_ddp(
    dtype, optimizer, layout, tiny, tmp_path, losses, arrays
) -> None:
    nproc, _, overrides = LAYOUTS[layout]
    given = [*BITS, *options_of(optimizer), *overrides, f"training.dtype={dtype}"]
    runs = {
        strategy: tiny.train(
            tmp_path / strategy, *given, f"data_parallel.strategy={strategy}", nproc=nproc
        )
        for strategy in STRATEGIES
    }
    for strategy in STRATEGIES[1:]:
        assert losses(runs[strategy]) == losses(runs["none"]), strategy
        for prefix in ("model/", "optimizer/"):
            wanted = arrays(runs["none"], step=4, prefix=prefix)
            assert wanted
            assert_same_arrays(arrays(runs[strategy], step=4, prefix=prefix), wanted)


def test_the_command_trains_the_strategies_of_its_yaml_alike(tiny, tmp_path, cli, arrays) -> None:
    found = {}
    for strategy in ("none", "full"):
        config = tmp_path / f"{strategy}.yaml"
        section = f"data_parallel: {{strategy: {strategy}}}\n"
        config.write_text(tiny.config.read_text() + section)
        out = tmp_path / strategy
        command = [sys.executable, "-m", "mt_train", "run", config, "--out", out]
        result = cli(*command, "--nproc", 2, *BITS)
        assert result.returncode == 0, result.stderr
        found[strategy] = arrays(out, step=4)
    assert_same_arrays(found["full"], found["none"])


# Where a run starts and where it goes on: every pair of these, and in CI a few.
WANDERING = pairwise(
    {
        "optimizer": OPTIMIZERS,
        "first": STRATEGIES,
        "before": tuple(LAYOUTS),
        "second": STRATEGIES,
        "after": tuple(LAYOUTS),
    },
    allowed=lambda row: row["before"] != row["after"],
    seed=2,
)


def strategy_options(strategy, layout):
    _, dp, overrides = LAYOUTS[layout]
    own = [f"data_parallel.strategy={strategy}", f"training.micro_batch_size={8 // dp // 2}"]
    return [*own, *overrides, "parallel.bucket_size=5000"]


@pytest.fixture(scope="module")
def references(tiny, tmp_path_factory):
    """One process, the whole batch in one micro-batch, never interrupted."""
    made = {}

    def get(optimizer):
        if optimizer not in made:
            out = tmp_path_factory.mktemp("reference")
            given = ["training.dtype=fp64", "model.tied=true", *options_of(optimizer)]
            made[optimizer] = tiny.train(out, *given)
        return made[optimizer]

    return get


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=() if number % 32 == 0 else pytest.mark.campaign)
        for number, row in enumerate(WANDERING)
    ],
    ids=lambda row: "-".join(row.values()),
)
def test_a_run_wanders_between_strategies_and_layouts_and_ends_like_one_process(
    row, tiny, references, tmp_path, losses, arrays
) -> None:
    common = ["training.dtype=fp64", "model.tied=true", *options_of(row["optimizer"])]
    saved = tiny.train(
        tmp_path / "saved",
        *common,
        *strategy_options(row["first"], row["before"]),
        "checkpoint.every=4",
        nproc=LAYOUTS[row["before"]][0],
    )
    step = saved / "checkpoints" / "step_00000004"
    resumed = tiny.train(
        tmp_path / "resumed",
        *common,
        *strategy_options(row["second"], row["after"]),
        f"checkpoint.load={step}",
        nproc=LAYOUTS[row["after"]][0],
    )
    whole = references(row["optimizer"])
    rest, expected = losses(resumed), losses(whole)
    assert list(rest) == list(range(5, 9))
    np.testing.assert_allclose(list(rest.values()), [expected[s] for s in rest], rtol=1e-10)
    assert_same_arrays(arrays(resumed), arrays(whole), rtol=0, atol=1e-9)
    moments = arrays(whole, prefix="optimizer/")
    found = arrays(resumed, prefix="optimizer/")
    assert_same_arrays(found, moments, rtol=1e-7, atol=1e-9)
