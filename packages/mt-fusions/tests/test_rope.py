"""Rotary embedding: every kernel against fp64, and the operator's manners."""

import mt_fusions
import pytest
import torch
from mt_fusions.attention.rope import _turn
from oracle import DEVICE, Graph, as_fp64, assert_close, drawn, gradients

FORMS = [(False, 1), (True, 1), (False, 2), (True, 2)]  # interleaved, heads_dim


def tables(*shape, dtype=torch.float32, device="cpu", interleaved=False):
    angle = drawn(*shape[:-1], shape[-1] // 2, dtype=torch.float64, seed=5)
    pairs = (
        torch.stack((angle, angle), -1).flatten(-2) if interleaved else torch.cat((angle,) * 2, -1)
    )
    return pairs.cos().to(dtype).to(device), pairs.sin().to(dtype).to(device)


def plain(x, cos, sin, *, interleaved, heads_dim):
    """By complex numbers: a pair times cos + i sin."""
    width = cos.shape[-1]
    cos, sin = (y[None] if y.dim() == 2 and x.dim() == 4 else y for y in (cos, sin))
    cos, sin = (y.unsqueeze(heads_dim) for y in (cos, sin))
    step = cos[..., 0::2] + 1j * sin[..., 0::2]
    if not interleaved:
        step = cos[..., : width // 2] + 1j * sin[..., : width // 2]
    part = x[..., :width]
    if interleaved:
        turned = (part[..., 0::2] + 1j * part[..., 1::2]) * step
        turned = torch.stack((turned.real, turned.imag), -1).flatten(-2)
    else:
        turned = (part[..., : width // 2] + 1j * part[..., width // 2 :]) * step
        turned = torch.cat((turned.real, turned.imag), -1)
    return torch.cat((turned, x[..., width:]), -1)


def compare(kernel, q, k, cos, sin, form):
    how = {"interleaved": form[0], "heads_dim": form[1]}
    found, grads = gradients(
        lambda a, b: mt_fusions.apply_rope(a, b, cos, sin, kernel=kernel, **how), (q, k)
    )
    own = as_fp64(cos, sin)
    expected, grads64 = gradients(
        lambda a, b: (plain(a, *own, **how), plain(b, *own, **how)), as_fp64(q, k)
    )
    for x, exact in zip(found + grads, expected + grads64, strict=True):
        assert x.dtype == q.dtype
        assert_close(x, exact, q.dtype)


@pytest.mark.parametrize("kernel", ["cpu", "triton", "reference"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_kernel_matches_fp64_forward_and_backward(kernel, form):
    device = DEVICE if kernel == "triton" else "cpu"
    for number, (batch, tokens, heads, size, width) in enumerate(
        [(2, 5, 3, 16, 16), (1, 7, 4, 24, 10), (3, 1, 1, 6, 2), (2, 0, 2, 8, 8), (0, 3, 2, 8, 8)]
    ):
        layout = ("contiguous", "sliced", "transposed")[(number + form[0]) % 3]
        dtype = torch.float16 if number == 1 else torch.float32
        dims = (batch, heads, tokens, size) if form[1] == 1 else (batch, tokens, heads, size)
        q = drawn(*dims, layout=layout, dtype=dtype, device=device)
        k = drawn(*dims, seed=1, dtype=dtype, device=device).narrow(form[1], 0, 1)
        shape = (batch, tokens, width) if number % 2 == 0 else (tokens, width)
        compare(kernel, q, k, *tables(*shape, device=device, interleaved=form[0]), form)


@pytest.mark.parametrize("kernel", ["cpu", "triton", "reference"])
def test_packed_tokens_take_the_rows_of_their_places(kernel):
    device = DEVICE if kernel == "triton" else "cpu"
    places = torch.tensor([0, 1, 2, 0, 1, 0], device=device)
    cos, sin = tables(9, 8, device=device)
    q, k = (drawn(6, heads, 8, seed=heads, device=device) for heads in (4, 2))
    compare(kernel, q, k, cos[places], sin[places], (False, 1))
    batched = torch.stack((places, places.flip(0)))
    q, k = (drawn(2, 6, heads, 8, seed=heads, device=device) for heads in (4, 2))
    compare(kernel, q, k, cos[batched], sin[batched], (False, 2))


def test_bf16_and_a_block_boundary():
    q, k = (drawn(1, 2400, heads, 64, seed=heads, dtype=torch.bfloat16) for heads in (8, 2))
    compare("cpu", q, k, *tables(2400, 64), (False, 2))


def test_memory_has_tokens_before_heads_as_a_projection_has():
    q = drawn(2, 5, 3, 8).transpose(1, 2)  # [B, heads, S, D]
    turned, _ = mt_fusions.apply_rope(q, q, *tables(5, 8))
    assert turned.stride() == q.stride()


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gradcheck(kernel, form):
    q, k = (drawn(2, 3, 3, 8, seed=i, dtype=torch.float64).requires_grad_() for i in (0, 1))
    cos, sin = tables(3, 6, dtype=torch.float64, interleaved=form[0])
    assert torch.autograd.gradcheck(
        lambda a, b: mt_fusions.apply_rope(
            a, b, cos, sin, interleaved=form[0], heads_dim=form[1], kernel=kernel
        ),
        (q, k),
    )


# opcheck itself asks leaves that it has copied for their gradients.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_opcheck():
    q, k = (drawn(2, 3, heads, 8).requires_grad_() for heads in (4, 1))
    cos, sin = (x[None] for x in tables(3, 6))
    torch.library.opcheck(_turn, (q, k, cos, sin, False, False, "auto"))


def test_a_compiled_function_keeps_it_as_one_node_each_way():
    graph = Graph()
    q, (cos, sin) = drawn(2, 3, 4, 8).requires_grad_(), tables(4, 8)
    compiled = torch.compile(
        lambda a: sum(x.sum() for x in mt_fusions.apply_rope(a * 2, a * 3, cos, sin)),
        backend=graph,
        fullgraph=True,
    )
    compiled(q).backward()
    assert graph.counts["mt_fusions.rope"] == 2  # forward, and back


def test_under_autocast_the_result_has_the_dtype_of_the_input():
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            q = drawn(2, 3, 4, 8, dtype=dtype).requires_grad_()
            y, _ = mt_fusions.apply_rope(q, q, *tables(4, 8))
            y.float().sum().backward()
            assert y.dtype == q.grad.dtype == dtype


Q, T = torch.ones(2, 3, 4, 8), torch.ones(4, 8)


@pytest.mark.parametrize(
    ("q", "k", "cos", "sin", "options", "kind", "words"),
    [
        (Q.long(), Q, T, T, {}, TypeError, "floating"),
        (Q, Q.double(), T, T, {}, TypeError, "convert one"),
        (Q[0, 0], Q[0, 0], T, T, {}, ValueError, "heads_dim"),
        (Q, Q, T, T, {"heads_dim": 3}, ValueError, "heads_dim"),
        (Q, Q, T, T, {"heads_dim": 1.0}, TypeError, "heads_dim"),
        (Q, Q[:, :, :2], T, T, {}, ValueError, "heads"),
        (Q, Q, T, T[:, :6], {}, ValueError, "one shape"),
        (Q, Q, T, T.clone().requires_grad_(), {}, ValueError, "no gradient"),
        (Q, Q, T[:3], T[:3], {}, ValueError, "places"),
        (Q, Q, T[:, :5], T[:, :5], {}, ValueError, "even"),
        (Q, Q, torch.ones(4, 10), torch.ones(4, 10), {}, ValueError, "at most 8"),
        (Q, Q, T.to("meta"), T, {}, ValueError, "one device"),
        (Q, Q, T, T, {"kernel": "fast"}, ValueError, "auto, cpu"),
    ],
)
def test_errors_say_what_is_wrong(q, k, cos, sin, options, kind, words):
    with pytest.raises(kind, match=words):
        mt_fusions.apply_rope(q, k, cos, sin, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_on_a_gpu_the_kernel_matches_fp64(dtype, form):
    q, k = (drawn(2, 8, 8, 128, seed=i, dtype=dtype, device="cuda") for i in (0, 1))
    compare("triton", q, k, *tables(8, 96, device="cuda", interleaved=form[0]), form)
