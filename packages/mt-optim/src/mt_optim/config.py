"""Everything that makes an optimizer, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mt_optim.group import check_number, check_size
from mt_optim.orthogonal import Orthogonalization
from mt_optim.override import GroupOverride
from mt_optim.storage import MomentStorage

NAMES = ("adamw", "adam", "sgd", "lion", "muon", "adaptive_muon")
TORCH = "torch.optim."


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """What `build_optimizer` builds.

    Attributes:
        name: adamw, adam, sgd, lion, muon or adaptive_muon (both with adamw for what is no hidden
            matrix), or a class of torch such as `torch.optim.RAdam`.
        lr: Learning rate; a schedule sets it anew for each step.
        weight_decay: Of matrices; biases, norms and other vectors have none.
        betas: Decay rates of adamw and adam (default 0.9 and 0.999) and lion (0.9 and 0.99); the
            second one also of adaptive_muon.
        eps: Added to the root of the second moment of adamw and adam.
        momentum: Of sgd (default 0.9) and muon (0.95).
        nesterov: Whether sgd (by default not) and muon (by default) look ahead.
        orthogonalization: Of muon; by default its updates have the size of adamw's.
        moments_dtype: What moments are kept in: full (as the masters), fp32, bf16, or fp16 or fp8
            with scales.
        overrides: What some parameters have in place of that.
        options: Further arguments of a class of torch.
        max_norm: Largest norm of the whole model's gradient; None never clips.
        max_value: Largest magnitude of a gradient's element; None for any.
        skip_above: A step with a larger norm is skipped; None skips what is not finite.

    Raises:
        ValueError: A field is out of range, or not for this optimizer.
        TypeError: A field is of another type.
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
    moments_dtype: str = "full"
    overrides: tuple[GroupOverride, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    max_norm: float | None = None
    max_value: float | None = None
    skip_above: float | None = None

    def __post_init__(self) -> None:
        how = self.orthogonalization
        if not isinstance(how, Orthogonalization):
            raise TypeError(f"orthogonalization must be an Orthogonalization, got {how!r:.60}")
        if not isinstance(self.name, str):
            raise TypeError(f"name must be a string, got {self.name!r:.60}")
        if self.name not in NAMES and not self.name.startswith(TORCH):
            raise ValueError(
                f"name must be one of {', '.join(NAMES)}, or a class such as torch.optim.RAdam; "
                f"got {self.name[:60]!r}"
            )
        check_size("lr", self.lr)
        check_size("weight_decay", self.weight_decay)
        for what in ("max_norm", "max_value", "skip_above"):
            limit = getattr(self, what)
            if limit is not None and not check_number(what, limit) > 0:
                raise ValueError(f"{what} must be positive (None for no limit), got {limit}")
        if not all(isinstance(override, GroupOverride) for override in self.overrides):
            raise TypeError(f"overrides must be GroupOverrides, got {self.overrides!r:.60}")
        MomentStorage(self.moments_dtype)
        if self.moments_dtype != "full" and self.name.startswith(TORCH):
            raise ValueError(
                f"moments_dtype {self.moments_dtype!r} is not for classes of torch, and name is "
                f"{self.name!r}; leave it out"
            )
        if self.options and not self.name.startswith(TORCH):
            raise ValueError(
                f"options {sorted(self.options)} are for classes of torch, and name is "
                f"{self.name!r}; its settings are fields of their own"
            )
