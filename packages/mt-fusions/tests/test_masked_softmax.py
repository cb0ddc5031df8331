"""Softmax of attention scores: every kernel against fp64 and torch's attention, and its manners."""

import mt_fusions
import pytest
import torch
import torch.nn.functional as F
from mt_fusions.attention.masked_softmax import _backward, _forward
from oracle import DEVICE, Graph, as_fp64, assert_close, drawn, gradients

SHAPES = [(2, 3, 5, 8), (1, 2, 7, 33), (2, 1, 4, 4), (0, 2, 3, 4), (1, 2, 3, 300), (2, 3, 6, 2)]
FORMS = [(False, False), (True, False), (False, True), (True, True)]  # masked, with sinks


def drawn_mask(*shape, device="cpu"):
    """Two queries in three look at a key; the first query of each head looks nowhere."""
    mask = drawn(*shape, seed=5, dtype=torch.float64) > -0.4
    if mask.numel():
        mask[..., :1, :] = False
    return mask.to(device)


def plain(scores, sinks, mask, scale, causal):
    """By exponentials of each score."""
    queries, keys = scores.shape[-2:]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
    if causal:
        seen = seen.tril(keys - queries)
    if mask is not None:
        seen = seen & mask
    shares = (scores * scale).exp() * seen
    total = shares.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp().view(1, -1, 1, 1)
    return shares / torch.where(total == 0, 1, total)


def compare(scores, sinks, mask, scale=1.0, causal=False, kernel="auto"):
    found, grads = gradients(
        lambda x, s: mt_fusions.masked_softmax(
            x, mask, scale=scale, causal=causal, sinks=s, kernel=kernel
        ),
        (scores, sinks),
    )
    exact, grads64 = gradients(
        lambda x, s: plain(x, s, mask, scale, causal), as_fp64(scores, sinks)
    )
    assert found[0].is_contiguous()
    for own, one in zip([*found, *grads], [*exact, *grads64], strict=True):
        assert (own is None) == (one is None)
        if own is not None:
            assert own.dtype == scores.dtype
            assert_close(own, one, scores.dtype)


