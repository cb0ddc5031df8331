"""How rotary angles are scaled for sequences longer than those of the first training."""

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
    """What becomes of the angles. A kind is a dataclass below this one.

    The length that a kind may look at is that of the whole sequence with what a cache holds of it,
    in tokens: the same on every rank, whatever the positions are.
    """

    @abstractmethod
    def angles(self, theta: float, width: int, length: int) -> Angles:
        """Return the angle of each pair at position 1.

        Args:
            theta: Base.
            width: Channels that turn.
            length: Of the sequence.
        """

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied with."""
        return 1.0

    @property
    def cache_break(self) -> int | None:
        """Length past which keys that were turned in shorter sequences don't serve."""
        return None

    def obstacle(self, theta: float, width: int) -> str | None:
        """Say why it does not go with a base and a number of channels; None if it does."""
        del theta, width
        return None


@dataclass(frozen=True, kw_only=True)
class LinearScaling(RopeScaling):
    """Position interpolation (Chen et al., 2023): all angles over the factor.

    Attributes:
        factor: 1 or more.
    """

    type_name: ClassVar[str] = "linear"

    factor: float

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "factor")
        checks.at_most(MAX_FACTOR, "factor")
        checks.done()

    def angles(self, theta: float, width: int, length: int) -> Angles:
        """Divide them."""
        del length
        return tuple(angle / self.factor for angle in plain_angles(theta, width))


@dataclass(frozen=True, kw_only=True)
class DynamicScaling(RopeScaling):
    """Dynamic NTK: the base grows with the sequence once it is longer than the original length.

    The base is `theta * (factor * length / original - (factor - 1)) ** (width / (width - 2))`.
    With a cache each token is turned by the length of its own pass, and keys stay as they were.

    Attributes:
        factor: 1 or more.
        original_length: Tokens of the sequences that the model was trained on.
    """

    type_name: ClassVar[str] = "dynamic"

    factor: float
    original_length: int

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "factor", "original_length")
        checks.at_most(MAX_FACTOR, "factor")
        checks.done()

    def angles(self, theta: float, width: int, length: int) -> Angles:
        """Take them of the larger base."""
        ratio = max(length, self.original_length) / self.original_length
        grown = self.factor * ratio - (self.factor - 1)
        return plain_angles(theta * grown ** (width / (width - 2)), width)

    def obstacle(self, theta: float, width: int) -> str | None:
        """Refuse a single pair, which has no angle that depends on the base."""
        del theta
        return "dynamic scaling needs at least 4 channels that turn" if width < 4 else None


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(RopeScaling):
    """Llama 3.1: slow pairs are divided by the factor, fast ones are left, between them a blend.

    A pair is slow or fast by the turns that it makes in the original length: below
    `low_freq_factor`, or above `high_freq_factor`.

    Attributes:
        factor: 1 or more.
        low_freq_factor: Turns below which a pair is divided.
        high_freq_factor: Turns above which it is left.
        original_length: Tokens of the sequences that the model was first trained on.
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
        """Blend each by its turns."""
        del length
        low, high = self.low_freq_factor, self.high_freq_factor

        def scaled(angle: float) -> float:
            turns = self.original_length * angle / (2 * pi)
            kept = min(max((turns - low) / (high - low), 0.0), 1.0)
            return angle * (kept + (1 - kept) / self.factor)

        return tuple(map(scaled, plain_angles(theta, width)))


@dataclass(frozen=True, kw_only=True)
class YarnScaling(RopeScaling):
    """YaRN (Peng et al., 2023): like Llama 3's blend, by the pair's index, with larger scores.

    With `mscale` and `mscale_all_dim` the magnitude is `m(mscale) / m(mscale_all_dim)`, else
    `m(1)`, where `m(s) = 0.1 * s * ln(factor) + 1`.

    Attributes:
        factor: 1 or more.
        original_length: Tokens of the sequences that the model was first trained on.
        beta_fast: Turns in the original length above which a pair is left.
        beta_slow: Turns below which it is divided by the factor.
        mscale: See above.
        mscale_all_dim: See above. Multi-head latent attention multiplies its scores by the square
            of its `m` too, `score_factor`; that is for the layer's `scale` to say.
        attention_factor: The magnitude itself.
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
        """What cosines and sines are multiplied with."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._m(self.mscale) / self._m(self.mscale_all_dim)
        return self._m(1.0)

    @property
    def score_factor(self) -> float:
        """What multi-head latent attention multiplies its scores with beside (DeepSeek-V2)."""
        return self._m(self.mscale_all_dim or 0.0) ** 2

    def _m(self, scale: float) -> float:
        return 0.1 * scale * log(self.factor) + 1.0

    def angles(self, theta: float, width: int, length: int) -> Angles:
        """Blend each by its index."""
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
        """Refuse a base whose pairs all turn alike."""
        del width
        return None if theta > 1 else f"yarn needs a theta above 1, and it is {theta}"

    def _index(self, turns: float, theta: float, width: int) -> float:
        """Return the index, not whole, of the pair that makes so many turns."""
        return width * log(self.original_length / (turns * 2 * pi)) / (2 * log(theta))


@dataclass(frozen=True, kw_only=True)
class LongropeScaling(RopeScaling):
    """LongRoPE (Ding et al., 2024): each pair has a divisor for short sequences and one for long.

    A sequence is long that has more than `original_length` tokens. Keys in a cache are turned by
    the short ones until then, so a cache that grows past it has to be made anew.

    Attributes:
        short_factor: Divisor of each pair.
        long_factor: The same, for long sequences.
        original_length: Tokens of the sequences that the model was first trained on.
        factor: How much longer the longest sequences are; says the magnitude,
            `sqrt(1 + ln(factor) / ln(original_length))`.
        attention_factor: The magnitude itself.
    """

    type_name: ClassVar[str] = "longrope"

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
        """What cosines and sines are multiplied with."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return sqrt(1 + log(self.factor) / log(self.original_length))

    @property
    def cache_break(self) -> int | None:
        """Length past which keys that were turned in shorter sequences don't serve."""
        return self.original_length

    def angles(self, theta: float, width: int, length: int) -> Angles:
        """Divide each by its own."""
        divisors: Sequence[float] = self.short_factor
        if length > self.original_length:
            divisors = self.long_factor
        return tuple(a / d for a, d in zip(plain_angles(theta, width), divisors, strict=True))

    def obstacle(self, theta: float, width: int) -> str | None:
        """Want a divisor for each pair."""
        del theta
        for name in ("short_factor", "long_factor"):
            count = len(getattr(self, name))
            if count != width // 2:
                return f"longrope's {name} has {count} numbers for {width // 2} pairs of channels"
        return None
