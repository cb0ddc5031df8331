"""A CPU takes an expert after the other through both products, with the separate ones' numbers."""

import pytest
import torch
from mt_kernels import Selector
from mt_moe import ExpertGroups, ExpertOptions
from mt_moe.experts.experts import Experts
from mt_moe.experts.kernels import GROUPED_KERNELS
from mt_parallel_state import WgradStore
from mt_tensor_parallel import TorchGemm, choose_gemms, defer_weight_gradients, sum_weight_gradients
from plain import F64, assert_same, drawn, gradients

COUNTS = [(4, 0, 9, 3), (0, 0, 16, 0), (0, 0, 0, 0), (1, 1, 1, 1)]
KINDS = [
    ExpertOptions(),
    ExpertOptions(activation="gelu_quick", clamp=0.4, up_offset=1.0),
    ExpertOptions(activation="gelu_tanh"),
    ExpertOptions(activation="relu2", gated=False),
    ExpertOptions(multiple=8),
]


def made(options, dtype=F64):
    torch.manual_seed(0)
    return Experts(16, 8, 4, options, groups=ExpertGroups(), dtype=dtype)


def separate(options, dtype=F64):
    """Return the same experts with the kernel `loop` for their products."""
    experts = made(options, dtype)
    experts.up.selector = experts.down.selector = Selector(GROUPED_KERNELS, "loop")
    return experts


def refuse(*_, **__):
    raise AssertionError("the layers of the products were called")


def only_streams(experts):
    """Fail where a product is computed on its own."""
    experts.up.forward = experts.down.forward = refuse
    return experts


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("options", KINDS, ids=lambda o: f"{o.activation}-{o.multiple}")
def test_results_and_gradients_are_those_of_separate_products(options, counts):
    number, own = sum(counts), torch.tensor(counts)
    x, grad = drawn(number, 16).requires_grad_(), drawn(number, 16, seed=1)
    found, expected = only_streams(made(options)), separate(options)
    y, z = found(x, own), expected(x, own)
    assert_same({"y": y}, {"y": z})
    assert_same(gradients(y, grad, found, x), gradients(z, grad, expected, x))
    with torch.no_grad():
        assert torch.equal(found(x, own), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_are_near_fp64(dtype):
    counts, x = torch.tensor([4, 0, 9, 3]), drawn(16, 16, dtype=dtype).requires_grad_()
    experts, grad = only_streams(made(ExpertOptions(), dtype)), drawn(16, 16, seed=1, dtype=dtype)
    found = gradients(experts(x, counts), grad, experts, x)
    wide, wide_x = separate(ExpertOptions(), dtype).double(), x.detach().double().requires_grad_()
    exact = gradients(wide(wide_x, counts), grad.double(), wide, wide_x)
    near = 1e-5 if dtype is torch.float32 else 3e-2
    assert_same({n: g.double() for n, g in found.items()}, exact, tolerance=near)


def test_rows_behind_all_experts_are_zero_and_have_no_gradient():
    x = torch.full((9, 16), torch.nan, dtype=F64)
    x[:6] = drawn(6, 16)
    x.requires_grad_()
    experts = only_streams(made(ExpertOptions()))
    y = experts(x, torch.tensor([2, 0, 3, 1]), exact=False)
    assert not y[6:].any()
    grads = gradients(y, torch.ones_like(y), experts, x)
    assert not grads["input0"][6:].any()
    assert all(grad.isfinite().all() for grad in grads.values())


@pytest.mark.parametrize("frozen", [("up.weight",), ("down.weight",), ("up.weight", "down.weight")])
def test_what_is_frozen_gets_no_gradient_and_the_rest_keeps_its_own(frozen):
    counts, grad = torch.tensor([4, 0, 9, 3]), drawn(16, 16, seed=1)
    x = drawn(16, 16).requires_grad_()
    expected = separate(ExpertOptions())
    wanted = gradients(expected(x, counts), grad, expected, x)
    experts = only_streams(made(ExpertOptions()))
    for name in frozen:
        experts.get_parameter(name).requires_grad_(False)
    experts(x, counts).backward(grad)
    found = {"input0": x.grad} | {name: p.grad for name, p in experts.named_parameters()}
    assert_same(found, wanted | dict.fromkeys(frozen))


class Sink:
    def __init__(self, shape, *, full):
        self.total, self.full, self.ended = torch.full(shape, 3.0, dtype=F64), full, 0

    def begin(self):
        return self.total, self.full

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("full", [False, True])
def test_sinks_get_the_gradients_once(full):
    counts, grad = torch.tensor([4, 0, 9, 3]), drawn(16, 16, seed=1)
    expected = separate(ExpertOptions())
    wanted = gradients(expected(drawn(16, 16), counts), grad, expected)
    experts, sinks = only_streams(made(ExpertOptions())), {}
    names = {id(p): name for name, p in experts.named_parameters()}

    def sink_of(param):
        return sinks.setdefault(names[id(param)], Sink(param.shape, full=full))

    sum_weight_gradients(experts, sink_of)
    experts(drawn(16, 16).requires_grad_(), counts).backward(grad)
    assert all(p.grad is None for p in experts.parameters())
    assert [sink.ended for sink in sinks.values()] == [1, 1]
    added = 3.0 if full else 0.0
    assert_same(
        {name: sink.total for name, sink in sinks.items()},
        {name: value + added for name, value in wanted.items()},
    )


class Doubles(TorchGemm):
    def forward(self, x, weight, bias=None):
        return 2 * super().forward(x, weight)


def test_strategies_hooks_and_deferred_gradients_have_the_separate_products():
    counts, x = torch.tensor([4, 0, 9, 3]), drawn(16, 16)
    plain = made(ExpertOptions(activation="relu", gated=False))
    y = plain(x, counts)
    choose_gemms(plain, lambda name: Doubles() if name.startswith("down") else TorchGemm())
    assert_same({"y": plain(x, counts)}, {"y": 2 * y})
    seen = []
    hooked = made(ExpertOptions())
    hooked.up.register_forward_hook(lambda *_: seen.append("up"))
    hooked(x, counts)
    assert seen == ["up"]
    deferred, store = made(ExpertOptions()), WgradStore()
    defer_weight_gradients(deferred, store)
    with store.deferring() as compute:
        deferred(x.requires_grad_(), counts).sum().backward()
    assert deferred.up.weight.grad is None
    compute()
    assert deferred.up.weight.grad is not None


def test_under_autocast_products_are_in_its_dtype_and_gradients_in_the_parameters():
    experts = only_streams(made(ExpertOptions(), torch.float32))
    x = drawn(16, 16, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, torch.tensor([4, 0, 9, 3]))
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert x.grad.dtype == experts.up.weight.grad.dtype == torch.float32
