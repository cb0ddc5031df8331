"""A residual and its norm: every kernel against fp64, both results, and their gradients."""

import mt_fusions
import pytest
import torch
import torch.nn.functional as F
from oracle import DEVICE, Graph, as_fp64, assert_close, drawn, gradients
from torch.utils._python_dispatch import TorchDispatchMode

EPS = 1e-5
SHAPES = [(3, 8), (5, 1, 33), (7, 257), (0, 16), (300, 40), (16,)]


def fused(kind, zero_centered, kernel="auto"):
    options = {"zero_centered": zero_centered, "kernel": kernel}
    if kind == "rms":
        return lambda x, r, w, _: mt_fusions.add_rms_norm(x, r, w, EPS, **options)
    return lambda x, r, w, b: mt_fusions.add_layer_norm(x, r, w, b, EPS, **options)


def plain(kind, zero_centered, dtype=None):
    """The norm of the sum, which is first rounded to a dtype as far as values go."""

    def function(x, residual, weight, bias):
        total = x + residual
        if dtype is not None:
            total = total + (total.detach().to(dtype) - total.detach())
        factor = None if weight is None else weight + zero_centered
        if kind == "rms":
            return F.rms_norm(total, x.shape[-1:], factor, EPS), total
        return F.layer_norm(total, x.shape[-1:], factor, bias, EPS), total

    return function


def compare(kind, tensors, dtype, zero_centered=False, kernel="auto"):
    found, grads = gradients(fused(kind, zero_centered, kernel), tensors)
    exact, grads64 = gradients(plain(kind, zero_centered, dtype), as_fp64(*tensors))
    for own, one in zip([*found, *grads], [*exact, *grads64], strict=True):
        assert (own is None) == (one is None)
        if own is not None:
            assert own.dtype == dtype
            assert_close(own, one, dtype)
    assert torch.equal(found[1], tensors[0] + tensors[1])
    assert found[0].is_contiguous()
    assert found[1].is_contiguous()


def drawn_all(kind, *shape, weighted=True, layout="contiguous", **how):
    return (
        drawn(*shape, layout=layout, **how),
        drawn(*shape, seed=1, **how),
        drawn(shape[-1], seed=2, **how) if weighted else None,
        drawn(shape[-1], seed=3, **how) if kind == "layer" else None,
    )


