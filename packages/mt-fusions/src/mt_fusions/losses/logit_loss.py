"""Losses of blocks of logits, and their gradient in the logits' memory, outside of autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from mt_kernels import Candidate, Registry, triton_obstacle
from torch import Tensor

from mt_fusions.blocks import wide_dtype
from mt_fusions.kernels import fused_kernel
from mt_fusions.losses.cross_entropy import CROSS_ENTROPY_KERNELS, TORCH, gradient_of_
from mt_fusions.losses.kernel import LogitKernel
from mt_fusions.losses.terms import LossOptions, Terms, local_labels, over_ranks, token_losses

_CACHED = 1 << 19  # logits whose softmax and gradient stay in a CPU's cache


class TokenLosses(NamedTuple):
    """Losses of some tokens, and what their gradient needs.

    Attributes:
        loss: Loss of each token.
        lse: Log-sum-exp over the whole vocabulary.
        own_lse: Log-sum-exp over this rank's columns.
    """

    loss: Tensor
    lse: Tensor
    own_lse: Tensor


class LogitLoss:
    """The loss of tokens whose logits are made block by block, as `cross_entropy` defines it.

    Args:
        labels: Labels of the whole vocabulary, for all tokens.
        like: A tensor with the dtype and device of the logits.
        width: Number of this rank's columns, the same on every rank.
        options: The terms of the loss.
        group: The ranks that share the vocabulary; None for one that is not split.

    Shape:
        labels: any; tokens are numbered through its dims.

    Attributes:
        options: The terms of the loss.
        counts: Whether each token counts, with one dim.
        group: The ranks that share the vocabulary, or None for one.

    Raises:
        ValueError: The vocabulary is larger than all columns, a label is outside of it, or the
            kernel does not serve.
    """

    def __init__(
        self,
        labels: Tensor,
        like: Tensor,
        width: int,
        options: LossOptions,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.options = options
        self._labels = local_labels(labels, width, group, options)
        self.counts = self._labels.counts
        self.group = None if group is None or group.size() == 1 else group
        kernel = options.kernel
        self._kernel = LOSS.find(kernel, like).function if isinstance(kernel, str) else kernel

    def losses_(self, logits: Tensor, rows: slice, *, wants_grad: bool) -> TokenLosses:
        """Return the losses of some tokens, and turn their logits into the gradient of the sum.

        With a group it runs the all-reduces of `cross_entropy`. If no gradient is wanted, the
        logits hold anything afterwards. Tokens that do not count get the gradient of others; the
        caller leaves them out.

        Args:
            logits: The logits, with neighbouring elements in a row.
            rows: Which tokens these are, a range with start and stop.
            wants_grad: Whether to make the gradient.

        Shape:
            logits: [N, V / ranks]. Returns three of [N].
        """
        size = max(1, len(logits))
        in_cache = self._kernel.softmax and logits.device.type == "cpu" and self.group is None
        if in_cache and type(logits) is Tensor and not torch.compiler.is_compiling():
            # The softmax takes fewer rows at a time than the products that made the logits. With a
            # group, each part would wait for all-reduces of its own. Fake tensors have no cache,
            # and thousands of parts would take minutes to count.
            size = max(16, _CACHED // logits.shape[1])
        parts = [
            self._losses_of_part_(logits[i : i + size], rows.start + i, wants_grad=wants_grad)
            for i in range(0, max(1, len(logits)), size)
        ]
        return TokenLosses(*(torch.cat(x) for x in zip(*parts, strict=True)))

    def _losses_of_part_(self, logits: Tensor, start: int, *, wants_grad: bool) -> TokenLosses:
        labels, options = self._labels.rows(slice(start, start + len(logits))), self.options
        capped, slope = _capped(logits[:, : labels.columns], options.softcap)
        wants_total, columns = options.label_smoothing > 0, labels.columns
        if self._kernel.softmax:
            terms, capped = self._kernel.softmax(capped, labels.local, wants_total=wants_total)
        else:
            terms = self._kernel.forward(capped, labels.local, columns, wants_total=wants_total)
        whole = over_ranks(terms, self.group)
        if wants_grad:
            slopes = self._slopes(whole[0], terms[0])
            if self._kernel.softmax:
                alone = not options.z_loss and self.group is None  # then the first slope is 1
                gradient_of_(capped, labels.local, (None if alone else slopes[0], *slopes[1:]))
            else:
                self._kernel.backward(capped, capped, labels.local, terms[0], slopes, columns)
            _write(logits, capped, slope)
        return TokenLosses(token_losses(whole, labels, options), whole[0], terms[0])

    def gradient_(self, logits: Tensor, rows: slice, losses: TokenLosses, grad: Tensor) -> None:
        """Turn logits into their gradient, without communication.

        Args:
            logits: The logits of some tokens, made again.
            rows: Which tokens these are.
            losses: What `losses_` returned for all tokens.
            grad: Gradient of each token's loss.

        Shape:
            logits: [N, V / ranks]; grad: [all tokens].
        """
        labels, lse, own = self._labels.rows(rows), losses.lse[rows], losses.own_lse[rows]
        capped, slope = _capped(logits[:, : labels.columns], self.options.softcap)
        of_lse, of_target, of_total = self._slopes(lse, own)
        scale = grad[rows]
        scaled = of_lse * scale, of_target * scale, of_total * scale if len(of_total) else of_total
        self._kernel.backward(capped, capped, labels.local, own, scaled, labels.columns)
        _write(logits, capped, slope)

    def _slopes(self, lse: Tensor, own: Tensor) -> Terms:
        """Return the gradients of a token's loss for the terms of this rank's columns."""
        smoothing = self.options.label_smoothing
        of_lse = (1 + 2 * self.options.z_loss * lse) * (own - lse).exp()
        share = -smoothing / self._labels.vocab_size
        of_total = torch.full_like(lse, share) if smoothing else lse.new_empty(0)
        return of_lse, torch.full_like(lse, smoothing - 1), of_total


def _capped(logits: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Cap logits, in place if they are wide, and return the derivative of that too."""
    if softcap is None:
        return logits, None
    wide = logits.to(wide_dtype(logits.dtype))
    turned = torch.tanh(wide / softcap)
    slope = 1 - turned.square()
    if torch.compiler.is_compiling():
        return turned * softcap, slope
    return torch.mul(turned, softcap, out=wide), slope


