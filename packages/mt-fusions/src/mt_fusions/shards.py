"""The parts of cross entropy on one rank's columns, for who joins ranks and gradients himself."""

from __future__ import annotations

import torch
from torch import Tensor

from mt_fusions.cross_entropy import CROSS_ENTROPY_KERNELS
from mt_fusions.kernels import AUTO, kernel_for
from mt_fusions.loss import Terms


@torch.no_grad()
def cross_entropy_parts(
    logits: Tensor, labels: Tensor, *, with_sum: bool = False, kernel: str = AUTO
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return each row's log-sum-exp, its label's logit and, if it is wanted, its sum.

    What `cross_entropy` joins over ranks. Computed in fp32 (fp64 for fp64), without a gradient:
    `cross_entropy_gradient_` makes that.

    Args:
        logits: This rank's columns, all real, with neighbouring elements in a row.
        labels: Their columns here; -1 for a row whose label is another rank's, or that has none.
        with_sum: The sum is wanted, as label smoothing does.
        kernel: "auto", or one of "cpu", "triton" and "reference" by name.

    Shape:
        logits: [N, V]; labels: [N]. Returns [N] each.

    Raises:
        ValueError: The kernel does not serve.
    """
    columns = logits.shape[1]
    found = torch.ops.mt_fusions.cross_entropy(logits, labels, columns, with_sum, kernel)
    return found[0], found[1], found[2] if with_sum else None


@torch.no_grad()
def cross_entropy_gradient_(
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    grads: tuple[Tensor, Tensor, Tensor | None],
    *,
    kernel: str = AUTO,
) -> Tensor:
    """Return the gradient of the logits, in their memory outside of compiled graphs.

    It is `softmax * grads[0] + grads[1] at the label + grads[2]`, with the softmax over this rank's
    columns: where others have some too, `grads[0]` has the factor `exp(lse - lse_of_all)`.

    Args:
        logits: As of `cross_entropy_parts`.
        labels: Likewise.
        lse: The first that `cross_entropy_parts` gave.
        grads: Of log-sum-exp, label's logit and sum.
        kernel: As of `cross_entropy_parts`.

    Shape:
        logits: [N, V]; labels, lse, grads: [N]. Returns [N, V].

    Raises:
        ValueError: The kernel does not serve.
    """
    columns = logits.shape[1]
    filled: Terms = (grads[0], grads[1], lse.new_empty(0) if grads[2] is None else grads[2])
    if torch.compiler.is_compiling():
        of_logits = torch.ops.mt_fusions.cross_entropy_backward
        return of_logits(logits, labels, lse, *filled, columns, kernel)
    found = kernel_for(CROSS_ENTROPY_KERNELS, kernel, logits)
    found.backward(logits, logits, labels, lse, filled, columns)
    return logits
