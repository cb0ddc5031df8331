"""Parameters of the choice of a request's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mt_files import Checks

_LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")
_GRAMMARS = ("json_schema", "regex", "grammar")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Parameters of the choice of tokens.

    Scores go through these in order: the grammar, allowed tokens, bad words, the repetition,
    frequency and presence penalty, the bias, `min_tokens`; then, unless greedy, temperature, top-k,
    top-p, min-p and typical-p, each applied to the tokens that the one before has kept.

    At most one of `json_schema`, `regex` and `grammar` may be given; they need
    `mt-infer[grammar]`. The continuation then ends only after a complete text, and as soon as
    nothing may follow, unless it first reaches `max_tokens`.

    Attributes:
        seed: The same seed gives the same tokens, on any number of ranks and beside any other
            requests. None draws a seed, which the completion has.
        temperature: Divisor of the scores; 0 is greedy.
        top_k: Number of most likely tokens to keep (and ties with the last); 0 keeps all.
        top_p: Keep the smallest set of most likely tokens whose probability reaches p.
        min_p: Keep tokens of at least this share of the largest probability.
        typical_p: Keep the smallest set of tokens whose information is nearest to the entropy
            and whose probability reaches p (https://arxiv.org/abs/2202.00666).
        presence_penalty: Subtracted from the scores of tokens that the continuation has.
        frequency_penalty: Subtracted from the score of a token for each occurrence in the
            continuation.
        repetition_penalty: Divisor of positive scores, and factor of negative ones, of tokens of
            the prompt and the continuation (https://arxiv.org/abs/1909.05858).
        logit_bias: Added to the scores of tokens, by their ids.
        allowed_token_ids: The only tokens to choose from; none means all.
        bad_words: Texts, or lists of tokens, that the continuation never has.
        stop: Texts that end the continuation, which is cut before the first of them.
        stop_token_ids: Tokens that end the continuation, besides the model's own ends.
        min_tokens: Number of tokens before a token may end the continuation.
        max_tokens: Largest number of tokens; 0 only scores the prompt.
        n: Number of continuations of each prompt.
        logprobs: Whether to return the logprob of each token, by the model's scores as they are;
            a number also returns that many of the most likely tokens.
        prompt_logprobs: The same for the tokens of the prompt, from the second on.
        json_schema: JSON schema of the continuation, as a mapping or as JSON.
        regex: Regular expression that the whole continuation matches.
        grammar: Grammar of the continuation, in the form of Lark that llguidance reads.
    """

    seed: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int = 128
    n: int = 1
    logprobs: bool | int | None = None
    prompt_logprobs: bool | int | None = None
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        for name in _LISTS:
            object.__setattr__(self, name, _tuple(getattr(self, name)))
        biases = {int(token): bias for token, bias in self.logit_bias.items()}  # JSON has texts
        object.__setattr__(self, "logit_bias", biases)
        checks = Checks(self)
        checks.at_least(0, "temperature", "top_k", "min_p", "min_tokens", "max_tokens")
        checks.at_least(0, "logprobs", "prompt_logprobs")
        checks.at_least(1, "n")
        checks.above(0, "top_p", "typical_p", "repetition_penalty")
        checks.at_most(1, "top_p", "min_p", "typical_p")
        if "" in self.stop:
            checks.add("stop", "'' is in every text; name a text of one character or more")
        if not all(self.bad_words):
            checks.add("bad_words", "an empty word is in every text; leave it out")
        given = [name for name in _GRAMMARS if getattr(self, name) is not None]
        if len(given) > 1:
            checks.add(given[1], f"{given[0]} is given too; a continuation has one grammar")
        checks.done()

    @property
    def grammar_field(self) -> str | None:
        """Name of the field with the grammar; None without one."""
        return next((name for name in _GRAMMARS if getattr(self, name) is not None), None)

    @property
    def kept(self) -> tuple[float, ...]:
        """Parameters of the distribution; requests with equal ones are drawn together."""
        return self.temperature, self.top_k, self.top_p, self.min_p, self.typical_p

    @property
    def adjusts(self) -> bool:
        """Whether scores are changed before a token is drawn."""
        neutral = (0.0, 0.0, 1.0)
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        listed = self.logit_bias or self.allowed_token_ids or self.bad_words or self.min_tokens
        return penalties != neutral or bool(listed) or self.grammar_field is not None


def _tuple(value: object) -> object:
    """Return lists, also nested ones, as tuples, and a lone text as a tuple of one."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple):
        return value
    return tuple(tuple(each) if isinstance(each, list) else each for each in value)
