"""The rotation is orthogonal: it cancels in products, and spreads outliers."""

import pytest
import torch
from drawing import hard, same_bits
from mt_fp8 import Scaling, quantize, recipe
from mt_fp8.quantize import amax_of

ROTATED = Scaling(format="e2m1", block=(1, 16), scale="nvfp4", hadamard=True)
PLAIN = Scaling(format="e2m1", block=(1, 16), scale="nvfp4")


def matrix():
    """Sylvester's: the sign of an entry is the parity of the bits that row and column share."""
    return torch.tensor(
        [[(-1.0) ** bin(i & j).count("1") for j in range(16)] for i in range(16)],
        dtype=torch.float64,
    )


def test_it_is_signs_and_the_hadamard_matrix():
    eye = torch.eye(16)
    scaling = Scaling(block="row", hadamard=True)
    # Entries are +-1/4, which are exact: the signs follow from the first column.
    rotation = quantize(eye, scaling).dequantize(rotated=True).double()
    signs = rotation[:, 0] * 4
    assert torch.equal(signs.abs(), torch.ones(16, dtype=torch.float64))
    assert 4 < (signs > 0).sum() < 12
    assert torch.allclose(rotation, signs.diag() @ matrix() / 4, rtol=1e-6)
    assert torch.allclose(rotation @ rotation.T, torch.eye(16, dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize("scaling", [ROTATED, Scaling(block="row", hadamard=True)])
def test_it_cancels_in_a_product(scaling):
    a, b = hard(24, 64, seed=1) * 1e-3, hard(40, 64, seed=2) * 1e-3
    q, r = quantize(a, scaling), quantize(b, scaling)
    turned = q.dequantize(torch.float64, rotated=True) @ r.dequantize(torch.float64, rotated=True).T
    back = q.dequantize(torch.float64) @ r.dequantize(torch.float64).T
    assert torch.allclose(turned, back, rtol=1e-5, atol=1e-6 * turned.abs().max().item())
    size = a.norm(dim=1)[:, None] * b.norm(dim=1)[None, :]
    assert ((turned - a.double() @ b.double().T).abs() <= 0.4 * size).all()


def test_an_outlier_is_spread_over_its_sixteen():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    x[:, 5] *= 100
    sizes = [amax_of(x, s).item() for s in (ROTATED, PLAIN)]
    assert sizes[1] / 4 <= sizes[0] < sizes[1] / 3


def test_a_weight_gradient_is_computed_from_both_rotated_operands():
    x, grad = hard(64, 48, seed=4).clamp(-50, 50), hard(64, 32, seed=5).clamp(-50, 50)
    operands = [
        quantize(t.mT, recipe("nvfp4").scaling(role, column=True), seed=6)
        for t, role in ((grad, "grad"), (x, "input"))
    ]
    assert all(q.scaling.hadamard for q in operands)
    found = operands[0].dequantize(rotated=True) @ operands[1].dequantize(rotated=True).T
    expected = grad.T @ x
    assert (found - expected).norm() < 0.2 * expected.norm()


def test_infinities_and_nan_make_nan_of_their_sixteen_and_large_numbers_do_not():
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(7))
    x[0, 3], x[0, 5], x[1, 20] = torch.inf, -torch.inf, torch.nan
    bad = torch.zeros(3, 48, dtype=torch.bool)
    bad[0, :16], bad[1, 16:32] = True, True
    assert torch.equal(quantize(x, ROTATED).dequantize().isnan(), bad)
    assert torch.equal(quantize(x, Scaling(block="row", hadamard=True)).dequantize().isnan(), bad)
    huge = torch.full((2, 32), 3.4e38)
    for scaling in (ROTATED, Scaling(block="row", hadamard=True)):
        assert not quantize(huge, scaling).dequantize(rotated=True).isnan().any()


def test_bf16_and_fp32_have_the_same_bits():
    x = hard(8, 64, seed=8).bfloat16()
    assert same_bits(quantize(x, ROTATED), quantize(x.float(), ROTATED))
