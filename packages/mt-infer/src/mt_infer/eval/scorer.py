"""Scores of texts and continuations by an engine, in the form that lm-eval needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from mt_parallel_state import ParallelLayout, ParallelState
from mt_tokenizer import Tokenizer

from mt_infer.completion import Completion
from mt_infer.engine.engine import Engine
from mt_infer.engine.options import EngineOptions
from mt_infer.loading import Run
from mt_infer.sampling import Sampling

_SAME = ("top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
_IGNORED = ("do_sample", "until", "temperature", "max_gen_toks")


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Options of `--model_args`, besides the folder.

    Attributes:
        step: Step of a run's checkpoint; None for the latest.
        dtype: `fp64`, `fp32`, `bf16` or `fp16`; by default fp32 on a CPU and bf16 on a GPU.
        max_length: Largest number of tokens that the model reads; None for its context.
        max_batch: Largest number of requests in a pass.
        prefix_token_id: Token before texts without context; by default the one that begins texts,
            else the one that ends them.
    """

    step: int | None = None
    dtype: Literal["fp64", "fp32", "bf16", "fp16"] | None = None
    max_length: int | None = None
    max_batch: int = 64
    prefix_token_id: int | None = None


class Scorer:
    """An engine that scores and continues lists of tokens.

    Args:
        engine: The engine, which ends no text by itself.
        tokenizer: Tokenizer of the model.
        ends: Tokens that end a text.
        longest: Largest number of tokens that the model reads; a text may have one more, because
            nothing follows the last one.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, ends: frozenset[int], longest: int
    ) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._ends, self._longest = ends, longest

    @classmethod
    def from_run(cls, run: Run, options: EvalOptions, *, device: str | None = None) -> Scorer:
        """Load an opened run.

        Args:
            run: The run.
            options: Options.
            device: Device; None for the GPU if there is one.
        """
        context = run.config.max_sequence_length
        longest = context if options.max_length is None else options.max_length
        if not 1 <= longest <= context:
            raise ValueError(f"max_length={longest}: use 1 to {context}, the model's context")
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        state = ParallelState(ParallelLayout(), device=device)
        # A token that ends a text may be scored, so it must not end a request.
        unending = replace(run, ends=frozenset())
        sizes = EngineOptions(max_batch=options.max_batch)
        engine = Engine.from_run(unending, state, sizes, dtype=options.dtype)
        return cls(engine, run.tokenizer, run.ends, longest)

    def score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Return the logprobs of continuations, and whether each token is the most likely one.

        Args:
            pairs: Contexts of one token or more, which are cut from the left if they are too long,
                and their continuations.
        """
        texts = [(context + rest)[-self._longest - 1 :] for context, rest in pairs]
        # The last token is the only one that may be chosen, so the same pass gives its logprob.
        how = [_forced(text[-1], prompt=len(rest) > 1) for text, (_, rest) in _zip(texts, pairs)]
        done = self._engine.generate([text[:-1] for text in texts], how)
        return [_score(each, rest) for each, (_, rest) in _zip(done, pairs)]

    def score_texts(self, texts: Sequence[list[int]], prefix: int) -> list[float]:
        """Return the logprob of each text, with the longest possible context for each token.

        Args:
            texts: The texts.
            prefix: Token before a text.
        """
        cut = [list(windows(text, prefix, self._longest)) for text in texts]
        scores = iter(self.score([pair for pairs in cut for pair in pairs]))
        return [sum(next(scores)[0] for _ in pairs) for pairs in cut]

    def generate(
        self, prompts: Sequence[list[int]], given: Sequence[Mapping[str, Any]]
    ) -> list[str]:
        """Return the continuations of prompts, cut before the texts that end them.

        Args:
            prompts: The prompts, which are cut from the left to make room for the continuations.
            given: Parameters of each continuation, normalised by lm-eval.

        Raises:
            ValueError: A parameter is not supported, or the room is too small.
        """
        how = [self._sampling(each, number) for number, each in enumerate(given)]
        rooms = [self._longest - each.max_tokens for each in how]
        if rooms and min(rooms) < 1:
            raise ValueError(
                f"max_gen_toks leaves no room for a prompt in {self._longest} tokens; lower it"
            )
        cut = [prompt[-room:] for prompt, room in _zip(prompts, rooms)]
        done = self._engine.generate(cut, how)
        return [self._text(each, how.stop) for each, how in _zip(done, how)]

    def _text(self, completion: Completion, stop: Sequence[str]) -> str:
        text = self._tokenizer.decode(completion.tokens, skip_special=True)
        for each in stop:
            text = text.split(each)[0]
        return text

    def _sampling(self, given: Mapping[str, Any], number: int) -> Sampling:
        unknown = [name for name in given if name not in (*_SAME, *_IGNORED)]
        if unknown:
            known = ", ".join((*_SAME, *_IGNORED))
            raise ValueError(f"gen_kwargs: {unknown[0]} is not supported; use {known}")
        until = given.get("until") or []
        return Sampling(
            seed=number,
            temperature=float(given["temperature"]) if given.get("do_sample") else 0.0,
            max_tokens=int(given["max_gen_toks"]),
            stop=tuple(each for each in ([until] if isinstance(until, str) else until) if each),
            stop_token_ids=tuple(self._ends),
            **{name: given[name] for name in _SAME if name in given},
        )


def windows(tokens: list[int], prefix: int, longest: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield contexts and continuations; each token of the text is in exactly one continuation.

    Args:
        tokens: The text.
        prefix: Token before it.
        longest: Largest number of tokens that the model reads.
    """
    text, done = [prefix, *tokens], 1
    while done < len(text):
        end = min(done + longest, len(text))
        begin = max(0, end - longest - 1)
        yield text[begin:done], text[done:end]
        done = end


def _forced(token: int, *, prompt: bool) -> Sampling:
    return Sampling(
        seed=0,
        temperature=0.0,
        max_tokens=1,
        allowed_token_ids=(token,),
        logprobs=1,
        prompt_logprobs=1 if prompt else None,
    )


def _score(done: Completion, rest: list[int]) -> tuple[float, bool]:
    """Return the logprob of a continuation, and whether it is the most likely one."""
    chosen = [*(done.prompt_logprobs or []), *(done.logprobs or [])][-len(rest) :]
    top = [*(done.prompt_top_logprobs or []), *(done.top_logprobs or [])][-len(rest) :]
    is_greedy = all(next(iter(best)) == token for best, token in _zip(top, rest))
    return sum(chosen), is_greedy


def _zip(first: Sequence[Any], second: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(first, second, strict=True)
