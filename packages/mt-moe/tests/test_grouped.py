"""Grouped products against one product per expert, by every kernel; gradients' destinations."""

import pytest
import torch
from mt_kernels import Registry, Selector
from mt_moe import ExpertGroups, GroupedLinear
from mt_moe.experts.kernels import GROUPED_KERNELS
from mt_parallel_state import WgradStore
from mt_tensor_parallel import TorchGemm, choose_gemms, defer_weight_gradients, sum_weight_gradients
from plain import F64, assert_same, drawn, gradients

COUNTS = [(4, 0, 9, 3), (0, 0, 16, 0), (0, 0, 0, 0), (1, 1, 1, 1)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _interpreter():
    import triton  # noqa: F401 - else the kernels don't ask its interpreter


def layer_of(kernel, dtype=F64, **options):
    torch.manual_seed(0)
    make = {"groups": ExpertGroups(), "split": "out", "kernel": kernel, "dtype": dtype}
    return GroupedLinear(4, 16, (2, 8), **make, **options)


def plain(x, layer, counts):
    weight = layer.weight.flatten(1, -2)
    parts = x.split(list(counts))
    return torch.cat([part @ w.T for part, w in zip(parts, weight, strict=True)])


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("kernel", ["loop", "grouped_mm", "triton"])
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_every_kernel_matches_a_product_per_expert(kernel, dtype, counts):
    if (dtype is F64 and kernel != "loop") or (kernel, dtype) == ("triton", torch.bfloat16):
        if dtype is F64:  # what they refuse, the registry says
            assert GROUPED_KERNELS.obstacles(drawn(1, 16), drawn(4, 16, 16), ())[kernel] is not None
        return  # Triton's interpreter does not round bf16
    layer, number = layer_of(kernel, dtype), sum(counts)
    x = drawn(number, 16, dtype=dtype).requires_grad_()
    grad = drawn(number, 16, seed=1, dtype=dtype)
    y = layer(x, torch.tensor(counts))
    expected = plain(x.double(), layer_of("loop", dtype).double(), counts)
    tolerance = {F64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}[dtype]
    assert_same({"y": y.double()}, {"y": expected}, tolerance=tolerance)
    wide = layer_of("loop", dtype).double()
    wide_x = x.detach().double().requires_grad_()
    exact = gradients(plain(wide_x, wide, counts), grad.double(), wide, wide_x)
    found = {name: g.double() for name, g in gradients(y, grad, layer, x).items()}
    assert_same(found, exact, tolerance=4 * tolerance)


@pytest.mark.parametrize("kernel", ["loop", "grouped_mm", "triton"])
def test_rows_behind_all_experts_are_zero_and_have_no_gradient(kernel):
    layer = layer_of(kernel, torch.float32, bias=True)
    x = torch.full((9, 16), torch.nan)
    x[:6] = drawn(6, 16, dtype=torch.float32)
    x.requires_grad_()
    y = layer(x, torch.tensor([2, 0, 3, 1]), exact=False)
    assert not y[6:].any()
    grads = gradients(y, torch.ones_like(y), layer)
    assert all(grad.isfinite().all() for grad in grads.values())


class Sink:
    def __init__(self, shape, *, full):
        self.total, self.full, self.ended = torch.full(shape, 3.0, dtype=F64), full, 0

    def begin(self):
        return self.total, self.full

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_a_sink_gets_the_gradient_now_or_when_the_store_is_asked(full, deferred):
    layer, counts = layer_of("auto"), torch.tensor([4, 0, 9, 3])
    x, grad = drawn(16, 16).requires_grad_(), drawn(16, 16, seed=1)
    expected = gradients(layer(x, counts), grad, layer, x)
    sink, store = Sink(layer.weight.shape, full=full), WgradStore()
    sum_weight_gradients(layer, lambda param: sink)
    defer_weight_gradients(layer, store)
    if deferred:
        with store.deferring() as compute:
            layer(x, counts).backward(grad)
        assert sink.ended == 0
        compute()
    else:
        layer(x, counts).backward(grad)
    assert layer.weight.grad is None
    assert sink.ended == 1
    added = 3.0 if full else 0.0
    assert_same({"w": sink.total}, {"w": expected["weight"] + added})
    assert_same({"x": x.grad}, {"x": expected["input0"]})


def test_a_store_adds_the_gradient_through_autograd_later():
    layer, counts, store = layer_of("auto"), torch.tensor([4, 0, 9, 3]), WgradStore()
    x, grad = drawn(16, 16).requires_grad_(), drawn(16, 16, seed=1)
    expected = gradients(layer(x, counts), grad, layer)["weight"]
    defer_weight_gradients(layer, store)
    with store.deferring() as compute:
        layer(x, counts).backward(grad)
    assert layer.weight.grad is None
    compute()
    assert_same({"w": layer.weight.grad}, {"w": expected})


class Halves(TorchGemm):
    """A strategy whose operands are no tensors: it multiplies halves, and doubles at the end."""

    def operand(self, x, role):
        return (role, x * 0.5)

    def saved(self, operand):
        return (operand[1],)

    def restored(self, tensors, role):
        return (role, tensors[0])

    def forward(self, x, weight, bias=None):
        assert (x[0], weight[0]) == ("input", "weight")
        return 4 * super().forward(x[1], weight[1])

    def dgrad(self, grad_y, weight):
        assert (grad_y[0], weight[0]) == ("grad", "weight")
        return 4 * super().dgrad(grad_y[1], weight[1])

    def wgrad(self, grad_y, x):
        assert (grad_y[0], x[0]) == ("grad", "input")
        return 4 * super().wgrad(grad_y[1], x[1])


def test_any_strategy_multiplies_expert_by_expert_and_is_chosen_by_name():
    layer, counts = layer_of("auto"), torch.tensor([4, 0, 9, 3])
    x, grad = drawn(16, 16).requires_grad_(), drawn(16, 16, seed=1)
    expected = gradients(layer(x, counts), grad, layer, x)
    names = []
    holder = torch.nn.ModuleDict({"up": layer})
    choose_gemms(holder, lambda name: names.append(name) or Halves())
    assert names == ["up.0", "up.1", "up.2", "up.3"]
    assert_same(gradients(layer(x, counts), grad, layer, x), expected)
    layer.selector = Selector(GROUPED_KERNELS, "grouped_mm")
    with pytest.raises(ValueError, match="use auto, loop"):
        layer(x, counts)


def test_a_layer_chooses_its_kernel_once_for_a_device_and_dtype(monkeypatch):
    layer, counts = layer_of("auto", torch.float32), torch.tensor([4, 0, 9, 3])
    x, searches = drawn(16, 16, dtype=torch.float32), []
    find = Registry.find
    monkeypatch.setattr(Registry, "find", lambda *a: searches.append(a[2].dtype) or find(*a))
    for _ in range(3):
        layer(x, counts)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x, counts)
        layer(x, counts)
    assert searches == [torch.float32, torch.bfloat16]


