"""AdamW and Adam, through torch's fused kernel, or its foreach one where that does not run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from mt_data_parallel import ParamShard
from torch import Tensor

# The functional form of torch.optim.AdamW runs the same kernels without importing torch._dynamo
# (seconds, once per process), which the class does when it is constructed.
from torch.optim.adam import adam

from mt_optim.checks import check_betas, check_size
from mt_optim.gradients.scaling import multiply_
from mt_optim.rules.rule import Batch, Rule

_FUSED_DEVICES = ("cpu", "cuda", "xpu")


def fused_obstacle(param: Tensor) -> str | None:
    """Return why torch's fused AdamW kernel does not take this parameter; None if it does."""
    kind = param.device.type
    if kind not in _FUSED_DEVICES:
        return f"no fused AdamW kernel for {kind}; there is one for {_FUSED_DEVICES}"
    if not param.is_contiguous():
        return "the fused AdamW kernel reads memory in order, and this one is not contiguous"
    return None


class AdamWRule(Rule):
    """Loshchilov and Hutter, arXiv 1711.05101; with `decoupled=False` the Adam of torch.optim.

    Args:
        decoupled: Whether weight decay shrinks the weights, or is added to the gradient (Adam).
        betas: Default decay rates of the two moments.
        eps: Default of the number added to the root of the second moment.
    """

    name: ClassVar[str] = "adamw"
    takes_tensor_lr = True
    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        *,
        decoupled: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self.decoupled = decoupled
        self.options = {"betas": betas, "eps": eps}

    def check(self, group: Mapping[str, Any]) -> None:
        """Check betas and eps."""
        check_betas(group["betas"])
        check_size("eps", group["eps"])

    def new_state(self, shard: ParamShard, master: Tensor) -> dict[str, Tensor]:
        """Return the state before the first step."""
        state = super().new_state(shard, master)
        if fused_obstacle(master) is None:  # where torch.optim.AdamW keeps it for that kernel
            state["step"] = state["step"].to(master.device)
        return state

    def device_obstacle(self, master: Tensor) -> str | None:
        """Return why rates on the device are not supported; only the fused kernel reads them."""
        if not self.decoupled:
            return "adam adds weight decay, a number of Python, to gradients; use adamw"
        return fused_obstacle(master)

    def update(self, batch: Batch, group: Mapping[str, Any]) -> None:
        """Run torch's kernels, each on all parameters for which it was chosen."""
        lr, decay = group["lr"], group["weight_decay"]
        if isinstance(decay, Tensor):
            # The kernel takes a Python number; this has the bits of its own decay on a CPU.
            taken = 1.0 if batch.skip is None else 1 - batch.skip
            multiply_(batch.masters, 1 - lr * decay * taken)
            decay = 0.0
        if isinstance(lr, Tensor) and lr.device.type != "cpu":
            lr = lr.to(torch.float32)  # as the kernel reads it
        by_kernel: dict[bool, list[int]] = {}
        for index, master in enumerate(batch.masters):
            by_kernel.setdefault(fused_obstacle(master) is None, []).append(index)
        for fused, indices in by_kernel.items():
            part = batch if len(by_kernel) == 1 else batch.pick(indices)
            adam(
                part.masters,
                part.grads,
                part.moment("exp_avg"),
                part.moment("exp_avg_sq"),
                [],
                part.moment("step"),
                foreach=not fused,
                fused=fused,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=lr,
                weight_decay=decay,
                eps=group["eps"],
                maximize=False,
                found_inf=None if batch.skip is None else batch.skip.to(torch.float32),
                decoupled_weight_decay=self.decoupled,
            )
