"""The tokens chosen by a pass's scores, and their logprobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mt_infer.choosing.draws import NO_TOKEN, choose_rows, no_token_error, uniform
from mt_infer.choosing.processors import adjust
from mt_infer.completion import End
from mt_infer.engine.answer import Answer, Logprobs, is_wanted
from mt_infer.engine.request import Part


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The scores that a part needs.

    Attributes:
        part: The part of the pass.
        answer: The answer of its request.
        prompt: Places of its tokens before a token of the prompt that needs a logprob.
        next: Places before a chosen token: the place of the last token, and of each draft.
    """

    part: Part
    answer: Answer
    prompt: range
    next: range

    @classmethod
    def of(cls, part: Part, answer: Answer) -> Wanted:
        """Return the scores that a part needs."""
        held, sampling = part.request.held, answer.sampling
        prompt, following = range(0), range(0)
        if is_wanted(sampling.prompt_logprobs):
            first = len(answer.prompt_logprobs.chosen) - held
            prompt = range(max(0, first), min(part.count, answer.prompt_length - 1 - held))
        if part.is_last and sampling.max_tokens:
            following = range(part.count - 1, part.count + len(part.drafts))
        return cls(part=part, answer=answer, prompt=prompt, next=following)

    @property
    def places(self) -> list[int]:
        """All places, in the order of their scores."""
        return [*self.prompt, *self.next]


@dataclass(kw_only=True)
class Drawn:
    """The tokens of a part, and the logprobs of each.

    Attributes:
        tokens: A token for each place of `Wanted.next`.
        logprobs: Their logprobs, if wanted.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: Logprobs = field(default_factory=Logprobs)


def choose_next(scores: Tensor, wanted: Sequence[Wanted]) -> list[Drawn]:
    """Choose the tokens of all parts, and record the logprobs of their prompts.

    Args:
        scores: Scores of the vocabulary, a row for each place of each part.
        wanted: The scores that each part needs.

    Shape:
        scores: [places, vocab].
    """
    rows: list[int] = []
    first = 0
    for each in wanted:
        count = len(each.prompt)
        if count:
            _note_prompt(scores[first : first + count], each)
        rows += range(first + count, first + count + len(each.next))
        first += count + len(each.next)
    if not rows:
        return [Drawn() for _ in wanted]
    raw = scores if len(rows) == first else scores[torch.tensor(rows, device=scores.device)]
    owners = [each for each in wanted for _ in each.next]
    samplings = [each.answer.sampling for each in owners]
    draws = torch.zeros(len(owners))
    if any(each.temperature for each in samplings):
        draws = uniform(
            [each.answer.seed for each in owners],
            [each.part.request.held + place + 1 for each in wanted for place in each.next],
            [each.answer.choice for each in owners],
        )
    chosen = choose_rows(_adjusted(raw, wanted), samplings, draws).tolist()
    drawn, start = [], 0
    for each in wanted:
        end = start + len(each.next)
        tokens = chosen[start:end]
        found = Logprobs()
        if each.answer.wants_logprobs:
            found = logprobs_of(raw[start:end], tokens, each.answer.sampling.logprobs)
        drawn.append(Drawn(tokens=tokens, logprobs=found))
        start = end
    return drawn


def follow(part: Part, answer: Answer, drawn: Drawn) -> tuple[list[int], End | None]:
    """Return the new tokens of an answer, up to the first wrong draft, and the reason for its end.

    Args:
        part: The part of the pass, whose request does not have the new tokens yet.
        answer: The answer, which gets their logprobs, and the error if no token can be chosen.
        drawn: The tokens drawn for the part.
    """
    held, new = answer.tokens, []
    end: End | None = None if answer.sampling.max_tokens or not part.is_last else "length"
    for place, token in enumerate(drawn.tokens):
        if token == NO_TOKEN:
            problem = "" if answer.grammar is None else answer.grammar.problem
            answer.error = no_token_error(len(part.request.tokens) + place, problem)
            end = "error"
            break
        if token not in answer.ends:
            new.append(token)
        end = answer.end_after([*held, *new], token)
        if end is not None or part.drafts[place : place + 1] != (token,):
            break
    answer.logprobs.chosen += drawn.logprobs.chosen[: len(new)]
    answer.logprobs.top += drawn.logprobs.top[: len(new)]
    return new, end


def _adjusted(scores: Tensor, wanted: Iterable[Wanted]) -> Tensor:
    """Return the scores with each request's penalties, biases and lists of tokens."""
    is_copy, row = False, 0
    for each in wanted:
        answer, tokens = each.answer, each.part.request.tokens
        if not answer.sampling.adjusts:
            row += len(each.next)
            continue
        prompt, after = tokens[: answer.prompt_length], tokens[answer.prompt_length :]
        for place in each.next:
            if not is_copy:
                scores, is_copy = scores.clone(), True
            text = [*after, *each.part.drafts[: place + 1 - each.part.count]]
            allowed = None if answer.grammar is None else answer.grammar.allowed(text)
            how = answer.sampling, prompt, text, answer.ends, answer.bad, allowed
            scores[row] = adjust(scores[row], *how)
            row += 1
    return scores


def _note_prompt(scores: Tensor, wanted: Wanted) -> None:
    request, first = wanted.part.request, wanted.part.request.held + wanted.prompt.start + 1
    tokens = request.tokens[first : first + len(wanted.prompt)]
    found = logprobs_of(scores, tokens, wanted.answer.sampling.prompt_logprobs)
    wanted.answer.prompt_logprobs.chosen += found.chosen
    wanted.answer.prompt_logprobs.top += found.top


def logprobs_of(scores: Tensor, tokens: Sequence[int], top: int | None) -> Logprobs:
    """Return the logprobs of tokens by scores, with those of the `top` most likely tokens.

    Shape:
        scores: [S, vocab].
    """
    wide = torch.promote_types(scores.dtype, torch.float32)
    all_of = scores.to(wide).log_softmax(-1)
    index = torch.tensor(tokens, device=scores.device).clamp(min=0)[:, None]
    found = Logprobs(chosen=all_of.gather(1, index).flatten().tolist())
    if top:
        values, ids = all_of.topk(min(int(top), all_of.shape[1]))
        pairs = zip(ids.tolist(), values.tolist(), strict=True)
        found.top = [dict(zip(*pair, strict=True)) for pair in pairs]
    return found
