"""Results of a request: the deltas, and the whole completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

End = Literal["stop", "length", "context", "cancel", "deadline", "error"]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A continuation.

    Attributes:
        tokens: Tokens after the prompt, without the token that ended the continuation, and with the
            tokens of a stop text.
        text: The text before a stop text; None without a tokenizer.
        end: Reason for the end: `stop` (a token or a text that ends it), `length` (the requested
            number of tokens), `context` (the model's context is full), `cancel` or `deadline`.
        seed: Seed of the choice of its tokens.
        step: Step of the checkpoint that made it; None for a folder of Hugging Face.
        logprobs: Logprob of each token, if wanted.
        top_logprobs: For each token the most likely ones, if wanted.
        prompt_logprobs: Logprob of each token of the prompt from the second on, if wanted.
        prompt_top_logprobs: The most likely tokens for each of these places, if wanted.
    """

    tokens: list[int]
    text: str | None
    end: End
    seed: int
    step: int | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[Mapping[int, float]] | None = None
    prompt_logprobs: list[float] | None = None
    prompt_top_logprobs: list[Mapping[int, float]] | None = None


@dataclass(frozen=True, kw_only=True)
class Delta:
    """The addition of one step to a continuation.

    Attributes:
        index: Number of the continuation; it belongs to prompt `index // n`.
        tokens: New tokens.
        text: New text, of whole characters, and without the beginning of a stop text.
        logprobs: Logprobs of the new tokens, if wanted.
        top_logprobs: For each new token the most likely ones, if wanted.
        step: Step of the checkpoint that made them; None for a folder of Hugging Face.
        completion: The whole completion, in the last delta.
    """

    index: int
    tokens: list[int]
    text: str
    logprobs: list[float] | None = None
    top_logprobs: list[Mapping[int, float]] | None = None
    step: int | None = None
    completion: Completion | None = None
