"""Tokens sorted by experts: identities, every kernel against fp64, and the operators' manners."""

import mt_fusions
import pytest
import torch
from mt_fusions.permute import _permute, _permute_backward, _unpermute, _unpermute_backward
from oracle import DEVICE, Graph, as_fp64, assert_close, drawn, gradients

SHAPES = [(5, 8, 2, 4), (7, 33, 1, 3), (9, 300, 3, 70), (0, 8, 2, 4), (1, 5, 4, 4)]  # T, H, k, E


def drawn_experts(tokens, choices, number, device="cpu"):
    """Different ones for each token; the last expert has none where there are more than choices."""
    generator = torch.Generator().manual_seed(3)
    share = torch.rand(tokens, number, generator=generator)
    share[:, -1] -= 2 * (number > choices)
    return share.topk(choices, -1).indices.to(device)


def plain(x, experts, weights=None):
    """What k experts that return what they are given make of each token."""
    one = torch.ones(experts.shape, dtype=x.dtype, device=x.device)
    return x * (one if weights is None else weights).sum(1, keepdim=True)


@pytest.mark.parametrize("kernel", ["cpu", "triton", "reference"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kernel_matches_fp64_forward_and_backward(kernel, shape):
    tokens, size, choices, number = shape
    device = DEVICE if kernel == "triton" else "cpu"
    experts = drawn_experts(tokens, choices, number, device)
    for case, layout in enumerate(("contiguous", "sliced", "transposed")):
        dtype = torch.float16 if case == 2 else torch.float32
        x = drawn(tokens, size, layout=layout, dtype=dtype, device=device)
        factors = drawn(number, size, seed=2, dtype=dtype, device=device)
        weights = drawn(tokens, choices, seed=1, dtype=dtype, device=device) if case else None

        def whole(a, w, own=experts, scale=factors):
            sent = mt_fusions.permute(a, own, len(scale), kernel=kernel)
            chosen = scale.repeat_interleave(sent.counts, dim=0)
            return sent.rows, mt_fusions.unpermute(
                sent.rows * chosen, sent.places, w, kernel=kernel
            )

        def exact(a, w, own=experts, scale=factors):
            scale = scale.double()
            order = own.flatten().argsort(stable=True)
            each = a.unsqueeze(1) * scale[own]
            each = each if w is None else each * w.unsqueeze(2)
            return a[order // own.shape[1]], each.sum(1)

        found, grads = gradients(whole, (x, weights))
        expected, grads64 = gradients(exact, as_fp64(x, weights))
        for own, one in zip([*found, *grads], [*expected, *grads64], strict=True):
            assert (own is None) == (one is None)
            if own is not None:
                assert own.dtype == dtype
                assert_close(own, one, dtype, factor=2)  # the product with factors is rounded too


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_there_and_back_is_k_times_or_the_weighted_sum(kernel, dtype):
    x, experts = drawn(40, 24, dtype=dtype), drawn_experts(40, 4, 9)
    weights = drawn(40, 4, seed=1, dtype=dtype).softmax(-1)
    sent = mt_fusions.permute(x, experts, 9, kernel=kernel)
    assert torch.equal(mt_fusions.unpermute(sent.rows, sent.places, kernel=kernel), 4 * x)
    back = mt_fusions.unpermute(sent.rows, sent.places, weights, kernel=kernel)
    assert_close(back, plain(x.double(), experts, weights.double()), dtype)


def test_rows_stand_by_expert_in_the_order_of_tokens_and_counts_say_how_many():
    experts = drawn_experts(50, 3, 7)
    tokens = torch.arange(50.0).unsqueeze(1)
    rows, places, counts = mt_fusions.permute(tokens, experts, 7)
    assert counts.tolist() == [(experts == e).sum().item() for e in range(7)]
    assert counts[-1] == 0
    expected = [(experts == e).any(1).nonzero().flatten() for e in range(7)]
    assert rows.flatten().tolist() == torch.cat(expected).tolist()
    assert sorted(places.flatten().tolist()) == list(range(150))


def test_a_block_boundary_is_no_seam():
    x, experts = drawn(900, 700, dtype=torch.float64), drawn_experts(900, 2, 8)
    weights = drawn(900, 2, seed=1, dtype=torch.float64)

    def whole(a, w):
        sent = mt_fusions.permute(a, experts, 8)
        return mt_fusions.unpermute(sent.rows, sent.places, w)

    found, grads = gradients(whole, (x, weights))
    expected, exact = gradients(lambda a, w: plain(a, experts, w), (x, weights))
    for own, one in zip([*found, *grads], [*expected, *exact], strict=True):
        assert_close(own, one, torch.float64)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_gradcheck(kernel):
    x = drawn(4, 3, dtype=torch.float64).requires_grad_()
    weights = drawn(4, 2, seed=1, dtype=torch.float64).requires_grad_()
    experts = drawn_experts(4, 2, 3)

    def whole(a, w):
        sent = mt_fusions.permute(a, experts, 3, kernel=kernel)
        return mt_fusions.unpermute(sent.rows.tanh(), sent.places, w, kernel=kernel)

    assert torch.autograd.gradcheck(whole, (x, weights))
    assert torch.autograd.gradcheck(lambda a: whole(a, None), (x,))


# opcheck itself asks leaves that it has copied for their gradients.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("tokens", [4, 0])
def test_opcheck(tokens):
    experts = drawn_experts(tokens, 2, 3)
    x, weights = drawn(tokens, 6).requires_grad_(), drawn(tokens, 2, seed=1).requires_grad_()
    rows, places, _ = mt_fusions.permute(x.detach(), experts, 3)
    torch.library.opcheck(_permute, (x, places, "auto"))
    torch.library.opcheck(_permute_backward, (rows, places, "auto"))
    leaf = rows.clone().requires_grad_()
    torch.library.opcheck(_unpermute, (leaf, places, weights, "auto"))
    torch.library.opcheck(_unpermute, (leaf, places, None, "auto"))
    sliced = drawn(tokens, 6, layout="sliced")
    own = weights.detach()
    for args in ((rows, places, own), (None, places, own), (None, places, None)):
        torch.library.opcheck(_unpermute_backward, (sliced, *args, "auto"))


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_without_a_gradient_of_weights_rows_are_not_kept_and_theirs_is_the_same(kernel):
    experts, weights = drawn_experts(40, 4, 9), drawn(40, 4, seed=1).requires_grad_()
    places = mt_fusions.permute(drawn(40, 24), experts, 9).places
    rows, kept, grads = drawn(160, 24).requires_grad_(), [], []
    for share in (weights, weights.detach()):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = mt_fusions.unpermute(rows, places, share, kernel=kernel)
        held = [t for t in kept if t.shape == rows.shape]
        assert len(held) == (1 if share is weights else 0)
        grads.append(torch.autograd.grad(y.square().sum(), rows)[0])
        kept.clear()
    assert torch.equal(*grads)


def test_a_compiled_function_keeps_each_as_one_node_each_way():
    graph = Graph()
    x, weights = drawn(4, 6).requires_grad_(), drawn(4, 2, seed=1).requires_grad_()
    experts = drawn_experts(4, 2, 3)

    def whole(a, w):
        sent = mt_fusions.permute(a * 2, experts, 3)
        return mt_fusions.unpermute(sent.rows.sin(), sent.places, w)

    torch.compile(whole, backend=graph, fullgraph=True)(x, weights).sum().backward()
    for name in ("permute", "permute_backward", "unpermute", "unpermute_backward"):
        assert graph.counts[f"mt_fusions.{name}"] == 1


def test_under_autocast_the_result_has_the_dtype_of_the_rows():
    experts = drawn_experts(4, 2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            x = drawn(4, 6, dtype=dtype).requires_grad_()
            sent = mt_fusions.permute(x, experts, 3)
            y = mt_fusions.unpermute(sent.rows, sent.places, drawn(4, 2))
            y.float().sum().backward()
            assert sent.rows.dtype == y.dtype == x.grad.dtype == dtype


X, E = torch.ones(2, 3), torch.tensor([[0, 1], [2, 0]])


@pytest.mark.parametrize(
    ("args", "kind", "words"),
    [
        ((X.long(), E, 3), TypeError, "floating"),
        ((X, E.float(), 3), TypeError, "integers"),
        ((X, E[0], 3), ValueError, r"\[T, k\]"),
        ((X, E[:1], 3), ValueError, "tokens of experts"),
        ((X, E, 2), ValueError, "expert 2 is outside the list of 2"),
        ((X, E.to("meta"), 3), ValueError, "on meta"),
        ((X, E, "3"), TypeError, "num_experts"),
    ],
)
def test_errors_of_permute_say_what_is_wrong(args, kind, words):
    with pytest.raises(kind, match=words):
        mt_fusions.permute(*args)


@pytest.mark.parametrize(
    ("rows", "weights", "kind", "words"),
    [
        (X.long(), None, TypeError, "floating"),
        (X, None, ValueError, "one for each of the places"),
        (torch.ones(4, 3), E, TypeError, "floating"),
        (torch.ones(4, 3), torch.ones(2), ValueError, "shape of places"),
    ],
)
def test_errors_of_unpermute_say_what_is_wrong(rows, weights, kind, words):
    with pytest.raises(kind, match=words):
        mt_fusions.unpermute(rows, E, weights)
    with pytest.raises(ValueError, match="auto, cpu"):
        mt_fusions.unpermute(torch.ones(4, 3), E, kernel="fast")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_the_kernels_match_fp64(dtype):
    experts = drawn_experts(515, 6, 64, "cuda")
    x, weights = (
        drawn(515, 3000, dtype=dtype, device="cuda"),
        drawn(515, 6, seed=1, dtype=dtype, device="cuda"),
    )

    def whole(a, w):
        sent = mt_fusions.permute(a, experts, 64, kernel="triton")
        return mt_fusions.unpermute(sent.rows, sent.places, w, kernel="triton")

    found, grads = gradients(whole, (x, weights))
    expected, exact = gradients(lambda a, w: plain(a, experts, w), as_fp64(x, weights))
    for own, one in zip([*found, *grads], [*expected, *exact], strict=True):
        assert_close(own, one, dtype, factor=2)
