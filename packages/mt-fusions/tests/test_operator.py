"""Operators of torch: what all of them refuse."""

import mt_fusions
import pytest
import torch
from oracle import DEVICE, drawn


@pytest.mark.parametrize("kernel", ["cpu", "triton", "reference"])
@pytest.mark.parametrize(
    "operation",
    [
        lambda x, how: mt_fusions.rms_norm(x, None, 1e-6, kernel=how),
        lambda x, how: mt_fusions.layer_norm(x, None, None, 1e-6, kernel=how),
        lambda x, how: mt_fusions.swiglu(x, x, kernel=how),
        lambda x, how: mt_fusions.bias_gelu(x, x[0], kernel=how),
        lambda x, how: mt_fusions.cross_entropy(
            x, torch.tensor([1, 2], device=x.device), kernel=how.replace("cpu", "torch")
        ),
    ],
    ids=["rms_norm", "layer_norm", "swiglu", "bias_gelu", "cross_entropy"],
)
def test_a_gradient_of_a_gradient_is_refused(operation, kernel):
    x = drawn(2, 6, device=DEVICE if kernel == "triton" else "cpu").requires_grad_()
    out = operation(x, kernel).square().sum()
    with pytest.raises(RuntimeError, match="differentiated once only; leave out create_graph"):
        torch.autograd.grad(out, x, create_graph=True)