@pytest.mark.parametrize("kernel", ["cpu", "triton", "reference"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kernel_matches_fp64_forward_and_backward(kernel, kind, shape):
    device = DEVICE if kernel == "triton" else "cpu"
    for number, layout in enumerate(("contiguous", "sliced", "transposed")):
        dtype = torch.float16 if number == 1 else torch.float32
        tensors = drawn_all(
            kind, *shape, weighted=number < 2, layout=layout, dtype=dtype, device=device
        )
        compare(kind, tensors, dtype, zero_centered=number == 1, kernel=kernel)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_match_fp64(kernel, kind, dtype):
    compare(kind, drawn_all(kind, 50, 130, dtype=dtype), dtype, kernel=kernel)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_the_rounded_sum(kind, dtype):
    x, residual, weight, bias = drawn_all(kind, 40, 96, dtype=dtype)
    y, total = fused(kind, zero_centered=False)(x, residual, weight, bias)
    own = mt_fusions.rms_norm if kind == "rms" else mt_fusions.layer_norm
    args = (weight,) if kind == "rms" else (weight, bias)
    assert torch.equal(y, own(total, *args, EPS))


def test_a_block_boundary_is_no_seam():
    for kind in ("rms", "layer"):
        compare(kind, drawn_all(kind, 4200, 300), torch.float32)


def test_llamas_rounding_comes_before_the_weight():
    x, residual, weight, _ = drawn_all("rms", 20, 64, dtype=torch.bfloat16)
    y, total = mt_fusions.add_rms_norm(x, residual, weight, EPS, rounds_first=True)
    assert torch.equal(y, mt_fusions.rms_norm(total, weight, EPS, rounds_first=True))


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_gradcheck(kernel, kind):
    for weighted in (True, False):
        tensors = drawn_all(kind, 4, 3, 9, weighted=weighted, dtype=torch.float64)
        tensors = [None if x is None else x.requires_grad_() for x in tensors]
        assert torch.autograd.gradcheck(fused(kind, zero_centered=True, kernel=kernel), tensors)


def test_a_result_that_nothing_needs_has_no_part_in_the_gradient():
    x, residual, weight, _ = drawn_all("rms", 4, 8, dtype=torch.float64)
    for number in (0, 1):
        found, grads = gradients(
            lambda *a, n=number: fused("rms", False)(*a, None)[n], (x, residual, weight)
        )
        exact, expected = gradients(
            lambda *a, n=number: plain("rms", False)(*a, None)[n], (x, residual, weight)
        )
        assert_close(found[0], exact[0], torch.float64)
        for own, one in zip(grads[: 3 - number], expected, strict=False):
            assert_close(own, one, torch.float64)


def test_a_compiled_function_keeps_it_as_one_node_each_way():
    graph = Graph()
    x, residual, weight, _ = drawn_all("rms", 4, 6)

    def function(a, r, w):
        y, total = mt_fusions.add_rms_norm(a * 2, r, w, EPS)
        return y * total

    compiled = torch.compile(function, backend=graph, fullgraph=True)
    leaves = [y.requires_grad_() for y in (x, residual, weight)]
    compiled(*leaves).sum().backward()
    assert graph.counts["mt_fusions.norm"] == 1
    assert graph.counts["mt_fusions.norm_backward"] == 1


def test_under_autocast_results_have_the_dtype_of_the_input():
    weight = drawn(6).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            x = drawn(4, 6, dtype=dtype).requires_grad_()
            y, total = mt_fusions.add_layer_norm(x, drawn(4, 6, dtype=dtype), weight, None, EPS)
            (y * total).float().sum().backward()
            assert y.dtype == total.dtype == x.grad.dtype == dtype


X = torch.ones(2, 3)


class Backwards(TorchDispatchMode):
    """Notes how many numbers of the gradients of weight and bias are made."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.mt_fusions.norm_backward.default:
            self.sizes.append([x.numel() for x in found[1:]])
        return found


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("kernel", ["cpu", "triton", "reference"])
def test_a_frozen_weight_has_no_gradient_made(kind, kernel):
    tensors = drawn_all(kind, 5, 33)
    _, expected = gradients(fused(kind, False, kernel), tensors)
    x, residual = (y.clone().requires_grad_() for y in tensors[:2])
    outs = fused(kind, False, kernel)(x, residual, *tensors[2:])
    grads = [drawn(5, 33, dtype=torch.bfloat16, seed=7 + i).float() for i in range(2)]
    with Backwards() as backwards:
        torch.autograd.backward(outs, grads)
    assert backwards.sizes == [[0, 0]]
    for own, one in zip((x.grad, residual.grad), expected[:2], strict=True):
        torch.testing.assert_close(own, one)


@pytest.mark.parametrize(
    ("residual", "kind", "words"),
    [
        (None, TypeError, "use rms_norm or layer_norm"),
        (X.double(), TypeError, "convert one"),
        (X[:1], ValueError, "shape of x"),
        (X.to("meta"), ValueError, "one device"),
    ],
)
def test_errors_say_what_is_wrong(residual, kind, words):
    with pytest.raises(kind, match=words):
        mt_fusions.add_rms_norm(X, residual, None, EPS)
    with pytest.raises(kind, match=words):
        mt_fusions.add_layer_norm(X, residual, None, None, EPS)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_on_a_gpu_the_kernel_matches_fp64(dtype, kind):
    for width in (64, 1000, 8192):
        tensors = drawn_all(kind, 515, width, dtype=dtype, device="cuda")
        compare(kind, tensors, dtype, kernel="triton")
