"""When messages are sent, received and let go of."""

import pytest
import torch
import torch.distributed as dist
from mt_pipeline import Executor
from mt_schedule import make_schedule
from stages import (
    WIDTH,
    assert_matches_unpipelined,
    make_batches,
    make_executor,
    objective,
    spec,
)
from torch.multiprocessing.reductions import StorageWeakRef


def test_receives_are_posted_before_the_computation_that_precedes_their_use(ranks):
    def body():
        schedule = make_schedule("1f1b", stages=2, microbatches=3)
        executor, _, _ = make_executor(schedule, 2, group=dist.group.WORLD)
        log = []
        irecv, stage = dist.irecv, executor._place.stages[dist.get_rank()]

        def logged_irecv(*args, **kwargs):
            log.append("irecv")
            return irecv(*args, **kwargs)

        def logged_stage(x, batch):
            log.append("F")
            if x is not None:
                x.register_hook(lambda _: log.append("B"))
            return stage(x, batch)

        executor._place.stages[dist.get_rank()] = logged_stage
        dist.irecv = logged_irecv
        try:
            executor.run(make_batches(3), objective=objective)
        finally:
            dist.irecv = irecv
        return log

    # All three fit among those that may be posted early.
    assert ranks(2, body)[1] == ["irecv"] * 3 + ["F", "B"] * 3


def test_messages_up_and_down_go_through_groups_of_their_own(ranks):
    def body():
        used = set()
        isend = dist.isend

        def logged_isend(tensor, *, group, group_dst):
            used.add((group_dst > dist.get_rank(), group.group_name))
            return isend(tensor, group=group, group_dst=group_dst)

        dist.isend = logged_isend
        try:
            schedule = make_schedule("interleaved", stages=3, microbatches=3, chunks=2)
            assert_matches_unpipelined(schedule, group=dist.group.WORLD, number_of_layers=6)
        finally:
            dist.isend = isend
        return used

    used = ranks(3, body)
    (up,), (down,) = used[0], used[2]  # the last rank's next stage is on the first
    assert (up[0], down[0]) == (True, False)
    assert up[1] != down[1]
    assert used[1] == {up, down}


@pytest.mark.parametrize("batch_p2p", [False, True])
def test_sent_activations_are_freed_while_their_graph_lives(ranks, batch_p2p):
    def body():
        refs = []
        weight = torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)

        def stage(x, batch):
            if x is not None:
                return {"y": x * weight}
            if dist.get_rank() == 0:
                alive = [not ref.expired() for ref in refs]
                assert sum(alive) <= 4, alive  # the sends of the last ones may be under way
            output = batch + weight  # keeps neither input nor output for its backward
            refs.append(StorageWeakRef(output.untyped_storage()))
            return output

        def middle(x, batch):
            return x + weight

        executor = Executor(
            make_schedule("gpipe", stages=4, microbatches=12),
            middle if dist.get_rank() in (1, 2) else stage,
            group=dist.group.WORLD,
            activation=spec,
            batch_p2p=batch_p2p,
        )
        executor.run(make_batches(12), objective=objective)

    ranks(4, body)


def test_a_batched_send_need_not_have_ended_at_the_next_exchange(ranks):
    def body():
        schedule = make_schedule("gpipe", stages=2, microbatches=6)
        executor, _, _ = make_executor(schedule, 2, group=dist.group.WORLD, batch_p2p=True)
        log = []
        batch, stage = dist.batch_isend_irecv, executor._place.stages[dist.get_rank()]

        class Logged:
            def __init__(self, work, number):
                self.work, self.number = work, number

            def wait(self):
                log.append(f"wait {self.number}")
                self.work.wait()

        def logged_batch(transfers):
            sent = log.count("F") - 1
            return [
                Logged(work, sent) if transfer.op is dist.isend else work
                for transfer, work in zip(transfers, batch(transfers), strict=True)
            ]

        def logged_stage(x, given):
            log.append("F")
            return stage(x, given)

        executor._place.stages[dist.get_rank()] = logged_stage
        dist.batch_isend_irecv = logged_batch
        try:
            executor.run(make_batches(6), objective=objective)
        finally:
            dist.batch_isend_irecv = batch
        return log

    log = ranks(2, body)[0]
    assert log[:8] == ["F"] * 5 + ["wait 0", "F", "wait 1"]
    # In the order in which they left.
    assert log[8:] == [f"wait {i}" for i in range(2, 6)]
