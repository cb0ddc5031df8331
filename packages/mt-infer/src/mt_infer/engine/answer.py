"""The answer to a request: while the request runs, and after its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mt_tokenizer import Tokenizer

from mt_infer.choosing.grammar import Grammar
from mt_infer.completion import Completion, Delta, End
from mt_infer.engine.request import Request
from mt_infer.sampling import Sampling
from mt_infer.text import StopTexts, TextStream


@dataclass(kw_only=True)
class Logprobs:
    """Logprobs of tokens in order, with the most likely ones if wanted.

    Attributes:
        chosen: Logprobs of the tokens.
        top: Most likely tokens at the place of each token.
    """

    chosen: list[float] = field(default_factory=list)
    top: list[Mapping[int, float]] = field(default_factory=list)


@dataclass(eq=False, kw_only=True)
class Answer:
    """The parameters of a request, and its continuation so far.

    Attributes:
        asked: Arguments of `Intake.answer`, from which other ranks make the same answer.
        request: The request.
        sampling: Parameters of the choice.
        seed: The seed, given or drawn.
        prompt_length: Number of tokens of the prompt.
        ends: Tokens that end the continuation.
        index: Number of the continuation in its call.
        choice: Number among the continuations of its prompt.
        adapter: Name of the adapter; None for none.
        bad: Lists of tokens that the continuation must not have.
        grammar: Grammar of the continuation; None for any text.
        logprobs: Logprobs of its tokens.
        prompt_logprobs: Logprobs of its prompt's tokens.
        stops: Texts that end the continuation; None without a tokenizer.
        stream: Text of the continuation so far.
        streams: Whether a caller waits for its deltas.
        cut: The text before the stop text, if one was found.
        news: Deltas that no caller has fetched yet.
        completion: The whole completion, after the end.
        error: The error that ended it.
    """

    asked: Mapping[str, Any]
    request: Request
    sampling: Sampling
    seed: int
    prompt_length: int
    ends: frozenset[int]
    index: int = 0
    choice: int = 0
    adapter: str | None = None
    bad: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    logprobs: Logprobs = field(default_factory=Logprobs)
    prompt_logprobs: Logprobs = field(default_factory=Logprobs)
    stops: StopTexts | None = None
    stream: TextStream | None = None
    streams: bool = False
    cut: str | None = None
    news: deque[Delta] = field(default_factory=deque)
    completion: Completion | None = None
    error: Exception | None = None

    @property
    def tokens(self) -> list[int]:
        """Tokens of the continuation."""
        return self.request.tokens[self.prompt_length :]

    @property
    def has_ended(self) -> bool:
        """Whether the answer is complete."""
        return self.completion is not None or self.error is not None

    @property
    def wants_logprobs(self) -> bool:
        """Whether its tokens' logprobs are wanted."""
        return is_wanted(self.sampling.logprobs)

    def end_after(self, tokens: list[int], token: int) -> End | None:
        """Return the reason why the continuation ends with a token, or None.

        Args:
            tokens: Tokens of the continuation, including the token unless it is an end.
            token: The token.
        """
        room = self.request.limit - self.prompt_length
        if token in self.ends:
            return "stop"
        if self.stops is not None and len(tokens) >= self.sampling.min_tokens:
            self.cut = self.stops.cut(tokens)
            if self.cut is not None:
                return "stop"
        if self.grammar is not None and self.grammar.is_over(tokens):
            return "stop"
        if len(tokens) < room:
            return None
        return "length" if len(tokens) == self.sampling.max_tokens else "context"

    def tell(self, count: int, step: int | None, completion: Completion | None = None) -> None:
        """Add a delta of the last tokens to the news.

        Args:
            count: Number of the tokens.
            step: Step of the weights.
            completion: The whole completion, in the last delta.
        """
        tokens = self.tokens
        text = ""
        if self.stream is not None and completion is not None:
            text = self.stream.rest(completion.text or "")
        elif self.stream is not None:
            text = self.stream.next(tokens)
        self.news.append(
            Delta(
                index=self.index,
                tokens=tokens[len(tokens) - count :],
                text=text,
                logprobs=self.logprobs.chosen[-count:] if self.wants_logprobs and count else None,
                top_logprobs=self.logprobs.top[-count:]
                if self.sampling.logprobs and count
                else None,
                step=step,
                completion=completion,
            )
        )

    def complete(
        self, end: End, tokenizer: Tokenizer | None, step: int | None, news: int | None = None
    ) -> None:
        """End the answer.

        Args:
            end: Reason for the end.
            tokenizer: Tokenizer of its tokens; None gives no text.
            step: Step of the weights.
            news: Number of tokens in the last delta; None for no delta.
        """
        wanted, of_prompt = self.sampling.logprobs, self.sampling.prompt_logprobs
        mine, prompts = self.logprobs, self.prompt_logprobs
        text = self.cut
        if text is None and tokenizer is not None:
            text = tokenizer.decode(self.tokens)
        completion = Completion(
            tokens=self.tokens,
            text=text,
            end=end,
            seed=self.seed,
            step=step,
            logprobs=mine.chosen if is_wanted(wanted) else None,
            top_logprobs=mine.top if wanted else None,
            prompt_logprobs=prompts.chosen if is_wanted(of_prompt) else None,
            prompt_top_logprobs=prompts.top if of_prompt else None,
        )
        if news is not None:
            self.tell(news, step, completion)
        self.completion = completion  # after the news: another thread reads until this is set


def is_wanted(logprobs: int | None) -> bool:
    """Return whether logprobs are wanted: 0 means only the logprobs of the chosen tokens."""
    return logprobs is not None and logprobs is not False


def all_ended(answers: Sequence[Answer]) -> bool:
    """Return whether all answers have ended."""
    return all(each.has_ended for each in answers)


def any_ready(answers: Sequence[Answer]) -> bool:
    """Return whether an answer has news, or all have ended."""
    return any(each.news for each in answers) or all_ended(answers)


def completed(answer: Answer) -> Completion:
    """Return the completion of an ended answer, or raise its error."""
    if answer.error is not None:
        raise answer.error
    assert answer.completion is not None, "it has ended"  # noqa: S101
    return answer.completion


def news_of(answers: Sequence[Answer]) -> Iterator[Delta]:
    """Yield the unfetched deltas; raise the error of an answer after its last delta."""
    for answer in answers:
        while answer.news:
            yield answer.news.popleft()
        if answer.error is not None:
            raise answer.error
