"""Check mode names what differs between ranks, before a wrong number or a hang."""

from __future__ import annotations

import time
from random import Random

import pytest
import torch
import torch.distributed as dist
from mt_parallel_state import CheckMode, CollectiveError, ParallelLayout, ParallelState


def in_group(world, fault, ranks, *, timeout=0.5, layout=None):
    """What each rank of a checked world raises, and after how many seconds."""

    def body():
        state = ParallelState(
            ParallelLayout(**(layout or {"tp": world})), check=CheckMode(timeout=timeout)
        )
        with state:
            group = state.group("tp")
            dist.all_reduce(torch.ones(2), group=group)
            started = time.monotonic()
            try:
                fault(state, group, dist.get_rank())
            except CollectiveError as error:
                return str(error), time.monotonic() - started
        return None, 0.0

    return ranks(world, body)


def test_right_calls_give_what_the_group_gives(ranks) -> None:
    def calls(group):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        x = torch.arange(4.0) + rank
        out = [x.clone()]
        dist.all_reduce(out[0], op=dist.ReduceOp.MAX, group=group)
        gathered = torch.empty(4 * size)
        dist.all_gather_into_tensor(gathered, x, group=group)
        piece = torch.empty(4)
        work = dist.reduce_scatter_tensor(piece, gathered.clone(), group=group, async_op=True)
        work.wait()
        listed = [torch.empty(4) for _ in range(size)]
        dist.all_gather(listed, x, group=group)
        uneven = torch.empty(3 - rank)  # rank 0 gets 1 + 2, rank 1 gets 1 + 0
        sizes = [1, 2] if rank == 0 else [1, 1]
        dist.all_to_all_single(
            uneven if rank == 0 else torch.empty(2),
            torch.ones(2) if rank == 0 else torch.ones(3),
            sizes,
            [1, 1] if rank == 0 else [2, 1],
            group=group,
        )
        dist.broadcast(x, group_src=1, group=group)
        parts = [torch.empty(4) for _ in range(size)] if rank == 0 else None
        dist.gather(x, parts, group_dst=0, group=group)
        dist.barrier(group=group)
        other, got = 1 - rank, torch.empty(2)
        sent = dist.isend(torch.full((2,), float(rank)), group=group, group_dst=other)
        dist.irecv(got, group=group, group_src=other).wait()
        sent.wait()
        batch = [
            dist.P2POp(dist.isend, got.clone(), group=group, group_peer=other),
            dist.P2POp(dist.irecv, torch.empty(2), group=group, group_peer=other),
        ]
        for each in dist.batch_isend_irecv(batch):
            each.wait()
        return [*out, gathered, piece, *listed, x, *(parts or []), got, batch[1].tensor]

    def body():
        results = []
        for check in (None, CheckMode()):
            with ParallelState(ParallelLayout(tp=2), check=check) as state:
                results.append(calls(state.group("tp")))
        return all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    assert all(ranks(2, body))


def test_one_group_asked_for_under_two_names_is_one_group(ranks) -> None:
    def sums(layout, names):
        if dist.get_rank() % 2:
            names = names[::-1]
        with ParallelState(layout, check=CheckMode(timeout=5)) as state:
            out = []
            for name in names:
                value = torch.ones(1)
                dist.all_reduce(value, group=state.group(name))
                out.append(value.item())
            return out

    def body():
        return [
            *sums(ParallelLayout(pp=2), ["pp", "embedding"]),
            *sums(ParallelLayout(dp=2), ["dp", "dp-cp"]),
        ]

    assert ranks(2, body) == [[2.0] * 4] * 2


