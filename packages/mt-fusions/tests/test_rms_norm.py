"""RMSNorm: every kernel against fp64, and the operator's manners."""

import itertools

import mt_fusions
import pytest
import torch
from mt_fusions.norms.norm import RMS_NORM_KERNELS
from oracle import DEVICE, Graph, as_fp64, assert_close, drawn, gradients

EPS = 1e-5
SHAPES = [(3, 8), (5, 1, 33), (2, 4, 3, 64), (7, 257), (0, 16), (300, 40), (16,)]
FORMS = list(itertools.product([False, True], [False, True]))  # zero_centered, rounds_first


def expected(x, weight, form):
    """fp64 of the plain formula, but for the rounding that `rounds_first` asks for."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide) / (x.to(wide).square().mean(-1, keepdim=True) + EPS).sqrt()
    if form[1]:
        y = y.to(x.dtype).to(wide)
    if weight is None:
        return y
    return y * (weight.to(wide) + form[0])


@pytest.mark.parametrize("kernel", ["cpu", "triton", "reference"])
@pytest.mark.parametrize("layout", ["contiguous", "sliced", "transposed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kernel_matches_fp64_forward_and_backward(kernel, shape, layout):
    device = DEVICE if kernel == "triton" else "cpu"
    x = drawn(*shape, layout=layout, device=device)
    for dtype, form, weighted in [
        (torch.float32, (False, False), True),
        (torch.float32, (True, False), True),
        (torch.float16, (False, True), True),
        (torch.float32, (False, False), False),
    ]:
        weight = drawn(shape[-1], dtype=dtype, seed=1, device=device) if weighted else None
        options = {"zero_centered": form[0], "rounds_first": form[1]}
        own = x.to(dtype)
        y, grads = gradients(
            lambda a, w, o=options: mt_fusions.rms_norm(a, w, EPS, kernel=kernel, **o),
            (own, weight),
        )
        y64, grads64 = gradients(lambda a, w, f=form: expected(a, w, f), as_fp64(own, weight))
        assert y[0].dtype == dtype
        assert y[0].is_contiguous()
        assert_close(y[0], y64[0], dtype)
        assert_close(grads[0], grads64[0], dtype)
        if weighted:
            assert grads[1].dtype == dtype
            assert_close(grads[1], grads64[1], dtype)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_bf16_is_fp64_rounded_once(kernel, form):
    x, weight = drawn(50, 130, dtype=torch.bfloat16), drawn(130, dtype=torch.bfloat16, seed=1)
    y = mt_fusions.rms_norm(
        x, weight, EPS, zero_centered=form[0], rounds_first=form[1], kernel=kernel
    )
    exact = expected(x.float(), weight.float(), (form[0], False))
    if form[1]:
        exact = expected(x, weight, form)
    torch.testing.assert_close(y, exact.to(torch.bfloat16), rtol=2**-7, atol=0)
    assert (y != exact.to(torch.bfloat16)).float().mean() < 0.01  # ties of fp32 only


def test_a_block_boundary_is_no_seam():
    x, weight = drawn(4200, 300), drawn(300, seed=1)  # more than one block
    (y,), grads = gradients(lambda a, w: mt_fusions.rms_norm(a, w, EPS), (x, weight))
    (y64,), grads64 = gradients(lambda a, w: expected(a, w, (False, False)), as_fp64(x, weight))
    assert_close(y, y64, torch.float32)
    assert_close(grads[0], grads64[0], torch.float32)
    assert_close(grads[1], grads64[1], torch.float32)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gradcheck(kernel, form):
    x = drawn(4, 3, 9, dtype=torch.float64).requires_grad_()
    weight = drawn(9, dtype=torch.float64, seed=1).requires_grad_()
    options = {"zero_centered": form[0], "rounds_first": form[1], "kernel": kernel}
    assert torch.autograd.gradcheck(
        lambda a, w: mt_fusions.rms_norm(a, w, EPS, **options), (x, weight)
    )
    assert torch.autograd.gradcheck(lambda a: mt_fusions.rms_norm(a, None, EPS, **options), (x,))


def test_a_compiled_function_keeps_it_as_one_node_each_way():
    graph = Graph()
    x, weight = drawn(4, 6).requires_grad_(), drawn(6, seed=1).requires_grad_()
    compiled = torch.compile(
        lambda a, w: mt_fusions.rms_norm(a * 2, w, EPS), backend=graph, fullgraph=True
    )
    compiled(x, weight).sum().backward()
    assert graph.counts["mt_fusions.norm"] == 1
    assert graph.counts["mt_fusions.norm_backward"] == 1
    (y64,), _ = gradients(lambda a, w: expected(a * 2, w, (False, False)), as_fp64(x, weight))
    assert_close(compiled(x, weight).detach(), y64, torch.float32)


def test_under_autocast_the_result_has_the_dtype_of_the_input():
    weight = drawn(6).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            x = drawn(4, 6, dtype=dtype).requires_grad_()
            y = mt_fusions.rms_norm(x, weight, EPS)
            assert y.dtype == dtype
            y.float().sum().backward()
            assert x.grad.dtype == dtype
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("x", "weight", "eps", "kind", "words"),
    [
        (torch.ones(2, 3, dtype=torch.int64), None, EPS, TypeError, "floating"),
        ([1.0], None, EPS, TypeError, "Tensor"),
        (torch.ones(2, 3), torch.ones(4), EPS, ValueError, "3 elements"),
        (torch.ones(2, 3), torch.ones(3), 0.0, ValueError, "eps"),
        (torch.ones(2, 3), torch.ones(3), "1", TypeError, "eps"),
        (torch.ones(()), None, EPS, ValueError, "last dim"),
        (torch.ones(2, 0), None, EPS, ValueError, "last dim"),
        (torch.ones(2, 3), torch.ones(3, device="meta"), EPS, ValueError, "one device"),
    ],
)
def test_errors_say_what_is_wrong(x, weight, eps, kind, words):
    with pytest.raises(kind, match=words):
        mt_fusions.rms_norm(x, weight, eps)


def test_a_kernel_that_cannot_serve_says_why():
    x = torch.ones(2, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="fp32"):
        mt_fusions.rms_norm(x, None, EPS, kernel="triton")
    with pytest.raises(ValueError, match="auto, cpu, triton, reference"):
        mt_fusions.rms_norm(x, None, EPS, kernel="fast")
    wide = torch.empty(1, 40000)
    assert "40000" in RMS_NORM_KERNELS.obstacles(wide)["triton"]
    assert RMS_NORM_KERNELS.obstacles(wide)["cpu"] is None
    assert "meta" in RMS_NORM_KERNELS.obstacles(wide.to("meta"))["cpu"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 1000, 4096, 8192, 16384])
def test_on_a_gpu_the_kernel_matches_fp64(dtype, width):
    x, weight = (
        drawn(515, width, dtype=dtype, device="cuda"),
        drawn(width, dtype=dtype, seed=1, device="cuda"),
    )
    (y,), grads = gradients(
        lambda a, w: mt_fusions.rms_norm(a, w, EPS, kernel="triton"), (x, weight)
    )
    (y64,), grads64 = gradients(lambda a, w: expected(a, w, (False, False)), as_fp64(x, weight))
    assert_close(y, y64, dtype)
    assert_close(grads[0], grads64[0], dtype)
    assert_close(grads[1], grads64[1], dtype)
