"""The Triton kernels compile for Hopper, which needs no device, and stay in registers."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mt_fusions.gpu.launch import row_tiles

TOOL = Path(__file__).parent / "compile_kernels.py"
WIDEST = 16384  # where 64 registers a thread are all there are
WIDEST_LAYER = 8192  # of LayerNorm
ROW = {"rows": "i32", "size": "i32"}


def norm_jobs():
    tensors = dict.fromkeys(
        ("X", "RESIDUAL", "W", "B", "Y", "TOTAL", "G", "G_TOTAL", "DX"), "*bf16"
    )
    numbers = dict.fromkeys(("M", "R", "DW", "DB"), "*fp32")
    signature = {**tensors, **numbers, **ROW, "eps": "fp32"}
    for size, centered in itertools.product((64, 4096, WIDEST), (False, True)):
        tile = row_tiles(WIDEST_LAYER if centered and size == WIDEST else size)
        common = {"module": "norms.triton_norm", "warps": tile.warps, "signature": signature}
        form = {"HAS_WEIGHT": True, "HAS_BIAS": centered, "CENTERED": centered}
        form |= {"ZERO_CENTERED": False, "ROWS": tile.rows, "COLUMNS": tile.columns}
        forward = {**form, "HAS_RESIDUAL": True, "ROUNDS_FIRST": False}
        yield {**common, "name": "_forward_kernel", "constants": forward}
        common["warps"] = min(32, tile.warps << centered)
        backward = {**form, "HAS_TOTAL": True, "SUMS_WEIGHT": True, "SUMS_BIAS": centered}
        del backward["HAS_BIAS"]
        yield {**common, "name": "_backward_kernel", "constants": backward}


def gated_jobs():
    tile = row_tiles(1024, 1024)
    shape = {"ROWS": tile.rows, "COLUMNS": tile.columns}
    tensors = dict.fromkeys(("X", "U", "Y", "G", "DX", "DU"), "*bf16")
    strides = {"x_stride": "i32", "u_stride": "i32", "clamp": "fp32", "offset": "fp32"}
    signature = {**tensors, **ROW, **strides}
    for kind in ("silu", "gelu", "gelu_tanh", "gelu_quick", "relu2"):
        form = {"KIND": kind, "HAS_UP": True, "HAS_CLAMP": kind == "silu"}
        for name in ("_forward_kernel", "_backward_kernel"):
            common = {"module": "activations.triton_gated", "warps": tile.warps, "name": name}
            yield {**common, "signature": signature, "constants": {**form, **shape}}


def bias_gelu_jobs():
    tile = row_tiles(256)
    signature = dict.fromkeys(("X", "B", "Y", "G", "DX"), "*bf16") | ROW
    signature |= {"DB": "*fp32", "x_stride": "i32"}
    for kind in ("gelu", "gelu_tanh"):
        form = {"KIND": kind, "ROWS": tile.rows, "COLUMNS": tile.columns}
        for name in ("_forward_kernel", "_backward_kernel"):
            common = {"module": "activations.triton_bias_gelu", "warps": tile.warps, "name": name}
            yield {**common, "signature": signature, "constants": form}


def bias_dropout_add_jobs():
    tile = row_tiles(256)
    signature = dict.fromkeys(("X", "B", "RESIDUAL", "Y", "G", "DX"), "*bf16") | ROW
    signature |= dict.fromkeys(("key", "key_2"), "i64") | {"DB": "*fp32", "FIRST": "*i64"}
    signature |= {"x_stride": "i32", "residual_stride": "i32", "limit": "i32", "factor": "fp32"}
    shape = {"ROWS": tile.rows, "COLUMNS": tile.columns}
    common = {
        "module": "residual.triton_bias_dropout_add",
        "warps": tile.warps,
        "signature": signature,
    }
    form = {"HAS_BIAS": True, "DROPS": True, **shape}
    yield {**common, "name": "_forward_kernel", "constants": form}
    yield {**common, "name": "_backward_kernel", "constants": shape}


def permute_jobs():
    signature = dict.fromkeys(("X", "G", "W", "Y"), "*bf16") | {"PLACES": "*i64", "D": "*fp32"}
    signature |= dict.fromkeys(("x_stride", "g_stride", "choices", "size"), "i32")
    common = {"module": "gpu.permute", "warps": 4, "signature": signature}
    form = {"HAS_WEIGHTS": True, "COLUMNS": 1024}
    for name in ("_spread_kernel", "_combine_kernel"):
        yield {**common, "name": name, "constants": form}
    yield {**common, "name": "_dots_kernel", "constants": {"COLUMNS": 1024}}


def cross_entropy_jobs():
    numbers = dict.fromkeys(("LSE", "TARGET", "TOTAL", "G_LSE", "G_TARGET", "G_TOTAL"), "*fp32")
    sizes = dict.fromkeys(("stride", "out_stride", "columns", "width"), "i32")
    signature = {**numbers, **sizes, "X": "*bf16", "OUT": "*bf16", "LABELS": "*i64"}
    constants = {"WANTS_TOTAL": True, "COLUMNS": 4096}
    for name in ("_forward_kernel", "_backward_kernel"):
        common = {"module": "gpu.cross_entropy", "warps": 8, "name": name}
        yield {**common, "signature": signature, "constants": constants}


def rope_jobs():
    sizes = ("token_stride", "head_stride", "tokens", "heads", "size", "width", "table_batch")
    tensors = dict.fromkeys(("X", "COS", "SIN", "Y"), "*bf16")
    common = {"module": "attention.triton_rope", "name": "_kernel", "warps": 4}
    form = {"INTERLEAVED": False, "BACK": False, "HEADS": 32, "HALF": 64, "REST": 64}
    yield {**common, "signature": tensors | dict.fromkeys(sizes, "i32"), "constants": form}


JOBS = [
    *norm_jobs(),
    *gated_jobs(),
    *bias_gelu_jobs(),
    *bias_dropout_add_jobs(),
    *permute_jobs(),
    *cross_entropy_jobs(),
    *rope_jobs(),
]


def is_sampled(job):
    """The widest rows, which take the most registers, and two of the activations."""
    constants = job["constants"]
    narrow = job["module"].endswith("_norm") and constants["COLUMNS"] <= 4096
    return not narrow and constants.get("KIND", "silu") in ("silu", "gelu_tanh")


SAMPLE = [job for job in JOBS if is_sampled(job)]
REST = [job for job in JOBS if not is_sampled(job)]


@pytest.mark.parametrize(
    "jobs",
    [pytest.param(SAMPLE, id="sample"), pytest.param(REST, id="rest", marks=pytest.mark.campaign)],
)
def test_kernels_compile_for_sm_90_with_few_registers(jobs, tmp_path):
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, str(TOOL)], input=json.dumps(jobs), env=env, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr[-2000:]
    for job, used in zip(jobs, json.loads(done.stdout), strict=True):
        name = job["module"] + job["name"], job["constants"]
        print(name, used)
        assert used["LOCAL"] == 0, f"{name} spills: {used}"
        widest = WIDEST_LAYER if job["constants"].get("CENTERED") else WIDEST
        wide = job["constants"].get("COLUMNS") == widest
        assert used["STACK"] <= 64 * wide, f"{name} spills: {used}"
        assert used["REG"] <= 255
        assert used["shared"] <= 48 * 1024, f"{name}: {used}"
