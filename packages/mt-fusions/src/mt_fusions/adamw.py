"""AdamW over many tensors at once (Loshchilov & Hutter, 2019), and their norm, for clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from mt_files import check_type
from mt_kernels import AUTO, triton_obstacle
from torch import Tensor

from mt_fusions.blocks import wide_dtype
from mt_fusions.kernels import Functions, implementations
from mt_fusions.operator import operator


class AdamWState(NamedTuple):
    """The tensors of a step, in the same order in each list.

    Attributes:
        params: What the model computes with, of any floating dtype.
        grads: Their gradients; not changed.
        exp_avgs: First moments, of the masters' dtype.
        exp_avg_sqs: Second moments, likewise.
        masters: What the moments belong to, in fp32 or fp64, rounded to the parameters after the
            step; empty where these are their own.
    """

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    masters: Sequence[Tensor] = ()


@dataclass(frozen=True, kw_only=True)
class AdamWOptions:
    """The numbers of a step.

    Attributes:
        step: Which one it is, from 1.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled, multiplied by the learning rate.

    Raises:
        TypeError: Something is no number.
        ValueError: Something is out of range.
    """

    step: int
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_type("step", self.step, int)
        if self.step < 1:
            raise ValueError(f"step must be 1 or more, got {self.step}")
        for name in ("lr", "eps", "weight_decay"):
            value = getattr(self, name)
            check_type(name, value, float, int)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be 0 or more, and finite, got {value}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers from 0 to below 1, got {self.betas}")


def adamw_(
    state: AdamWState,
    options: AdamWOptions,
    *,
    factor: Tensor | None = None,
    kernel: str = AUTO,
) -> None:
    """Step masters and moments in place, and round the parameters from the masters.

    The arithmetic equals `torch.optim.AdamW`, in the dtype of the masters.

    Args:
        state: The tensors, contiguous.
        options: The numbers.
        factor: Multiplies the gradients first, such as what clips them; it stays on its device, so
            that nothing waits for it.
        kernel: "auto", or one of "cpu", "triton" and "reference" by name.

    Shape:
        factor: a scalar.

    Raises:
        TypeError: Dtypes do not fit.
        ValueError: Lists, shapes or devices do not fit, or the kernel does not serve.
    """
    check_type("state", state, AdamWState)
    check_type("options", options, AdamWOptions)
    _check(state, factor)
    if state.params:
        numbers = [options.lr, *options.betas, options.eps, options.weight_decay]
        lists = [list(x) for x in state]
        _step(*lists, factor, numbers, options.step, kernel)


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The root of the sum of all squares, in fp32 (fp64 for fp64), on the tensors' device.

    Shape:
        Returns a scalar; 0 for no tensors.
    """
    if not tensors:
        return torch.zeros(())
    wide = wide_dtype(tensors[0].dtype)
    norms = torch.cat([part for x in tensors for part in _part_norms(x, wide)])
    return torch.linalg.vector_norm(norms, dtype=torch.float64).to(wide)


