"""Gated activations: every kernel against fp64, and the operator's manners."""

import mt_fusions
import pytest
import torch
import torch.nn.functional as F
from mt_fusions.activations.gated import _backward, _forward
from oracle import DEVICE, Graph, as_fp64, assert_close, drawn, gradients

SHAPES = [(3, 8), (5, 1, 33), (2, 3, 257), (0, 16), (70, 40), (16,), (3, 0)]
KINDS = {
    "swiglu": (mt_fusions.swiglu, F.silu),
    "geglu": (mt_fusions.geglu, F.gelu),
    "tanh": (
        lambda *args, **kw: mt_fusions.geglu(*args, approximate="tanh", **kw),
        lambda x: F.gelu(x, approximate="tanh"),
    ),
    "quick": (mt_fusions.quick_geglu, lambda x: x * torch.sigmoid(1.702 * x)),
}
FORMS = [{}, {"clamp": 0.7, "up_offset": 1.0}]


def plain(activation, gate, up, clamp=None, up_offset=0.0):
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return activation(gate) * (up + up_offset)


def compare(kernel, kind, tensors, form, dtype):
    function, activation = KINDS[kind]
    found, grads = gradients(lambda g, u: function(g, u, kernel=kernel, **form), tensors)
    expected, grads64 = gradients(lambda g, u: plain(activation, g, u, **form), as_fp64(*tensors))
    assert found[0].dtype == dtype
    assert found[0].is_contiguous()
    assert_close(found[0], expected[0], dtype)
    for own, exact in zip(grads, grads64, strict=True):
        assert own.dtype == dtype
        assert_close(own, exact, dtype)


@pytest.mark.parametrize("kernel", ["cpu", "triton", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kernel_matches_fp64_forward_and_backward(kernel, kind, shape):
    device = DEVICE if kernel == "triton" else "cpu"
    for number, form in enumerate(FORMS):
        for dtype in (torch.float32, torch.float16)[: number + 1]:
            half = dtype == torch.float16
            layout = ("contiguous", "sliced", "transposed")[(number + half + len(shape)) % 3]
            make = {"layout": layout, "device": device, "dtype": dtype}
            compare(kernel, kind, [drawn(*shape, seed=i, **make) for i in (0, 1)], form, dtype)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_fp64_to_a_few_roundings(kernel, kind):
    tensors = [drawn(40, 130, dtype=torch.bfloat16, seed=i) for i in (0, 1)]
    compare(kernel, kind, tensors, {}, torch.bfloat16)


@pytest.mark.parametrize("kernel", ["cpu", "triton", "reference"])
def test_squared_relu_matches_fp64(kernel):
    device = DEVICE if kernel == "triton" else "cpu"
    x = drawn(9, 2, 70, layout="sliced", device=device)
    (y,), grads = gradients(lambda a: mt_fusions.squared_relu(a, kernel=kernel), (x,))
    (y64,), grads64 = gradients(lambda a: F.relu(a).square(), as_fp64(x))
    assert_close(y, y64, torch.float32)
    assert_close(grads[0], grads64[0], torch.float32)


def test_a_block_boundary_is_no_seam():
    tensors = (drawn(4200, 300), drawn(4200, 300, seed=1))
    for form in FORMS:
        compare("cpu", "swiglu", tensors, form, torch.float32)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gradcheck(kernel, kind, form):
    tensors = [drawn(2, 3, 5, dtype=torch.float64, seed=i).requires_grad_() for i in (0, 1)]
    function = KINDS[kind][0]
    assert torch.autograd.gradcheck(lambda g, u: function(g, u, kernel=kernel, **form), tensors)


# opcheck itself asks leaves that it has copied for their gradients.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("has_up", "cut"), [(True, True), (True, False), (False, False)])
def test_opcheck(has_up, cut):
    gate = drawn(4, 6).requires_grad_()
    up = drawn(4, 6, seed=1).requires_grad_() if has_up else None
    terms = (1.5, 0.5) if cut else (None, 0.0)
    how = ("silu" if has_up else "relu2", *terms, "auto", True)
    torch.library.opcheck(_forward, (gate, up, *how))
    tensors = [None if x is None else x.detach() for x in (gate, gate, up)]
    kept = _forward(*tensors[1:], *how)[1]
    assert kept.numel() == (has_up and not cut) * gate.numel()
    torch.library.opcheck(_backward, (*tensors, kept, *how))


def test_a_compiled_function_keeps_it_as_one_node_each_way():
    graph = Graph()
    packed = drawn(4, 12).requires_grad_()
    compiled = torch.compile(
        lambda x: mt_fusions.swiglu(*x.chunk(2, dim=-1)), backend=graph, fullgraph=True
    )
    compiled(packed).sum().backward()
    assert graph.counts["mt_fusions.gated"] == 1
    assert graph.counts["mt_fusions.gated_backward"] == 1


def test_under_autocast_the_result_has_the_dtype_of_the_input():
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            gate = drawn(4, 6, dtype=dtype).requires_grad_()
            y = mt_fusions.swiglu(gate, drawn(4, 6, dtype=dtype))
            y.float().sum().backward()
            assert y.dtype == gate.grad.dtype == dtype


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("args", "options", "kind", "words"),
    [
        ((X.long(), X), {}, TypeError, "floating"),
        ((X, X.double()), {}, TypeError, "convert one"),
        ((X, torch.ones(2, 4)), {}, ValueError, "shape of gate"),
        ((X, X.to("meta")), {}, ValueError, "one device"),
        ((X, X), {"clamp": 0.0}, ValueError, "clamp"),
        ((X, X), {"up_offset": None}, TypeError, "up_offset"),
        ((X, X), {"kernel": "fast"}, ValueError, "auto, cpu"),
        ((torch.ones(()), torch.ones(())), {}, ValueError, "one dim"),
    ],
)
def test_errors_say_what_is_wrong(args, options, kind, words):
    with pytest.raises(kind, match=words):
        mt_fusions.swiglu(*args, **options)


def test_geglu_has_two_forms():
    with pytest.raises(ValueError, match="'none' or 'tanh'"):
        mt_fusions.geglu(X, X, approximate="erf")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_the_kernel_matches_fp64(dtype, kind):
    tensors = [drawn(300, 5000, dtype=dtype, seed=i, device="cuda") for i in (0, 1)]
    compare("triton", kind, tensors, FORMS[1], dtype)
