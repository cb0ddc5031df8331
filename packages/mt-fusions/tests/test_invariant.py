"""Activations whose bits for a number don't depend on its place in a tensor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from mt_fusions import (
    GATED,
    activate,
    invariant_activation,
    invariant_sigmoid,
    invariant_softplus,
)

KINDS = "silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2"


def values(dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.randn(500, generator=torch.Generator().manual_seed(1)) * 3
    return torch.cat((drawn, torch.tensor([0.0, -200, 200, -90, 90, 19.9, 20.1]))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*KINDS, "sigmoid", "softplus"])
def test_a_number_has_the_same_bits_in_any_tensor(kind, dtype):
    def apply(x):
        own = {"sigmoid": invariant_sigmoid, "softplus": invariant_softplus}
        return own[kind](x) if kind in own else invariant_activation(x, kind)

    x = values(dtype)
    whole = apply(x)
    for length in (1, 3, 8, 16, 17, 31, 33, 100):
        for start in (0, 1, 5, 64):
            part = slice(start, start + length)
            assert torch.equal(apply(x[part].clone()), whole[part])


@pytest.mark.parametrize("kind", KINDS)
def test_activations_have_torchs_values_and_gradients(kind):
    x = values(torch.float64).requires_grad_()
    found, expected = invariant_activation(x, kind), activate(x, kind)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(y.sum(), x)[0] for y in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_sigmoid_and_softplus_have_torchs_values_and_gradients():
    x = values(torch.float64).requires_grad_()
    for own, plain in ((invariant_sigmoid, torch.sigmoid), (invariant_softplus, F.softplus)):
        torch.testing.assert_close(own(x), plain(x), rtol=1e-12, atol=1e-12)
        grads = [torch.autograd.grad(y(x).sum(), x)[0] for y in (own, plain)]
        torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_the_gated_candidate_clamps_and_adds_as_the_reference_does():
    x, how = values(torch.float64)[:504].view(-1, 2, 6), {"clamp": 2.0, "up_offset": 1.0}
    found, expected = (
        GATED.get(name).function(x, "gelu_quick", **how) for name in ("invariant", "reference")
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
