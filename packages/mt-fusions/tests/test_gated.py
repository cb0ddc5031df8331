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


def plain(activation, gate, up, weight=None, clamp=None, up_offset=0.0):
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    out = activation(gate) * (up + up_offset)
    return out if weight is None else out * weight.unsqueeze(-1)


def compare(kernel, kind, tensors, form, dtype):
    function, activation = KINDS[kind]
    found, grads = gradients(
        lambda g, u, w: function(g, u, weight=w, kernel=kernel, **form), tensors
    )
    expected, grads64 = gradients(
        lambda g, u, w: plain(activation, g, u, w, **form), as_fp64(*tensors)
    )
    assert found[0].dtype == dtype
    assert found[0].is_contiguous()
    assert_close(found[0], expected[0], dtype)
    for own, exact in zip(grads, grads64, strict=True):
        if exact is not None:
            assert own.dtype == dtype
            assert_close(own, exact, dtype)


@pytest.mark.parametrize("kernel", ["cpu", "triton", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kernel_matches_fp64_forward_and_backward(kernel, kind, shape):
    device = DEVICE if kernel == "triton" else "cpu"
    for number, form in enumerate(FORMS):
        for weighted in (False, True):
            layout = ("contiguous", "sliced", "transposed")[(number + weighted + len(shape)) % 3]
            dtype = torch.float16 if number + weighted == 2 else torch.float32
            gate, up = (
                drawn(*shape, seed=i, layout=layout, device=device, dtype=dtype) for i in (0, 1)
            )
            weight = drawn(*shape[:-1], seed=2, device=device, dtype=dtype) if weighted else None
            compare(kernel, kind, (gate, up, weight), form, dtype)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_fp64_to_a_few_roundings(kernel, kind):
    tensors = [drawn(40, 130, dtype=torch.bfloat16, seed=i) for i in (0, 1)]
    compare(kernel, kind, (*tensors, None), {}, torch.bfloat16)


@pytest.mark.parametrize("kernel", ["cpu", "triton", "reference"])
@pytest.mark.parametrize("weighted", [False, True])
def test_squared_relu_matches_fp64(kernel, weighted):
    device = DEVICE if kernel == "triton" else "cpu"
    x = drawn(9, 2, 70, layout="sliced", device=device)
    weight = drawn(9, 2, seed=1, device=device) if weighted else None
    (y,), grads = gradients(
        lambda a, w: mt_fusions.squared_relu(a, weight=w, kernel=kernel), (x, weight)
    )
    (y64,), grads64 = gradients(
        lambda a, w: F.relu(a).square() * (1 if w is None else w.unsqueeze(-1)),
        as_fp64(x, weight),
    )
    assert_close(y, y64, torch.float32)
    assert_close(grads[0], grads64[0], torch.float32)
    if weighted:
        assert_close(grads[1], grads64[1], torch.float32)


def test_a_block_boundary_is_no_seam():
    tensors = (drawn(4200, 300), drawn(4200, 300, seed=1), drawn(4200, seed=2))
    compare("cpu", "swiglu", tensors, {}, torch.float32)
    compare("cpu", "swiglu", (*tensors[:2], None), {}, torch.float32)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gradcheck(kernel, kind, form):
    tensors = [
        drawn(*shape, dtype=torch.float64, seed=i).requires_grad_()
        for i, shape in enumerate([(2, 3, 5), (2, 3, 5), (2, 3)])
    ]
    function = KINDS[kind][0]
    assert torch.autograd.gradcheck(
        lambda g, u, w: function(g, u, weight=w, kernel=kernel, **form), tensors
    )
    assert torch.autograd.gradcheck(lambda g, u: function(g, u, kernel=kernel, **form), tensors[:2])


# opcheck itself asks leaves that it has copied for their gradients.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("has_up", "weighted"), [(True, True), (True, False), (False, True)])
def test_opcheck(has_up, weighted):
    gate = drawn(4, 6).requires_grad_()
    up = drawn(4, 6, seed=1).requires_grad_() if has_up else None
    weight = drawn(4, seed=2).requires_grad_() if weighted else None
    how = ("silu", 1.5, 0.5, "auto", True) if weighted else ("silu", None, 0.0, "auto", True)
    how = how if has_up else ("relu2", None, 0.0, "auto", True)
    torch.library.opcheck(_forward, (gate, up, weight, *how))
    tensors = [None if x is None else x.detach() for x in (gate, gate, up, weight)]
    kept = _forward(*tensors[1:], *how)[1]
    assert kept.numel() == (has_up and not weighted) * gate.numel()
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
        ((X, X), {"weight": torch.ones(3)}, ValueError, "each row"),
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
    weight = drawn(300, dtype=dtype, seed=2, device="cuda")
    compare("triton", kind, (*tensors, weight), FORMS[1], dtype)
