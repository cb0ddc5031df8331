"""A whole batch, plain tensors, is cut into the micro-batches of the schedule."""

import pytest
import torch
import torch.distributed as dist
from mt_pipeline import Executor, StageError, TensorSpec, make_schedule
from torch import nn
from torch.nn.functional import mse_loss

ROWS = 10


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def make_batch():
    torch.manual_seed(1)
    return {"x": torch.randn(ROWS, 8).double(), "y": torch.randn(ROWS, 1).double()}


def make_executor(part, *, group, microbatches):
    return Executor(
        make_schedule("1f1b", 1 if group is None else 2, microbatches),
        lambda x, batch: part(batch["x"] if x is None else x),
        group=group,
        activation=lambda batch: TensorSpec((len(batch["x"]), 16), torch.float64),
    )


def loss_of(y, batch):
    return mse_loss(y, batch["y"], reduction="sum")


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 10])
def test_a_sequential_over_two_ranks_has_the_gradients_of_one_process(ranks, microbatches):
    whole, batch = make_model(), make_batch()
    loss_of(whole(batch["x"]), batch).backward()

    def body():
        model, rank = make_model(), dist.get_rank()
        part = model[1:] if rank else model[:1]
        executor = make_executor(part, group=dist.group.WORLD, microbatches=microbatches)
        outputs = executor.run(make_batch(), objective=loss_of)
        if rank:
            assert [len(y) for y in outputs] == [
                len(x) for x in batch["x"].tensor_split(microbatches)
            ]
            torch.testing.assert_close(torch.cat(outputs), whole(batch["x"]).detach())
            evaluated = executor.evaluate(make_batch())
            assert all(map(torch.equal, evaluated, outputs))
        else:
            executor.evaluate(make_batch())
        output = executor.infer(
            make_batch(), output=lambda b: TensorSpec((len(b["x"]), 1), torch.float64)
        )
        torch.testing.assert_close(torch.cat(output), whole(batch["x"]).detach())
        return [p.grad for p in part.parameters()]

    first, second = ranks(2, body)
    for ours, theirs in zip([*first, *second], whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad, rtol=1e-12, atol=1e-12)


def test_a_single_tensor_is_cut_too():
    schedule = make_schedule("gpipe", 1, 4)
    executor = Executor(schedule, lambda x, batch: batch * 2, group=None)
    outputs = executor.evaluate(torch.arange(10))
    assert [y.tolist() for y in outputs] == [[0, 2, 4], [6, 8, 10], [12, 14], [16, 18]]


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (torch.zeros(3, 8), ValueError, "the batch has 3 rows for 4 micro-batches"),
        ({"x": torch.zeros(4), "y": torch.zeros(5)}, ValueError, "different numbers of rows: {'x'"),
        ({}, ValueError, "an empty dict"),
        ({"x": [1, 2, 3, 4]}, TypeError, "'x' of the batch is .*only tensors with rows"),
        (torch.zeros(()), TypeError, "only tensors with rows"),
        (None, TypeError, "expected a sequence of micro-batches, or a tensor"),
        ("abcd", TypeError, "expected a sequence of micro-batches"),
        (10**12, TypeError, "expected a sequence of micro-batches"),
    ],
)
def test_what_cannot_be_cut_is_named(batch, error, message):
    executor = make_executor(make_model(), group=None, microbatches=4)
    for call in (executor.evaluate, lambda b: executor.run(b, objective=loss_of)):
        with pytest.raises(error, match=message):
            call(batch)


def test_a_batch_that_cannot_be_cut_on_one_rank_is_named_on_all(ranks):
    def body():
        model, rank = make_model(), dist.get_rank()
        part = model[1:] if rank else model[:1]
        executor = make_executor(part, group=dist.group.WORLD, microbatches=4)
        with pytest.raises(StageError, match=r"rank 1 failed in .*the batch is an empty dict"):
            executor.run({} if rank else make_batch(), objective=loss_of)
        executor.run(make_batch(), objective=loss_of)  # and the pipeline goes on

    ranks(2, body)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": None}, "expected a Schedule, got None"),
        ({"schedule": "1f1b"}, "expected a Schedule, got '1f1b'; make_schedule"),
        ({"stage": None}, "but None is no function"),
        ({"stage": [3]}, "but 3 is no function"),
        ({"group": 0}, "group must be a ProcessGroup or None"),
        ({"group": "world"}, "group must be a ProcessGroup or None"),
    ],
)
def test_wrong_objects_are_named(change, message):
    good = {"schedule": make_schedule("1f1b", 1, 2), "stage": print, "group": None}
    with pytest.raises(TypeError, match=message):
        Executor(**{**good, **change})
