"""Differentiated functions as two CUDA graphs, and their stand-ins on a CPU."""

import gc

import pytest
import torch
from mt_fusions import AutogradGraph, GraphError, GraphPool, rms_norm
from torch import nn


class Layer(nn.Module):
    def __init__(self, size=6):
        super().__init__()
        self.norm = nn.Parameter(torch.ones(size))
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x, table):
        y = self.down(nn.functional.silu(self.up(rms_norm(x, self.norm, 1e-5))) * table)
        return x + y, {"aux": y.square().mean(), "count": (y > 0).sum()}


def make_layers(device="cpu"):
    torch.manual_seed(0)
    return nn.ModuleList(Layer() for _ in range(3)).to(device)


def graphed(layers, *, slots=16, **options):
    pool = GraphPool(slots=slots)
    return [AutogradGraph(layer, state=layer, pool=pool, **options) for layer in layers]


def forward(steps, x, table):
    total = 0.0
    for step in steps:
        x, losses = step(x, table)
        total = total + losses["aux"]
    return x.square().sum() + total


def inputs_of(number, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    draw = (torch.randn(2, 5, 6, generator=generator), torch.randn(5, 12, generator=generator))
    draws = [tuple(x * (1 + n) for x in draw) for n in range(number)]
    return [tuple(x.to(device) for x in draw) for draw in draws]


def compare(ours, theirs, **bounds):
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, **bounds)


def run(steps, draws, *, in_flight):
    """Run like a pipeline, with `in_flight` forwards before the first backward."""
    waiting, results = [], []
    for x, table in draws:
        leaf = x.clone().requires_grad_()
        waiting.append((leaf, forward(steps, leaf, table)))
        if len(waiting) == in_flight:
            leaf, loss = waiting.pop(0)
            loss.backward()
            results.append((loss.detach(), leaf.grad))
    for leaf, loss in waiting:
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    return results


@pytest.mark.parametrize("in_flight", [1, 3])
def test_accumulated_gradients_have_the_bits_of_eager(in_flight):
    ours, theirs = make_layers(), make_layers()
    steps, draws = graphed(ours), inputs_of(9)
    found = run(steps, draws, in_flight=in_flight)
    for own, other in zip(found, run(theirs, draws, in_flight=in_flight), strict=True):
        assert torch.equal(own[0], other[0])
        assert torch.equal(own[1], other[1])
    compare(ours, theirs, rtol=0, atol=0)
    assert all(step.replays == 6 for step in steps)
    assert all(step.reason is None for step in steps)


def test_without_gradients_it_is_the_callable():
    layers = make_layers()
    steps, (draw,) = graphed(layers, warmup=1), inputs_of(1)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(forward(steps, *draw), forward(layers, *draw))
    assert not any(step.replays for step in steps)


def test_a_dropped_pass_gives_its_slot_back():
    steps = graphed(make_layers(), slots=1, warmup=1)
    for draw in inputs_of(6):
        loss = forward(steps, *draw)
        del loss
        gc.collect()
    assert all(step.replays == 4 for step in steps)


def test_more_passes_than_slots_run_eagerly_and_say_so_once():
    said, layers = [], make_layers()[:1]
    (step,) = graphed(layers, slots=1, warmup=1, on_eager=said.append)
    draws = inputs_of(4)
    losses = [forward([step], *draw) for draw in draws]
    for loss in losses:
        loss.backward()
    theirs = make_layers()[:1]
    for draw in draws:
        forward(theirs, *draw).backward()
    compare(layers, theirs)
    (reason,) = said
    assert "more than slots=1 passes wait for their backward" in reason


def test_a_second_backward_is_refused():
    steps = graphed(make_layers(), warmup=1)
    for draw in inputs_of(3):
        loss = forward(steps, *draw)
        loss.backward(retain_graph=True)
    with pytest.raises(GraphError, match="a backward came twice"):
        loss.backward()


def test_a_read_in_backward_is_found():
    class Read(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.sum().item()

    said = []
    step = AutogradGraph(Read.apply, warmup=1, on_eager=said.append)
    for _ in range(4):
        x = torch.ones(3, requires_grad=True)
        step(x).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 3.0))
    assert len(said) == 1
    assert "has the host read a tensor" in step.reason


def test_a_number_of_python_in_backward_is_found():
    by = [2.0]

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return grad * by[0]

    step = AutogradGraph(Scaled.apply, warmup=1)

    def go():
        step(torch.ones(3, requires_grad=True)).sum().backward()

    for _ in range(3):
        go()
    by[0] = 3.0
    with pytest.raises(GraphError, match=r"is 3\.0, and was 2\.0 at capture"):
        go()


def test_a_moved_parameter_is_named():
    layers = make_layers()
    steps = graphed(layers, warmup=1)
    for draw in inputs_of(3):
        forward(steps, *draw).backward()
    layers[1].up.weight.data = layers[1].up.weight.data.clone()
    with pytest.raises(GraphError, match=r"up\.weight is not where it was"):
        forward(steps, *inputs_of(1)[0])


def test_gradients_that_the_callable_adds_itself_are_replayed():
    total, calls = torch.zeros(3), []

    class Sunk(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x)
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            total.add_(grad * ctx.saved_tensors[0])
            return grad, None

    weight = torch.ones(3, requires_grad=True)
    step = AutogradGraph(lambda x: Sunk.apply(x, weight), state={"weight": weight}, warmup=1)
    step.around = calls.append
    for n in range(5):
        step(torch.full((3,), float(n), requires_grad=True)).sum().backward()
    assert total.tolist() == [10.0] * 3
    assert weight.grad is None
    assert calls == [True, False] * 4


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="slots=0"):
        GraphPool(slots=0)
    with pytest.raises(TypeError, match="warmup"):
        AutogradGraph(torch.exp, warmup=None)  # pyright: ignore[reportArgumentType]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("in_flight", [1, 3])
def test_captured_layers_give_what_eager_gives(in_flight):
    ours, theirs = make_layers("cuda"), make_layers("cuda")
    steps, draws = graphed(ours), inputs_of(12, "cuda")
    found = run(steps, draws, in_flight=in_flight)
    for own, other in zip(found, run(theirs, draws, in_flight=in_flight), strict=True):
        torch.testing.assert_close(own[0], other[0])
        torch.testing.assert_close(own[1], other[1])
    compare(ours, theirs)
    assert all(step.reason is None for step in steps)
    assert all(step.replays > 0 for step in steps)
