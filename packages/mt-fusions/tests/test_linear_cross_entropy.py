"""Linear cross entropy: every kernel against fp64, its memory, over ranks, and its manners."""

import mt_fusions
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mt_fusions import LossOptions, linear_loss
from mt_fusions.linear_cross_entropy import _backward, _forward, _run, _run_backward
from oracle import DEVICE, Graph, as_fp64, assert_close, drawn, gradients
from test_cross_entropy import drawn_labels, plain
from torch.utils._python_dispatch import TorchDispatchMode

OPTIONS = [{}, {"label_smoothing": 0.2}, {"z_loss": 0.01, "label_smoothing": 0.1}]
SHAPES = [(7, 12, 33), (2, 3, 16, 300), (0, 8, 16), (40, 5, 7), (3, 5)]  # [..., H, V]


def drawn_head(*shape, **how):
    """x, weight and bias."""
    *tokens, width, size = shape
    bias = {key: value for key, value in how.items() if key != "layout"}
    return (
        drawn(*tokens, width, scale=2.0, **how),
        drawn(size, width, seed=1, **how),
        drawn(size, seed=2, **bias),
    )


def logits_of(x, weight, bias):
    return F.linear(x, weight, bias)


def compare(tensors, labels, options, kernel="auto", dtype=torch.float32):
    found, grads = gradients(
        lambda x, w, b: mt_fusions.linear_cross_entropy(
            x, w, labels, bias=b, options=LossOptions(**options), kernel=kernel
        ),
        tensors,
    )
    expected, grads64 = gradients(
        lambda *args: plain(logits_of(*args), labels, **options), as_fp64(*tensors)
    )
    assert found[0].dtype == torch.promote_types(dtype, torch.float32)
    assert_close(found[0], expected[0], dtype)
    for own, exact in zip(grads, grads64, strict=True):
        assert (own is None) == (exact is None)
        if own is not None:
            assert own.dtype == dtype
            assert_close(own, exact, dtype)


