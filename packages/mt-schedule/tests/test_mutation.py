"""The checker's verdict on edited schedules agrees with an interpreter that just runs them."""

import dataclasses
import itertools
import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_schedule import (
    SCHEDULES,
    Action,
    Costs,
    Op,
    Schedule,
    check,
    insert_communication,
    make_schedule,
)


class WrongRunError(Exception):
    """The run crashed, or computed something else than it should."""


class Interpreter:
    """Runs a schedule with symbols for tensors: the checker's oracle.

    Every rank takes its actions in turn; what stands between two other actions is one exchange,
    whose messages happen at the same time. A message carries the name of what was computed, and
    whoever works on it looks whether that is what it should work on. Without messages, results
    are there for every rank at once. An overlapped pair needs both inputs at its start, and
    a peak that is not kept is wrong.
    """

    def __init__(self, schedule: Schedule, buffers: int) -> None:
        self.schedule, self.buffers = schedule, buffers
        self.done: set[Action] = set()
        self.slots: dict[Action, Action] = {}  # what a receive got
        self.sends: dict[tuple[int, int], list[Action]] = defaultdict(list)
        self.receives: dict[tuple[int, int], list[Action]] = defaultdict(list)
        self.live = [0] * len(schedule.ranks)
        self.talks = any(a.op.is_message for _, _, a in schedule)

    def goes_wrong(self) -> bool:
        programs = [self.program(rank) for rank in range(len(self.schedule.ranks))]
        try:
            moved = True
            while moved:
                before = sum(map(len, (self.done, *self.sends.values(), *self.receives.values())))
                finished = [next(program, True) for program in programs]
                after = sum(map(len, (self.done, *self.sends.values(), *self.receives.values())))
                moved = after > before
        except WrongRunError:
            return True
        left = any(
            len(self.sends[channel]) != len(self.receives[channel])
            for channel in {*self.sends, *self.receives}
        )
        return left or not all(finished) or not self.is_complete()

    def is_complete(self) -> bool:
        wanted = 0
        for stage in range(self.schedule.stages):
            for number in self.schedule.microbatches_of(stage):
                whole = Action(Op.B, stage, number) in self.done
                halves = {Action(Op.I, stage, number), Action(Op.W, stage, number)} <= self.done
                if Action(Op.F, stage, number) not in self.done or not (whole or halves):
                    return False
                wanted += 2 if whole else 3
        return len(self.done) == wanted

    def program(self, rank: int):
        actions = self.schedule.ranks[rank]
        exchange, index = [], 0
        while index < len(actions) or exchange:
            if index < len(actions) and actions[index].op.is_message:
                exchange.append(actions[index])
                index += 1
                continue
            posted = [self.post(rank, action) for action in exchange]
            while not all(is_through() for is_through in posted):
                yield False
            exchange = []
            unit = list(actions[index : index + 1])
            if tuple(actions[index : index + 2]) in self.schedule.pairs:
                unit = list(actions[index : index + 2])
            while not self.talks and not all(self.has_source(rank, action) for action in unit):
                yield False
            for action in unit:
                self.take(rank, action)
            index += len(unit)
        while True:
            yield True

    def own(self, rank: int, action: Action) -> None:
        stages, holder = self.schedule.stages, self.schedule.stage_ranks
        if not 0 <= action.stage < stages or holder[action.stage] != rank:
            raise WrongRunError
        if action.microbatch not in self.schedule.microbatches_of(action.stage):
            raise WrongRunError

    def neighbour(self, stage: int, *, after: bool) -> int | None:
        depth = self.schedule.stages // self.schedule.directions
        at_the_end = stage % depth == (depth - 1 if after else 0)
        return None if at_the_end else stage + (1 if after else -1)

    def post(self, rank: int, action: Action):
        self.own(rank, action)
        other = self.neighbour(action.stage, after=action.op in (Op.SEND_F, Op.RECV_B))
        if other is None or self.schedule.stage_ranks[other] == rank:
            raise WrongRunError
        peer = self.schedule.stage_ranks[other]
        if action.op.is_receive:
            channel = (peer, rank)
            number = len(self.receives[channel])
            self.receives[channel].append(action)

            def received() -> bool:
                if len(self.sends[channel]) <= number:
                    return False
                self.slots[action] = self.sends[channel][number]
                return True

            return received
        value = self.result(action)
        channel = (rank, peer)
        number = len(self.sends[channel])
        self.sends[channel].append(value)
        return lambda: len(self.receives[channel]) + self.buffers > number

    def result(self, send: Action) -> Action:
        ops = (Op.F,) if send.op is Op.SEND_F else (Op.B, Op.I)
        for op in ops:
            if send._replace(op=op) in self.done:
                return send._replace(op=op)
        raise WrongRunError

    def source(self, action: Action) -> list[Action]:
        """What an action works on: one of these."""
        op, stage, number = action
        if op is Op.F:
            before = self.neighbour(stage, after=False)
            return [] if before is None else [Action(Op.F, before, number)]
        after = self.neighbour(stage, after=True)
        if op in (Op.B, Op.I) and after is not None:
            return [Action(Op.B, after, number), Action(Op.I, after, number)]
        return []

    def has_source(self, rank: int, action: Action) -> bool:
        if not action.op.is_compute or not 0 <= action.stage < self.schedule.stages:
            return True
        source = self.source(action)
        return not source or any(one in self.done for one in source)

    def take(self, rank: int, action: Action) -> None:
        self.own(rank, action)
        op, stage, number = action
        if action in self.done:
            raise WrongRunError
        source = self.source(action)
        if source and self.schedule.stage_ranks[source[0].stage] != rank and self.talks:
            receive = Action(Op.RECV_F if op is Op.F else Op.RECV_B, stage, number)
            if self.slots.get(receive) not in source:
                raise WrongRunError
        elif source and not any(one in self.done for one in source):
            raise WrongRunError
        had = {other: Action(other, stage, number) in self.done for other in Op}
        if op in (Op.B, Op.I) and (not had[Op.F] or had[Op.B] or had[Op.I]):
            raise WrongRunError
        if op is Op.W and not had[Op.I]:
            raise WrongRunError
        self.done.add(action)
        self.live[rank] += {Op.F: 1, Op.B: -1, Op.W: -1}.get(op, 0)
        declared = self.schedule.peak_activations
        if declared is not None and self.live[rank] > declared[rank]:
            raise WrongRunError


