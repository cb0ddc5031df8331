"""AdamW and Adam, through torch's fused and foreach kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from mt_data_parallel import ParamShard
from mt_files import check_type
from torch import Tensor

# The functional form of torch.optim.AdamW runs the same kernels without importing torch._dynamo
# (seconds, once per process), which the class does when it is constructed.
from torch.optim.adam import adam

from mt_optim.checks import check_betas, check_size
from mt_optim.gradients.scaling import multiply_
from mt_optim.rules.rule import Batch, Rule

ENGINES = ("auto", "fused", "foreach")
_FUSED_DEVICES = ("cpu", "cuda", "xpu")


def fused_obstacle(param: Tensor) -> str | None:
    """Say why torch's fused AdamW kernel does not take this parameter; None if it does."""
    check_type("param", param, Tensor)
    kind = param.device.type
    if kind not in _FUSED_DEVICES:
        return f"no fused AdamW kernel for {kind}; there is one for {_FUSED_DEVICES}"
    if not param.is_contiguous():
        return "the fused AdamW kernel reads memory in order, and this one is not contiguous"
    return None


class AdamWRule(Rule):
    """Loshchilov and Hutter, arXiv 1711.05101; with `decoupled=False` the Adam of torch.optim.

    Args:
        engine: "fused", "foreach", or "auto" for fused if `fused_obstacle` is None.
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
        engine: str = "auto",
        decoupled: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if engine not in ENGINES:
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}; got {engine!r}")
        self.engine, self.decoupled = engine, decoupled
        self.options = {"betas": betas, "eps": eps}

    def check(self, group: Mapping[str, Any]) -> None:
        """Check betas and eps."""
        check_betas(group["betas"])
        check_size("eps", group["eps"])

    def new_state(self, shard: ParamShard, master: Tensor) -> dict[str, Tensor]:
        """Return the state before the first step; the engine must run for the parameter."""
        obstacle = fused_obstacle(master)
        if self.engine == "fused" and obstacle is not None:
            raise ValueError(f"engine 'fused' does not run: {obstacle}")
        state = super().new_state(shard, master)
        if self._is_fused(master):  # where torch.optim.AdamW keeps it for that kernel
            state["step"] = state["step"].to(master.device)
        return state

    def device_obstacle(self, master: Tensor) -> str | None:
        """Say why rates on the device are not supported; only the fused kernel reads them."""
        if not self.decoupled:
            return "adam adds weight decay, a number of Python, to gradients; use adamw"
        if self.engine == "foreach":
            return "engine 'foreach' does not leave out a step on the device; use 'auto'"
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
        by_engine: dict[bool, list[int]] = {}
        for index, master in enumerate(batch.masters):
            by_engine.setdefault(self._is_fused(master), []).append(index)
        for fused, indices in by_engine.items():
            part = batch if len(by_engine) == 1 else batch.pick(indices)
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

    def _is_fused(self, param: Tensor) -> bool:
        return self.engine != "foreach" and fused_obstacle(param) is None