def _part_norms(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Norms of runs of elements: on a CPU torch's sum of all of them has four digits in fp32."""
    flat, width = x.reshape(-1), 1024
    whole = len(flat) // width * width
    rows = flat[:whole].view(-1, width)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
    return torch.linalg.vector_norm(rows, dim=1, dtype=dtype), rest.view(1)


def _corrections(numbers: Sequence[float], step: int) -> tuple[float, float]:
    """What the step and the root of the second moment are divided by."""
    return 1 - numbers[1] ** step, math.sqrt(1 - numbers[2] ** step)


def _reference(
    state: AdamWState, factor: Tensor | None, numbers: Sequence[float], step: int
) -> None:
    lr, beta_1, beta_2, eps, decay = numbers
    first, second = _corrections(numbers, step)
    masters = state.masters or state.params
    for number, w in enumerate(masters):
        m, v = state.exp_avgs[number], state.exp_avg_sqs[number]
        g = state.grads[number].to(w.dtype)
        if factor is not None:
            g = g * factor.to(w.dtype)
        w.mul_(1 - lr * decay)
        m.lerp_(g, 1 - beta_1)
        v.mul_(beta_2).addcmul_(g, g, value=1 - beta_2)
        w.addcdiv_(m, (v.sqrt() / second).add_(eps), value=-lr / first)
        if state.masters:
            state.params[number].copy_(w)


def _cpu(state: AdamWState, factor: Tensor | None, numbers: Sequence[float], step: int) -> None:
    """By torch's fused kernel for the CPU, which goes over each tensor once."""
    lr, beta_1, beta_2, eps, decay = numbers
    masters = list(state.masters or state.params)
    grads = [g.to(w.dtype) for g, w in zip(state.grads, masters, strict=True)]
    if factor is not None:
        grads = torch._foreach_mul(grads, factor.to(masters[0].dtype))
    steps = [torch.tensor(float(step)) for _ in masters]
    torch._fused_adamw_(
        *(masters, grads, list(state.exp_avgs), list(state.exp_avg_sqs), [], steps),
        lr=lr,
        beta1=beta_1,
        beta2=beta_2,
        weight_decay=decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
    if state.masters:
        torch._foreach_copy_(list(state.params), masters)


def _triton(state: AdamWState, factor: Tensor | None, numbers: Sequence[float], step: int) -> None:
    from mt_fusions.gpu.adamw import adamw_

    adamw_(state, factor, numbers, _corrections(numbers, step))


def _triton_obstacle(master: Tensor, *_: Any) -> str | None:
    if master.dtype != torch.float32:
        return f"it keeps masters in fp32, and these are {master.dtype}"
    return triton_obstacle(master)


ADAMW_KERNELS = implementations(
    "adamw_",
    cpu=Functions(_cpu),
    triton=Functions(_triton),
    reference=Functions(_reference),
    obstacle=_triton_obstacle,
)


def _nothing(*_: Any) -> None:
    """Return no result: a step writes into its arguments."""


def _run(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    masters: list[Tensor],
    factor: Tensor | None,
    *how: Any,
) -> None:
    numbers, step, name = how
    state = AdamWState(params, grads, exp_avgs, exp_avg_sqs, masters)
    kernel = ADAMW_KERNELS.find(name, (masters or params)[0]).function
    kernel.forward(state, factor, numbers, step)


_step = operator(
    "adamw_",
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] masters, Tensor? factor, float[] numbers, int step, str kernel) -> ()",
    _run,
    fake=_nothing,
)


def _check(state: AdamWState, factor: Tensor | None) -> None:
    masters = state.masters or state.params
    device = masters[0].device if masters else torch.device("cpu")
    for name, tensors in state._asdict().items():
        if len(tensors) != len(masters) and (tensors or name != "masters"):
            raise ValueError(f"there are {len(tensors)} {name} for {len(masters)} parameters")
        for x, w in zip(tensors, masters, strict=False):
            check_type(f"each of {name}", x, Tensor)
            if x.shape != w.shape or x.device != device or not x.is_contiguous():
                raise ValueError(
                    f"one of {name} is {tuple(x.shape)} on {x.device}, and must be contiguous, "
                    f"{tuple(w.shape)} and on {device}"
                )
            if name.startswith("exp") and x.dtype != w.dtype:
                raise TypeError(f"one of {name} is {x.dtype}, and must be {w.dtype} as its master")
    if len({w.dtype for w in masters}) > 1:
        raise TypeError("masters must have one dtype; step those of each dtype alone")
    if masters and masters[0].dtype not in (torch.float32, torch.float64):
        raise TypeError(f"masters must be fp32 or fp64, got {masters[0].dtype}; give some")
    if factor is not None and (factor.numel() != 1 or factor.device != device):
        raise ValueError(f"factor must be one number on {device}, got {tuple(factor.shape)}")
