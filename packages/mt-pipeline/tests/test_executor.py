"""The executor against the same model run without a pipeline, in fp64, bit for bit."""

import dataclasses
import datetime
import re
import time

import pytest
import torch
import torch.distributed as dist
from mt_pipeline import Executor, StageError, TensorSpec, TransferError
from mt_pipeline.transfer import Links, Mailbox
from mt_schedule import Action, Op, Schedule, check, make_schedule, split_layers
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

WIDTH = 6


def make_layers(number: int) -> list[nn.Module]:
    torch.manual_seed(7)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)).double()
        for _ in range(number)
    ]


def make_batches(number: int, *, lengths: bool = True) -> list[torch.Tensor]:
    """Micro-batches of different sequence lengths."""
    torch.manual_seed(11)
    return [torch.randn(2, 3 + (i % 3) * lengths, WIDTH).double() for i in range(number)]


def spec(batch):
    return TensorSpec(tuple(batch.shape), batch.dtype)


def objective(output, batch):
    return (output["y"] * batch.cos()).sum()


def make_stage(layers: list[nn.Module], *, last: bool):
    def stage(x, batch):
        h = batch if x is None else x
        for layer in layers:
            h = layer(h)
        return {"y": h, "parts": [h.sum(), (h.mean(), 3)]} if last else h

    return stage


def grads(layers) -> list[torch.Tensor]:
    return [parameter.grad for layer in layers for parameter in layer.parameters()]


def unpipelined(number_of_layers: int, batches):
    layers = make_layers(number_of_layers)
    stage = make_stage(layers, last=True)
    losses = []
    for batch in batches:
        loss = objective(stage(None, batch), batch)
        loss.backward()
        losses.append(loss.detach())
    return losses, layers


def make_executor(schedule: Schedule, number_of_layers: int, *, group, batch_p2p=None):
    layers = make_layers(number_of_layers)
    rank = 0 if group is None else dist.get_rank(group)
    held = schedule.stages_of(rank)
    split = split_layers(number_of_layers, schedule.stages)
    mine = [[layers[i] for i in split[stage]] for stage in held]
    stages = [
        make_stage(part, last=stage == schedule.stages - 1)
        for stage, part in zip(held, mine, strict=True)
    ]
    executor = Executor(
        schedule,
        stages if len(stages) > 1 else stages[0],
        group=group,
        activation=spec,
        batch_p2p=batch_p2p,
    )
    numbers = [i for stage in held for i in split[stage]]
    return executor, layers, numbers


def assert_matches_unpipelined(schedule, *, group, batch_p2p=None, number_of_layers=5, steps=1):
    batches = make_batches(schedule.microbatches)
    executor, layers, numbers = make_executor(
        schedule, number_of_layers, group=group, batch_p2p=batch_p2p
    )
    losses, reference = unpipelined(number_of_layers, batches)
    for _ in range(steps):
        for layer in layers:
            layer.zero_grad()
        outputs = executor.run(batches, objective=objective)
        for i in numbers:
            for ours, theirs in zip(grads([layers[i]]), grads([reference[i]]), strict=True):
                assert torch.equal(ours, theirs)
        untouched = [
            g for i, layer in enumerate(layers) if i not in numbers for g in grads([layer])
        ]
        assert all(g is None for g in untouched)
    if schedule.stages - 1 not in schedule.stages_of(executor.rank):
        assert outputs == []
        return
    assert len(outputs) == schedule.microbatches
    for loss, output, batch in zip(losses, outputs, batches, strict=True):
        assert torch.equal(objective(output, batch), loss)
        assert not output["y"].requires_grad
        assert not output["parts"][0].requires_grad
        assert output["parts"][1][1] == 3


@pytest.mark.parametrize("batch_p2p", [False, True])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_1f1b_matches_unpipelined_loss_and_gradients(ranks, stages, batch_p2p):
    def body():
        for microbatches in (1, 2, 5, 8):
            schedule = make_schedule("1f1b", stages=stages, microbatches=microbatches)
            assert_matches_unpipelined(
                schedule, group=dist.group.WORLD, batch_p2p=batch_p2p, steps=2
            )

    ranks(stages, body)


def test_one_stage_needs_no_group():
    assert_matches_unpipelined(make_schedule("1f1b", stages=1, microbatches=3), group=None)


@pytest.mark.parametrize("batch_p2p", [False, True])
def test_several_stages_on_a_rank_match_unpipelined(ranks, batch_p2p):
    schedule = make_schedule("interleaved", 2, 4)

    def body():
        assert_matches_unpipelined(schedule, group=dist.group.WORLD, batch_p2p=batch_p2p)

    ranks(2, body)


