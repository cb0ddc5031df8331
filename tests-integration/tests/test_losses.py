"""Losses of inner layers: every layout against one process, from one YAML and a kind made here."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
from mt_model import FeedForwardConfig
from mt_tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import nn


@dataclass(frozen=True, kw_only=True)
class GateConfig(FeedForwardConfig):
    """A gated feed-forward that keeps its scores small and even: losses by name, on each token."""

    width: int
    aux_weight: float = 0.5

    @property
    def loss_weights(self):
        return {"aux": self.aux_weight, "z": 0.02}

    def build(self, model, *, layer, shard):
        return Gate(self.width, model.hidden_size, shard)

    def num_parameters(self, hidden_size):
        return (2 * self.width + 4) * hidden_size

    def flops_per_token(self, hidden_size, sequence_length):
        return 6 * self.num_parameters(hidden_size)

    def split_sizes(self, tp):
        yield "width", self.width


class Gate(nn.Module):
    def __init__(self, width, hidden_size, shard):
        super().__init__()
        linear = shard.linear_arguments()
        self.up = ColumnParallelLinear(hidden_size, width, bias=False, **linear)
        self.down = RowParallelLinear(width, hidden_size, bias=False, **linear)
        self.router = nn.Linear(hidden_size, 4, bias=False, dtype=shard.dtype, device="meta")
        shard.mark_replicated(self.router, partial=shard.sequence_parallel)

    def forward(self, x):
        scores = self.router(x)
        even = scores.softmax(-1)
        losses = {"aux": even.square().sum(), "z": scores.logsumexp(-1).square().sum()}
        return self.down(self.up(x).relu()) * even[..., :1], losses


MIXER = "mixer: {num_heads: 4, num_kv_heads: 2, head_dim: 8, rope: {}}"
PLAIN = f"{{{MIXER}, feed_forward: {{ffn_size: 64}}}}"
GATED = f"{{{MIXER}, feed_forward: {{type: gate, width: 32}}}}"
# Losses arise in layers 1 and 2 of four: on inner stages, and on one that shares a rank with the
# last.
MODEL = [
    *(f"model.{name}=null" for name in ("num_layers", "num_heads", "num_kv_heads", "ffn_size")),
    "model.qk_norm=null",
    f"model.layers=[{PLAIN}, {GATED}, {GATED}, {PLAIN}]",
    "training.dtype=fp64",
    "training.steps=6",
    "optimizer.warmup=2",
    # No number of windows that batches or ranks divide evenly.
    "evaluation.max_windows=5",
]
SP = "parallel.sequence_parallel=true"
ROWS = {
    "micro": (1, ["training.micro_batch_size=2"]),
    "tp2": (2, ["parallel.tp=2", "training.micro_batch_size=4"]),
    "tp2-sp": (2, ["parallel.tp=2", SP]),
    "cp2": (2, ["parallel.cp=2"]),
    "dp2": (2, ["training.micro_batch_size=2"]),
    "pp2": (2, ["parallel.pp=2", "training.micro_batch_size=2"]),
    "pp4": (4, ["parallel.pp=4", "training.micro_batch_size=1"]),
    "interleaved": (2, ["pipeline.schedule=interleaved", "pipeline.chunks=2", "parallel.pp=2"]),
    "zb-h1": (2, ["pipeline.schedule=zb-h1", "parallel.pp=2", "training.recompute=selective"]),
    "zb-v": (2, ["pipeline.schedule=zb-v", "parallel.pp=2", "training.recompute=full"]),
    "v-half": (2, ["pipeline.schedule=v-half", "parallel.pp=2"]),
    "dualpipe": (2, ["pipeline.schedule=dualpipe", "parallel.pp=2"]),
    "dualpipe-v": (2, ["pipeline.schedule=dualpipe-v", "parallel.pp=2"]),
    "full": (1, ["training.recompute=full"]),
    "selective-tp2": (2, ["parallel.tp=2", "training.recompute=selective"]),
    "full-tp2-sp": (2, ["parallel.tp=2", SP, "training.recompute=full"]),
    "tp2-cp2": (4, ["parallel.tp=2", "parallel.cp=2", SP]),
    "tp2-pp2-sp": (4, ["parallel.tp=2", "parallel.pp=2", SP]),
    "tp2-sp-dualpipe": (
        4,
        [
            *("parallel.tp=2", SP, "parallel.pp=2"),
            *("pipeline.schedule=dualpipe", "training.recompute=selective"),
        ],
    ),
    "pp2-dp2-dualpipe": (4, ["parallel.pp=2", "pipeline.schedule=dualpipe"]),
}
MICRO_BATCH = {"interleaved": 2, "zb-h1": 2, "zb-v": 1, "v-half": 2, "dualpipe": 2, "dualpipe-v": 2}
MICRO_BATCH |= {"tp2-pp2-sp": 2, "tp2-sp-dualpipe": 2, "pp2-dp2-dualpipe": 1}


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run):
    """Every loss of every step and evaluation, by name."""
    return [
        {name: value for name, value in row.items() if name == "step" or name.endswith("loss")}
        for row in rows(run)
    ]


@pytest.fixture(scope="module")
def one_process(tiny, tmp_path_factory):
    return tiny.train(tmp_path_factory.mktemp("one"), *MODEL, kinds=(GateConfig,))


def test_the_losses_of_one_process_are_weighed_and_all_reported(one_process):
    first, *_, last = losses(one_process)
    names = {"loss", "aux_loss", "z_loss", "total_loss"}
    assert first.keys() == {"step", *names}
    assert last.keys() == {"step", *(f"val_{name}" for name in names)}
    total = first["loss"] + 0.5 * first["aux_loss"] + 0.02 * first["z_loss"]
    assert first["total_loss"] == pytest.approx(total, rel=1e-14)
    # Two layers, four scores that are almost even at first: 2 x 4 x (1/4)^2.
    assert first["aux_loss"] == pytest.approx(0.5, rel=0.02)
    assert first["z_loss"] == pytest.approx(2 * np.log(4) ** 2, rel=0.02)
    assert last["val_z_loss"] < first["z_loss"]  # it was trained on
    assert last["val_aux_loss"] == pytest.approx(0.5, rel=0.02)


IN_CI = ("micro", "interleaved", "dualpipe-v", "tp2-cp2", "pp2-dp2-dualpipe")


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if row in IN_CI else pytest.mark.campaign) for row in ROWS],
)
def test_losses_of_inner_layers_train_like_one_process(row, tiny, one_process, tmp_path, arrays):
    nproc, options = ROWS[row]
    if row in MICRO_BATCH:
        options = [*options, f"training.micro_batch_size={MICRO_BATCH[row]}"]
    run = tiny.train(tmp_path, *MODEL, *options, nproc=nproc, kinds=(GateConfig,))
    for ours, theirs in zip(losses(run), losses(one_process), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10)
    parameters, wanted = arrays(run, 6), arrays(one_process, 6)
    assert parameters.keys() == wanted.keys()
    for name, value in parameters.items():
        np.testing.assert_allclose(value, wanted[name], rtol=0, atol=1e-9, err_msg=name)
