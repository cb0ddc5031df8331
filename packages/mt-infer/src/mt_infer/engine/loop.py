"""The engine's loop: plan, pass, choose, append; each step serves all running requests."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from mt_model import GPT
from mt_tokenizer import Tokenizer

from mt_infer.completion import End
from mt_infer.digests import Identity
from mt_infer.engine.adapters import Adapters, AdapterSource
from mt_infer.engine.answer import Answer
from mt_infer.engine.blocks import BlockPool
from mt_infer.engine.chooser import Drawn, Wanted, choose_next, follow
from mt_infer.engine.drafts import drafter_of
from mt_infer.engine.host import HostRoom
from mt_infer.engine.intake import Intake
from mt_infer.engine.isolation import isolate
from mt_infer.engine.lock import FairLock
from mt_infer.engine.options import EngineOptions
from mt_infer.engine.prefix import salt_of
from mt_infer.engine.ranks import Ranks
from mt_infer.engine.request import Part, Request
from mt_infer.engine.runner import Runner
from mt_infer.engine.scheduler import Scheduler


class Loop:
    """The requests of a model, and the step that serves them.

    One thread of the first rank steps at a time and holds `lock`, which threads get in the order of
    their requests; other threads may hand in requests meanwhile. Other ranks do the same `deeds`.

    Args:
        model: The model.
        options: Sizes and switches.
        vocab_size: Number of tokens to choose from.
        tokenizer: The model's tokenizer; None for token lists alone.
        identity: Step and digest of the model's weights.
        intake: Maker of the first rank's requests on the other ranks.
        ranks: The ranks that serve the same requests.

    Raises:
        ValueError: The model is a stage without its place, or can't take guesses back; or ranks
            share sequences.
    """

    def __init__(
        self,
        model: GPT,
        options: EngineOptions,
        *,
        vocab_size: int,
        tokenizer: Tokenizer | None,
        identity: Identity,
        intake: Intake,
        ranks: Ranks,
    ) -> None:
        self.runner = Runner(model, options, ranks.state)
        self.pool = BlockPool(self.runner.blocks)
        self.adapters, self.identity = Adapters(model), identity
        self._vocab_size, self._tokenizer = vocab_size, tokenizer
        self.drafter = drafter_of(self.runner, options, vocab_size)
        self._intake, self._ranks = intake, ranks
        self.scheduler = Scheduler(
            self.pool,
            block_size=options.block_size,
            max_batch=options.max_batch,
            max_batch_tokens=options.max_batch_tokens,
            prefix_cache=options.prefix_cache and not self.runner.by_length,
            by_length=self.runner.by_length,
            drafter=None if self.drafter is None else self.drafter.guess,
        )
        if self.runner.has_states and self.scheduler.prefix is not None:
            self.scheduler.prefix.add_states(options.max_batch)
        if options.host_blocks:
            self.scheduler.host = HostRoom(options.host_blocks, options.block_size)
        self.lock = FairLock()
        self.arriving: deque[Answer] = deque()
        self.leaving: deque[Answer] = deque()
        self._answers: dict[Request, Answer] = {}
        self._own: dict[int, Answer] = {}  # of this rank's callers, until they are taken in
        self._version = 0
        self.deeds: dict[str, Callable[..., Any]] = {}
        self.add_deeds(self.take, self.run_pass, self.load_adapter, self.remove_adapter)
        self.add_deeds(self.runner.embedding)
        self.counts = dict.fromkeys(("passes", "tokens", "drafted", "accepted"), 0)

    @contextmanager
    def submitted(self, answers: list[Answer]) -> Iterator[None]:
        """Hand in requests; the block's end cancels unfinished requests.

        Cancelled requests end at once, or, while another thread steps, with the next step.
        """
        for each in answers:
            self.adapters.number(each.adapter)
            self.scheduler.check(each.request)
        self.arriving.extend(answers)
        try:
            yield
        finally:
            self.leaving.extend(each for each in answers if not each.has_ended)
            if self.leaving and not self._ranks.has_failed and self.lock.acquire(blocking=False):
                try:
                    self.take_in()
                finally:
                    self.lock.release()

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self.scheduler or self.arriving or self.leaving)

    def add_deeds(self, *deeds: Callable[..., Any]) -> None:
        """Add deeds, which all ranks do in the same order."""
        self.deeds |= {deed.__name__: deed for deed in deeds}

    def step(self) -> None:
        """Take in new requests, end cancelled ones, and serve all for one pass."""
        self.take_in()
        self.advance()

    def take_in(self) -> None:
        """Take in new requests, and end cancelled ones."""
        arrived = [self.arriving.popleft() for _ in range(len(self.arriving))]
        left = [self.leaving.popleft() for _ in range(len(self.leaving))]
        if not arrived and not left:
            return
        self._own.update((each.request.number, each) for each in arrived)
        numbers = [each.request.number for each in left if not each.has_ended]
        self._ranks.do(self.take, asked=[each.asked for each in arrived], left=numbers)

    def advance(self) -> None:
        """Serve the admitted and waiting requests for one pass."""
        if self.scheduler:
            self.runner.check_awake()
            self._ranks.do(self.run_pass, now=time.monotonic())

    def take(self, asked: Sequence[Mapping[str, Any]], left: Sequence[int]) -> None:
        """Take in requests, and end cancelled ones.

        Args:
            asked: `Answer.asked` of each new request.
            left: Numbers of the cancelled requests.
        """
        for each in asked:
            answer = self._own.pop(each["number"], None) or self._intake.answer(**each)
            try:  # somebody may have removed it since
                answer.request.adapter = self.adapters.number(answer.adapter)
            except ValueError as error:
                answer.error = error
                continue
            answer.request.salt = self.salt(answer.request)
            self._answers[answer.request] = answer
            self.scheduler.add(answer.request)
        for answer in [each for each in self._answers.values() if each.request.number in left]:
            self._end(answer, "cancel")

    @torch.inference_mode()
    def run_pass(self, now: float) -> None:
        """Serve the admitted and waiting requests for one pass.

        Args:
            now: Time on the first rank's clock.
        """
        for request in self.scheduler.expire(now):
            self._tell_end(self._answers.pop(request), "deadline")
        parts = self._planned()
        answers = {each.request: self._answers[each.request] for each in parts}
        try:
            self._serve(parts)
        except Exception as error:
            if self._ranks.group is not None or isinstance(error, torch.AcceleratorError):
                raise

            def fail(request: Request, problem: Exception) -> None:
                if not answers[request].has_ended:
                    answers[request].error = problem
                    self._end(answers[request], "error")

            isolate(
                self.scheduler, list(answers), error, lambda: self._serve(self._planned()), fail
            )

    def _planned(self) -> list[Part]:
        parts = self.scheduler.plan()
        self._move()
        return parts

    def _serve(self, parts: list[Part]) -> None:
        if not parts:
            return
        if self.drafter is not None:
            parts = self.drafter.fill(parts, self._answers)
        wanted = [Wanted.of(part, self._answers[part.request]) for part in parts]
        for part in parts:
            self._encode(part.request)
        scores = self.runner.scores(parts, [each.places for each in wanted])
        for each, drawn in zip(
            wanted, choose_next(scores[:, : self._vocab_size], wanted), strict=True
        ):
            self._append(each.part, each.answer, drawn)
        self.runner.copy_states(self.scheduler.copies())
        if self.drafter is not None:
            self.drafter.keep(parts)
        self.counts["passes"] += 1

    def _encode(self, request: Request) -> None:
        """Let the encoder read a source, unless it has read the same source for another request."""
        if not request.unread:
            return
        if self.scheduler.prefix is None or not self.scheduler.prefix.match_memory(request):
            self.runner.encode(request)
        self.scheduler.note_encoded(request)

    def forget(self, identity: Identity) -> None:
        """Compute running requests again, with new weights.

        Args:
            identity: Step and digest of the new weights.
        """
        self.scheduler.forget()
        self._version += 1
        self.identity = identity
        for request in self._answers:
            request.salt = self.salt(request)

    def sleep(self) -> None:
        """Free the pages; running requests wait, and host memory may keep their blocks."""
        for request in list(self.scheduler.running):
            self.scheduler.evict(request)
        self.pool.forget()
        self._move()
        for runner in self.runners:
            runner.sleep()

    def load_adapter(self, name: str, source: AdapterSource, alpha: float | None) -> None:
        """Load an adapter; see `Engine.load_adapter`."""
        self.adapters.load(name, source, alpha)
        self.drop_unused_adapters()

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter; see `Engine.remove_adapter`."""
        self.adapters.remove(name)
        self.drop_unused_adapters()

    def drop_unused_adapters(self) -> None:
        """Drop removed adapters that no request uses."""
        self.adapters.drop_unused(request.adapter for request in self._answers)

    @property
    def runners(self) -> list[Runner]:
        """The runners of the model and of the guessing model, both with pages."""
        guessing = () if self.drafter is None else self.drafter.runners
        return list(dict.fromkeys((self.runner, *guessing)))

    def salt(self, request: Request) -> bytes:
        """Return the start of the keys of a request's blocks."""
        adapter, caller = request.adapter, request.caller
        return salt_of(version=self._version, adapter=adapter, caller=caller)

    def stats(self) -> dict[str, int]:
        """Return the counts; see `Engine.stats`."""
        scheduler, pool = self.scheduler, self.pool
        return {
            "blocks": pool.size,
            "free_blocks": pool.free_blocks,
            "cached_blocks": pool.cached_blocks,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting) + len(self.arriving),
            "adapters": len(self.adapters),
            "evictions": scheduler.evictions,
            "free_host_blocks": 0 if scheduler.host is None else scheduler.host.pool.free_blocks,
            "restored_tokens": 0 if scheduler.host is None else scheduler.host.restored,
            "prefix_tokens": scheduler.found_tokens,
            "admitted_tokens": scheduler.admitted_tokens,
            **self.counts,
        }

    def _move(self) -> None:
        """Copy pages to host memory for evicted requests, and back for admitted ones."""
        moves = [] if self.scheduler.host is None else self.scheduler.host.take_moves()
        out, back = [[each for each in moves if each.is_out == way] for way in (True, False)]
        for runner in self.runners:
            runner.move(out)
        self.runner.copy_states(self.scheduler.copies())
        for runner in self.runners:
            runner.move(back)

    def _append(self, part: Part, answer: Answer, drawn: Drawn) -> None:
        """Continue an answer by the tokens drawn for it, up to the first wrong draft."""
        new, end = follow(part, answer, drawn)
        unseen = 0 if self.drafter is None else self.drafter.unseen(part, len(new))
        self.scheduler.note(part, new, unseen)
        self.counts["tokens"] += len(new)
        self.counts["drafted"] += len(part.drafts)
        self.counts["accepted"] += max(0, len(new) - 1)
        if end is not None:
            self._end(answer, end, len(new))
            return
        if new and answer.streams:
            answer.tell(len(new), self.identity.step)
        if part.request.held and self.runner.restarts(part.request.held, len(part.request.tokens)):
            part.request.held = 0

    def _end(self, answer: Answer, end: End, new: int = 0) -> None:
        self._answers.pop(answer.request, None)
        if answer.request.end is None:
            self.scheduler.finish(answer.request, end)
        self._tell_end(answer, end, new)

    def _tell_end(self, answer: Answer, end: End, new: int = 0) -> None:
        if answer.error is None:
            answer.complete(end, self._tokenizer, self.identity.step, new)
        self.drop_unused_adapters()
