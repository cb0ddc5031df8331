"""Kernels have the bits of the reference: interpreted on a CPU, compiled on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from drawing import LAYOUTS, hard, laid_out, same_bits
from mt_fp8 import Scaling, quantize
from mt_fp8.quantize import amax_of

FP4 = {"format": "e2m1", "scale": "nvfp4"}
SCALINGS = {
    "tensor": Scaling(),
    "tensor e5m2": Scaling(format="e5m2", scale="pow2", margin=1),
    "tensor at random": Scaling(format="e5m2", stochastic=True),
    "row": Scaling(block="row"),
    "row rotated": Scaling(block="row", hadamard=True),
    "1x128": Scaling(block=(1, 128), scale="pow2"),
    "1x128 e5m2": Scaling(block=(1, 128), format="e5m2", eps=1e-3),
    "128x128": Scaling(block=(128, 128), scale="pow2", margin=2),
    "4x8": Scaling(block=(4, 8), stochastic=True),
    "mxfp8": Scaling(block=(1, 32), scale="e8m0"),
    "mxfp8 floor": Scaling(block=(1, 32), scale="e8m0", exponent="floor"),
    "mxfp8 e5m2": Scaling(block=(1, 32), scale="e8m0", format="e5m2", margin=1),
    "mxfp4": Scaling(block=(1, 32), scale="e8m0", format="e2m1"),
    "fp4": Scaling(block=(1, 32), scale="fp32", format="e2m1"),
    "nvfp4": Scaling(block=(1, 16), **FP4),
    "nvfp4 16x16": Scaling(block=(16, 16), **FP4),
    "nvfp4 rotated": Scaling(block=(1, 16), hadamard=True, **FP4),
    "nvfp4 at random": Scaling(block=(1, 16), stochastic=True, hadamard=True, **FP4),
}


def check(x, scaling, device="cpu"):
    """A tensor and its transpose, against the reference on the CPU."""
    for each in (x, x.mT):
        with np.errstate(all="ignore"):  # the interpreter multiplies infinities with NumPy
            found = quantize(each.to(device), scaling, seed=9, kernel="triton")
        assert same_bits(on_cpu(found), quantize(each, scaling, seed=9, kernel="reference"))


def on_cpu(q):
    tensors = {name: tensor.cpu() for name, tensor in q.tensors().items()}
    return type(q).from_tensors(tensors, scaling=q.scaling, dtype=q.dtype, shape=q.shape)


def with_nan(*shape, seed, dtype=torch.float32):
    x = hard(*shape, seed=seed, finite=False).clamp(-6e4, 6e4)
    x[..., -1, -1] = torch.nan
    x[..., 0, 3] = torch.inf
    return x.to(dtype)


# Those that every dtype or layout is read with below.
READ_BELOW = ("row", "1x128", "4x8", "nvfp4", "tensor", "mxfp8", "nvfp4 16x16")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.campaign if name in READ_BELOW else ())
        for name in SCALINGS
    ],
)
def test_the_kernel_has_the_bits_of_the_reference(name):
    check(with_nan(80, 144, seed=1), SCALINGS[name])


@pytest.mark.parametrize("name", ["row", "1x128", "4x8", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype_is_read(name, dtype):
    check(with_nan(32, 48, seed=2, dtype=dtype), SCALINGS[name])


@pytest.mark.parametrize("name", ["tensor", "mxfp8", "nvfp4 16x16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read(name, layout):
    check(laid_out(hard(21, 35, seed=3), layout), SCALINGS[name])


@pytest.mark.parametrize("name", ["tensor", "row", "128x128", "mxfp8", "nvfp4 at random"])
def test_batches_of_matrices_are_read(name):
    check(with_nan(3, 16, 32, seed=4), SCALINGS[name])
    check(hard(2, 3, 16, 32, seed=4), SCALINGS[name])


@pytest.mark.parametrize("name", SCALINGS)
def test_empty_tensors_and_rows_alone(name):
    scaling = SCALINGS[name]
    for shape in ((0, 16), (16, 0), (0, 16, 16)):
        check(torch.empty(shape), scaling)
    if not isinstance(scaling.block, tuple) or scaling.block[0] == 1:
        x = hard(48, seed=5)
        q = quantize(x, scaling, seed=1, kernel="triton")
        assert same_bits(q, quantize(x, scaling, seed=1, kernel="reference"))


@pytest.mark.parametrize("form", ["e4m3", "e5m2", "e2m1"])
def test_every_tie_rounds_as_the_reference(form):
    # All magnitudes of bf16 within reach, among which are all ties of the formats.
    x = torch.arange(0x3000, 0x4800, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.cat((x, -x)).view(-1, 128)
    block = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}[form]
    x = torch.where(x.abs() > block, block, x).float()
    x[:, 0] = block  # so that factors are 1
    check(x, Scaling(format=form, block=(1, 128), scale="pow2"))


def test_factors_that_are_given_are_used():
    x = hard(40, 70, seed=6)
    for factor in (torch.tensor(0.37), torch.tensor(1e20)):
        found = quantize(x, "tensorwise", factor=factor, kernel="triton")
        assert same_bits(found, quantize(x, "tensorwise", factor=factor, kernel="reference"))
    amax = amax_of(x, "rowwise") * 2
    found = quantize(x, "rowwise", amax=amax, kernel="triton")
    assert same_bits(found, quantize(x, "rowwise", amax=amax))


def test_what_a_kernel_does_not_serve_is_said():
    x = hard(8, 4, 16, seed=7)
    with pytest.raises(ValueError, match="no scales of block 'head'"):
        quantize(x, Scaling(block="head"), kernel="triton")
    with pytest.raises(ValueError, match="powers of two up to 128"):
        quantize(x, Scaling(block=(1, 48)), kernel="triton")
    with pytest.raises(ValueError, match="can't take given ones"):
        quantize(x, "mxfp8", amax=torch.ones(8, 4, 1), kernel="triton")
    with pytest.raises(ValueError, match="e2m1"):
        quantize(x, Scaling(format="e2m1"), kernel="triton")
    with pytest.raises(ValueError, match="auto, cpu, triton, reference"):
        quantize(x, "mxfp8", kernel="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_kernels_have_the_bits_of_the_reference_on_a_cpu(name, dtype):
    check(with_nan(1008, 2064, seed=8, dtype=dtype), SCALINGS[name], "cuda")
    check(with_nan(3, 112, 208, seed=9, dtype=dtype), SCALINGS[name], "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCALINGS)
def test_the_reference_has_the_same_bits_on_a_gpu_as_on_a_cpu(name):
    x = with_nan(1008, 2064, seed=10)
    found = quantize(x.cuda(), SCALINGS[name], seed=3, kernel="reference")
    assert same_bits(on_cpu(found), quantize(x, SCALINGS[name], seed=3, kernel="reference"))


TOOL = Path(__file__).parent / "compile_casts.py"


JOBS = [
    {"recipe": name, "role": role, "casts": role == "grad"}
    for name in ("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4")
    for role in ("grad", "weight")
]


@pytest.mark.campaign
def test_kernels_compile_for_sm_90_without_spilling(tmp_path):
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, str(TOOL)],
        input=json.dumps(JOBS),
        env=env,
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr[-2000:]
    for job, used in zip(JOBS, json.loads(done.stdout), strict=True):
        print(job, used)
        assert used["LOCAL"] == 0, (job, used)
        assert used["STACK"] <= 64, (job, used)
        assert used["REG"] <= 255
