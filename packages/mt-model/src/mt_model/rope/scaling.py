"""Scalings of rotary angles for sequences longer than in the first training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log, pi, sqrt
from typing import ClassVar, TypeAlias

from mt_files import Checks

Angles: TypeAlias = tuple[float, ...]  # of the pairs, at position 1
MAX_FACTOR = 1 << 20  # above it a base leaves the range of floats


def plain_angles(theta: float, width: int) -> Angles:
    """Return `theta ** (-2 * i / width)` for each pair."""
    return tuple(theta ** (-i / width) for i in range(0, width, 2))


@dataclass(frozen=True, kw_only=True)
class RopeScaling(ABC):
    """A scaling of the angles. Each kind is a dataclass derived from this one.

    A kind may depend on the length of the whole sequence, cached tokens included: the length is the
    same on every rank, whatever the positions.
    """

    @abstractmethod
    def angles(self, theta: float, width: int, length: int) -> Angles:
        """Return the angle of each pair at position 1.

        Args:
            theta: Base of the angles.
            width: Number of channels that turn.
            length: Length of the sequence in tokens.
        """

    by_length: ClassVar[bool] = False
    """Whether the angles depend on the length."""

    @property
    def magnitude(self) -> float:
        """Factor of cosines and sines."""
        return 1.0

    @property
    def cache_break(self) -> int | None:
        """Length past which keys of shorter sequences no longer serve, or None."""
        return None

    def obstacle(self, theta: float, width: int) -> str | None:
        """Return why the scaling does not fit a base and a number of channels; None if it does."""
        del theta, width
        return None


@dataclass(frozen=True, kw_only=True)
class LinearScaling(RopeScaling):
    """Position interpolation (Chen et al., 2023): all angles over the factor.

    Attributes:
        factor: Factor of the length, 1 or more.
    """

    type_name: ClassVar[str] = "linear"

    factor: float

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "factor")
        checks.at_most(MAX_FACTOR, "factor")
        checks.done()

    def angles(self, theta: float, width: int, length: int) -> Angles:
        """Return the divided angles."""
        del length
        return tuple(angle / self.factor for angle in plain_angles(theta, width))


@dataclass(frozen=True, kw_only=True)
class DynamicScaling(RopeScaling):
    """Dynamic NTK: the base grows with the sequence once it is longer than the original length.

    The base is `theta * (factor * length / original - (factor - 1)) ** (width / (width - 2))`.
    With a cache each token is turned by the length of its own pass, and keys stay as they were.

    Attributes:
        factor: Factor of the length, 1 or more.
        original_length: Length of the sequences in the first training, in tokens.
    """

    type_name: ClassVar[str] = "dynamic"
    by_length: ClassVar[bool] = True

    factor: float
    original_length: int

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "factor", "original_length")
        checks.at_most(MAX_FACTOR, "factor")
        checks.done()

    def angles(self, theta: float, width: int, length: int) -> Angles:
        """Return the angles of the larger base."""
        ratio = max(length, self.original_length) / self.original_length
        grown = self.factor * ratio - (self.factor - 1)
        return plain_angles(theta * grown ** (width / (width - 2)), width)

    def obstacle(self, theta: float, width: int) -> str | None:
        """Refuse a single pair, whose angle does not depend on the base."""
        del theta
        return "dynamic scaling needs at least 4 channels that turn" if width < 4 else None


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(RopeScaling):
    """Llama 3.1: slow pairs are divided by the factor, fast pairs stay, others are blended.

    A pair is slow that makes fewer turns in the original length than `low_freq_factor`, and fast
    that makes more than `high_freq_factor`.

    Attributes:
        factor: Factor of the length, 1 or more.
        low_freq_factor: Number of turns below which a pair is divided.
        high_freq_factor: Number of turns above which a pair stays.
        original_length: Length of the sequences in the first training, in tokens.
    """

    type_name: ClassVar[str] = "llama3"

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "factor", "original_length")
        checks.at_most(MAX_FACTOR, "factor")
        checks.above(0, "low_freq_factor")
        checks.done()
        if self.high_freq_factor <= self.low_freq_factor:
            text = f"{self.high_freq_factor} is not above low_freq_factor={self.low_freq_factor}"
            checks.add("high_freq_factor", text)
        checks.done()

    def angles(self, theta: float, width: int, length: int) -> Angles:
        """Return the angles, each blended by its turns."""
        del length
        low, high = self.low_freq_factor, self.high_freq_factor

        def scaled(angle: float) -> float:
            turns = self.original_length * angle / (2 * pi)
            kept = min(max((turns - low) / (high - low), 0.0), 1.0)
            return angle * (kept + (1 - kept) / self.factor)

        return tuple(map(scaled, plain_angles(theta, width)))


@dataclass(frozen=True, kw_only=True)
class YarnScaling(RopeScaling):
    """YaRN (Peng et al., 2023): a blend by the pair's index, with larger scores.

    With `mscale` and `mscale_all_dim` the magnitude is `m(mscale) / m(mscale_all_dim)`, else
    `m(1)`, where `m(s) = 0.1 * s * ln(factor) + 1`.

    Attributes:
        factor: Factor of the length, 1 or more.
        original_length: Length of the sequences in the first training, in tokens.
        beta_fast: Number of turns in the original length above which a pair stays.
        beta_slow: Number of turns below which a pair is divided by the factor.
        mscale: Numerator's scale, see above.
        mscale_all_dim: Denominator's scale, see above. Multi-head latent attention also multiplies
            its scores by the square of its `m`, `score_factor`, which its `scale` states.
        attention_factor: The magnitude itself, in place of the formula.
        truncate: The bounds of the blend are whole indices.
    """

    type_name: ClassVar[str] = "yarn"

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "factor", "original_length")
        checks.at_most(MAX_FACTOR, "factor")
        checks.above(0, "beta_fast", "beta_slow", "attention_factor")
        checks.at_least(0, "mscale", "mscale_all_dim")
        checks.done()
        if self.beta_fast < self.beta_slow:
            checks.add("beta_fast", f"{self.beta_fast} is below beta_slow={self.beta_slow}")
        checks.done()

    @property
    def magnitude(self) -> float:
        """Factor of cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._m(self.mscale) / self._m(self.mscale_all_dim)
        return self._m(1.0)

    @property
    def score_factor(self) -> float:
        """Further factor of the scores of multi-head latent attention (DeepSeek-V2)."""
        return self._m(self.mscale_all_dim or 0.0) ** 2

    def _m(self, scale: float) -> float:
        return 0.1 * scale * log(self.factor) + 1.0

    def angles(self, theta: float, width: int, length: int) -> Angles:
        """Return the angles, each blended by its index."""
        del length
        low, high = (self._index(beta, theta, width) for beta in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = floor(low), ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        span = high - low or 0.001

        def scaled(index: int, angle: float) -> float:
            divided = min(max((index - low) / span, 0.0), 1.0)
            return angle * (1 - divided + divided / self.factor)

        return tuple(scaled(i, angle) for i, angle in enumerate(plain_angles(theta, width)))

    def obstacle(self, theta: float, width: int) -> str | None:
        """Refuse a base for which all pairs turn alike."""
        del width
        return None if theta > 1 else f"yarn needs a theta above 1, and it is {theta}"

    def _index(self, turns: float, theta: float, width: int) -> float:
        """Return the fractional index of the pair that makes the given number of turns."""
        return width * log(self.original_length / (turns * 2 * pi)) / (2 * log(theta))


@dataclass(frozen=True, kw_only=True)
class LongropeScaling(RopeScaling):
    """LongRoPE (Ding et al., 2024): each pair has one divisor for short and one for long sequences.

    A sequence with more than `original_length` tokens is long. Cached keys of a short sequence have
    the short divisors, so a cache that grows past the limit has to be made anew.

    Attributes:
        short_factor: Divisor of each pair in short sequences.
        long_factor: Divisor of each pair in long sequences.
        original_length: Length of the sequences in the first training, in tokens.
        factor: Ratio of the longest length to the original one, which gives the magnitude
            `sqrt(1 + ln(factor) / ln(original_length))`.
        attention_factor: The magnitude itself, in place of the formula.
    """

    type_name: ClassVar[str] = "longrope"
    by_length: ClassVar[bool] = True

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_length: int
    factor: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(2, "original_length")
        checks.above(0, "factor", "attention_factor")
        checks.at_most(MAX_FACTOR, "factor")
        for name in ("short_factor", "long_factor"):
            if name not in checks.errors and not all(x > 0 for x in getattr(self, name)):
                checks.add(name, "every number must be greater than 0")
        checks.done()

    @property
    def magnitude(self) -> float:
        """Factor of cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return sqrt(1 + log(self.factor) / log(self.original_length))

    @property
    def cache_break(self) -> int | None:
        """Length past which keys of shorter sequences no longer serve."""
        return self.original_length

    def angles(self, theta: float, width: int, length: int) -> Angles:
        """Return the angles, each divided by its own divisor."""
        divisors: Sequence[float] = self.short_factor
        if length > self.original_length:
            divisors = self.long_factor
        return tuple(a / d for a, d in zip(plain_angles(theta, width), divisors, strict=True))

    def obstacle(self, theta: float, width: int) -> str | None:
        """Check that there is a divisor for each pair."""
        del theta
        for name in ("short_factor", "long_factor"):
            count = len(getattr(self, name))
            if count != width // 2:
                return f"longrope's {name} has {count} numbers for {width // 2} pairs of channels"
        return None