@pytest.mark.parametrize("kernel", ["cpu", "triton", "reference"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_kernel_matches_fp64_forward_and_backward(kernel, options):
    device = DEVICE if kernel == "triton" else "cpu"
    for number, (*tokens, width, size) in enumerate(SHAPES):
        layout = ("contiguous", "sliced", "transposed")[number % 3]
        dtype = torch.float16 if number == 3 else torch.float32
        reduction = ("none", "mean", "sum")[number % 3]
        x, weight, bias = drawn_head(
            *tokens, width, size, layout=layout, dtype=dtype, device=device
        )
        labels = drawn_labels(tokens, size, device)
        how = {**options, "reduction": reduction}
        compare((x, weight, bias if number % 2 else None), labels, how, kernel, dtype)


@pytest.mark.parametrize("options", [OPTIONS[2], {"reduction": "none"}], ids=str)
def test_blocks_in_fp64_are_exact_and_no_seam(options):
    tensors = drawn_head(700, 3, 15000, dtype=torch.float64)
    compare(tensors, drawn_labels((700,), 15000), options, dtype=torch.float64)


def test_bf16_has_the_loss_of_its_own_logits():
    x, weight, _ = drawn_head(600, 64, 9000, dtype=torch.bfloat16)
    labels = drawn_labels((600,), 9000)
    compare((x * 0.1, weight, None), labels, {"reduction": "sum"}, dtype=torch.bfloat16)


class Watch(TorchDispatchMode):
    """Counts products, and remembers the largest tensor that any operation makes."""

    numel = products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += "mm" in str(func)
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


def watched(kernel, wanted, *shape):
    """Both passes of a scalar loss, from inside the operators."""
    x, weight, bias = drawn_head(*shape)
    labels = drawn_labels(shape[:1], shape[-1]).clamp(min=-1)
    sizes, how = (shape[-1], shape[-1], 0.1, 0.01), ("", wanted, kernel)
    with Watch() as seen:
        loss, *grads = linear_loss._run(x, weight, bias, labels, labels >= 0, *sizes, *how)
        linear_loss._run_backward(loss, *grads, x.dtype)
    return seen


def watched_unreduced(kernel, wanted, *shape):
    """Both passes of a loss for each token."""
    x, weight, bias = drawn_head(*shape)
    labels = drawn_labels(shape[:1], shape[-1]).clamp(min=-1)
    with Watch() as seen:
        found = _run(x, weight, bias, labels, shape[-1], True, kernel)
        _run_backward(x, weight, bias, labels, *found, found[0], shape[-1], wanted, kernel)
    return seen


@pytest.mark.parametrize(("kernel", "rows"), [("cpu", 512), ("reference", 1024)])
def test_no_more_logits_are_held_than_a_block(kernel, rows):
    for both in (watched, watched_unreduced):
        assert both(kernel, [True, True, True], 1024, 4, 20000).numel == rows * 20000


def test_there_are_three_products_and_fewer_for_frozen_parameters():
    assert watched("cpu", [True, True, True], 6, 5, 8).products == 3
    assert watched("cpu", [True, False, False], 6, 5, 8).products == 2
    assert watched("cpu", [False, False, False], 6, 5, 8).products == 1
    assert watched_unreduced("cpu", [True, True, False], 6, 5, 8).products == 4
    assert watched_unreduced("cpu", [True, False, False], 6, 5, 8).products == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_many_blocks_are_summed_and_scaled_in_fp32(dtype):
    x, weight, bias = drawn_head(1100, 4, 17000, dtype=dtype)  # 3 blocks
    labels = drawn_labels((1100,), 17000)
    leaves = [y.requires_grad_() for y in (x, weight, bias)]
    loss = mt_fusions.linear_cross_entropy(x, weight, labels, bias=bias)
    (loss * 2**14).backward()  # as a loss scale does
    wide = [y.detach().float().requires_grad_() for y in leaves]
    # The logits and their gradients are rounded alike.
    expected = plain(logits_of(*wide), labels)
    (expected * 2**14).backward()
    assert_close(loss.detach(), expected.detach(), dtype)
    for leaf, exact in zip(leaves, wide, strict=True):
        assert_close(leaf.grad, exact.grad, dtype)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_is_refused(reduction):
    x, weight, _ = (y.requires_grad_() for y in drawn_head(4, 3, 6))
    options = LossOptions(reduction=reduction)
    loss = mt_fusions.linear_cross_entropy(x, weight, drawn_labels((4,), 6), options=options)
    with pytest.raises(RuntimeError, match="no gradient"):
        torch.autograd.grad(loss.sum(), (x, weight), create_graph=True)


def test_without_gradients_none_is_made_or_kept():
    x, weight, _ = (y.requires_grad_() for y in drawn_head(4, 3, 6))
    labels = drawn_labels((4,), 6)
    with torch.no_grad(), Watch() as seen:
        loss = mt_fusions.linear_cross_entropy(x, weight, labels)
    assert loss.grad_fn is None
    assert seen.numel == x.numel()  # the rows; a weight's gradient would be more
    frozen = mt_fusions.linear_cross_entropy(x, weight.detach(), labels)
    frozen.backward()
    assert weight.grad is None
    assert x.grad is not None


def test_what_ignored_tokens_hold_does_not_matter():
    x, weight, bias = drawn_head(5, 6, 9)
    labels = drawn_labels((5,), 9)
    expected, _ = gradients(
        lambda a, w, b: mt_fusions.linear_cross_entropy(a, w, labels, bias=b), (x, weight, bias)
    )
    x[labels == -100] = torch.nan
    found, grads = gradients(
        lambda a, w, b: mt_fusions.linear_cross_entropy(a, w, labels, bias=b), (x, weight, bias)
    )
    assert torch.equal(found[0], expected[0])
    assert all(g.isfinite().all() for g in grads)
    assert not grads[0][labels == -100].any()


@pytest.mark.parametrize("kernel", ["cpu", "triton", "reference"])
def test_padding_rows_of_the_head_have_no_probability_and_no_gradient(kernel):
    tensors = drawn_head(5, 6, 40, device=DEVICE if kernel == "triton" else "cpu")
    labels = drawn_labels((5,), 33, tensors[0].device)
    options = {"label_smoothing": 0.1, "z_loss": 0.01}
    (loss,), grads = gradients(
        lambda x, w, b: mt_fusions.linear_cross_entropy(
            *(x, w, labels), bias=b, options=LossOptions(vocab_size=33, **options), kernel=kernel
        ),
        tensors,
    )
    (loss64,), grads64 = gradients(
        lambda *args: plain(logits_of(*args)[:, :33], labels, **options), as_fp64(*tensors)
    )
    assert_close(loss, loss64, torch.float32)
    for own, exact in zip(grads, grads64, strict=True):
        assert_close(own, exact, torch.float32)
    assert not grads[1][33:].any()
    assert not grads[2][33:].any()


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("options", [*OPTIONS, {"vocab_size": 5, "reduction": "none"}], ids=str)
def test_gradcheck(kernel, options):
    tensors = [x.requires_grad_() for x in drawn_head(4, 3, 6, dtype=torch.float64)]
    labels = drawn_labels((4,), 5)
    assert torch.autograd.gradcheck(
        lambda x, w, b: mt_fusions.linear_cross_entropy(
            x, w, labels, bias=b, options=LossOptions(**options), kernel=kernel
        ),
        tensors,
    )


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.campaign)])
def test_a_vocabulary_over_ranks_has_the_loss_and_gradient_of_one(ranks, size):
    x, weight, bias = drawn_head(6, 5, 12, dtype=torch.float64)
    labels = drawn_labels((6,), 10)

    def body(case):
        own = [y.chunk(dist.get_world_size())[dist.get_rank()].clone() for y in (weight, bias)]
        leaves = [y.requires_grad_() for y in (x.clone(), *own)]
        group, options = dist.group.WORLD, LossOptions(**case)
        loss = mt_fusions.linear_cross_entropy(
            *leaves[:2], labels, bias=leaves[2], options=options, group=group
        )
        loss.backward()
        return loss.detach(), *(leaf.grad for leaf in leaves)

    cases = {"vocab_size": 10, "z_loss": 0.01}, {"label_smoothing": 0.2, "reduction": "sum"}
    for case in cases:
        given = [y.requires_grad_() for y in (x.clone(), weight.clone(), bias.clone())]
        expected = mt_fusions.linear_cross_entropy(
            *given[:2], labels, bias=given[2], options=LossOptions(**case)
        )
        expected.backward()
        found = ranks(size, body, case)
        whole = [torch.cat([f[i] for f in found]) for i in (2, 3)]
        parts = [sum(f[1] for f in found), *whole]
        for loss, *_ in found:
            assert_close(loss, expected.detach(), torch.float64)
        for part, one in zip(parts, given, strict=True):
            assert_close(part, one.grad, torch.float64)


