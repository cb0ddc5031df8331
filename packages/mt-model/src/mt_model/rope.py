"""How a layer turns its heads with the position, as values."""

from __future__ import annotations

from dataclasses import dataclass

from mt_files import Checks

from mt_model.rope_scaling import RopeScaling, plain_angles


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021): pairs of channels turn with the position.

    Of the `width` channels that turn, pair `i` turns by `position * theta ** (-2 * i / width)`.

    Attributes:
        theta: base of the angles.
        fraction: share of a head's channels that turn, its first ones; the others stay.
        interleaved: a pair is the channels `2 * i` and `2 * i + 1` (GPT-J); else `i` and
            `i + width / 2` (GPT-NeoX, Llama).
        scaling: of the angles, for sequences longer than those first trained on; its `type` is
            `linear`, `dynamic`, `llama3`, `yarn` or `longrope`.
    """

    theta: float = 10000.0
    fraction: float = 1.0
    interleaved: bool = False
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.above(0, "theta", "fraction")
        checks.at_most(1, "fraction")
        checks.done()

    def width(self, head_dim: int) -> int:
        """Return how many channels of a head turn."""
        return int(head_dim * self.fraction)

    def obstacle(self, head_dim: int) -> str | None:
        """Say why heads of this width can't be turned; None if they can."""
        width = self.width(head_dim)
        if width % 2 or not width:
            share = "" if self.fraction == 1 else f", of which rope turns {width},"
            return f"{head_dim}{share} is odd or zero, and rope turns pairs of channels"
        why = None if self.scaling is None else self.scaling.obstacle(self.theta, width)
        return None if why is None else f"{head_dim}: {why}"


@dataclass(frozen=True)
class Rotary:
    """What a table of angles is made for; layers with equal ones share it.

    Attributes:
        rope: How channels turn.
        head_dim: Channels of what is turned.
    """

    rope: RopeConfig
    head_dim: int

    def angles(self, length: int) -> tuple[float, ...]:
        """Return the angle of each pair at position 1, in a sequence of so many tokens."""
        width, scaling = self.rope.width(self.head_dim), self.rope.scaling
        if scaling is None:
            return plain_angles(self.rope.theta, width)
        return scaling.angles(self.rope.theta, width, length)

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied with."""
        return 1.0 if self.rope.scaling is None else self.rope.scaling.magnitude
