"""Quantised tensors stand for what they were made of, within half a step."""

import pytest
import torch
from mt_fp8 import QTensor, quantize, quantize_both, recipe

NAMES = ("tensorwise", "rowwise", "delayed", "blockwise", "mxfp8", "nvfp4")


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("role", ["input", "weight", "grad"])
def test_every_recipe_quantises_every_role_and_can_be_saved(name, role):
    x = drawn(3, 48, 80)
    scaling = recipe(name).scaling(role)
    q = quantize(x, scaling, seed=3)
    limit = 0.5 if scaling.format == "e2m1" else 0.26 if scaling.format == "e5m2" else 0.13
    assert ((q.dequantize() - x).abs() <= limit * x.abs() + 0.4).all()
    assert q.dequantize().shape == x.shape
    back = QTensor.from_tensors(q.tensors(), scaling=scaling, dtype=q.dtype, shape=q.shape)
    assert torch.equal(back.dequantize(), q.dequantize())
    both = quantize_both(x, recipe(name), role, seed=3)
    assert both.column.dequantize().shape == x.mT.shape
