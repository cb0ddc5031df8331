"""Every way to multiply quantised matrices is the definition, up to the order of its sum."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mt_fp8 import Recipe, Scaling, matmul, quantize, recipe
from mt_fp8.matmul import MATMUL_KERNELS
from torch import Tensor

RECIPES = ("tensorwise", "rowwise", "delayed", "blockwise", "mxfp8", "nvfp4")
ROW_32 = Scaling(block=(1, 32), scale="e8m0")
ROW_128 = Scaling(block=(1, 128), scale="pow2")
SQUARE_128 = Scaling(block=(128, 128), scale="pow2")
SQUARE_64 = Scaling(block=(64, 64))


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(shape[0], 1, generator=generator).exp()
    return (torch.randn(*shape, generator=generator) * spread).to(dtype)


def _pair(how: Recipe, role: str, *, column: bool = False):
    first, second = how.scaling("grad" if column else "input", column=column), None
    second = how.scaling(role, column=column)
    return (
        quantize(_random(48, 256), first, seed=3),
        quantize(_random(32, 256, seed=1), second, seed=4),
    )


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("column", [False, True])
def test_emulation_is_the_product_of_what_the_codes_stand_for(name, column) -> None:
    how = recipe(name)
    a, b = _pair(how, "input" if column else "weight", column=column)
    bias = _random(32, 1)[:, 0]
    expected = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t() + bias
    y = matmul(a, b, bias=bias, out_dtype=torch.float64, kernel="emulation")
    # A rotation that is undone first is rounded once more, in fp32.
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-4 if how.hadamard else 1e-9)
    narrow = matmul(a, b, bias=bias, kernel="emulation")
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow, expected.float(), rtol=1e-5, atol=1e-3)


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")])
@pytest.mark.parametrize("block", ["tensor", "row"])
def test_torchs_product_is_the_emulated_one(dtype, with_bias, formats, block) -> None:
    if block == "row" and _version() < (2, 15):
        pytest.skip("torch has rows on a CPU from 2.15 on")
    sizes = ((40, 64), (48, 64))
    a, b = (
        quantize(_random(*size, seed=i), Scaling(format=name, block=block))
        for i, (size, name) in enumerate(zip(sizes, formats, strict=True))
    )
    bias = _random(48, 1)[:, 0] if with_bias else None
    y = matmul(a, b, bias=bias, out_dtype=dtype, kernel="scaled_mm")
    expected = matmul(a, b, bias=bias, out_dtype=dtype, kernel="emulation")
    assert y.dtype == dtype
    scale = expected.abs().max().item()
    step = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(y, expected, rtol=2 * step, atol=2 * step * scale)


@pytest.mark.parametrize(
    ("first", "second", "sizes"),
    [
        (ROW_128, SQUARE_128, (40, 140, 256)),
        (ROW_128, ROW_128, (33, 20, 200)),
        (ROW_32, ROW_32, (20, 50, 96)),
        (SQUARE_64, SQUARE_64, (70, 40, 100)),
    ],
)
@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3")])
def test_the_block_kernel_is_the_emulated_product(first, second, sizes, formats) -> None:
    rows, columns, inner = sizes
    a = quantize(_random(rows, inner), replace(first, format=formats[0]))
    b = quantize(_random(columns, inner, seed=1), replace(second, format=formats[1]))
    bias = _random(columns, 1)[:, 0]
    y = matmul(a, b, bias=bias, kernel="triton")
    expected = matmul(a, b, bias=bias, kernel="emulation")
    scale = expected.abs().max().item()
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6 * scale)
    half = matmul(a, b, out_dtype=torch.bfloat16, kernel="triton")
    wanted = matmul(a, b, out_dtype=torch.bfloat16, kernel="emulation")
    torch.testing.assert_close(half, wanted, rtol=2**-7, atol=1e-6 * scale)


def test_what_does_not_serve_says_why() -> None:
    x = _random(16, 32)
    blocks, whole = quantize(x, ROW_32), quantize(x, "tensorwise")
    two = quantize(x, Scaling(format="e5m2"))
    for pair, kernel, words in (
        ((blocks, blocks), "scaled_mm", "it takes fp32 of tensor or row; use auto"),
        ((two, two), "scaled_mm", "e5m2 x e5m2; it takes e4m3, and e5m2 on one side"),
        ((whole, whole), "quick", "must be one of auto, scaled_mm, te, triton, emulation"),
    ):
        with pytest.raises(ValueError, match=words):
            matmul(*pair, kernel=kernel)
    assert MATMUL_KERNELS.names[-1] == "emulation"
    with pytest.raises(ValueError, match=r"a \(16, 32\) and b \(8, 16\) must be \[M, K\]"):
        matmul(whole, quantize(_random(8, 16), "tensorwise"))
    with pytest.raises(ValueError, match=r"bias \(3,\) .*16 rows"):
        matmul(whole, whole, bias=torch.ones(3))
    with pytest.raises(TypeError, match="b must be"):
        matmul(whole, x)