def test_a_message_from_any_rank_is_received_and_compared(ranks) -> None:
    def body():
        with ParallelState(ParallelLayout(tp=3), check=CheckMode(timeout=5)) as state:
            group, rank = state.group("tp"), dist.get_rank()
            for _ in range(2):
                if rank:
                    dist.send(torch.full((2,), float(rank)), group=group, group_dst=0)
                    continue
                for _ in range(2):
                    got = torch.empty(2)
                    assert dist.recv(got, group=group) == got[0]
            dist.barrier(group=group)
            if rank == 2:
                return ""
            try:
                if rank:
                    dist.send(torch.ones(2), group=group, group_dst=0)
                else:
                    dist.recv(torch.empty(3), group=group)
            except CollectiveError as error:
                return str(error)
            return None

    for text in ranks(3, body)[:2]:
        assert "the two sides of a message differ" in text

    def silence():
        with ParallelState(ParallelLayout(tp=2), check=CheckMode(timeout=0.5)) as state:
            if dist.get_rank() == 0:
                with pytest.raises(CollectiveError, match=r"rank 1 did not come .* from any rank"):
                    dist.recv(torch.empty(3), group=state.group("tp"))
            else:
                state.group("tp")

    ranks(2, silence)


def test_functional_collectives_use_the_group_unchecked(ranks) -> None:
    def body():
        import torch.distributed._functional_collectives as functional

        with ParallelState(ParallelLayout(tp=2), check=CheckMode(timeout=5)) as state:
            return functional.all_reduce(torch.ones(1), "sum", state.group("tp")).item()

    assert ranks(2, body) == [2.0, 2.0]


@pytest.mark.campaign  # the import of the compiler takes seconds
def test_compiled_functions_may_use_a_checked_group(ranks) -> None:
    def body():
        with ParallelState(ParallelLayout(tp=2), check=CheckMode(timeout=5)) as state:
            group = state.group("tp")

            def double(x):
                y = x * group.size()
                dist.all_reduce(y, group=group)
                return y

            return torch.compile(double, backend="aot_eager")(torch.ones(1)).item()

    assert ranks(2, body) == [4.0, 4.0]


def wrong_dtype(state, group, rank):
    dist.all_reduce(torch.ones(2, dtype=torch.int32 if rank else torch.float32), group=group)


def wrong_reduce_op(state, group, rank):
    op = dist.ReduceOp.PRODUCT if rank else dist.ReduceOp.SUM
    dist.all_reduce(torch.ones(2), op=op, group=group)


def wrong_shape(state, group, rank):
    dist.all_reduce(torch.ones(2 + rank), group=group)


def wrong_order(state, group, rank):
    def gather():
        dist.all_gather_into_tensor(torch.empty(2 * group.size()), torch.ones(2), group=group)

    def reduce():
        dist.all_reduce(torch.ones(2), group=group)

    for call in (gather, reduce) if rank else (reduce, gather):
        call()


def wrong_root(state, group, rank):
    dist.broadcast(torch.ones(2), group_src=min(rank, 1), group=group)


def wrong_splits(state, group, rank):
    size = group.size()
    x = torch.ones(size + (rank == 0))
    sizes = [1 + (rank == 0), *[1] * (size - 1)]
    dist.all_to_all_single(torch.empty(size), x, [1] * size, sizes, group=group)


