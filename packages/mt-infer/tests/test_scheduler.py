"""Blocks, prefix cache and scheduler against a plain model of what they may do."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from mt_infer.engine.blocks import BlockPool
from mt_infer.engine.host import HostRoom
from mt_infer.engine.prefix import salt_of
from mt_infer.engine.request import Part, Request
from mt_infer.engine.scheduler import Scheduler
from mt_infer.images import Image


class World:
    """Drawn requests, and what each block holds as a dictionary written by each pass.

    A token's content is all tokens up to it, so a block found by a wrong key, taken from a request
    that still runs, or given to two, shows as another content.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.size, self.block = rng.choice([6, 12, 40]), rng.choice([1, 2, 4])
        self.pool = BlockPool(self.size)
        self.prefix = rng.random() < 0.7
        self.by_length = by_length = rng.random() < 0.2
        self.kind = "text" if by_length else rng.choice(["text", "images", "encoder"])
        self.scheduler = Scheduler(
            self.pool,
            block_size=self.block,
            max_batch=rng.choice([1, 3, 8]),
            max_batch_tokens=rng.choice([1, 5, 16]),
            prefix_cache=self.prefix,
            by_length=by_length,
            drafter=self.guess if rng.random() < 0.5 else None,
        )
        self.recurs = self.scheduler.prefix is not None and rng.random() < 0.5
        if self.recurs:
            self.scheduler.prefix.add_states(self.scheduler.max_batch)
        self.states: dict[tuple[int, ...], tuple] = {}
        self.found_states = 0
        if rng.random() < 0.5:
            self.scheduler.host = HostRoom(rng.choice([2, 20]), self.block)
        self.content: dict[tuple[int, int], tuple] = {}
        self.memories: dict[int, tuple] = {}
        self.on_host: dict[tuple[int, int], tuple] = {}
        self.live: list[Request] = []
        self.ended: Counter[str] = Counter()
        self.number = 0

    def guess(self, request: Request, most: int) -> list[int]:
        return [self.next(request.tokens)] * self.rng.randint(0, most)

    @staticmethod
    def next(tokens: list[int]) -> int:
        return (sum(tokens) + len(tokens)) % 3

    def add(self) -> None:
        rng, most = self.rng, self.size * self.block
        length = rng.randint(1, min(most, 12))
        limit = rng.randint(length + 1, min(most, length + 9) + 1)
        salt = salt_of(version=0, caller=rng.choice("ab"))
        tokens = [rng.randrange(2) for _ in range(length)]
        how = {"priority": rng.choice([0, 0, 0, 2]), "reads_cache": rng.random() < 0.9}
        if rng.random() < 0.05:
            how["deadline"] = rng.randint(0, 20)
        how |= self.inputs(tokens, most - limit)
        request = Request(number=self.number, tokens=tokens, limit=limit, salt=salt, **how)
        self.number += 1
        self.scheduler.add(request)
        self.live.append(request)

    def inputs(self, tokens: list[int], room: int) -> dict[str, Any]:
        """An encoder's tokens, or images of which some are longer than a pass."""
        rng = self.rng
        if self.kind == "encoder" and room >= self.block:
            length = rng.randint(1, min(room - room % self.block, 9))
            del tokens[1:]
            return {"source": tuple(rng.randrange(2) for _ in range(length))}
        if self.kind == "images" and len(tokens) > 2:
            size = rng.randint(1, min(len(tokens), 8))
            start = rng.randint(0, len(tokens) - size)
            for place in range(start, start + size):
                tokens[place] = 9
            digest = rng.choice([b"one", b"two"])
            return {"images": (Image(start=start, end=start + size, digest=digest, pixels=None),)}
        return {}

    def end(self, request: Request, end: str) -> None:
        self.scheduler.finish(request, end)
        self.live.remove(request)
        self.ended[end] += 1

    def act(self) -> None:
        draw = self.rng.random()
        if draw < 0.3 and len(self.live) < 30:
            self.add()
        elif draw < 0.32 and self.live:
            self.end(self.rng.choice(self.live), "cancel")
        elif draw < 0.33:
            for request in self.scheduler.expire(self.rng.randint(0, 10)):
                self.live.remove(request)
        elif draw < 0.332:
            self.flush()
        else:
            self.step()

    def flush(self) -> None:
        """Other weights: all content is stale."""
        self.scheduler.forget()
        self.content.clear()
        self.memories.clear()
        self.on_host.clear()

    def step(self) -> None:
        scheduler = self.scheduler
        parts = scheduler.plan()
        self.move()
        self.check()
        assert bool(parts) == bool(scheduler), "a step without work, or work without a step"
        counts = [len(part.fed) for part in parts]
        assert len({part.request for part in parts}) == len(parts) <= scheduler.max_batch
        assert not self.by_length or all(part.is_last for part in parts), "a prompt was cut"
        unread = [part.request.unread for part in parts]
        counts = [count + more for count, more in zip(counts, unread, strict=True)]
        assert sum(counts[:-1]) <= scheduler.max_batch_tokens
        if sum(counts) > scheduler.max_batch_tokens:
            last = parts[-1]
            assert self.by_length or unread[-1] or last.count == last.request.piece > 1
        for part in parts:
            self.encode(part.request)
            self.write(part)
        for part in parts:
            self.read(part)
            self.choose(part)
        self.copy()

    def copy(self) -> None:
        for copy in self.scheduler.copies():
            own, kept = (copy.state, copy.turn), (copy.kept,)
            self.states[own if copy.is_back else kept] = self.states[kept if copy.is_back else own]
            self.found_states += copy.is_back

    def encode(self, request: Request) -> None:
        if request.unread:
            for block in request.memory:
                assert self.pool.references(block) == 1, "a shared memory is written"
                self.memories[block] = request.salt, request.source
            self.scheduler.note_encoded(request)

    def move(self) -> None:
        """Copy to the host, within the pages, and back, as the loop does before a pass writes."""
        moves = [] if self.scheduler.host is None else self.scheduler.host.take_moves()
        for each in (each for each in moves if each.is_out):
            for host, block in zip(each.host, each.blocks, strict=True):
                self.on_host |= {(host, n): self.content.get((block, n)) for n in range(self.block)}
            each.request.kept = [self.states.get((each.state, each.turn))]
        self.copy()
        for each in (each for each in moves if not each.is_out):
            for host, block in zip(each.host, each.blocks, strict=True):
                self.content |= {(block, n): self.on_host[host, n] for n in range(self.block)}
            self.states[each.state, each.turn] = each.request.kept[0]

    def write(self, part: Part) -> None:
        request = part.request
        for image in request.images:
            end = request.held + part.count
            assert not image.start < end < image.end, "an image was cut"
        for place, _ in enumerate(part.fed, request.held):
            block = request.table[place // self.block]
            assert self.pool.references(block) == 1, "a shared block is written"
            seen = self.seen(part, place)
            self.content[block, place % self.block] = seen
        if self.recurs:
            self.recur(part)

    def recur(self, part: Part) -> None:
        """Go on from the states of the tokens before; each draft has a row of its own."""
        request, text = part.request, (part.request.salt, *part.request.tokens)
        state, turn, end = request.state, request.turn, 1 + part.start + part.count
        assert not part.start or self.states[state, turn] == text[: 1 + part.start]
        if not part.drafts:
            self.states[state, turn] = text[:end]
        for count in range(len(part.drafts) + bool(part.drafts)):
            self.states[state, turn + 1 + count] = (*text, *part.drafts[:count])

    def read(self, part: Part) -> None:
        request = part.request
        for block in request.memory:
            assert self.memories[block] == (request.salt, request.source)
        for place in range(request.held + len(part.fed)):
            block = request.table[place // self.block]
            assert self.content[block, place % self.block] == self.seen(part, place)

    @staticmethod
    def seen(part: Part, place: int) -> tuple:
        """What a token's key depends on."""
        request = part.request
        images = tuple((each.start, each.digest) for each in request.images if each.start <= place)
        return (
            request.salt,
            request.source,
            images,
            *request.tokens[: place + 1],
            *part.drafts[: max(0, place + 1 - len(request.tokens))],
        )

    def choose(self, part: Part) -> None:
        request, chosen = part.request, []
        if part.is_last:
            for draft in (*part.drafts, None):
                chosen.append(self.next([*request.tokens, *chosen]))
                if draft != chosen[-1] or len(request.tokens) + len(chosen) == request.limit:
                    break
        self.scheduler.note(part, chosen, self.rng.randint(0, 1))
        assert len(request.tokens) <= request.limit
        if len(request.tokens) == request.limit:
            self.end(request, "length")

    def check(self) -> None:
        """No leak and no double owner: references agree with the running requests' tables."""
        scheduler, pool = self.scheduler, self.pool
        held = (block for each in scheduler.running for block in each.table + each.memory)
        owners = Counter(held)
        assert all(pool.references(block) == owners[block] for block in range(self.size))
        assert pool.free_blocks == self.size - len(owners)
        assert len(scheduler.running) + len(scheduler.waiting) == len(self.live)
        states = [each.state for each in scheduler.running]
        assert len(set(states)) == len(states) <= scheduler.max_batch
        assert all(
            not each.table + each.memory and each.state is None for each in scheduler.waiting
        )
        assert not any(each.host for each in scheduler.running)
        if scheduler.host is not None:
            kept = [block for each in scheduler.waiting for block in each.host]
            assert len(set(kept)) == len(kept)
            assert scheduler.host.pool.free_blocks == scheduler.host.pool.size - len(kept)


def drive(seed: int, operations: int) -> Counter[str]:
    """Act at random, then let all end."""
    world = World(seed)
    for _ in range(operations):
        world.act()
    for _ in range(20_000):
        if not world.scheduler:
            break
        world.step()
    assert not world.live
    assert world.pool.free_blocks == world.size
    if not world.prefix:
        assert world.pool.cached_blocks == 0
    world.pool.forget()
    assert sorted(world.pool.take(world.size)) == list(range(world.size))
    return world.ended + Counter(
        evictions=world.scheduler.evictions,
        hits=world.scheduler.found_tokens,
        states=world.found_states,
        restored=0 if world.scheduler.host is None else world.scheduler.host.restored,
    )


@pytest.mark.parametrize(
    ("worlds", "operations"),
    [(40, 500), pytest.param(200, 5000, marks=pytest.mark.campaign)],
)
def test_random_operations_leak_nothing_and_end_every_request(worlds, operations) -> None:
    seen = sum((drive(seed, operations) for seed in range(worlds)), Counter())
    for event in ("length", "cancel", "evictions", "hits", "restored"):
        assert seen[event] > 100, seen
    assert seen["states"] > 30, seen


def new(number: int, length: int, more: int, **how) -> Request:
    return Request(number=number, tokens=[number + 1] * length, limit=length + more, **how)


def scheduler(blocks: int, **how) -> Scheduler:
    given = {"block_size": 4, "max_batch": 8, "max_batch_tokens": 8} | how
    return Scheduler(BlockPool(blocks), **given)


def test_decoding_goes_before_chunks_of_prompts_within_the_budget() -> None:
    plan = scheduler(20)
    plan.add(first := new(0, 3, 5))
    plan.add(second := new(1, 20, 2))
    parts = plan.plan()
    assert [(p.request, p.count) for p in parts] == [(first, 3), (second, 5)]
    assert [p.is_last for p in parts] == [True, False]
    plan.note(parts[0], [7])
    plan.note(parts[1], [])
    assert [(p.request, p.count) for p in plan.plan()] == [(first, 1), (second, 7)]


def test_a_request_that_never_fits_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"6 blocks.*there are 5.*max_tokens"):
        scheduler(5).add(new(0, 10, 12))
    scheduler(5).add(new(0, 10, 11))


def test_the_last_served_is_evicted_and_computed_again() -> None:
    plan = scheduler(4)
    plan.add(first := new(0, 4, 9))
    plan.add(second := new(1, 8, 2))
    for part in plan.plan():
        plan.note(part, [9] if part.is_last else [])
    parts = plan.plan()
    assert [(p.request, p.count) for p in parts] == [(first, 1), (second, 4)]
    for part in parts:
        plan.note(part, [9])
    while len(first.table) < 3:
        for part in plan.plan():
            if part.request is first:
                plan.note(part, [9])
    assert (second.table, second.held, plan.evictions) == ([], 0, 1)
    assert second.tokens[-1] == 9


def test_a_higher_priority_takes_blocks_from_a_lower() -> None:
    plan = scheduler(3)
    plan.add(low := new(0, 9, 3))
    plan.plan()
    plan.add(high := new(1, 9, 3, priority=1))
    assert [part.request for part in plan.plan()] == [high]
    assert plan.waiting == [low]


def test_a_second_prompt_starts_from_the_blocks_of_the_first_unless_its_salt_differs() -> None:
    plan = scheduler(20, max_batch_tokens=64)
    for number, salt in enumerate((b"a", b"a", b"b")):
        plan.add(request := Request(number=number, tokens=list(range(12)), limit=14, salt=salt))
        (part,) = plan.plan()
        # The last token is always computed, so its block is not found.
        assert request.held == (8 if number == 1 else 0)
        plan.note(part, [5])
        plan.finish(request, "stop")
    assert plan.pool.free_blocks == 20


@pytest.mark.parametrize("field", ["version", "adapter", "caller"])
def test_each_field_of_the_salt_changes_it(field) -> None:
    plain = {"version": 1, "adapter": None, "caller": ""}
    other = {"version": 2, "adapter": "", "caller": "x"}
    assert salt_of(**plain) != salt_of(**(plain | {field: other[field]}))


def test_the_pool_and_the_scheduler_import_no_torch() -> None:
    code = "import sys, mt_infer.engine.scheduler; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
