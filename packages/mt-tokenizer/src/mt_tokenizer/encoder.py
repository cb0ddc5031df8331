"""Encoding of documents by the fastest equivalent library, in one process or several."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

from mt_tokenizer.error import TokenizerError
from mt_tokenizer.fast import Encoded, FastEncoder, encode_flat, fast_encoder, is_compared
from mt_tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from concurrent.futures import Future

PROBE_CHARACTERS = 1 << 20
_SAMPLE_CHARACTERS = 1 << 19
_SMALL_SAMPLE = 1 << 16
_LOOKAHEAD = 2
_Item = TypeVar("_Item")


class Encoder:
    """An encoder of batches of texts for a dataset.

    The tokenizer's own library encodes the first megabyte. If there is more text, the first of
    gigatoken and fastokens takes over that gives the same ids for a sample of it, for every
    character of Unicode and for difficult texts; otherwise `obstacle` has the reasons. Where the
    verdict on the characters is kept from before, it takes over at once, after a smaller sample.

    Use it as a context manager if `workers` is above 1: then other processes encode, and this one
    reads and writes.

    Args:
        tokenizer: The tokenizer.
        fast: Whether to use a faster library: True uses one from the beginning or raises, False
            never uses one, None uses one if it gives the same ids.
        workers: Number of processes that encode.

    Attributes:
        library: Name of the library in use.
        obstacle: Reason why no faster library is used, once known.
    """

    def __init__(self, tokenizer: Tokenizer, *, fast: bool | None = None, workers: int = 1) -> None:
        if workers < 1:
            raise TokenizerError(f"workers is {workers}; it must be at least 1")
        self.tokenizer = tokenizer
        self.workers = workers
        self.library = "tokenizers" if tokenizer.suffix == ".json" else "sentencepiece"
        self.obstacle: str | None = None
        self._fast: FastEncoder | None = None
        self._undecided = fast is None
        self._sample: list[str] = []
        self._seen = self._sampled = 0
        self._stack = ExitStack()
        if fast:
            self._decide()
            if self.obstacle is not None:
                raise TokenizerError(f"no faster library can serve: {self.obstacle}")

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Encode texts in this process; return all ids concatenated, and the count of each text.

        Shape:
            - Output: [tokens], [len(texts)]
        """
        if self._undecided:
            self._probe(texts)
        return encode_flat(self.tokenizer, self._fast, texts)

    def _probe(self, texts: Sequence[str]) -> None:
        """Remember a sample; try faster libraries once there is enough text for it to matter."""
        if self._seen >= PROBE_CHARACTERS:
            self._decide()
            return
        is_much = not self._seen and sum(map(len, texts)) >= _SMALL_SAMPLE
        is_known = is_much and is_compared(self.tokenizer.engine)
        most = _SMALL_SAMPLE if is_known else _SAMPLE_CHARACTERS
        for text in texts:
            self._seen += len(text)
            if self._sampled < most and len(text) < most:
                self._sample.append(text)
                self._sampled += len(text)
        if is_known:
            self._decide()

    def _decide(self) -> None:
        found = fast_encoder(self.tokenizer.engine, self._sample)
        self._undecided, self._sample = False, []
        if isinstance(found, str):
            self.obstacle = found
        else:
            self._fast, self.library = found, found.library

    def stream(
        self, batches: Iterable[tuple[_Item, Sequence[str]]]
    ) -> Iterator[tuple[_Item, Encoded]]:
        """Encode batches of (item, texts), and yield each item with its ids, in order."""
        batches = iter(batches)
        for item, texts in batches:
            yield item, self.encode(texts)
            if not self._undecided and self.workers > 1:
                break
        yield from self._parallel(batches)

    def _parallel(
        self, batches: Iterator[tuple[_Item, Sequence[str]]]
    ) -> Iterator[tuple[_Item, Encoded]]:
        from concurrent.futures import ThreadPoolExecutor

        from mt_tokenizer.workers import Worker

        idle: deque[Worker] = deque()
        threads: ThreadPoolExecutor | None = None
        waiting: deque[tuple[_Item, Future[Encoded]]] = deque()

        def work(texts: Sequence[str]) -> Encoded:
            worker = idle.popleft()  # never empty: there is one worker for each thread
            encoded = worker.encode(texts)
            idle.append(worker)
            return encoded

        for item, texts in batches:
            if threads is None:  # started late, so a small corpus starts no process
                threads = self._stack.enter_context(ThreadPoolExecutor(self.workers))
                for _ in range(self.workers):
                    worker = Worker(self.tokenizer, fast=self._fast)
                    self._stack.callback(worker.close)  # runs before the pool's exit, which waits
                    idle.append(worker)
            waiting.append((item, threads.submit(work, texts)))
            if len(waiting) > _LOOKAHEAD * self.workers:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()