def test_stages_in_a_v_hand_over_within_a_rank(ranks):
    def actions(stages):
        forwards = [[Action(Op.F, s, i) for s in stages] for i in range(3)]
        backwards = [[Action(Op.B, s, i) for s in reversed(stages)] for i in range(3)]
        return tuple(a for f, b in zip(forwards, backwards, strict=True) for a in (*f, *b))

    schedule = Schedule(
        name="v",
        stages=4,
        microbatches=3,
        ranks=(actions((0, 3)), actions((1, 2))),
        stage_ranks=(0, 1, 1, 0),
    )
    assert check(schedule) == []
    ranks(2, lambda: assert_matches_unpipelined(schedule, group=dist.group.WORLD))


def test_a_ring_of_ranks_that_have_never_met_does_not_wait_for_itself(ranks):
    schedule = make_schedule("interleaved", 3, 1)

    def body():
        group = dist.new_group([0, 1, 2])
        assert_matches_unpipelined(schedule, group=group, number_of_layers=6)

    ranks(3, body)


def test_the_pipeline_may_be_a_part_of_the_world(ranks):
    def body():
        groups = [dist.new_group([3, 1]), dist.new_group([0, 2])]
        group = groups[0] if dist.get_rank() in (1, 3) else groups[1]
        assert_matches_unpipelined(
            make_schedule("1f1b", stages=2, microbatches=3), group=group, batch_p2p=False
        )

    ranks(4, body)


@pytest.mark.parametrize("number", [0, 1, 4, 7])
def test_evaluate_takes_any_number_of_microbatches_and_no_gradients(ranks, number):
    def body():
        schedule = make_schedule("1f1b", stages=3, microbatches=4)
        executor, layers, _ = make_executor(schedule, 3, group=dist.group.WORLD)
        batches = make_batches(number)
        outputs = executor.evaluate(batches)
        assert all(grad is None for grad in grads(layers))
        assert len(outputs) == (number if dist.get_rank() == 2 else 0)
        stage = make_stage(make_layers(3), last=True)
        for output, batch in zip(outputs, batches, strict=False):
            assert torch.equal(output["y"], stage(None, batch)["y"])
            assert not output["y"].requires_grad
        executor.run(make_batches(4), objective=objective)  # training goes on after it

    ranks(3, body)


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


def test_a_batched_send_need_not_have_ended_at_the_next_exchange(monkeypatch):
    waited = []

    class Work:
        def __init__(self, tensor):
            self.tensor = tensor

        def wait(self):
            waited.append(int(self.tensor[0]))

    monkeypatch.setattr(dist, "P2POp", lambda op, tensor, **_: tensor)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda tensors: [Work(t) for t in tensors])
    mail = Mailbox(
        make_schedule("gpipe", stages=2, microbatches=6),
        links=Links(rank=0, up=None, down=None, batched=True),
        device=torch.device("cpu"),
        specs=[TensorSpec((1,), torch.float32)] * 6,
    )
    seen = []
    for i in range(6):
        send = Action(Op.SEND_F, 0, i)
        mail.put(send, torch.tensor([float(i)]))
        mail.exchange([send])
        seen.append(list(waited))
    assert seen == [[], [], [], [], [0], [0, 1]]
    mail.finish()
    assert waited == list(range(6))  # in the order in which they left


def test_a_frozen_first_stage_sends_activations_and_takes_no_gradient(ranks):
    def body():
        schedule = make_schedule("1f1b", stages=2, microbatches=3)
        executor, layers, _ = make_executor(schedule, 2, group=dist.group.WORLD)
        layers[0].requires_grad_(False)
        executor.run(make_batches(3), objective=objective)
        assert grads([layers[0]])[0] is None
        assert (grads([layers[1]])[0] is not None) == (dist.get_rank() == 1)

    ranks(2, body)


@pytest.mark.parametrize("batch_p2p", [False, True])
def test_integer_activations_get_no_gradient_back(ranks, batch_p2p):
    def body():
        table = nn.Embedding(9, WIDTH)

        def stage(x, batch):
            return batch + 1 if x is None else table(x)

        executor = Executor(
            make_schedule("1f1b", stages=2, microbatches=3),
            stage,
            group=dist.group.WORLD,
            activation=lambda batch: TensorSpec(tuple(batch.shape), torch.int64),
            batch_p2p=batch_p2p,
        )
        batches = [torch.tensor([i, i + 1]) for i in range(3)]
        outputs = executor.run(batches, objective=lambda y, _: y.sum())
        if dist.get_rank() == 1:
            assert [tuple(y.shape) for y in outputs] == [(2, WIDTH)] * 3
            counts = torch.tensor([0, 1, 2, 2, 1, 0, 0, 0, 0])
            assert torch.equal(table.weight.grad, counts[:, None].expand(-1, WIDTH).float())

    ranks(2, body)


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