# opcheck itself asks leaves that it has copied for their gradients.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("wants_total", "biased"), [(True, False), (False, True)])
def test_opcheck(wants_total, biased):
    x, weight, bias = (y.requires_grad_() for y in drawn_head(4, 3, 6))
    bias, labels = bias if biased else None, torch.tensor([0, -1, 5, 2])
    torch.library.opcheck(_forward, (x, weight, bias, labels, 6, wants_total, "auto"))
    tensors = [None if y is None else y.detach() for y in (x, weight, bias)]
    found = _forward(*tensors, labels, 6, wants_total, "auto")
    for wanted in ([True, True, biased], [True, False, False]):
        args = (*tensors, labels, found[0], *found, 6, wanted, "auto")
        torch.library.opcheck(_backward, args)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("smoothing", "biased"), [(0.1, False), (0.0, True)])
def test_opcheck_of_the_scalar_loss(smoothing, biased):
    x, weight, bias = (y.requires_grad_() for y in drawn_head(4, 3, 6))
    bias, labels = bias if biased else None, torch.tensor([0, -1, 5, 2])
    sizes = (labels, labels >= 0, 6, 6, smoothing, 0.01, "")
    torch.library.opcheck(
        linear_loss._forward, (x, weight, bias, *sizes, [True, True, biased], "auto")
    )
    tensors = [None if y is None else y.detach() for y in (x, weight, bias)]
    for wanted in ([True, True, biased], [True, False, False]):
        found = linear_loss._forward(*tensors, *sizes, wanted, "auto")
        torch.library.opcheck(linear_loss._backward, (*found, torch.bfloat16))


