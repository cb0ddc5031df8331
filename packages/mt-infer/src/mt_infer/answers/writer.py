"""Bodies of answers, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from mt_files import to_plain
from mt_tokenizer import Tokenizer

from mt_infer.backends.backend import Backend
from mt_infer.completion import Completion, Delta
from mt_infer.forms.choosing import Choosing
from mt_infer.prompts.ask import Ask
from mt_infer.receipts import Receipt, answered, versions

_LEAST_LOGPROB = -9999.0  # JSON has no infinity


class Writer(Protocol):
    """A writer of the body of an answer, whole or in events.

    Attributes:
        has_named_events: Whether each event begins with its `type` as a name; such a stream has no
            `[DONE]`.
    """

    has_named_events: ClassVar[bool]

    def whole(self, completions: Sequence[Completion]) -> Mapping[str, Any]:
        """Return the body of a whole answer."""
        ...

    def chunks(self, delta: Delta) -> Iterable[Mapping[str, Any]]:
        """Return the events of a delta."""
        ...

    def last_chunks(self) -> Iterable[Mapping[str, Any]]:
        """Return the events after the deltas."""
        ...


class ChoicesWriter(ABC):
    """A `Writer` of one or several choices.

    Args:
        backend: The engine.
        form: The fields of the request.
        ask: The engine's task.

    Attributes:
        kind: Name of the body of a whole answer.
        chunk_kind: Name of the body of a chunk.
        prefix: Beginning of the answer's id.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]
    has_named_events: ClassVar[bool] = False

    def __init__(self, backend: Backend, form: Choosing, ask: Ask) -> None:
        self.backend, self.form, self.ask = backend, form, ask
        self.ended = dict[int, Completion]()
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self.model = form.model or backend.facts.model
        self._fingerprints: dict[int | None, str] = {}

    @abstractmethod
    def choice(self, index: int, found: Completion) -> dict[str, Any]:
        """Return a whole choice."""

    @abstractmethod
    def parts(self, delta: Delta) -> Iterable[dict[str, Any]]:
        """Return the choices of the chunks of a delta."""

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the body of a whole answer."""
        self.ended = dict(enumerate(completions))
        choices = [self.choice(*each) for each in self.ended.items()]
        return {**self._head(self.kind, completions[0].step), "choices": choices, **self.ending()}

    def chunks(self, delta: Delta) -> Iterable[dict[str, Any]]:
        """Return the chunks of a delta."""
        if delta.completion is not None:
            self.ended[delta.index] = delta.completion
        usage = {"usage": None} if self.form.stream_options.include_usage else {}
        for part in self.parts(delta):
            yield {**self._head(self.chunk_kind, delta.step), "choices": [part], **usage}

    def last_chunks(self) -> Iterable[dict[str, Any]]:
        """Return the chunks after the deltas."""
        ending = self.ending()
        if not self.form.stream_options.include_usage:
            del ending["usage"]
        if ending:
            yield {**self._head(self.chunk_kind, self.ended[0].step), "choices": [], **ending}

    def ending(self) -> dict[str, Any]:
        """Return the numbers of tokens, and the receipt if requested."""
        found: dict[str, Any] = {"usage": self._usage()}
        if self.form.receipt:
            found["receipt"] = to_plain(self._receipt())
        return found

    def _usage(self) -> dict[str, int]:
        read = self.ask.num_prompt_tokens
        written = sum(len(each.tokens) for each in self.ended.values())
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def _receipt(self) -> Receipt:
        facts, tokenizer = self.backend.facts, self.backend.tokenizer
        step = self.ended[0].step
        return Receipt(
            model=facts.model,
            step=step,
            weights=facts.digests[step],
            tokenizer=None if tokenizer is None else tokenizer.sha256,
            dtype=facts.dtype,
            layout=facts.layout,
            kernels=facts.kernels,
            versions=versions(),
            prompts=tuple(map(tuple, self.ask.tokens)),
            sampling=self.ask.sampling,
            answers=answered([self.ended[index] for index in sorted(self.ended)]),
        )

    def _head(self, kind: str, step: int | None) -> dict[str, Any]:
        if step not in self._fingerprints:
            self._fingerprints[step] = self.backend.facts.fingerprint(step)
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self._fingerprints[step],
        }


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """Return the bytes of a token, or of its name if it is a special one."""
    return tokenizer.decode_bytes([token]) or tokenizer.decode([token]).encode()


def bounded(logprob: float) -> float:
    """Return a logprob that JSON can represent."""
    return max(logprob, _LEAST_LOGPROB)
