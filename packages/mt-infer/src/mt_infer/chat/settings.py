"""Settings of the choice of answers in a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mt_files import FileError, build, parse_json

from mt_infer.sampling import Sampling

_NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the choice of an answer's tokens; see `Sampling`.

    Attributes:
        temperature: Divisor of the scores; 0 is greedy.
        top_k: Number of most likely tokens to keep; 0 keeps all.
        top_p: Keep the most likely tokens that together reach this probability.
        min_p: Keep tokens of at least this share of the largest probability.
        presence_penalty: Subtracted from the scores of tokens that the answer has.
        frequency_penalty: Subtracted from the score of a token for each occurrence in the answer.
        repetition_penalty: Divisor of the scores of tokens that the text has.
        seed: Seed of the choice; the same seed gives the same answer. None draws a seed.
        max_tokens: Largest number of tokens of an answer.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int = 1024

    def __post_init__(self) -> None:
        self.sampling()

    def sampling(self, *stop: str) -> Sampling:
        """Return the parameters of the choice, with texts that end an answer."""
        return Sampling(**asdict(self), stop=stop)


def with_setting(given: Mapping[str, Any], name: str, text: str) -> dict[str, Any]:
    """Return settings with a changed one.

    Args:
        given: The earlier settings.
        name: Name of the setting to change.
        text: Its value; `none` for none.

    Raises:
        ValueError: There is no such setting, or the value is not allowed.
    """
    try:
        value = None if text == _NONE else parse_json(text, name=name)
    except FileError:
        value = text
    changed = {**given, name: value}
    build(Settings, changed)
    return changed
