"""GELU of a sum with a bias: every kernel against fp64, and the operator's manners."""

import mt_fusions
import pytest
import torch
import torch.nn.functional as F
from mt_fusions.activations.bias_gelu import _backward, _forward
from oracle import DEVICE, Graph, as_fp64, assert_close, difference, drawn, gradients

SHAPES = [(3, 8), (5, 1, 33), (7, 600), (0, 16), (70, 40), (16,), (3, 0)]
KINDS = {"none": mt_fusions.bias_gelu, "tanh": mt_fusions.bias_gelu_tanh}


def compare(kind, tensors, dtype, kernel="auto"):
    found, grads = gradients(lambda x, b: KINDS[kind](x, b, kernel=kernel), tensors)
    exact, grads64 = gradients(lambda x, b: F.gelu(x + b, approximate=kind), as_fp64(*tensors))
    assert found[0].is_contiguous()
    for own, one in zip([*found, *grads], [*exact, *grads64], strict=True):
        assert own.dtype == dtype
        assert_close(own, one, dtype)


def drawn_pair(*shape, layout="contiguous", **how):
    return drawn(*shape, layout=layout, scale=2.0, **how), drawn(shape[-1], seed=1, **how)


@pytest.mark.parametrize("kernel", ["cpu", "triton", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kernel_matches_fp64_forward_and_backward(kernel, kind, shape):
    device = DEVICE if kernel == "triton" else "cpu"
    for number, layout in enumerate(("contiguous", "sliced", "transposed")):
        dtype = torch.float16 if number == 1 else torch.float32
        compare(kind, drawn_pair(*shape, layout=layout, dtype=dtype, device=device), dtype, kernel)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_match_fp64(kernel, kind, dtype):
    compare(kind, drawn_pair(40, 130, dtype=dtype), dtype, kernel)


def test_a_block_boundary_is_no_seam():
    for kind in KINDS:
        compare(kind, drawn_pair(4200, 300), torch.float32)


def test_the_two_forms_differ_by_their_approximation():
    x, bias = drawn_pair(200, 50, dtype=torch.float64)
    y, z = (function(x, bias) for function in KINDS.values())
    assert 1e-4 < (y - z).abs().max() < 5e-4
    assert difference(y, F.gelu(x + bias)) < 1e-12


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kernel, kind):
    tensors = [y.requires_grad_() for y in drawn_pair(2, 3, 5, dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda x, b: KINDS[kind](x, b, kernel=kernel), tensors)


# opcheck itself asks leaves that it has copied for their gradients.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("layout", ["contiguous", "sliced"])
def test_opcheck(layout):
    x, bias = drawn_pair(4, 6, layout=layout)
    leaves = [y.clone().requires_grad_() for y in (x, bias)]
    torch.library.opcheck(_forward, (*leaves, "gelu", "auto"))
    torch.library.opcheck(_forward, (x, bias, "gelu_tanh", "auto"))
    torch.library.opcheck(_backward, (x, x, bias, "gelu", "auto"))


def test_a_compiled_function_keeps_it_as_one_node_each_way():
    graph = Graph()
    tensors = [y.requires_grad_() for y in drawn_pair(4, 6)]
    compiled = torch.compile(
        lambda x, b: mt_fusions.bias_gelu(x * 2, b), backend=graph, fullgraph=True
    )
    compiled(*tensors).sum().backward()
    assert graph.counts["mt_fusions.bias_gelu"] == 1
    assert graph.counts["mt_fusions.bias_gelu_backward"] == 1


def test_under_autocast_the_result_has_the_dtype_of_the_input():
    bias = drawn(6).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            x = drawn(4, 6, dtype=dtype).requires_grad_()
            y = mt_fusions.bias_gelu(x, bias)
            y.float().sum().backward()
            assert y.dtype == x.grad.dtype == dtype
    assert bias.grad.dtype == torch.float32


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("x", "bias", "kernel", "kind", "words"),
    [
        (X.long(), X[0], "auto", TypeError, "floating"),
        (X, None, "auto", TypeError, "bias"),
        (X, X, "auto", ValueError, "3 elements"),
        (X, X[0].to("meta"), "auto", ValueError, "one device"),
        (torch.ones(()), X[0], "auto", ValueError, "one dim"),
        (X, X[0], "fast", ValueError, "auto, cpu"),
    ],
)
def test_errors_say_what_is_wrong(x, bias, kernel, kind, words):
    for function in KINDS.values():
        with pytest.raises(kind, match=words):
            function(x, bias, kernel=kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_the_kernel_matches_fp64(dtype, kind):
    compare(kind, drawn_pair(515, 5000, dtype=dtype, device="cuda"), dtype, "triton")