def test_a_compiled_function_keeps_it_as_one_node_each_way():
    graph = Graph()
    x, weight, _ = (y.requires_grad_() for y in drawn_head(4, 3, 6))
    labels = drawn_labels((4,), 6)
    compiled = torch.compile(
        lambda a, w: mt_fusions.linear_cross_entropy(a * 2, w, labels),
        backend=graph,
        fullgraph=True,
    )
    compiled(x, weight).backward()
    assert graph.counts["mt_fusions.linear_loss"] == 1
    assert graph.counts["mt_fusions.linear_loss_backward"] == 1
    x64, weight64 = (y.requires_grad_() for y in as_fp64(x, weight))
    plain(x64 * 2 @ weight64.t(), labels).backward()
    assert_close(x.grad, x64.grad, torch.float32)
    assert_close(weight.grad, weight64.grad, torch.float32)


def test_under_autocast_the_products_are_in_its_dtype_and_the_loss_is_fp32():
    x, weight, bias = (y.requires_grad_() for y in drawn_head(4, 3, 6))
    labels = drawn_labels((4,), 6)
    with torch.autocast("cpu", torch.bfloat16):
        loss = mt_fusions.linear_cross_entropy(x.bfloat16(), weight, labels, bias=bias)
    loss.backward()
    assert loss.dtype == torch.float32
    assert x.grad.dtype == weight.grad.dtype == bias.grad.dtype == torch.float32
    rounded = [y.detach().bfloat16() for y in (x, weight, bias)]
    expected = mt_fusions.linear_cross_entropy(*rounded[:2], labels, bias=rounded[2])
    assert torch.equal(loss.detach(), expected)


X, W, Y = torch.ones(2, 3), torch.ones(4, 3), torch.tensor([0, 3])


@pytest.mark.parametrize(
    ("x", "weight", "labels", "options", "kind", "words"),
    [
        (X.long(), W, Y, {}, TypeError, "floating"),
        (X, None, Y, {}, TypeError, "weight"),
        (X, W.double(), Y, {}, TypeError, "convert one"),
        (X, W[:, :2], Y, {}, ValueError, r"\[V, H\]"),
        (X, W.to("meta"), Y, {}, ValueError, "one device"),
        (X, W, Y, {"bias": torch.ones(3)}, ValueError, "4 rows"),
        (X, W, Y.float(), {}, TypeError, "integers"),
        (X, W, Y[:1], {}, ValueError, "without the last dim"),
        (X, W, Y + 1, {}, ValueError, "label 4 .* 0 to 3"),
        (X, W, Y, {"options": LossOptions(vocab_size=5)}, ValueError, "vocab_size"),
        (X, W, Y, {"options": {"z_loss": 1.0}}, TypeError, "options"),
        (X, W, Y, {"kernel": "fast"}, ValueError, "auto, cpu"),
    ],
)
def test_errors_say_what_is_wrong(x, weight, labels, options, kind, words):
    with pytest.raises(kind, match=words):
        mt_fusions.linear_cross_entropy(x, weight, labels, **options)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"reduction": "max"}, ValueError, "reduction"),
        ({"label_smoothing": 1.5}, ValueError, "from 0 to 1"),
        ({"z_loss": -1.0}, ValueError, "0 or more"),
        ({"z_loss": "1"}, TypeError, "z_loss"),
        ({"ignore_index": 0.5}, TypeError, "ignore_index"),
        ({"vocab_size": 1.5}, TypeError, "vocab_size"),
    ],
)
def test_options_are_checked_where_they_are_made(options, kind, words):
    with pytest.raises(kind, match=words):
        LossOptions(**options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_kernel_matches_fp64(dtype):
    x, weight, bias = drawn_head(3000, 256, 50257, dtype=dtype, device="cuda")
    labels = drawn_labels((3000,), 50257, "cuda")
    compare((x * 0.1, weight, bias), labels, {"reduction": "sum"}, "triton", dtype)
