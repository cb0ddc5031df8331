"""The scheduler, which chooses the requests, tokens and blocks of the next pass."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from itertools import chain

from mt_infer.engine.blocks import BlockPool
from mt_infer.engine.host import HostRoom
from mt_infer.engine.prefix import PrefixCache
from mt_infer.engine.request import Part, Request, StateCopy

Drafter = Callable[[Request, int], list[int]]
"""Guesses of up to a number of a request's next tokens."""


class Scheduler:
    """Waiting requests, running requests, and the blocks of the running ones.

    A request is admitted when all of its tokens find blocks. A step of decoding may need one more;
    if none is left, the last running request in the order of service gives its blocks back, waits,
    and computes its tokens again later, unless host memory keeps them. The first request never
    gives its blocks back, and each request fits alone, so all requests end. A request of a higher
    priority takes blocks from lower ones.

    Args:
        pool: The blocks.
        block_size: Number of tokens of a block.
        max_batch: Largest number of requests in a pass.
        max_batch_tokens: Largest number of tokens in a pass.
        prefix_cache: Whether requests start from blocks that others filled.
        by_length: Whether keys depend on the length of the pass that made them. Prompts then are
            one chunk, even longer ones than `max_batch_tokens`, and a request is admitted when
            all blocks that it may need are free, and never evicted.
        drafter: Source of guesses that the pass verifies; None without guesses.

    Attributes:
        host: Host memory that keeps the blocks of evicted requests; None to compute them again.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_batch: int,
        max_batch_tokens: int,
        prefix_cache: bool = True,
        by_length: bool = False,
        drafter: Drafter | None = None,
    ) -> None:
        for name, value in {
            "block_size": block_size,
            "max_batch": max_batch,
            "max_batch_tokens": max_batch_tokens,
        }.items():
            if value < 1:
                raise ValueError(f"{name}={value}: use 1 or more")
        self.pool, self.block_size = pool, block_size
        self.max_batch, self.max_batch_tokens = max_batch, max_batch_tokens
        self.prefix = PrefixCache(pool, block_size) if prefix_cache else None
        self._copies: list[StateCopy] = []
        self._by_length, self._drafter = by_length, drafter
        self.host: HostRoom | None = None
        self._states = list(range(max_batch - 1, -1, -1))
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.evictions = self.found_tokens = self.admitted_tokens = 0

    def __bool__(self) -> bool:
        """Whether there are unfinished requests."""
        return bool(self.running or self.waiting)

    def check(self, request: Request) -> None:
        """Raise ValueError if a request alone needs more blocks than there are."""
        needed = self._blocks(request.limit - 1) + self._blocks(len(request.source))
        if needed > self.pool.size:
            raise ValueError(
                f"a request of up to {request.limit} tokens needs {needed} blocks of "
                f"{self.block_size} tokens, and there are {self.pool.size}; make the engine with "
                "more blocks, or lower max_tokens"
            )

    def add(self, request: Request) -> None:
        """Take in a request; see `check`."""
        self.check(request)
        insort(self.waiting, request, key=lambda each: each.rank)

    def finish(self, request: Request, end: str) -> None:
        """End a waiting or running request, and take its blocks back."""
        request.end = end
        if request.state is None:
            self.waiting.remove(request)
            self._drop(request)
        else:
            self._take_back(request)

    def expire(self, now: float) -> list[Request]:
        """End the requests whose deadline has passed, and return them."""
        late = [each for each in chain(self.running, self.waiting) if each.deadline <= now]
        for request in late:
            self.finish(request, "deadline")
        return late

    def evict(self, request: Request) -> None:
        """Let a running request wait, without its blocks; host memory may keep them."""
        if self.host is not None:
            self.host.keep(request)
        self._take_back(request)
        self.evictions += 1
        insort(self.waiting, request, key=lambda each: each.rank)

    def forget(self) -> None:
        """Let all requests wait, and forget all blocks, since they come from other weights."""
        for request in list(self.running):
            self.evict(request)
        for request in self.waiting:
            self._drop(request)
            request.keys.clear()
        if self.host is not None:
            self.host.take_moves()
        self.pool.forget()

    def plan(self) -> list[Part]:
        """Return the parts of the next pass: steps of decoding first, then chunks of prompts."""
        self._prefer_higher_priority()
        running = sorted(self.running, key=lambda each: each.rank)
        steps: set[Request] = set()
        for request in running:
            is_step = request.pending == 1 and not request.unread
            if is_step and len(steps) < self.max_batch_tokens:
                steps |= {request} if self._grow(request, steps) else set()
        budget = self.max_batch_tokens - len(steps)
        parts: list[Part] = []
        for request in sorted(steps, key=lambda each: each.rank):
            drafts = self._drafts(request, budget)
            parts.append(Part(request=request, start=request.held, count=1, drafts=drafts))
            budget -= len(drafts)
        prompts = (each for each in running if each not in steps)
        chunks: list[Part] = []
        for request in chain(prompts, self._admitted()):
            # A request that was evicted above has no state; one without a free block waits for one.
            if request.state is None or self._lacks(request):
                continue
            count = self._chunk(request, budget, is_first=not chunks)
            if not count:
                break
            chunks.append(Part(request=request, start=request.held, count=count))
            budget = max(0, budget - request.unread - count)
        return parts + chunks

    def note_encoded(self, request: Request) -> None:
        """Record that the blocks of a request's memory are filled."""
        request.is_encoded = True
        if self.prefix is not None:
            self.prefix.note_memory(request)

    def note(self, part: Part, chosen: list[int], unseen: int = 0) -> None:
        """Record a pass of a part.

        Args:
            part: The part.
            chosen: The new tokens: the first continues the request, and each further one follows
                an accepted draft. Empty after a chunk that doesn't reach the last token.
            unseen: See `Request.unseen`.
        """
        request, before = part.request, max(0, part.start - part.request.unseen)
        request.unseen = unseen
        request.held += part.count + max(0, len(chosen) - 1)
        request.turn += len(chosen) if part.drafts else 0
        request.tokens.extend(chosen)
        if self.prefix is not None:
            self.prefix.note(request, before)
            if part.count > 1:
                self._copy(request, self.prefix.keep_states(request), is_back=False)

    def copies(self) -> list[StateCopy]:
        """Return the copies of states to make now: before the pass of a plan, or after it."""
        found, self._copies = self._copies, []
        return found

    def _copy(self, request: Request, row: int | None, *, is_back: bool) -> None:
        if row is not None and request.state is not None:
            self._copies.append(StateCopy(request.state, request.turn, row, is_back))

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _needs(self, request: Request) -> int:
        """Return the number of blocks that a waiting request needs to be admitted."""
        tokens = request.limit - 1 if self._by_length else len(request.tokens)
        return self._blocks(tokens) + self._blocks(len(request.source))

    def _lacks(self, request: Request) -> int:
        """Return the number of blocks that a running request's tokens lack."""
        return max(0, self._blocks(len(request.tokens)) - len(request.table))

    def _chunk(self, request: Request, budget: int, *, is_first: bool) -> int:
        """Return the number of a prompt's tokens in a pass, besides the source for its encoder.

        The first chunk of a pass may exceed the budget if it can't be cut: a source, an image, or a
        prompt whose keys depend on its length.
        """
        room = budget - request.unread
        least = request.pending if self._by_length else request.piece
        if room < least:
            return least if is_first and budget else 0
        count = request.uncut(min(request.pending, room))
        if self._by_length or self.prefix is None or not self.prefix.has_states:
            return count
        # States are kept at the end of a block. The last token is always computed.
        end = min(request.held + count, len(request.tokens) - 1)
        cut = request.uncut(end - end % self.block_size - request.held)
        return cut if cut > 0 else count

    def _grow(self, request: Request, planned: set[Request]) -> bool:
        """Give a request the block of its last token; evict later requests."""
        if request.state is None:
            return False
        missing = self._lacks(request)
        while self.pool.free_blocks < missing:
            later = [each for each in self.running if each.rank > request.rank]
            victim = max(set(later) - planned, key=lambda each: each.rank, default=None)
            if victim is None:
                return False
            self.evict(victim)
        request.table += self.pool.take(missing)
        return True

    def _drafts(self, request: Request, budget: int) -> tuple[int, ...]:
        """Return guesses that fit the budget, the request's limit and the free blocks."""
        room = min(budget, request.limit - len(request.tokens) - 1)
        if self._drafter is None or room < 1:
            return ()
        drafts = self._drafter(request, room)
        free = len(request.table) + self.pool.free_blocks
        drafts = drafts[: free * self.block_size - len(request.tokens)]
        more = self._blocks(len(request.tokens) + len(drafts)) - len(request.table)
        request.table += self.pool.take(max(0, more))
        return tuple(drafts)

    def _admitted(self) -> Iterator[Request]:
        """Admit waiting requests in order while the next one finds room."""
        while self.waiting and len(self.running) < self.max_batch:
            request = self.waiting[0]
            matched = self.prefix.match(request) if self.prefix is not None else []
            memory = self.prefix.match_memory(request) if self.prefix is not None else []
            needed = self._needs(request) - len(matched) - len(memory)
            idle = sum(self.pool.is_idle(block) for block in matched + memory)
            if needed > self.pool.free_blocks - idle:
                return
            del self.waiting[0]
            self.pool.share(matched + memory)
            taken = self.pool.take(needed)
            request.is_encoded = bool(memory)
            request.memory = memory or taken[: self._blocks(len(request.source))]
            request.table = matched + (taken if memory else taken[len(request.memory) :])
            request.held = len(matched) * self.block_size
            request.state = self._states.pop()
            self.running.append(request)
            if self.prefix is not None:
                self._copy(request, self.prefix.states_of(request), is_back=True)
            self.found_tokens += request.held
            if self.host is not None:
                self.host.restore(request)
            self.admitted_tokens += len(request.tokens)
            yield request

    def _prefer_higher_priority(self) -> None:
        """Evict requests of a lower priority than the first waiting one's, if that makes room."""
        if not self.waiting or self._by_length:
            return
        first = self.waiting[0]
        lower = [each for each in self.running if each.priority < first.priority]
        needed = self._needs(first)
        own = sum(
            self.pool.references(block) == 1 for each in lower for block in each.table + each.memory
        )
        if not lower or needed > self.pool.free_blocks + own:
            return
        lower.sort(key=lambda each: each.rank)
        while lower and (len(self.running) == self.max_batch or needed > self.pool.free_blocks):
            self.evict(lower.pop())

    def _drop(self, request: Request) -> None:
        if self.host is not None:
            self.host.drop(request)

    def _take_back(self, request: Request) -> None:
        assert request.state is not None, "only a running request has blocks"  # noqa: S101
        self.running.remove(request)
        self.pool.release(request.table)
        self.pool.release(request.memory)
        self._states.append(request.state)
        request.table, request.held, request.unseen, request.state = [], 0, 0, None
        request.memory, request.is_encoded = [], False
