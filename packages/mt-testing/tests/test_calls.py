"""The rules by which recorded calls are replayed: programs that end, and programs that hang."""

import pytest
import torch
import torch.distributed as dist
from mt_testing import CommunicationError, fake_world, recorded_ranks, replay
from mt_testing.calls import recorded_calls


def connect():
    dist.all_reduce(torch.zeros(1))


def swap(rank, *, batched):
    """Exchange with the other of two ranks: each sends first."""
    x, y = torch.ones(4), torch.empty(4)
    if not batched:
        dist.isend(x, dst=1 - rank).wait()
        dist.irecv(y, src=1 - rank).wait()
        return
    ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def test_a_swap_ends_as_one_batch_and_hangs_as_two_messages():
    replay(recorded_ranks(2, lambda rank: swap(rank, batched=True)))
    with pytest.raises(CommunicationError, match=r"rank 0 waits for isend\(4 float32 from rank 0"):
        replay(recorded_ranks(2, lambda rank: swap(rank, batched=False)))


def test_a_receive_that_is_posted_early_holds_up_what_is_sent_after_it():
    def program(rank):
        connect()
        works = []
        for sends in (False, True):
            op = dist.isend if sends else dist.irecv
            works += dist.batch_isend_irecv([dist.P2POp(op, torch.ones(2), 1 - rank)])
        for work in works:
            work.wait()

    with pytest.raises(CommunicationError, match="ranks wait forever"):
        replay(recorded_ranks(2, program))


def test_two_communicators_let_messages_of_both_ways_pass_each_other():
    def program(rank):
        up, down = dist.new_group([0, 1]), dist.new_group([0, 1])
        for group in (up, down):
            dist.all_reduce(torch.zeros(1), group=group)
        lanes = [(down, dist.irecv), (up, dist.isend)]
        if rank == 1:
            lanes = [(up, dist.irecv), (down, dist.isend)]
        works = []
        for group, op in lanes:
            works += dist.batch_isend_irecv([dist.P2POp(op, torch.ones(2), 1 - rank, group)])
        for work in works:
            work.wait()

    replay(recorded_ranks(2, program))


def test_the_first_batch_needs_all_ranks_of_its_group():
    def program(rank, *, connects):
        if connects:
            connect()
        if rank < 2:
            swap(rank, batched=True)

    replay(recorded_ranks(3, lambda rank: program(rank, connects=True)))
    with pytest.raises(CommunicationError, match=r"connects 0/cpu, without ranks \[2\]"):
        replay(recorded_ranks(3, lambda rank: program(rank, connects=False)))


def test_collectives_of_two_groups_in_two_orders_hang():
    def program(rank, *, turned):
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        for group in groups[::-1] if turned and rank == 1 else groups:
            dist.all_reduce(torch.zeros(1), group=group)

    replay(recorded_ranks(2, lambda rank: program(rank, turned=False)))
    with pytest.raises(CommunicationError, match="ranks wait forever"):
        replay(recorded_ranks(2, lambda rank: program(rank, turned=True)))


def test_a_batch_that_nobody_waits_for_still_has_to_end():
    def program(rank):
        connect()
        if rank == 0:
            dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(2), 1)])

    with pytest.raises(CommunicationError, match=r"rank 0 at its end\n.*first of its communicator"):
        replay(recorded_ranks(2, program))


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (lambda rank: dist.all_reduce(torch.zeros(1 + rank)), "ranks differ in one call of 0/cpu"),
        (
            lambda rank: (dist.reduce if rank else dist.broadcast)(torch.zeros(1), 0),
            r"rank 0: broadcast\(1 float32, .*\n.*rank 1: reduce\(1 float32, ",
        ),
        (
            lambda rank: dist.send(torch.ones(2), 1) if rank == 0 else dist.recv(torch.ones(3), 0),
            "2 float32 from rank 0 to 1 is sent at .* where 3 float32",
        ),
    ],
    ids=["size", "kind", "message"],
)
def test_sides_that_differ_are_found(program, text):
    with pytest.raises(CommunicationError, match=text):
        replay(recorded_ranks(2, program))


def test_a_gather_brings_what_this_rank_gives():
    with fake_world(3, 1), recorded_calls() as calls:
        parts = [torch.zeros(2) for _ in range(3)]
        dist.all_gather(parts, torch.ones(2))
        whole = torch.zeros(6)
        dist.all_gather_into_tensor(whole, torch.full((2,), 2.0), async_op=True).wait()
    assert torch.stack(parts).eq(1).all()
    assert whole.eq(2).all()
    kinds = [call.kind for call in calls]
    assert kinds == ["all_gather", "wait", "all_gather_into_tensor", "wait"]
    assert dist.all_gather.__module__.startswith("torch")


def test_calls_on_meta_tensors_are_recorded_with_their_place():
    with fake_world(2), recorded_calls() as calls:
        dist.reduce_scatter_tensor(
            torch.empty(2, device="meta"), torch.empty(4, device="meta"), op=dist.ReduceOp.SUM
        )
    assert calls[0].what == "4 float32, op=RedOpType.SUM"
    assert calls[0].lane.endswith("/meta")
    assert calls[0].place.startswith("test_calls.py:")