def mutate(schedule: Schedule, chance: random.Random) -> Schedule:
    ranks = [list(actions) for actions in schedule.ranks]
    actions = chance.choice(ranks)
    i, j = (chance.randrange(len(actions)) for _ in range(2))
    kind = chance.choice(["drop", "swap", "duplicate", "move", "retarget", "elsewhere"])
    if kind == "drop":
        actions.pop(i)
    elif kind == "swap":
        near = min(i + chance.choice([1, 1, 1, 2, 3]), len(actions) - 1)
        j = chance.choice([j, near])
        actions[i], actions[j] = actions[j], actions[i]
    elif kind == "duplicate":
        actions.insert(j, actions[i])
    elif kind == "move":
        actions.insert(chance.choice([j, max(0, i - 1), i + 1]), actions.pop(i))
    elif kind == "elsewhere":
        chance.choice(ranks).append(actions.pop(i))
    else:
        actions[i] = chance.choice(
            [
                actions[i]._replace(op=chance.choice(list(Op))),
                actions[i]._replace(stage=chance.randint(-1, schedule.stages)),
                actions[i]._replace(microbatch=chance.randint(-1, schedule.microbatches)),
            ]
        )
    return dataclasses.replace(schedule, ranks=tuple(tuple(actions) for actions in ranks))


def draw(chance: random.Random) -> Schedule:
    name = chance.choice(list(SCHEDULES))
    stages, microbatches = chance.randint(2, 4), chance.randint(1, 9)
    if name.startswith("dualpipe"):
        stages, microbatches = chance.choice([(2, 4), (2, 6), (4, 8)])
    pairs = name in ("1f1b", "interleaved") and chance.random() < 0.5
    options = {"overlap": True} if pairs else {}
    schedule = make_schedule(name, stages, microbatches, **options)
    if chance.random() < 0.6:
        schedule = insert_communication(schedule)
    return schedule