@pytest.mark.parametrize("kernel", ["cpu", "triton", "reference"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("masked", "sinks"), FORMS)
def test_every_kernel_matches_fp64_forward_and_backward(kernel, causal, masked, sinks):
    device = DEVICE if kernel == "triton" else "cpu"
    for number, shape in enumerate(SHAPES):
        layout = ("contiguous", "sliced", "transposed")[number % 3]
        dtype = torch.float16 if number == 4 else torch.float32
        x = drawn(*shape, layout=layout, dtype=dtype, device=device, scale=2.0)
        own = drawn(shape[1], seed=1, dtype=dtype, device=device) if sinks else None
        of_mask = shape if number % 2 else (shape[0], 1, *shape[2:])
        mask = drawn_mask(*of_mask, device=device) if masked else None
        compare(x, own, mask, 0.3 + number / 10, causal, kernel)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_match_fp64(kernel, dtype):
    x, sinks = drawn(2, 3, 20, 30, dtype=dtype), drawn(3, seed=1, dtype=dtype)
    compare(x, sinks, drawn_mask(20, 30), 0.7, causal=True, kernel=kernel)


def test_a_block_boundary_is_no_seam():
    compare(drawn(1, 2, 1100, 1000), drawn(2, seed=1), None, 0.5, causal=True)


@pytest.mark.parametrize("kernel", ["cpu", "triton", "reference"])
def test_it_is_what_torchs_attention_has(kernel):
    device = DEVICE if kernel == "triton" else "cpu"
    q, k, v = (drawn(2, 3, 6, 8, seed=i, device=device) for i in range(3))
    probs = mt_fusions.masked_softmax(q @ k.mT, scale=8**-0.5, causal=True, kernel=kernel)
    exact = F.scaled_dot_product_attention(*as_fp64(q, k, v), is_causal=True)
    assert_close(probs @ v, exact, torch.float32)


@pytest.mark.parametrize("kernel", ["cpu", "triton", "reference"])
def test_huge_scores_do_not_overflow_and_a_sink_can_take_all(kernel):
    device = DEVICE if kernel == "triton" else "cpu"
    x = torch.tensor([[[[1e30, 1e4, -1e30], [5.0, 5.0, -torch.inf]]]], device=device)
    probs = mt_fusions.masked_softmax(x, kernel=kernel)
    assert probs.flatten().tolist() == [1, 0, 0, 0.5, 0.5, 0]
    sinks = torch.tensor([1e4], device=device)
    assert not mt_fusions.masked_softmax(x, sinks=sinks, kernel=kernel)[..., 1, :].any()


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize(("masked", "with_sinks"), FORMS)
def test_gradcheck(kernel, masked, with_sinks):
    x = drawn(2, 2, 3, 4, dtype=torch.float64).requires_grad_()
    sinks = drawn(2, seed=1, dtype=torch.float64).requires_grad_() if with_sinks else None
    mask = drawn_mask(2, 1, 3, 4) if masked else None
    assert torch.autograd.gradcheck(
        lambda a, s: mt_fusions.masked_softmax(
            a, mask, scale=0.7, causal=True, sinks=s, kernel=kernel
        ),
        (x, sinks),
    )


# opcheck itself asks leaves that it has copied for their gradients.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("shape", [(2, 2, 3, 4), (0, 2, 3, 4)], ids=str)
def test_opcheck(shape):
    x, sinks = drawn(*shape).requires_grad_(), drawn(2, seed=1).requires_grad_()
    torch.library.opcheck(_forward, (x, drawn_mask(*shape), sinks, 0.5, True, "auto"))
    sliced = drawn(*shape, layout="sliced")
    torch.library.opcheck(_forward, (sliced, None, None, 0.5, False, "auto"))
    probs, rest = _forward(x.detach(), None, sinks.detach(), 0.5, False, "auto")
    torch.library.opcheck(_backward, (probs, probs, rest, 0.5, "auto"))


def test_a_compiled_function_keeps_it_as_one_node_each_way():
    graph = Graph()
    x, sinks = drawn(2, 2, 3, 4).requires_grad_(), drawn(2, seed=1).requires_grad_()
    compiled = torch.compile(
        lambda a, s: mt_fusions.masked_softmax(a * 2, causal=True, sinks=s),
        backend=graph,
        fullgraph=True,
    )
    compiled(x, sinks).square().sum().backward()
    assert graph.counts["mt_fusions.masked_softmax"] == 1
    assert graph.counts["mt_fusions.masked_softmax_backward"] == 1


def test_under_autocast_the_result_has_the_dtype_of_the_scores():
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            x = drawn(1, 2, 3, 4, dtype=dtype).requires_grad_()
            y = mt_fusions.masked_softmax(x, sinks=drawn(2))
            y.float().sum().backward()
            assert y.dtype == x.grad.dtype == dtype


X, M = torch.ones(1, 2, 3, 4), torch.ones(3, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("x", "options", "kind", "words"),
    [
        (X.long(), {}, TypeError, "floating"),
        (X[0], {}, ValueError, "queries, keys"),
        (X, {"mask": M.float()}, TypeError, "bool"),
        (X, {"mask": M[:, :3]}, ValueError, "broadcast"),
        (X, {"mask": M.to("meta")}, ValueError, "mask is on meta"),
        (X, {"sinks": torch.ones(3)}, ValueError, "2 heads"),
        (X, {"scale": "1"}, TypeError, "scale"),
        (X, {"scale": float("nan")}, ValueError, "finite"),
        (X, {"kernel": "fast"}, ValueError, "auto, cpu"),
    ],
)
def test_errors_say_what_is_wrong(x, options, kind, words):
    with pytest.raises(kind, match=words):
        mt_fusions.masked_softmax(x, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_the_kernel_matches_fp64(dtype):
    for keys in (64, 1000, 16384):
        x, sinks = (
            drawn(2, 3, 50, keys, dtype=dtype, device="cuda"),
            drawn(3, seed=1, dtype=dtype, device="cuda"),
        )
        compare(x, sinks, drawn_mask(2, 1, 50, keys, device="cuda"), 0.5, True, "triton")
