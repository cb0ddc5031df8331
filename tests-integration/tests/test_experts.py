"""Mixtures of experts: every layout against one process, from one YAML."""

from __future__ import annotations

import numpy as np
import pytest

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
IN_CI = {("ep2", "fp64"), ("ep2-tp2-etp2", "fp64"), ("ep2-pp2", "fp32"), ("ep2-cp2", "fp64")}
TOLERANCE = {"fp32": (1e-5, 1e-4), "fp64": (1e-10, 1e-9)}
LOSSES = ("loss", "aux_loss", "router_z_loss", "total_loss")


@pytest.fixture(scope="module")
def reference(tiny, tmp_path_factory):
    """One process with the micro-batches of so many data-parallel ranks."""
    made = {}

    def get(dtype: str, dp: int):
        if (dtype, dp) not in made:
            out = tmp_path_factory.mktemp("reference")
            options = [*MOE, f"training.dtype={dtype}", f"training.micro_batch_size={size(dp)}"]
            made[dtype, dp] = tiny.train(out, *options)
        return made[dtype, dp]

    return get


def size(dp: int) -> int:
    """Sequences of a micro-batch: the same ones on every layout with so many ranks."""
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
    ours, theirs = metrics_of(run), metrics_of(expected)
    for name in LOSSES:
        values = [[row[name] for row in rows if name in row] for rows in (ours, theirs)]
        assert len(values[0]) == 20
        np.testing.assert_allclose(*values, rtol=rtol, err_msg=name)
    np.testing.assert_allclose(held_out(run), held_out(expected), rtol=10 * rtol)
    found, wanted = arrays(run), arrays(expected)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, wanted[name], rtol=0, atol=atol, err_msg=name)
