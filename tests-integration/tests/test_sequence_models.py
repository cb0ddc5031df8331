"""Mamba-2, gated delta nets and attention in one stack: the same on every layout."""

from __future__ import annotations

import sys
from functools import cache

import numpy as np
import pytest

MAMBA = "{type: mamba2, num_heads: 4, head_dim: 8, state_size: 8, chunk_size: 8}"
DELTA = "{type: gateddeltanet, num_key_heads: 2, num_value_heads: 4, key_dim: 8, value_dim: 8}"
ATTENTION = "{num_heads: 4, num_kv_heads: 2, head_dim: 8, rope: {}}"
MLP = "feed_forward: {ffn_size: 64}"
MODEL = [
    *(f"model.{name}=null" for name in ("num_layers", "num_heads", "num_kv_heads", "ffn_size")),
    "model.qk_norm=null",
    f"model.layers=[{{mixer: {MAMBA}, {MLP}}}, {{mixer: {DELTA}, {MLP}}}, "
    f"{{mixer: {ATTENTION}, {MLP}}}, {{mixer: {MAMBA}}}]",
    "training.steps=8",
    "optimizer.warmup=2",
    "optimizer.weight_decay=0.1",
]
SP = "parallel.sequence_parallel=true"
PACKED = "data.packing=documents"
ROWS = {
    "tp2": (2, ["parallel.tp=2"]),
    "tp2-sp-packed": (2, ["parallel.tp=2", SP, PACKED, "training.recompute=selective"]),
    "pp2-packed": (2, ["parallel.pp=2", "training.micro_batch_size=2", PACKED]),
    "tp2-pp2-sp": (4, ["parallel.tp=2", "parallel.pp=2", SP, "training.micro_batch_size=4"]),
    "full": (2, ["data_parallel.strategy=full", "training.micro_batch_size=4"]),
    "muon-tp2": (2, ["parallel.tp=2", "optimizer.name=muon"]),
}


def of_the_run(options: list[str]) -> list[str]:
    """Return the options that the single process gets too."""
    return [text for text in options if text.startswith(("data.", "optimizer."))]


IN_CI = ("tp2-sp-packed", "tp2-pp2-sp")


@pytest.fixture(scope="module")
def one_process(tiny, tmp_path_factory):
    return cache(lambda *options: tiny.train(tmp_path_factory.mktemp("one"), *options))


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if row in IN_CI else pytest.mark.campaign) for row in ROWS],
)
def test_a_hybrid_trains_like_one_process(
    row, tiny, one_process, tmp_path, losses, held_out, arrays
) -> None:
    nproc, options = ROWS[row]
    common = [*MODEL, "training.dtype=fp64"]
    whole = one_process(*common, *of_the_run(options))
    run = tiny.train(tmp_path / "run", *common, *options, nproc=nproc)
    ours, theirs = losses(run), losses(whole)
    assert ours.keys() == theirs.keys()
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-10)
    np.testing.assert_allclose(held_out(run), held_out(whole), rtol=1e-9)
    parameters, wanted = arrays(run, step=8), arrays(whole, step=8)
    assert parameters.keys() == wanted.keys()
    assert "model/layers.0.mixer.A_log" in wanted
    for name, value in parameters.items():
        np.testing.assert_allclose(value, wanted[name], rtol=0, atol=1e-9, err_msg=name)


def test_a_hybrid_in_bf16_keeps_its_decays_in_fp32_and_generates_alike(
    tiny, tmp_path, cli, arrays
) -> None:
    run = tiny.train(tmp_path / "run", *MODEL, "training.dtype=bf16", "training.steps=30")
    stored = arrays(run, step=30)
    assert stored["model/layers.0.mixer.A_log"].dtype == np.float32
    texts = []
    for options in ((), ("--nproc", 2), ("--nproc", 2, "--pp", 2)):
        result = cli(
            *(sys.executable, "-m", "mt_infer", "generate", run, "--prompt", "import os\n"),
            *("--max-tokens", 24, "--greedy", *options),
        )
        assert result.returncode == 0, result.stderr
        texts.append(result.stdout)
    assert texts[1:] == texts[:1] * 2


def test_sequences_that_ranks_share_are_refused_by_name(tiny, tmp_path) -> None:
    with pytest.raises(Exception, match=r"Mamba2Config needs whole sequences; use cp=1 \(layer 0"):
        tiny.train(tmp_path, *MODEL, "parallel.cp=2", nproc=2)
