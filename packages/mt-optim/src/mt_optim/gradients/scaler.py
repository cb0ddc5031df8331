"""The scale of an fp16 model's loss, without which small gradients would become zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from mt_files import check_type

from mt_optim.checks import check_count, check_number

LARGEST_SCALE = 2.0**127  # the largest power of two in fp32
_DEFAULT_START = 2.0**32


@dataclass(frozen=True, kw_only=True)
class ScaleState:
    """The state of a loss scale in a checkpoint.

    Attributes:
        scale: The factor of the next loss.
        left: Number of overflows until the scale is lowered, including the one that lowers it.
        clean: Steps without an overflow since the scale last changed or one occurred.
    """

    scale: float
    left: int
    clean: int = 0

    def __post_init__(self) -> None:
        if not 0 < check_number("scale", self.scale) <= LARGEST_SCALE:
            raise ValueError(f"scale must be positive and at most 2^127, got {self.scale}")
        for what in ("left", "clean"):
            check_count(what, getattr(self, what), least=0)


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The settings of a loss scale, constant or dynamic.

    A dynamic scale doubles after `growth_interval` steps in a row with finite gradients. The first
    `hysteresis - 1` overflows are tolerated; each later one halves the scale, down to `minimum`.
    When the scale grows, the tolerance is restored.

    Attributes:
        initial: The first scale. Powers of two change only exponents.
        dynamic: Whether the scale changes.
        growth_interval: Steps without an overflow before the scale doubles.
        hysteresis: Overflows before the scale is halved.
        minimum: The smallest scale.

    Raises:
        ValueError: A field is out of range.
        TypeError: A field is not a number.

    Example:
        >>> how = LossScale(initial=8.0, growth_interval=2, hysteresis=1)
        >>> state = how.start()
        >>> for overflow in (True, False, False):
        ...     state = how.after(state, overflow=overflow)
        ...     print(state.scale)
        4.0
        4.0
        8.0
    """

    initial: float = _DEFAULT_START
    dynamic: bool = True
    growth_interval: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0

    def __post_init__(self) -> None:
        for what in ("minimum", "initial"):
            if not 0 < check_number(what, getattr(self, what)) <= LARGEST_SCALE:
                raise ValueError(
                    f"{what} must be positive and at most 2^127, got {getattr(self, what)}"
                )
        for what in ("growth_interval", "hysteresis"):
            check_count(what, getattr(self, what), least=1)
        if self.dynamic and self.initial < self.minimum:
            raise ValueError(f"initial {self.initial} is below minimum {self.minimum}")

    @classmethod
    def of(cls, given: LossScale | float | str | None) -> LossScale | None:
        """Return the loss scale for "dynamic", a number or None.

        Raises:
            ValueError: It is another string, or a number out of range.
            TypeError: It has the wrong type.
        """
        if given is None or isinstance(given, LossScale):
            return given
        if given == "dynamic":
            return cls()
        if isinstance(given, str):
            raise ValueError(  # noqa: TRY004 - another string would do
                f"loss_scale must be 'dynamic', a number or None; got {given!r:.60}"
            )
        number = float(check_number("loss_scale", given))
        if not 0 < number <= LARGEST_SCALE:
            raise ValueError(f"loss_scale must be positive and at most 2^127, got {given}")
        return cls(initial=number, dynamic=False)

    def start(self) -> ScaleState:
        """Return the state before the first step."""
        return ScaleState(scale=float(self.initial), left=self.hysteresis)

    def after(self, state: ScaleState, *, overflow: bool) -> ScaleState:
        """Return the state after a step.

        Args:
            state: The state before the step.
            overflow: Whether the gradients were not finite.
        """
        if not self.dynamic:
            return state
        if overflow:
            left = max(state.left - 1, 0)
            scale = state.scale if left else max(state.scale / 2, self.minimum)
            return ScaleState(scale=scale, left=left)
        if state.clean + 1 < self.growth_interval:
            return ScaleState(scale=state.scale, clean=state.clean + 1, left=state.left)
        return ScaleState(scale=min(state.scale * 2, LARGEST_SCALE), left=self.hysteresis)


class GradScaler:
    """The scale of a run's losses: multiply the loss with `scale` before its backward.

    An optimizer with a scaler divides the gradients by it before they are clipped, and updates it
    after each step.

    Args:
        how: The settings.

    Attributes:
        how: The settings.
        state: The current state.
    """

    def __init__(self, how: LossScale) -> None:
        check_type("how", how, LossScale)
        self.how, self.state = how, how.start()

    @property
    def scale(self) -> float:
        """The factor of the next loss."""
        return self.state.scale

    def update(self, *, overflow: bool) -> None:
        """Update the state after a step, with the same argument on every rank."""
        self.state = self.how.after(self.state, overflow=overflow)

    def restore(self, state: ScaleState) -> None:
        """Continue from a saved state; a constant scale keeps its own.

        Raises:
            TypeError: `state` is not a ScaleState.
        """
        check_type("state", state, ScaleState)
        if self.how.dynamic:
            self.state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return asdict(self.state)


def read_scale(given: Any) -> ScaleState:
    """Return the state from plain values.

    Raises:
        ValueError: A value is missing or out of range.
        TypeError: `given` is not such a mapping.
    """
    names = [item.name for item in fields(ScaleState)]
    if not isinstance(given, Mapping):
        raise TypeError(f"the state of a loss scale is a dict, got {given!r:.60}")
    if set(given) != set(names):
        raise ValueError(
            f"the state of a loss scale has {', '.join(names)}; got {sorted(map(str, given))}"
        )
    return ScaleState(**given)
