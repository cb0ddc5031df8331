"""A backward in two halves against one backward, bit for bit."""

import copy
import weakref

import pytest
import torch
from mt_pipeline.backward import backward_input
from torch import nn
from torch.autograd.graph import get_gradient_edge


class Block(nn.Module):
    """Residuals, norms, a product with a weight, and a branch that reads the input twice."""

    def __init__(self, width=6):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(width, width, bias=False)
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x):
        gate, value = self.up(self.norm(x)).chunk(2, dim=-1)
        return x + self.scale * self.down(gate.sigmoid() * value)


class Attention(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return x + nn.functional.scaled_dot_product_attention(q, k, v)


class Tied(nn.Module):
    """One weight at two places."""

    def __init__(self, width=6):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.linear(torch.tanh(self.linear(x))))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum((0, 1))


class Custom(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(Scaled.apply(x, self.weight))


class Casted(nn.Module):
    """Weights behind an operation of their own, one of them used twice."""

    def __init__(self, width=6):
        super().__init__()
        self.a = nn.Parameter(torch.randn(width, width))
        self.b = nn.Parameter(torch.randn(width))

    def forward(self, x):
        b = self.b.exp()
        return (x @ self.a.exp().t() + b) * b


def blocks():
    return {
        "linear": nn.Linear(6, 4),
        "block": nn.Sequential(Block(), Block()),
        "attention": nn.Sequential(Attention(), nn.GELU(), Attention()),
        "tied": Tied(),
        "custom": Custom(),
        "casted": Casted(),
        "convolution": nn.Sequential(nn.Conv1d(3, 5, 1), nn.ReLU(), nn.Conv1d(5, 2, 1)),
        "gru": nn.GRU(6, 4, batch_first=True),
        "no weights": nn.Tanh(),
        "frozen": nn.Sequential(Block().requires_grad_(False), Block()),
    }


def first(output):
    return output[0] if isinstance(output, tuple) else output


def ramp(output):
    return torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)


def halves(module, x):
    """Both halves; what `.grad` held in between."""
    output = first(module(x))
    root = get_gradient_edge(output)
    pending = backward_input([root], [ramp(output)], [x])
    del output
    between = {n for n, p in module.named_parameters() if p.grad is not None}
    if pending is not None:
        pending()
    return between


@pytest.mark.parametrize("name", blocks())
def test_both_halves_together_are_one_backward(name):
    torch.manual_seed(3)
    ours = blocks()[name].double()
    theirs = copy.deepcopy(ours)
    for seed in range(3):  # gradients add up
        torch.manual_seed(seed)
        x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        halves(ours, x)
        output = first(theirs(y))
        output.backward(ramp(output))
        assert torch.equal(x.grad, y.grad)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or torch.equal(a.grad, b.grad)


@pytest.mark.parametrize(
    ("name", "early"),
    [
        ("block", set()),
        ("attention", set()),
        ("tied", {"linear.weight", "linear.bias"}),
        ("custom", {"weight"}),
        ("casted", {"b"}),
    ],
)
def test_weights_wait_for_the_second_half_where_they_can(name, early):
    module = blocks()[name].double()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert halves(module, x) == early


def test_the_input_half_computes_no_weight_gradient_and_the_second_no_input_gradient():
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    x = torch.randn(4, 6, requires_grad=True)
    output = module(x)
    with torch.profiler.profile(acc_events=True) as profile:
        pending = backward_input([get_gradient_edge(output)], [torch.ones(4, 6)], [x])
    assert sum(event.name == "aten::mm" for event in profile.events()) == 2
    with torch.profiler.profile(acc_events=True) as profile:
        pending()
    assert sum(event.name == "aten::mm" for event in profile.events()) == 2


def test_each_weight_accumulates_once():
    calls = []
    module = nn.Sequential(Block(), Tied())
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    halves(module, torch.randn(2, 3, 6, requires_grad=True))
    assert sorted(calls) == sorted(dict(module.named_parameters()))


def test_hooks_inside_the_stage_change_the_gradient_once():
    def run(two_halves):
        torch.manual_seed(0)
        a, b = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
        a.weight.register_hook(lambda grad: grad * 5)
        x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
        h = a(x)
        h.register_hook(lambda grad: grad * 3)
        output = b(h)
        if two_halves:
            backward_input([get_gradient_edge(output)], [torch.ones_like(output)], [x])()
        else:
            output.backward(torch.ones_like(output))
        return [x.grad, *(p.grad for m in (a, b) for p in m.parameters())]

    for ours, theirs in zip(run(True), run(False), strict=True):
        assert torch.equal(ours, theirs)


def test_without_an_input_all_is_done_in_the_second_half():
    layer = nn.Linear(6, 2)
    output = layer(torch.ones(3, 6)).sum()
    pending = backward_input([get_gradient_edge(output)], [None], [])
    assert layer.weight.grad is None
    pending()
    assert torch.equal(layer.bias.grad, torch.full((2,), 3.0))
    x = torch.ones(3, 6, requires_grad=True)  # an input that the output does not depend on
    pending = backward_input([get_gradient_edge(layer(torch.ones(3, 6)).sum())], [None], [x])
    pending()
    assert x.grad is None
    assert torch.equal(layer.bias.grad, torch.full((2,), 6.0))


def test_the_graph_is_freed_by_the_second_half():
    class Witness:
        pass

    x = torch.randn(4, 6, requires_grad=True)
    h = nn.Linear(6, 6)(x).tanh()
    witness = Witness()
    h.grad_fn.metadata["witness"] = witness
    alive = weakref.ref(witness)
    root = get_gradient_edge(nn.Linear(6, 6)(h))
    pending = backward_input([root], [torch.ones(4, 6)], [x])
    del h, witness, root
    pending()
    del pending
    assert alive() is None


def test_several_outputs_and_inputs_share_one_backward():
    def run(two_halves):
        torch.manual_seed(0)
        a, b, c = (nn.Linear(6, 6).double() for _ in range(3))
        x, y = (torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
        outputs = [a(x) * y, b(x), c(torch.ones(4, 6).double())]  # the last one has no input
        roots = [get_gradient_edge(output) for output in outputs]
        grads = [ramp(output) for output in outputs]
        if two_halves:
            backward_input(roots, grads, [x, y])()
        else:
            torch.autograd.backward(outputs, grads)
        return [x.grad, y.grad, *(p.grad for m in (a, b, c) for p in m.parameters())]

    for ours, theirs in zip(run(True), run(False), strict=True):
        assert torch.equal(ours, theirs)
