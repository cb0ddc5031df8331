"""The settings of an optimizer, as one value."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mt_files import check_type

from mt_optim.checks import check_bool, check_count, check_fraction, check_size
from mt_optim.gradients.limits import GradLimits, NormGroup
from mt_optim.gradients.scaler import LossScale
from mt_optim.parameters.matching import GroupOverride
from mt_optim.rules.orthogonal import Orthogonalization
from mt_optim.state.storage import StateStorage

NAMES = ("adamw", "adam", "sgd", "lion", "muon", "adaptive_muon", "soap")
TORCH = "torch.optim."
_MUON = ("muon", "adaptive_muon")
_READ_BY = {
    "betas": ("adamw", "adam", "lion", "soap", *_MUON),
    "momentum": ("sgd", *_MUON),
    "nesterov": ("sgd", *_MUON),
}


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The settings of `build_optimizer`.

    Attributes:
        name: adamw, adam, sgd, lion, muon, adaptive_muon or soap (the last three with adamw for all
            parameters but hidden matrices), or a class of torch such as `torch.optim.RAdam`.
        lr: Learning rate; a schedule sets it anew for each step.
        weight_decay: Weight decay of matrices; biases, norms and other vectors have none.
        betas: Decay rates of adamw and adam (default 0.9 and 0.999), soap (0.95 and 0.95) and lion
            (0.9 and 0.99); the second one also of adaptive_muon.
        eps: Added to the root of the second moment of adamw, adam and soap.
        momentum: Momentum of sgd (default 0.9) and muon (0.95).
        nesterov: Whether sgd (by default not) and muon (by default) look ahead.
        orthogonalization: Orthogonalization of muon; by default its updates have the size of
            adamw's.
        soap_frequency: Steps from one refresh of soap's bases to the next.
        soap_max_dim: Longest side of a matrix for which soap keeps a basis.
        moments_dtype: Format of the moments: full (as the masters), fp32, bf16, or fp16 or fp8 with
            scales.
        masters: Form of the fp32 masters of bf16 parameters: full (a copy), or remainder (only the
            17 bits that the parameter lacks).
        offload: Share of the states, 0 to 1, to keep and step on the host.
        offload_dir: A folder for files with these states; None for the host's memory.
        ema: Decay rate of an average of the weights; None for no average.
        overrides: Settings of some parameters in place of these.
        options: Further arguments of a class of torch.
        loss_scale: Factor of the losses of an fp16 model: "dynamic", a number, or a `LossScale`
            with its settings. None for bf16 and wider types.
        max_norm: Largest norm of the whole model's gradient; None never clips.
        norm_groups: Groups of parameters with norms of their own for clipping.
        max_value: Largest magnitude of a gradient's element; None never clips.
        skip_above: Skip a step with a larger norm; None skips a step only if its norm is not
            finite.
        count_zeros: Whether a step counts the zeros of the gradient.
        statistics: Groups in which a step describes the gradient: "layer", a function from a
            parameter's name to its group, or None for no description.

    Raises:
        ValueError: A field is out of range, or not for this optimizer.
        TypeError: A field has the wrong type.
    """

    name: str = "adamw"
    lr: float
    weight_decay: float = 0.0
    betas: tuple[float, float] | None = None
    eps: float = 1e-8
    momentum: float | None = None
    nesterov: bool | None = None
    orthogonalization: Orthogonalization = field(
        default_factory=lambda: Orthogonalization(extra_scale=0.2)
    )
    soap_frequency: int = 10
    soap_max_dim: int = 8192
    moments_dtype: str = "full"
    masters: str = "full"
    offload: float = 0.0
    offload_dir: str | os.PathLike[str] | None = None
    ema: float | None = None
    overrides: tuple[GroupOverride, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    loss_scale: LossScale | float | str | None = None
    max_norm: float | None = None
    norm_groups: tuple[NormGroup, ...] = ()
    max_value: float | None = None
    skip_above: float | None = None
    count_zeros: bool = False
    statistics: Callable[[str], str] | Literal["layer"] | None = None

    def __post_init__(self) -> None:
        check_type("orthogonalization", self.orthogonalization, Orthogonalization)
        check_type("name", self.name, str)
        if self.name not in NAMES and not self.name.startswith(TORCH):
            raise ValueError(
                f"name must be one of {', '.join(NAMES)}, or a class such as torch.optim.RAdam; "
                f"got {self.name[:60]!r}"
            )
        for what, names in _READ_BY.items():
            if getattr(self, what) is not None and self.name not in names:
                raise ValueError(
                    f"{what} {getattr(self, what)} does not go with name {self.name!r}; leave it "
                    f"out, or use {' or '.join(names)} (a class of torch has options)"
                )
        check_size("lr", self.lr)
        check_count("soap_frequency", self.soap_frequency)
        check_count("soap_max_dim", self.soap_max_dim)
        check_size("weight_decay", self.weight_decay)
        if self.ema is not None:
            check_fraction("ema", self.ema)
        _ = self.limits  # which checks itself
        LossScale.of(self.loss_scale)
        check_bool("count_zeros", self.count_zeros)
        by = self.statistics
        if by is not None and by != "layer" and not callable(by):
            raise ValueError(
                f"statistics must be 'layer', a function or None; got {self.statistics!r:.60}"
            )
        if not all(isinstance(override, GroupOverride) for override in self.overrides):
            raise TypeError(f"overrides must be GroupOverrides, got {self.overrides!r:.60}")
        self.storage()
        for what, plain in (("moments_dtype", "full"), ("offload", 0)):
            value = getattr(self, what)
            if value != plain and self.name.startswith(TORCH):
                raise ValueError(
                    f"{what} {value!r} is not for classes of torch, and name is {self.name!r}; "
                    "leave it out"
                )
        if self.options and not self.name.startswith(TORCH):
            raise ValueError(
                f"options {sorted(self.options)} are for classes of torch, and name is "
                f"{self.name!r}; its settings are fields of their own"
            )

    def storage(self) -> StateStorage:
        """Return the state storage of one optimizer."""
        return StateStorage(
            moments_dtype=self.moments_dtype,
            masters=self.masters,
            offload=self.offload,
            offload_dir=self.offload_dir,
        )

    @property
    def limits(self) -> GradLimits:
        """The limits on the size of gradients."""
        return GradLimits(
            max_norm=self.max_norm,
            norm_groups=self.norm_groups,
            max_value=self.max_value,
            skip_above=self.skip_above,
        )