def _write(logits: Tensor, gradient: Tensor, slope: Tensor | None) -> None:
    """Write a gradient into the memory of the logits, unless it stands there already."""
    columns = gradient.shape[1]
    if slope is not None:
        gradient.mul_(slope)
    if gradient.dtype != logits.dtype or torch.compiler.is_compiling():
        logits[:, :columns] = gradient
    logits[:, columns:] = 0


def _through_operator(name_of: Callable[[Tensor], str]) -> LogitKernel:
    """Return a kernel of `cross_entropy` as one node of a compiled graph.

    Args:
        name_of: Returns the kernel's name for some logits.
    """

    def forward(logits: Tensor, labels: Tensor, columns: int, *, wants_total: bool) -> Terms:
        run = torch.ops.mt_fusions.cross_entropy
        return run(logits, labels, columns, wants_total, name_of(logits))

    def backward(
        out: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, grads: Terms, columns: int
    ) -> None:
        name = name_of(logits)
        if torch.compiler.is_compiling():
            run = torch.ops.mt_fusions.cross_entropy_backward
            out.copy_(run(logits, labels, lse, *grads, columns, name))
        else:
            kernel = CROSS_ENTROPY_KERNELS.find(name, logits).function
            kernel.backward(out, logits, labels, lse, grads, columns)

    return LogitKernel(forward, backward)


def _fused_name(logits: Tensor) -> str:
    return "triton" if fused_kernel(logits) == "triton" else "torch"


def _fused_obstacle(x: Tensor) -> str | None:
    if torch.compiler.is_compiling() or x.device.type == "cpu":
        return None  # in a compiled graph the kernel says it when it runs
    return triton_obstacle(x)


LOSS: Registry[LogitKernel] = Registry(
    "loss",
    (
        Candidate("torch", TORCH),
        Candidate("fused", _through_operator(_fused_name), _fused_obstacle),
        Candidate("reference", _through_operator(lambda _: "reference")),
    ),
)
"""Kernels of `LogitLoss`: torch's softmax in place, the fused kernel of the device, or neither."""
