"""The form of texts for fill-in-the-middle training; a module without numpy."""

from __future__ import annotations

from dataclasses import dataclass

from mt_files import Checks, shorten


@dataclass(frozen=True, kw_only=True)
class FillInMiddle:
    """The share and the form of rearranged texts for fill-in-the-middle (Bavarian et al., 2022).

    Attributes:
        rate: Share of the texts to cut in three; other texts stay unchanged.
        spm_rate: Share of the cut texts in the order suffix, prefix, middle (SPM); the others have
            the order prefix, suffix, middle (PSM).
        prefix: Name of the special token at the beginning.
        suffix: Name of the special token before the suffix.
        middle: Name of the special token after which a model writes the middle.
    """

    rate: float = 0.5
    spm_rate: float = 0.5
    prefix: str = "<|fim_prefix|>"
    suffix: str = "<|fim_suffix|>"
    middle: str = "<|fim_middle|>"

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.above(0, "rate")
        checks.at_least(0, "spm_rate")
        checks.at_most(1, "rate", "spm_rate")
        if not checks.errors and len({*self.special}) < len(self.special):
            text = f"prefix, suffix and middle are {', '.join(map(shorten, self.special))}; give "
            checks.add("middle", f"{text}each of the three a token of its own")
        checks.done()

    @property
    def special(self) -> tuple[str, ...]:
        """The special tokens."""
        return self.prefix, self.suffix, self.middle
