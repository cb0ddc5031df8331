"""Parts of cross entropy and their gradient: what autograd makes of the same sums."""

import pytest
import torch
from mt_fusions import cross_entropy_gradient_, cross_entropy_parts


def by_hand(logits, labels):
    """Log-sum-exp, the label's logit and the sum."""
    target = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return logits.logsumexp(-1), torch.where(labels >= 0, target, 0), logits.sum(-1)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("with_sum", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6), (torch.bfloat16, 2e-2)]
)
def test_parts_and_gradient_are_those_of_autograd(kernel, with_sum, dtype, tolerance):
    generator = torch.Generator().manual_seed(1)
    padded = torch.randn(7, 40, generator=generator, dtype=torch.float64).to(dtype)
    logits, labels = padded[:, :37], torch.tensor([3, -1, 36, 0, 5, -1, 12])
    exact = logits.detach().double().clone().requires_grad_()
    expected = by_hand(exact, labels)
    found = cross_entropy_parts(logits, labels, with_sum=with_sum, kernel=kernel)
    assert (found[2] is None) != with_sum
    grads = [torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(3)]
    used = 2 + with_sum
    for ours, part in zip(found[:used], expected[:used], strict=True):
        assert (ours - part).abs().max() <= tolerance * part.abs().max()
    torch.autograd.backward(expected[:used], grads[:used])
    wide = [grad.to(found[0].dtype) for grad in grads]
    given = wide[0], wide[1], wide[2] if with_sum else None
    beyond = padded[:, 37:].clone()
    out = cross_entropy_gradient_(
        logits, labels, expected[0].detach().to(wide[0].dtype), given, kernel=kernel
    )
    assert out.data_ptr() == logits.data_ptr()
    assert torch.equal(padded[:, 37:], beyond)
    assert (out.double() - exact.grad).abs().max() <= tolerance * exact.grad.abs().max()


def test_no_rows_and_a_kernel_that_does_not_serve():
    empty, labels = torch.empty(0, 5), torch.empty(0, dtype=torch.int64)
    lse, target, _ = cross_entropy_parts(empty, labels)
    assert cross_entropy_gradient_(empty, labels, lse, (lse, target, None)).shape == (0, 5)
    with pytest.raises(ValueError, match="kernel must be one of auto, cpu, triton, reference"):
        cross_entropy_parts(empty, labels, kernel="fast")
