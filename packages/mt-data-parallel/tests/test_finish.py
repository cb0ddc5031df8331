"""Mistakes around `start` and `finish` are named: no wait, no silent zero, no half step."""

import pytest
import torch
import torch.distributed as dist
from mt_data_parallel import GradBuffer, shard
from torch import nn

STRATEGIES = ("none", "optimizer", "optimizer_gradients", "full")


class Net(nn.Module):
    """Two layers and a side branch that not every pass takes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.side = nn.Linear(4, 4)

    def forward(self, x, *, branch):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x + self.side(x) if branch else x).sum()


def step(strategy, branch_on, unused="error"):
    """One step in which only some ranks take the branch; the message, and the gradient of it."""
    net = Net()
    with shard(net, strategy, group=dist.group.WORLD, unused=unused) as buffer:
        buffer.start(2)
        for _ in range(2):
            net(torch.ones(1, 4), branch=dist.get_rank() in branch_on).backward()
        try:
            buffer.finish()
        except RuntimeError as error:
            message = str(error)
        else:
            message = ""
        buffer.gather_params()
        grads = {p.name: p.grad.abs().sum().item() for p in buffer.shards()}
        buffer.start(1)  # a step that follows is a new one
        net(torch.ones(1, 4), branch=True).backward()
        buffer.finish()
        return message, grads


@pytest.mark.parametrize(
    ("strategy", "branch_on"),
    [
        *((strategy, ()) for strategy in STRATEGIES),
        *((strategy, (0,)) for strategy in STRATEGIES[:3]),  # full needs ranks that do the same
    ],
)
def test_parameters_without_a_gradient_are_named_on_the_ranks_that_miss_it(
    ranks, strategy, branch_on
):
    """The others end their step: nobody waits for the rank that has an error."""
    for rank, (message, _) in enumerate(ranks(2, step, strategy, branch_on)):
        if rank in branch_on:
            assert message == ""
        else:
            assert message.startswith("2 of 6 parameters got no gradient on this rank: ")
            assert "'side.weight', 'side.bias'" in message
            assert "requires_grad_(False)" in message
            assert "unused='zero'" in message


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_missing_gradients_count_as_zero_where_that_is_allowed(ranks, strategy):
    nobody = ranks(2, step, strategy, (), "zero")
    one = ranks(2, step, strategy, (0,), "zero")
    assert [message for message, _ in nobody + one] == [""] * 4
    for _, grads in nobody:
        assert all(value == 0 for name, value in grads.items() if name.startswith("side"))
    for name in ("side.weight", "side.bias"):
        assert max(grads.get(name, 0) for _, grads in one) > 0


def started(**options):
    net = Net()
    buffer = GradBuffer(net.named_parameters(), group=None, **options)
    buffer.start(2)
    return net, buffer


def test_finish_before_the_last_backward_says_how_many_came():
    net, buffer = started()
    net(torch.ones(1, 4), branch=True).backward()
    with pytest.raises(
        RuntimeError, match=r"expect 2 backward passes, and finish\(\) came after 1"
    ):
        buffer.finish()
    buffer.start(1)
    net(torch.ones(1, 4), branch=True).backward()
    buffer.finish()


def test_finish_before_any_backward_is_told():
    _, buffer = started()
    with pytest.raises(RuntimeError, match=r"finish\(\) came before any gradient"):
        buffer.finish()


def test_a_step_before_finish_is_told():
    """Whoever reads a piece's gradient, or asks the buffer as optimizers do."""
    net, buffer = started()
    pieces = buffer.shards()
    for _ in range(2):
        net(torch.ones(1, 4), branch=True).backward()
    with pytest.raises(RuntimeError, match=r"'layers.0.weight' before GradBuffer.finish\(\)"):
        pieces[0].grad  # noqa: B018
    with pytest.raises(RuntimeError, match=r"not reduced yet: GradBuffer.finish\(\) was not"):
        buffer.check_finished()
    with pytest.raises(RuntimeError, match=r"start\(\) was called twice; call finish\(\)"):
        buffer.start(2)
    buffer.finish()
    buffer.check_finished()
    assert pieces[0].grad is not None


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_a_step_without_gather_params_is_told(ranks, strategy):
    def body():
        net = Net()
        with shard(net, strategy, group=dist.group.WORLD) as buffer:
            buffer.start(1)
            net(torch.ones(1, 4), branch=True).backward()
            buffer.finish()
            with pytest.raises(RuntimeError, match=r"start\(\) without gather_params\(\)"):
                buffer.start(1)
            buffer.gather_params()
            buffer.start(1)
            net(torch.ones(1, 4), branch=True).backward()
            buffer.finish()

    ranks(2, body)


def test_what_to_do_about_unused_parameters_is_one_of_two():
    with pytest.raises(ValueError, match="unused must be 'error' or 'zero', got 'ignore'"):
        GradBuffer(Net().named_parameters(), group=None, unused="ignore")  # pyright: ignore
