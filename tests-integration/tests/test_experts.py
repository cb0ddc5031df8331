"""Mixtures of experts: every layout against one process, from one YAML."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from mt_testing import KillAt, RankDied

MOE = [
    "model.qk_norm=none",
    "model.moe={num_experts: 8, top_k: 2, ffn_size: 32, aux_loss: 0.02, router_z_loss: 0.001}",
    "training.micro_batch_size=4",
]
SEQUENCE_PARALLEL = "parallel.sequence_parallel=true"
# Processes, data-parallel size, and what the layout says.
LAYOUTS = {
    "ep2": (2, 2, ["parallel.ep=2"]),
    "ep4": (4, 4, ["parallel.ep=4"]),
    "tp2": (2, 1, ["parallel.tp=2"]),
    "ep2-tp2": (2, 1, ["parallel.tp=2", "parallel.ep=2"]),
    "ep2-tp2-sp": (4, 2, ["parallel.tp=2", "parallel.ep=2", SEQUENCE_PARALLEL]),
    "ep2-tp2-etp2": (4, 2, ["parallel.tp=2", "parallel.ep=2", "parallel.etp=2"]),
    "ep2-pp2": (4, 2, ["parallel.pp=2", "parallel.ep=2"]),
    "ep2-cp2": (2, 1, ["parallel.cp=2", "parallel.ep=2"]),
    "ep2-edp2": (4, 4, ["parallel.ep=2"]),
}
IN_CI = {("ep2-tp2-etp2", "fp64"), ("ep2-pp2", "fp64")}
# What keeps the load even, and what hangs on which token is meant, is of no layout either.
DEEPSEEK = """{num_experts: 8, top_k: 2, ffn_size: 16, score: sigmoid, scale: 2.5, num_groups: 4,
    top_groups: 2, group_top: 1, bias_rate: 0.01, sequence_aux_loss: 0.01, shared_size: 16}"""
QUANTILE = """{num_experts: 8, top_k: 1, ffn_size: 16, normalize: false, bias_rate: 0.2,
    bias_kind: quantile}"""
DROPPING = """{num_experts: 8, top_k: 2, ffn_size: 16, capacity_factor: 0.75, drop: position,
    jitter: 0.05, aux_loss: 0.02, shared_size: 8, shared_gate: true}"""
LATENT = "{num_experts: 4, top_k: 2, ffn_size: 16, sinkhorn: 3, latent_size: 16, bias: true}"
KINDS = {"deepseek": DEEPSEEK, "quantile": QUANTILE, "dropping": DROPPING, "latent": LATENT}
FURTHER = {
    "ep2-zero": (2, 2, ["parallel.ep=2", "data_parallel.strategy=optimizer"]),
    "ep2-recompute": (2, 2, ["parallel.ep=2", "training.recompute=full"]),
    "ep2-pp2-dualpipe": (4, 2, ["parallel.pp=2", "parallel.ep=2", "pipeline.schedule=dualpipe"]),
    "ep2-tp2-sp": LAYOUTS["ep2-tp2-sp"],
    "ep2-cp2": LAYOUTS["ep2-cp2"],
}
TOLERANCE = {"fp32": (1e-5, 1e-4), "fp64": (1e-10, 1e-9)}
LOSSES = ("loss", "aux_loss", "router_z_loss", "total_loss")


@pytest.fixture(scope="module")
def reference(tiny, tmp_path_factory):
    """One process with the micro-batches of `dp` data-parallel ranks."""
    made = {}

    def get(dtype: str, dp: int):
        if (dtype, dp) not in made:
            out = tmp_path_factory.mktemp("reference")
            options = [*MOE, f"training.dtype={dtype}", f"training.micro_batch_size={size(dp)}"]
            made[dtype, dp] = tiny.train(out, *options)
        return made[dtype, dp]

    return get


def assert_same_run(run, expected, metrics_of, held_out, arrays, rtol, atol) -> None:
    ours, theirs = metrics_of(run), metrics_of(expected)
    assert len(ours) == len(theirs)
    for own, other in zip(ours, theirs, strict=True):
        for name in other:
            if name == "loss" or name.endswith("_loss") or name.startswith("expert"):
                np.testing.assert_allclose(own[name], other[name], rtol=10 * rtol, err_msg=name)
    np.testing.assert_allclose(held_out(run), held_out(expected), rtol=10 * rtol)
    found, wanted = arrays(run), arrays(expected)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, wanted[name], rtol=0, atol=atol, err_msg=name)


def size(dp: int) -> int:
    """Return the number of sequences in a micro-batch, equal on every layout with `dp` ranks."""
    return min(4, 8 // dp)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        pytest.param(n, d, marks=() if (n, d) in IN_CI else pytest.mark.campaign)
        for n in LAYOUTS
        for d in ("fp64", "fp32")
    ],
)
def test_every_layout_trains_experts_like_one_process(
    layout, dtype, tiny, reference, tmp_path, metrics_of, held_out, arrays
) -> None:
    nproc, dp, overrides = LAYOUTS[layout]
    options = [*MOE, *overrides, f"training.dtype={dtype}", f"training.micro_batch_size={size(dp)}"]
    run = tiny.train(tmp_path, *options, nproc=nproc)
    expected, (rtol, atol) = reference(dtype, dp), TOLERANCE[dtype]
    for name in LOSSES:
        values = [[row[name] for row in metrics_of(r) if name in row] for r in (run, expected)]
        assert len(values[0]) == 8
        np.testing.assert_allclose(*values, rtol=rtol, err_msg=name)
    assert_same_run(run, expected, metrics_of, held_out, arrays, rtol, atol)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(k, n, marks=() if i < 2 and (i + j) % 5 == 0 else pytest.mark.campaign)
        for i, k in enumerate(KINDS)
        for j, n in enumerate(FURTHER)
    ],
)
def test_every_way_to_route_is_the_same_on_every_layout(
    kind, layout, tiny, tmp_path, metrics_of, held_out, arrays
) -> None:
    nproc, dp, overrides = FURTHER[layout]
    options = [f"model.moe={KINDS[kind]}", "model.qk_norm=none", "training.dtype=fp64"]
    # A bias goes up and down by the same amount, and none is back at zero after these steps.
    options += ["training.steps=8", "optimizer.warmup=5"]
    options.append(f"training.micro_batch_size={2 // dp}")
    expected = tiny.train(tmp_path / "one", *options)
    run = tiny.train(tmp_path / "many", *options, *overrides, nproc=nproc)

    def last(run):
        return arrays(run, 8)

    assert_same_run(run, expected, metrics_of, held_out, last, 1e-10, 1e-9)
    rows = [row for row in metrics_of(run) if "lr" in row]
    assert all(row["expert_imbalance"] >= 1 for row in rows)
    assert any(row["dropped_choices"] > 0 for row in rows) == (kind == "dropping")
    biases = [v for n, v in last(run).items() if n.endswith("expert_bias.value")]
    assert len(biases) == (4 if kind in ("deepseek", "quantile") else 0)
    assert all(bias.any() for bias in biases)


def test_the_balance_of_a_whole_step_is_over_all_ranks(tiny, tmp_path, metrics_of) -> None:
    moe = "model.moe={num_experts: 8, top_k: 2, ffn_size: 32, global_aux_loss: 0.02}"
    options = [moe, "model.qk_norm=none", "training.dtype=fp64", "training.steps=5"]
    runs = [tiny.train(tmp_path / "one", *options)]  # a micro-batch of all 8 sequences
    options += ["training.micro_batch_size=4", "training.recompute=full"]
    runs.append(tiny.train(tmp_path / "two", *options, "parallel.ep=2", nproc=2))
    for name in ("loss", "global_aux_loss", "grad_norm"):
        one, two = ([row[name] for row in metrics_of(run) if "lr" in row] for run in runs)
        np.testing.assert_allclose(two, one, rtol=1e-10, err_msg=name)


def test_the_load_of_each_expert_is_recorded(tiny, tmp_path, metrics_of) -> None:
    run = tiny.train(tmp_path, *MOE, "parallel.ep=2", "logging.every=5", nproc=2)
    rows = [row for row in metrics_of(run) if "lr" in row]
    for row in rows:
        loads = {name: row[name] for name in row if name.startswith("experts/")}
        assert len(loads) == (4 if row["step"] % 5 == 0 else 0)
        for load in loads.values():
            assert len(load) == 8
            assert sum(load) == pytest.approx(1, abs=1e-5)
        if loads:
            worst = max(8 * max(load) for load in loads.values())
            assert row["expert_imbalance"] == pytest.approx(worst, rel=1e-4)


RESUMED = {
    "one": (1, 4, []),
    "tp2": (2, 4, ["parallel.tp=2"]),
    "pp2": (2, 4, ["parallel.pp=2"]),
    "ep2-etp2": (4, 2, ["parallel.tp=2", "parallel.ep=2", "parallel.etp=2"]),
}


@pytest.fixture(scope="module")
def at_ep4(tiny, tmp_path_factory):
    """Twenty steps on four ranks with two of eight experts each, and a kill on the way."""
    options = [f"model.moe={DEEPSEEK}", "model.qk_norm=none", "training.dtype=fp64"]
    options += ["training.micro_batch_size=2", "parallel.ep=4", "checkpoint.every=4"]
    whole = tiny.train(tmp_path_factory.mktemp("whole"), *options, nproc=4)
    killed = tmp_path_factory.mktemp("killed")
    with pytest.raises(RankDied):
        tiny.train(killed, *options, nproc=4, on_event=KillAt("train.update", rank=2, nth=6))
    return options, whole, killed


@pytest.mark.campaign  # test_recovery kills at every point
def test_a_kill_loses_nothing(at_ep4, tiny, arrays, losses) -> None:
    options, whole, killed = at_ep4
    tiny.train(killed, *options, nproc=4)
    ours, theirs = arrays(killed, prefix=""), arrays(whole, prefix="")
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)
    assert losses(killed) == losses(whole)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(n, marks=pytest.mark.campaign if n in ("tp2", "pp2", "ep2-etp2") else ())
        for n in RESUMED
    ],
)
def test_a_checkpoint_of_ep4_goes_on_at_any_layout(
    layout, at_ep4, tiny, tmp_path, losses, arrays
) -> None:
    options, whole, _ = at_ep4
    nproc, micro, overrides = RESUMED[layout]
    step = whole / "checkpoints" / "step_00000004"
    changed = [f"training.micro_batch_size={2 * micro // 4}", f"checkpoint.load={step}"]
    options = [each for each in options if each != "parallel.ep=4"]
    run = tiny.train(tmp_path, *options, *overrides, *changed, nproc=nproc)
    found, wanted = losses(run), losses(whole)
    assert min(found) == 5
    for at, loss in found.items():
        np.testing.assert_allclose(loss, wanted[at], rtol=1e-9)
    for name, value in arrays(run).items():
        np.testing.assert_allclose(value, arrays(whole)[name], rtol=0, atol=1e-9, err_msg=name)


def test_generation_is_the_same_where_ranks_share_experts(at_ep4, cli) -> None:
    _, whole, _ = at_ep4
    command = [sys.executable, "-m", "mt_infer", "generate", whole, "--prompt", "import os\n"]
    command += ["--max-tokens", 12, "--greedy", "--dtype", "fp64"]
    texts = []
    for options in ((), ("--nproc", 2, "--ep", 2)):
        result = cli(*command, *options)
        assert result.returncode == 0, result.stderr
        texts.append(result.stdout)
    assert len({*texts}) == 1
    result = cli(*command, "--nproc", 2, "--ep", 3)
    assert result.returncode != 0
    assert "--ep 3" in result.stderr