def test_under_autocast_products_are_in_its_dtype_and_gradients_in_the_parameters():
    layer, counts = layer_of("auto", torch.float32), torch.tensor([4, 0, 9, 3])
    x = drawn(16, 16, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, counts)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32


def test_obstacles_name_the_reason():
    found = GROUPED_KERNELS.obstacles(torch.ones(2, 5), torch.ones(3, 7, 5), ())
    assert "multiples of 4" in found["grouped_mm"]
    assert found["loop"] is None
    assert "float64" in GROUPED_KERNELS.obstacles(drawn(2, 8), drawn(3, 8, 8), ())["triton"]


class _Wide(TorchGemm):
    """Takes 8 rows at a time, and keeps in mind how many it was given."""

    row_multiple = 8

    def __init__(self) -> None:
        self.seen = []

    def skip(self, role):
        self.seen.append(role)

    def operand(self, x, role):
        if role != "weight":
            self.seen.append(len(x))
        return x


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_rows_are_filled_up_for_a_strategy_and_nothing_else_changes(counts):
    x, grad = drawn(sum(counts), 16).requires_grad_(), drawn(sum(counts), 16, seed=1)
    layer, other = layer_of("loop"), layer_of("loop")
    made = {str(expert): _Wide() for expert in range(4)}
    choose_gemms(layer, lambda name: made[name.rpartition(".")[2]])
    y, expected = layer(x, torch.tensor(counts)), other(x, torch.tensor(counts))
    assert_same({"y": y}, {"y": expected}, tolerance=1e-14)
    found = gradients(y, grad, layer, x)
    assert_same(found, gradients(expected, grad, other, x), tolerance=1e-14)
    for count, gemm in zip(counts, made.values(), strict=True):
        assert gemm.seen == ([-(-count // 8) * 8] * 2 if count else ["input", "grad"])
