"""Rotary embeddings of a layer's heads, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from mt_files import Checks

from mt_model.rope.scaling import RopeScaling, plain_angles


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021): pairs of channels turn with the position.

    Pair `i` of the `width` turning channels turns by `position * theta ** (-2 * i / width)`.

    Attributes:
        theta: Base of the angles.
        fraction: Share of a head's channels that turn, its first ones; the others stay.
        interleaved: A pair is the channels `2 * i` and `2 * i + 1` (GPT-J); else `i` and
            `i + width / 2` (GPT-NeoX, Llama).
        scaling: Scaling of the angles for sequences longer than in the first training; its `type`
            is `linear`, `dynamic`, `llama3`, `yarn` or `longrope`.
        sections: MRoPE (Qwen2-VL): number of pairs that turn with the first, second and third
            position of a token (time, height and width). Tokens of text have three equal positions.
        sections_interleaved: Pairs take turns, from the first on, until a section has all its
            pairs (Qwen3-VL); else the sections follow each other.
    """

    theta: float = 10000.0
    fraction: float = 1.0
    interleaved: bool = False
    scaling: RopeScaling | None = None
    sections: tuple[int, int, int] | None = None
    sections_interleaved: bool = False

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.above(0, "theta", "fraction")
        checks.at_most(1, "fraction")
        checks.done()
        if self.sections is None and self.sections_interleaved:
            checks.add("sections_interleaved", "there are no sections; set them, or leave it out")
        if self.sections is not None and min(self.sections) < 0:
            checks.add("sections", f"{self.sections}: use three numbers of pairs, 0 or more")
        if self.sections_interleaved and not checks.errors:
            checks.errors |= self._check_interleaved()
        checks.done()

    def _check_interleaved(self) -> dict[str, str]:
        """Assign every second and third pair of three to height and width, from the first on."""
        time, height, width = self.sections or (0, 0, 0)
        pairs = time + height + width
        if 3 * height <= pairs + 1 and 3 * width <= pairs:
            return {}
        text = (
            f"{self.sections}: interleaved, height and width can have at most a third of the pairs "
            "each; give the first more, or use sections_interleaved=False"
        )
        return {"sections": text}

    def axes(self, head_dim: int) -> tuple[int, ...] | None:
        """Return the index of the position that turns each pair; None with a single position."""
        if self.sections is None:
            return None
        if not self.sections_interleaved:
            return tuple(axis for axis, pairs in enumerate(self.sections) for _ in range(pairs))
        pairs = range(self.width(head_dim) // 2)
        return tuple(i % 3 if i < 3 * self.sections[i % 3] else 0 for i in pairs)

    def width(self, head_dim: int) -> int:
        """Return the number of channels of a head that turn."""
        return int(head_dim * self.fraction)

    def obstacle(self, head_dim: int) -> str | None:
        """Return why heads of this width can't turn; None if they can."""
        width = self.width(head_dim)
        if width % 2 or not width:
            share = "" if self.fraction == 1 else f", of which rope turns {width},"
            return f"{head_dim}{share} is odd or zero, and rope turns pairs of channels"
        if self.sections is not None and sum(self.sections) != width // 2:
            return f"{head_dim}: rope.sections {self.sections} are not of its {width // 2} pairs"
        why = None if self.scaling is None else self.scaling.obstacle(self.theta, width)
        return None if why is None else f"{head_dim}: {why}"


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of a table of angles; layers with equal ones share the table.

    Attributes:
        rope: Rotary embedding.
        head_dim: Number of channels of a head.
    """

    rope: RopeConfig
    head_dim: int

    def angles(self, length: int) -> tuple[float, ...]:
        """Return the angle of each pair at position 1, in a sequence of `length` tokens."""
        width, scaling = self.rope.width(self.head_dim), self.rope.scaling
        if scaling is None:
            return plain_angles(self.rope.theta, width)
        return scaling.angles(self.rope.theta, width, length)

    @property
    def magnitude(self) -> float:
        """Factor of cosines and sines."""
        return 1.0 if self.rope.scaling is None else self.rope.scaling.magnitude
