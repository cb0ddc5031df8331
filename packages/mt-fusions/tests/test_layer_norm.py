"""LayerNorm: every kernel against fp64, and the operator's manners."""

import mt_fusions
import pytest
import torch
import torch.nn.functional as F
from mt_fusions.norms.form import Form
from mt_fusions.norms.norm import (
    LAYER_NORM_KERNELS,
    RMS_NORM_KERNELS,
    _backward,
    _forward,
    norm_reference,
)
from oracle import DEVICE, Graph, as_fp64, assert_close, drawn, gradients

EPS = 1e-5
SHAPES = [(3, 8), (5, 1, 33), (2, 4, 3, 64), (7, 257), (0, 16), (300, 40), (16,)]
PARAMETERS = [(True, True), (True, False), (False, True), (False, False)]  # weight, bias


def expected(x, weight, bias, zero_centered=False):
    if weight is not None and zero_centered:
        weight = weight + 1
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def parameters(size, there, dtype=torch.float32, device="cpu"):
    return [
        drawn(size, seed=1 + i, dtype=dtype, device=device) if is_there else None
        for i, is_there in enumerate(there)
    ]


def compare(tensors, dtype, zero_centered=False, kernel="auto"):
    found, grads = gradients(
        lambda a, w, b: mt_fusions.layer_norm(
            a, w, b, EPS, zero_centered=zero_centered, kernel=kernel
        ),
        tensors,
    )
    exact, grads64 = gradients(lambda *args: expected(*args, zero_centered), as_fp64(*tensors))
    assert found[0].dtype == dtype
    assert found[0].is_contiguous()
    assert_close(found[0], exact[0], dtype)
    for own, one in zip(grads, grads64, strict=True):
        assert (own is None) == (one is None)
        if own is not None:
            assert own.dtype == dtype
            assert_close(own, one, dtype)


@pytest.mark.parametrize("kernel", ["cpu", "triton", "reference"])
@pytest.mark.parametrize(
    "layout",
    [
        "sliced",
        *(pytest.param(x, marks=pytest.mark.campaign) for x in ("contiguous", "transposed")),
    ],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kernel_matches_fp64_forward_and_backward(kernel, shape, layout):
    device = DEVICE if kernel == "triton" else "cpu"
    for number, there in enumerate(PARAMETERS):
        dtype = torch.float16 if number == 1 else torch.float32
        x = drawn(*shape, layout=layout, dtype=dtype, device=device)
        tensors = (x, *parameters(shape[-1], there, dtype, device))
        compare(tensors, dtype, zero_centered=number < 2 and layout == "sliced", kernel=kernel)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_match_fp64(kernel, dtype):
    tensors = (drawn(50, 130, dtype=dtype) + 3, *parameters(130, (True, True), dtype))
    compare(tensors, dtype, kernel=kernel, zero_centered=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype):
    x, (weight, bias) = drawn(50, 130, dtype=dtype), parameters(130, (True, True))
    y = mt_fusions.layer_norm(x, weight, bias, EPS)  # the parameters are fp32
    exact = expected(x.double(), weight.double(), bias.double())
    assert y.dtype == dtype
    assert (y != exact.to(dtype)).float().mean() < 0.01  # ties of fp32 only


def test_a_block_boundary_is_no_seam():
    compare((drawn(4200, 300), *parameters(300, (True, True))), torch.float32)


def test_triton_takes_rows_of_half_the_length_that_rms_norm_has():
    wide = torch.empty(1, 16384)
    assert "8192" in LAYER_NORM_KERNELS.obstacles(wide)["triton"]
    assert "16384" not in (RMS_NORM_KERNELS.obstacles(wide)["triton"] or "")


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("zero_centered", [True, False])
def test_gradcheck(kernel, zero_centered):
    x = drawn(4, 3, 9, dtype=torch.float64)
    for there in PARAMETERS:
        tensors = [x, *parameters(9, there, torch.float64)]
        tensors = [None if y is None else y.requires_grad_() for y in tensors]
        assert torch.autograd.gradcheck(
            lambda a, w, b: mt_fusions.layer_norm(
                a, w, b, EPS, zero_centered=zero_centered, kernel=kernel
            ),
            tensors,
        )


# opcheck itself asks leaves that it has copied for their gradients.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("shape", [(4, 6), (0, 6)], ids=str)
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("adds", [True, False])
def test_opcheck(shape, centered, adds):
    x, weight, bias = drawn(*shape), drawn(6, seed=1), drawn(6, seed=2) if centered else None
    residual = drawn(*shape, seed=3, layout="sliced") if adds else None
    form = Form(EPS, centered=centered, has_bias=centered)
    tensors = x, residual, weight, bias
    leaves = [None if y is None else y.clone().requires_grad_() for y in tensors]
    torch.library.opcheck(_forward, (*leaves, *form, "auto"))
    torch.library.opcheck(
        _forward, (x, residual, None, None, *form._replace(has_bias=False), "auto")
    )
    stats = norm_reference(*tensors, form)[2:]
    for own in (weight, None):
        for sums in (True, False):
            args = (x, x if adds else None, x, own, *stats, torch.float32, sums, *form, "auto")
            torch.library.opcheck(_backward, args)


def test_a_compiled_function_keeps_it_as_one_node_each_way():
    graph = Graph()
    tensors = [y.requires_grad_() for y in (drawn(4, 6), *parameters(6, (True, True)))]
    compiled = torch.compile(
        lambda a, w, b: mt_fusions.layer_norm(a * 2, w, b, EPS), backend=graph, fullgraph=True
    )
    compiled(*tensors).sum().backward()
    assert graph.counts["mt_fusions.norm"] == 1
    assert graph.counts["mt_fusions.norm_backward"] == 1


def test_under_autocast_the_result_has_the_dtype_of_the_input():
    weight, bias = (y.requires_grad_() for y in parameters(6, (True, True)))
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            x = drawn(4, 6, dtype=dtype).requires_grad_()
            y = mt_fusions.layer_norm(x, weight, bias, EPS)
            y.float().sum().backward()
            assert y.dtype == x.grad.dtype == dtype
    assert weight.grad.dtype == bias.grad.dtype == torch.float32


X, W = torch.ones(2, 3), torch.ones(3)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "eps", "kind", "words"),
    [
        (X.long(), None, None, EPS, TypeError, "floating"),
        (X, W.long(), None, EPS, TypeError, "weight .* floating"),
        (X, W, torch.ones(4), EPS, ValueError, "bias .* 3 elements"),
        (X, torch.ones(4), W, EPS, ValueError, "weight .* 3 elements"),
        (X, W, W.to("meta"), EPS, ValueError, "one device"),
        (X, W, W, -1.0, ValueError, "eps"),
        (torch.ones(2, 0), None, None, EPS, ValueError, "last dim"),
    ],
)
def test_errors_say_what_is_wrong(x, weight, bias, eps, kind, words):
    with pytest.raises(kind, match=words):
        mt_fusions.layer_norm(x, weight, bias, eps)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 1000, 4096, 8192])
def test_on_a_gpu_the_kernel_matches_fp64(dtype, width):
    tensors = (
        drawn(515, width, dtype=dtype, device="cuda"),
        *parameters(width, (True, True), dtype, "cuda"),
    )
    compare(tensors, dtype, kernel="triton")