DIFFERENT = {
    "wrong dtype": (wrong_dtype, ["int32 [2]", "float32 [2]"]),
    "wrong reduce op": (wrong_reduce_op, ["reduce_op SUM", "reduce_op PRODUCT"]),
    "wrong shape": (wrong_shape, ["float32 [2]", "float32 [3]"]),
    "wrong order": (wrong_order, ["all_gather_into_tensor", "all_reduce"]),
    "wrong root": (wrong_root, ["root 0", "root 1"]),
    "wrong splits": (wrong_splits, ["rank 0 sends 2 rows to rank 0, which expects 1"]),
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", DIFFERENT)
def test_a_difference_is_named_on_every_rank_at_once(name, world, ranks) -> None:
    fault, expected = DIFFERENT[name]
    for text, seconds in in_group(world, fault, ranks, timeout=20):
        assert text is not None
        for part in [*expected, "of group tp-", "at test_check.py:"]:
            assert part in text
        assert seconds < 5


def sleeping(state, group, rank):
    if rank == 1:
        time.sleep(1.5)
    dist.all_reduce(torch.ones(2), group=group)


def missing(state, group, rank):
    if rank != 1:
        dist.all_reduce(torch.ones(2), group=group)
    else:
        time.sleep(1.0)
        dist.barrier(group=state.group("dp-pp-tp"))  # whatever it calls next tells it


@pytest.mark.parametrize("fault", [sleeping, missing])
def test_an_absent_rank_is_named_with_its_last_call_within_the_timeout(fault, ranks) -> None:
    results = in_group(3, fault, ranks)
    for rank, (text, seconds) in enumerate(results):
        assert text is not None
        if rank != 1:
            assert "rank 1 did not come within 0.5 s" in text
            assert "rank 1 last: all_reduce(of float32 [2], reduce_op SUM), call 0 of" in text
            assert seconds < 0.5 + 2


def test_a_call_in_the_wrong_group_names_both_groups(ranks) -> None:
    def fault(state, group, rank):
        if rank == 3:
            time.sleep(0.5)  # rank 2 is the first to have waited long enough, and tells the others
        dist.all_reduce(torch.ones(2), group=state.group("dp") if rank == 3 else group)

    results = in_group(4, fault, ranks, timeout=1.5, layout={"tp": 2, "dp": 2})
    assert any("dp-1_3" in (text or "") and "tp-2_3" in (text or "") for text, _ in results)
    assert all(text is not None for text, _ in results[2:])


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 2), (torch.float32, 3)])
def test_the_two_sides_of_a_message_are_compared(dtype, size, ranks) -> None:
    def fault(state, group, rank):
        if rank == 0:
            dist.isend(torch.ones(2), group=group, group_dst=1).wait()
        else:
            time.sleep(0.2)  # the send is announced first: nothing wrong is received
            dist.irecv(torch.ones(size, dtype=dtype), group=group, group_src=0).wait()

    for text, _ in in_group(2, fault, ranks):
        assert "the two sides of a message differ" in text
        assert "send(of float32 [2], from 0, to 1" in text


FAULTS = {**{name: fault for name, (fault, _) in DIFFERENT.items()}, "sleeping rank": sleeping}
FAULTS |= {"missing call": missing}


def draw_fault(seed: int):
    """A world, a number of right calls, then one fault of one rank."""
    random = Random(seed)
    name = random.choice([*FAULTS, "wrong group"])
    world = random.choice([2, 3, 4])
    if name in ("sleeping rank", "missing call"):
        world = 3
    return name, world, random.randrange(5)


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[pytest.mark.campaign] if seed >= 8 else []) for seed in range(100)],
)
def test_every_injected_fault_is_named_on_every_rank_in_time(seed, ranks, record_property) -> None:
    name, world, calls = draw_fault(seed)
    layout = None
    if name == "wrong group":
        world, layout = 4, {"tp": 2, "dp": 2}
    record_property("fault", name)
    record_property("ranks", world)
    record_property("right calls before", calls)

    def fault(state, group, rank):
        for _ in range(calls):
            dist.all_reduce(torch.ones(3), group=group)
        if name != "wrong group":
            FAULTS[name](state, group, rank)
        else:
            dist.all_reduce(torch.ones(2), group=state.group("dp") if rank == 3 else group)
            if rank < 2:  # rank 1 is the partner in the group that rank 3 went to by mistake
                dist.all_reduce(torch.ones(2), group=state.group("dp"))
            dist.barrier(group=state.group("tp-dp"))  # what a program does later tells the rest

    found = in_group(world, fault, ranks, layout=layout)
    awake = [seconds for rank, (_, seconds) in enumerate(found) if rank != 1]
    record_property("named after, s", f"{max(awake):.2f}")
    for rank, (text, seconds) in enumerate(found):
        assert text is not None, (name, rank)
        for part in ("rank", " of group ", " at test_check.py:"):
            assert part in text
        assert seconds < 0.5 + 2 or rank == 1  # rank 1 is the one that sleeps


def test_a_timeout_must_be_positive() -> None:
    with pytest.raises(ValueError, match="timeout=0 must be above 0 seconds"):
        CheckMode(timeout=0)
