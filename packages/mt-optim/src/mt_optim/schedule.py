"""Learning-rate schedules as pure functions of a counter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mt_optim.checks import LARGEST_LR, check_number, check_size

KINDS = ("constant", "linear", "cosine", "inverse-sqrt", "wsd")

# Coefficient of max_lr - min_lr at the fraction q in [0, 1] of a decay.
_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda q: 1.0 - q,
    "cosine": lambda q: 0.5 * (1.0 + math.cos(math.pi * q)),
    "exponential": lambda q: 2.0 * 0.5**q - 1.0,
    "minus-sqrt": lambda q: 1.0 - math.sqrt(q),
}
WSD_SHAPES = tuple(_SHAPES)


@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """Learning rate after `n` units, with linear warm-up and one of five decays.

    The unit is yours (steps, samples or tokens), the same for `warmup`, `decay`, `wsd_anneal` and
    the argument of `at`. With M = max_lr, m = min_lr, I = init_lr, W = warmup, D = decay:

    - ``n <= W``: ``I + (M - I) n / W``
    - ``n > D``: ``m`` (all kinds except constant)
    - constant: ``M``
    - linear, cosine: ``m + c(r) (M - m)`` with ``r = (n - W) / (D - W)``
    - inverse-sqrt: ``max(m, M sqrt(max(W, 1) / n))``
    - wsd (warm-up, stable, decay): ``M`` until ``D - wsd_anneal``, then ``m + c(q) (M - m)``
      with ``q`` going from 0 to 1 at ``D``

    where ``c`` is ``1 - q`` (linear), ``(1 + cos(pi q)) / 2`` (cosine), ``2 * 0.5**q - 1``
    (exponential) or ``1 - sqrt(q)`` (minus-sqrt).

    Attributes:
        kind: One of constant, linear, cosine, inverse-sqrt, wsd.
        max_lr: Peak learning rate.
        min_lr: Learning rate after the decay, and the floor of inverse-sqrt.
        init_lr: Learning rate at 0, where there is a warm-up.
        warmup: Units of warm-up, 0 for none.
        decay: Unit at which the decay ends, counted from 0 (warm-up included). Needed by linear,
            cosine and wsd; inverse-sqrt without it never ends; constant does not use it.
        wsd_anneal: Units of the final decay of wsd; the other kinds do not use it.
        wsd_shape: Its shape: linear, cosine, exponential or minus-sqrt.

    Raises:
        ValueError: A field is out of range; the message lists the allowed values.
        TypeError: A field is not a number where one is needed.

    Example:
        >>> LRSchedule(kind="cosine", max_lr=1e-3, warmup=100, decay=1000).at(550)
        0.0005
    """

    kind: str = "cosine"
    max_lr: float
    min_lr: float = 0.0
    init_lr: float = 0.0
    warmup: int = 0
    decay: int | None = None
    wsd_anneal: int | None = None
    wsd_shape: str = "exponential"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {self.kind!r}")
        if self.wsd_shape not in _SHAPES:
            raise ValueError(
                f"wsd_shape must be one of {', '.join(WSD_SHAPES)}; got {self.wsd_shape!r}"
            )
        for name in ("max_lr", "min_lr", "init_lr"):
            check_number(name, getattr(self, name))
        for name in ("warmup", "decay", "wsd_anneal"):
            if getattr(self, name) is not None or name == "warmup":
                check_number(name, getattr(self, name))
        if not 0 < self.max_lr <= LARGEST_LR:
            raise ValueError(
                f"max_lr must be positive and at most {LARGEST_LR:.3g}, the largest number of "
                f"fp32; got {self.max_lr}"
            )
        for name, value in (("min_lr", self.min_lr), ("init_lr", self.init_lr)):
            if not 0 <= value <= self.max_lr:
                raise ValueError(f"{name} must be in [0, max_lr={self.max_lr}], got {value}")
        if self.warmup < 0:
            raise ValueError(f"warmup must be 0 or more, got {self.warmup}")
        self._check_decay()
        self._check_anneal()

    def at(self, n: float) -> float:
        """Return the learning rate at `n` units.

        Args:
            n: Units done (0 gives `init_lr` where there is a warm-up).

        Raises:
            ValueError: `n` is negative.
        """
        if not check_number("n", n) >= 0:
            raise ValueError(f"n must be 0 or more, got {n}")
        if self.warmup and n <= self.warmup:
            return self.init_lr + (self.max_lr - self.init_lr) * (n / self.warmup)
        if self.kind == "constant":
            return self.max_lr
        if self.decay is not None and n > self.decay:
            return self.min_lr
        if self.kind == "inverse-sqrt":
            return max(self.min_lr, self.max_lr * math.sqrt(max(self.warmup, 1) / max(n, 1)))
        return self.min_lr + self._coefficient(n) * (self.max_lr - self.min_lr)

    def _coefficient(self, n: float) -> float:
        decay = self.decay or 0
        if self.kind != "wsd":
            return _SHAPES[self.kind]((n - self.warmup) / (decay - self.warmup))
        anneal = self.wsd_anneal or 0
        begin = decay - anneal
        return 1.0 if n <= begin else _SHAPES[self.wsd_shape]((n - begin) / anneal)

    def _check_decay(self) -> None:
        if self.decay is None:
            if self.kind in ("linear", "cosine", "wsd"):
                raise ValueError(
                    f"kind {self.kind!r} needs decay, the number of units after which min_lr is "
                    "reached (often the length of the run)"
                )
        elif self.decay < max(self.warmup, 1):
            raise ValueError(
                f"decay must be at least warmup={self.warmup}, and 1 (it is counted from 0, the "
                f"warm-up included); got {self.decay}"
            )

    def _check_anneal(self) -> None:
        if self.kind != "wsd":
            return
        longest = (self.decay or 0) - self.warmup
        if self.wsd_anneal is None or not 0 <= self.wsd_anneal <= longest:
            raise ValueError(
                f"kind 'wsd' needs wsd_anneal between 0 and decay - warmup = {longest}, "
                f"got {self.wsd_anneal}"
            )


@dataclass(frozen=True, kw_only=True)
class WeightDecaySchedule:
    """Weight decay after `n` units, from `start` to `end` over `length` units.

    A pure function like `LRSchedule`: a resumed run asks for the same `n`, and nothing is stored.

    Attributes:
        start: Weight decay at 0.
        end: Weight decay from `length` on.
        length: Units of the change.
        kind: `linear` `start + v (end - start)` or `cosine` `start + (1 + cos(pi (1 - v))) / 2
            (end - start)`, with `v = n / length`; `constant` needs `end` to be `start`.

    Raises:
        ValueError: A field is out of range.
        TypeError: A field is not a number where one is needed.

    Example:
        >>> WeightDecaySchedule(start=0.0, end=0.1, length=100).at(50)
        0.05
    """

    start: float
    end: float
    length: int
    kind: str = "linear"

    def __post_init__(self) -> None:
        check_size("start", self.start)
        check_size("end", self.end)
        if not check_number("length", self.length) > 0:
            raise ValueError(f"length must be positive, got {self.length}")
        if self.kind not in ("constant", "linear", "cosine"):
            raise ValueError(f"kind must be constant, linear or cosine; got {self.kind!r:.60}")
        if self.kind == "constant" and self.start != self.end:
            raise ValueError(
                f"kind 'constant' needs end to be start, got {self.start} and {self.end}; make "
                "them the same, or use linear or cosine"
            )

    def at(self, n: float) -> float:
        """Return the weight decay at `n` units.

        Raises:
            ValueError: `n` is negative.
        """
        if not check_number("n", n) >= 0:
            raise ValueError(f"n must be 0 or more, got {n}")
        done = min(n / self.length, 1.0)
        if self.kind == "cosine":
            done = 0.5 * (1.0 + math.cos(math.pi * (1.0 - done)))
        return self.start + done * (self.end - self.start)