def verdicts_agree(seed: int) -> bool:
    """Edit one schedule and compare; say whether the edit made it wrong."""
    chance = random.Random(seed)
    schedule, buffers = draw(chance), chance.choice([0, 0, 1, 100])
    assert check(schedule, buffers=buffers) == []
    assert not Interpreter(schedule, buffers).goes_wrong()
    edited = mutate(schedule, chance)
    wrong = Interpreter(edited, buffers).goes_wrong()
    violations = check(edited, buffers=buffers)
    assert bool(violations) == wrong, f"seed {seed}: {wrong=}, {[str(v) for v in violations[:3]]}"
    for violation in violations:
        assert 0 <= violation.index <= len(edited.ranks[violation.rank])
    return wrong


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_an_edit_is_flagged_exactly_when_it_breaks_the_run(first):
    outcomes = [verdicts_agree(seed) for seed in range(first, first + 40)]
    assert any(outcomes)
    assert not all(outcomes)


@pytest.mark.campaign
@pytest.mark.parametrize("first", range(1000, 5000, 500))
def test_thousands_of_edits_are_flagged_exactly_when_they_break_the_run(first):
    outcomes = [verdicts_agree(seed) for seed in range(first, first + 500)]
    assert 50 < sum(outcomes) < 490


@st.composite
def any_valid_schedule(draw) -> Schedule:
    """Stages placed anyhow on ranks, and per-rank orders that are odd but can complete."""
    stages, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    ranks = draw(st.integers(1, 4))
    placement = tuple(draw(st.integers(0, ranks - 1)) for _ in range(stages))
    # Any order of whole actions in which each follows its source can complete.
    chance = random.Random(draw(st.integers(0, 10**6)))
    lists = [[] for _ in range(ranks)]
    way = [
        *(Action(Op.F, stage, 0) for stage in range(stages)),
        *(
            Action(op, stage, 0)
            for stage in reversed(range(stages))
            for op in chance.choice([(Op.B,), (Op.I, Op.W)])
        ),
    ]
    turns = [number for number in range(microbatches) for _ in way]
    chance.shuffle(turns)
    for turn, number in enumerate(turns):
        action = way[turns[:turn].count(number)]
        lists[placement[action.stage]].append(action._replace(microbatch=number))
    return Schedule(
        name="drawn",
        stages=stages,
        microbatches=microbatches,
        ranks=tuple(tuple(actions) for actions in lists),
        stage_ranks=placement,
    )


@settings(max_examples=120, deadline=None)
@given(schedule=any_valid_schedule(), times=st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)))
def test_inserted_communication_never_deadlocks(schedule, times):
    assert check(schedule) == []
    full = insert_communication(schedule, Costs(forward=times[0], backward=times[1]))
    assert check(full, buffers=0) == []
    assert not Interpreter(full, 0).goes_wrong()


@settings(max_examples=60, deadline=None)
@given(schedule=any_valid_schedule(), buffers=st.sampled_from([0, 1, 3]), seed=st.integers(0, 999))
def test_messages_shuffled_anyhow_are_flagged_exactly_when_they_break_the_run(
    schedule, buffers, seed
):
    full, chance = insert_communication(schedule), random.Random(seed)
    ranks = []
    for actions in full.ranks:
        listed = list(actions)
        for i, j in itertools.islice(itertools.pairwise(range(len(listed))), 40):
            if chance.random() < 0.1 and any(listed[k].op.is_message for k in (i, j)):
                listed[i], listed[j] = listed[j], listed[i]
        ranks.append(tuple(listed))
    shuffled = dataclasses.replace(full, ranks=tuple(ranks))
    wrong = Interpreter(shuffled, buffers).goes_wrong()
    assert bool(check(shuffled, buffers=buffers)) == wrong
