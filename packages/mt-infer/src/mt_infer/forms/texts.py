"""Fields of bodies with texts: completions, embeddings, scores and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from mt_files import Checks

from mt_infer.forms.bodies import Form
from mt_infer.forms.choosing import MOST_TOP, Choosing

_MOST_PROMPTS = 2048  # as many as OpenAI's

Given: TypeAlias = str | tuple[str | int | tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class CompletionForm(Choosing):
    """Body of `/v1/completions`.

    Attributes:
        prompt: Texts, or lists of tokens.
        max_tokens: Largest number of tokens.
        echo: Whether the answer begins with the prompt.
        logprobs: Number of most likely tokens to report for each.
    """

    NOT_SERVED: ClassVar[Mapping[str, str]] = {
        "suffix": "models continue texts from their end; leave it out",
        "best_of": "ask for n answers, and take the best by their logprobs",
    }

    prompt: Given
    max_tokens: int = 16
    echo: bool = False
    logprobs: int | None = None

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        checks.at_least(0, "logprobs", "max_tokens")
        checks.at_most(MOST_TOP, "logprobs")
        if self.echo and self.stream and self.logprobs is not None:
            checks.add("echo", "true does not go with a stream of logprobs; leave one out")
        check_prompts(checks, "prompt", self.prompt)


@dataclass(frozen=True, kw_only=True)
class TextsForm(Form):
    """Fields of a body with texts to read.

    Attributes:
        input: Texts, or lists of tokens.
        model: Name of the served model or of an adapter.
    """

    input: Given
    model: str = ""

    def __post_init__(self) -> None:
        checks = Checks(self)
        self._check(checks)
        checks.done()

    def _check(self, checks: Checks) -> None:
        check_prompts(checks, "input", self.input)


@dataclass(frozen=True, kw_only=True)
class EmbeddingForm(TextsForm):
    """Body of `/v1/embeddings`, which adapters do not serve.

    Attributes:
        encoding_format: `float` for numbers, `base64` for the bytes of fp32.
        dimensions: Size of the vectors, which must be the model's.
        pooling: Tokens whose features make the vector; see `Engine.embed`.
    """

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    pooling: Literal["last", "mean"] = "last"

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        checks.at_least(1, "dimensions")


@dataclass(frozen=True, kw_only=True)
class ScoreForm(TextsForm):
    """Body of `/score`."""


@dataclass(frozen=True, kw_only=True)
class TokenizeForm(Form):
    """Body of `/tokenize`.

    Attributes:
        prompt: The text.
        model: Name of the served model or of an adapter.
    """

    prompt: str
    model: str = ""


@dataclass(frozen=True, kw_only=True)
class DetokenizeForm(Form):
    """Body of `/detokenize`.

    Attributes:
        tokens: The tokens.
        model: Name of the served model or of an adapter.
    """

    tokens: tuple[int, ...]
    model: str = ""


def prompts_of(given: Given) -> list[str | list[int]]:
    """Return the prompts of a field, which has one or several."""
    if isinstance(given, str):
        return [given]
    tokens = [each for each in given if isinstance(each, int)]
    if tokens:
        return [tokens]
    return [list(each) if isinstance(each, tuple) else str(each) for each in given]


def check_prompts(checks: Checks, name: str, given: Given) -> None:
    """Refuse a field without prompts, with too many, or with several kinds of them."""
    parts = () if isinstance(given, str) else given
    if given == ():
        checks.add(name, "an empty list; give one prompt or more")
    if len({isinstance(each, int) for each in parts}) > 1:
        checks.add(name, "mixes tokens with texts or lists; give one of these")
    if len(parts) > _MOST_PROMPTS and not any(isinstance(each, int) for each in parts):
        checks.add(name, f"{len(parts)} prompts are too many; use at most {_MOST_PROMPTS}")
