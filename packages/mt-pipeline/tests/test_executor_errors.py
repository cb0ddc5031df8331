"""Error messages for a wrong stage, rank or setup."""

import dataclasses
import datetime
import re
import time

import pytest
import torch
import torch.distributed as dist
from mt_pipeline import Executor, StageError, TensorSpec, TransferError
from mt_schedule import Action, Op, make_schedule
from stages import (
    WIDTH,
    make_batches,
    objective,
    spec,
)
from torch import nn


class Fault(nn.Module):
    """Raises in the forward or in the backward of one micro-batch."""

    def __init__(self, number: int, *, backward: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).double()
        self.number, self.backward = number, backward
        self.seen = -1

    def forward(self, x, batch):
        self.seen += 1
        y = self.layer(batch if x is None else x)
        if self.seen == self.number and self.backward:
            y.register_hook(self.fail)
        elif self.seen == self.number:
            self.fail(y)
        return y

    def fail(self, _):
        raise ArithmeticError("out of luck")


@pytest.mark.parametrize("backward", [False, True])
def test_a_failing_stage_is_named_with_its_microbatch(backward):
    executor = Executor(
        make_schedule("1f1b", stages=1, microbatches=4), Fault(2, backward=backward), group=None
    )
    with pytest.raises(StageError) as caught:
        executor.run(make_batches(4), objective=lambda y, _: y.sum())
    direction = "backward" if backward else "forward"
    assert str(caught.value) == (
        f"stage 0 on pipeline rank 0 failed in the {direction} of micro-batch 2: "
        "ArithmeticError: out of luck"
    )
    op = Op.B if backward else Op.F
    assert (caught.value.stage, caught.value.microbatch, caught.value.op) == (0, 2, op)
    assert isinstance(caught.value.__cause__, ArithmeticError)


@pytest.mark.parametrize("share_failures", [False, True])
def test_a_rank_that_is_gone_is_named(ranks, share_failures):
    def body():
        def make():
            return Executor(
                make_schedule("1f1b", stages=2, microbatches=2),
                lambda x, batch: batch * torch.ones(1, requires_grad=True),
                group=group,
                activation=spec,
                share_failures=share_failures,
            )

        group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
        executor = make()
        if dist.get_rank() == 1:
            time.sleep(2.5)
            return None
        with pytest.raises(TransferError) as running:
            executor.run(make_batches(2), objective=objective)
        with pytest.raises(TransferError) as making:
            make()
        return str(running.value), str(making.value)

    running, making = ranks(2, body)[0]
    pattern = (
        r"stage 0, (activation|gradient) of micro-batch 0: (sending it to|receiving it from) "
        r"pipeline rank 1 failed: .*Look for the first error on that rank; activation\(\) must .*"
    )
    if share_failures:
        pattern = "pipeline rank 0 did not meet the others before or after a run: .* as the others"
    assert re.fullmatch(pattern, running, flags=re.DOTALL)
    assert making.startswith("pipeline rank 0 could not connect to its neighbours:")
    assert making.endswith("Every rank of the group must make its Executor at this point")


def test_an_output_that_breaks_the_spec_is_named(ranks):
    def body():
        def wrong(batch):
            return TensorSpec((*batch.shape[:-1], WIDTH + 1), torch.float32)

        def run(stage):
            executor = Executor(
                make_schedule("1f1b", stages=2, microbatches=1),
                stage,
                group=dist.group.WORLD,
                activation=wrong,
            )
            with pytest.raises(StageError) as caught:
                executor.run(make_batches(1), objective=objective)
            return str(caught.value)

        return run(lambda x, batch: batch), run(lambda x, batch: (batch, batch))

    for wrong_shape, wrong_type in ranks(2, body):
        assert wrong_shape.endswith(
            "the stage returned (2, 3, 6) float64, but activation() says (2, 3, 7) float32"
        )
        assert wrong_type.endswith("a stage before the last one must return one tensor, got tuple")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (3.0, "got float"),
        (torch.ones(2, requires_grad=True), r"got a \(2,\) tensor with requires_grad=True"),
        (torch.ones(()), r"got a \(\) tensor with requires_grad=False"),
    ],
)
def test_an_objective_without_a_gradient_is_refused(result, message):
    executor = Executor(make_schedule("1f1b", 1, 1), lambda x, batch: batch, group=None)
    with pytest.raises(StageError, match=f"the objective must return one number.*{message}"):
        executor.run([torch.ones(1)], objective=lambda *_: result)


def test_a_wrong_setup_says_what_would_work():
    def stage(x, batch):
        return batch

    one = make_schedule("1f1b", stages=1, microbatches=2)
    with pytest.raises(ValueError, match="the schedule has 4 ranks but the group has 1"):
        Executor(make_schedule("1f1b"), stage, group=None)
    with pytest.raises(ValueError, match=r"rank 0 was given 2 stages, but .* stages \[0\]"):
        Executor(one, [stage, stage], group=None)
    forward = Action(Op.F, 0, 0)
    broken = dataclasses.replace(one, ranks=((forward, *one.ranks[0]),))
    with pytest.raises(
        ValueError, match="has 1 violations: rank 0, action 1: F0 of stage 0 is alr"
    ):
        Executor(broken, stage, group=None)
    with pytest.raises(ValueError, match="got 3 micro-batches, but the schedule is for 2"):
        Executor(one, stage, group=None).run([1, 2, 3], objective=objective)


def test_an_activation_spec_is_asked_for(ranks):
    def body():
        with pytest.raises(ValueError, match="activation is None but the schedule has 2 ranks"):
            Executor(make_schedule("1f1b", 2, 2), lambda x, b: x, group=dist.group.WORLD)

    ranks(2, body)
