"""The form of texts whose middle is to be filled in; it is read without numpy."""

from __future__ import annotations

from dataclasses import dataclass

from mt_files import Checks, shorten


@dataclass(frozen=True, kw_only=True)
class FillInMiddle:
    """The share and the form of texts whose middle is to be filled in (Bavarian et al., 2022).

    Attributes:
        rate: Share of the texts that are cut in three; the others stay as they are.
        spm_rate: Share of these in the order suffix, prefix, middle (SPM); the others have prefix,
            suffix, middle (PSM).
        prefix: Name of the special token before the prefix, and before all three.
        suffix: The one before the suffix.
        middle: The one behind which the middle is written.
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
