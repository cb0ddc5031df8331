"""Cross entropy: every kernel against fp64 and torch, split over ranks, and its manners."""

import contextlib

import mt_fusions
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mt_fusions.losses.cross_entropy import _backward, _forward
from oracle import DEVICE, Graph, as_fp64, assert_close, drawn, gradients

OPTIONS = [{}, {"label_smoothing": 0.2}, {"z_loss": 0.01, "label_smoothing": 0.1}]
SHAPES = [(7, 33), (2, 3, 300), (0, 16), (40, 5), (3,), (3, 2)]


def drawn_labels(shape, size, device="cpu"):
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, size, shape, generator=generator)
    if labels.numel() > 1:
        labels.view(-1)[1] = -100
    return labels.to(device)


def plain(logits, labels, label_smoothing=0.0, z_loss=0.0, reduction="mean"):
    """torch's, and the z-loss beside it."""
    flat, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    loss = F.cross_entropy(flat, labels, reduction="none", label_smoothing=label_smoothing)
    loss = loss + z_loss * flat.logsumexp(-1).square() * (labels != -100)
    if reduction == "none":
        return loss.view(logits.shape[:-1])
    return loss.sum() if reduction == "sum" else loss.sum() / (labels != -100).sum()


@pytest.mark.parametrize("kernel", ["torch", "triton", "reference"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_kernel_matches_fp64_forward_and_backward(kernel, in_place, options):
    device = DEVICE if kernel == "triton" else "cpu"
    for number, shape in enumerate(SHAPES):
        layout = ("contiguous", "sliced", "transposed")[number % 3]
        dtype = torch.float16 if number == 3 else torch.float32
        reduction = ("mean", "sum", "none")[number % 3] if shape[0] else "sum"
        x = drawn(*shape, layout=layout, dtype=dtype, device=device, scale=3.0)
        labels = drawn_labels(shape[:-1], shape[-1], device)
        how = {**options, "reduction": reduction}
        (loss,), (grad,) = gradients(
            lambda a, y=labels, h=how: mt_fusions.cross_entropy(
                a * 1, y, in_place=in_place, kernel=kernel, **h
            ),
            (x,),
        )
        (loss64,), (grad64,) = gradients(lambda a, y=labels, h=how: plain(a, y, **h), as_fp64(x))
        assert loss.dtype == torch.float32
        assert grad.dtype == dtype
        assert_close(loss, loss64, torch.float32)
        assert_close(grad, grad64, dtype)


@pytest.mark.parametrize("kernel", ["torch", "reference"])
def test_bf16_logits_have_the_fp32_loss_of_their_values(kernel):
    x, labels = drawn(30, 500, dtype=torch.bfloat16, scale=3.0), drawn_labels((30,), 500)
    (loss,), (grad,) = gradients(lambda a: mt_fusions.cross_entropy(a, labels, kernel=kernel), (x,))
    (loss64,), (grad64,) = gradients(lambda a: plain(a, labels), as_fp64(x))
    assert_close(loss, loss64, torch.float32)
    assert_close(grad, grad64, torch.bfloat16)


def test_a_block_boundary_is_no_seam():
    x, labels = drawn(1800, 1000), drawn_labels((1800,), 1000)
    (loss,), (grad,) = gradients(lambda a: mt_fusions.cross_entropy(a, labels), (x,))
    (loss64,), (grad64,) = gradients(lambda a: plain(a, labels), as_fp64(x))
    assert_close(loss, loss64, torch.float32)
    assert_close(grad, grad64, torch.float32)


@pytest.mark.parametrize("kernel", ["torch", "triton", "reference"])
def test_logits_of_minus_infinity_have_no_share_and_huge_ones_do_not_overflow(kernel):
    x = drawn(4, 40, scale=1e4, device=DEVICE if kernel == "triton" else "cpu")
    x[:, 3] = -torch.inf
    labels = torch.tensor([0, 1, 2, 5], device=x.device)
    (loss,), (grad,) = gradients(lambda a: mt_fusions.cross_entropy(a, labels, kernel=kernel), (x,))
    (loss64,), (grad64,) = gradients(lambda a: plain(a, labels), as_fp64(x))
    assert_close(loss, loss64, torch.float32)
    assert_close(grad, grad64, torch.float32)


@pytest.mark.parametrize("kernel", ["torch", "reference"])
@pytest.mark.parametrize("options", [*OPTIONS, {"vocab_size": 5, "reduction": "none"}], ids=str)
def test_gradcheck(kernel, options):
    x, labels = drawn(4, 6, dtype=torch.float64).requires_grad_(), drawn_labels((4,), 5)
    assert torch.autograd.gradcheck(
        lambda a: mt_fusions.cross_entropy(a, labels, kernel=kernel, **options), (x,)
    )


@pytest.mark.parametrize("kernel", ["torch", "triton", "reference"])
def test_padding_has_no_probability_and_no_gradient(kernel):
    device = DEVICE if kernel == "triton" else "cpu"
    x, labels = drawn(5, 40, device=device), drawn_labels((5,), 33, device)
    options = {"label_smoothing": 0.1, "z_loss": 0.01}
    (loss,), (grad,) = gradients(
        lambda a: mt_fusions.cross_entropy(a, labels, vocab_size=33, kernel=kernel, **options), (x,)
    )
    (loss64,), (grad64,) = gradients(lambda a: plain(a[:, :33], labels, **options), as_fp64(x))
    assert_close(loss, loss64, torch.float32)
    assert_close(grad, grad64, torch.float32)
    assert not grad[:, 33:].any()


@pytest.mark.parametrize("size", [2, 3])
def test_a_vocabulary_over_ranks_has_the_loss_and_gradient_of_one(ranks, size):
    x = drawn(6, 12, dtype=torch.float64)
    x[0, 4:] = -torch.inf  # whole shards without probability
    labels = drawn_labels((6,), 10)
    labels[0] = 2
    cases = [{"vocab_size": 10}, {"vocab_size": 10, "z_loss": 0.01}]
    cases = [(case, x) for case in cases]
    finite = x.clone().nan_to_num(neginf=-3.0)
    cases.append(({"label_smoothing": 0.2}, finite))

    def body(case, logits, in_place):
        own = logits.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()]
        own = own.clone().requires_grad_()
        group = dist.group.WORLD
        loss = mt_fusions.cross_entropy(own * 1, labels, group=group, in_place=in_place, **case)
        loss.backward()
        return loss.detach(), own.grad

    for case, logits in cases:
        whole = logits.clone().requires_grad_()
        expected = mt_fusions.cross_entropy(whole, labels, **case)
        expected.backward()
        found = ranks(size, body, case, logits, case == cases[0][0])
        for loss, _ in found:
            assert_close(loss, expected.detach(), torch.float64)
        assert_close(torch.cat([grad for _, grad in found], -1), whole.grad, torch.float64)


def test_in_place_puts_the_gradient_into_the_logits_and_runs_once():
    x, labels = drawn(5, 8).requires_grad_(), drawn_labels((5,), 8)
    logits = x * 1
    loss = mt_fusions.cross_entropy(logits, labels, in_place=True)
    loss.backward(retain_graph=True)
    torch.testing.assert_close(logits.detach(), x.grad)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "rows", [lambda x: x.unfold(0, 6, 1), lambda x: x[:6].expand(5, 6)], ids=["windows", "expanded"]
)
def test_in_place_copies_rows_that_overlap(rows):
    labels = drawn_labels((5,), 6)
    (_,), (found,) = gradients(
        lambda x: mt_fusions.cross_entropy(rows(x * 1), labels, in_place=True), (drawn(10),)
    )
    _, (expected,) = gradients(lambda x: plain(rows(x), labels), as_fp64(drawn(10)))
    assert_close(found, expected, torch.float32)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_labels_of_any_integers_give_the_loss_of_int64(dtype):
    x, labels = drawn(3, 7), torch.tensor([0, 6, 99])
    found = mt_fusions.cross_entropy(x, labels.to(dtype), ignore_index=99)
    assert torch.equal(found, mt_fusions.cross_entropy(x, labels, ignore_index=99))


def test_a_softcap_is_that_of_the_logits():
    x, labels = drawn(5, 8, dtype=torch.bfloat16, scale=5.0), drawn_labels((5,), 8)
    (loss,), (grad,) = gradients(lambda a: mt_fusions.cross_entropy(a, labels, softcap=2.0), (x,))
    (loss64,), (grad64,) = gradients(lambda a: plain(2.0 * torch.tanh(a / 2.0), labels), as_fp64(x))
    assert_close(loss, loss64, torch.float32)
    assert_close(grad, grad64, torch.bfloat16)


def test_no_fp32_copy_of_the_logits_is_kept():
    logits = torch.randn(64, 512, dtype=torch.bfloat16, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        mt_fusions.cross_entropy(logits, torch.randint(0, 512, (64,)))
    large = [t for t in saved if t.numel() >= logits.numel()]
    assert [t.data_ptr() for t in large] == [logits.data_ptr()]


def test_gathered_logits_are_refused(ranks):
    """Counted on every rank they would be off by log(ranks)."""

    def body():
        labels = torch.zeros(2, dtype=torch.int64)
        with pytest.raises(ValueError, match="every rank has all 8 columns"):
            mt_fusions.cross_entropy(
                torch.zeros(2, 8), labels, group=dist.group.WORLD, vocab_size=8
            )

    ranks(2, body)


@pytest.mark.parametrize("kernel", [known.name for known in mt_fusions.LOSS.candidates])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_of_logits_becomes_the_gradient_of_its_losses(kernel, dtype):
    device = DEVICE if kernel == "fused" else "cpu"
    options = mt_fusions.LossOptions(
        kernel=kernel, label_smoothing=0.1, z_loss=0.01, vocab_size=33, softcap=3.0
    )
    x, labels = drawn(6, 40, dtype=dtype, device=device), drawn_labels((6,), 33, device)
    loss_of = mt_fusions.LogitLoss(labels, x, 40, options)
    leaf = x.double().requires_grad_()
    expected = plain(
        3.0 * torch.tanh(leaf[:, :33] / 3.0), labels, label_smoothing=0.1, z_loss=0.01,
        reduction="none",
    )  # fmt: skip
    counted = (labels != -100).unsqueeze(1)
    at_once = x.clone()
    losses = loss_of.losses_(at_once, slice(0, 6), wants_grad=True)
    assert_close(losses.loss, expected.detach(), torch.float32)
    (grad64,) = torch.autograd.grad(expected.sum(), leaf, retain_graph=True)
    assert_close(at_once * counted, grad64, dtype)
    grad = drawn(6, seed=9, device=device)
    later = x.clone()
    loss_of.gradient_(later, slice(0, 6), losses, grad)
    (grad64,) = torch.autograd.grad(expected, leaf, grad.double())
    assert_close(later * counted, grad64, dtype)


def test_logits_without_data_are_not_cut_into_parts_for_the_cache(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    sizes, whole = [], mt_fusions.LogitLoss._losses_of_part_
    monkeypatch.setattr(
        mt_fusions.LogitLoss,
        "_losses_of_part_",
        lambda self, part, *given, **how: (
            sizes.append(len(part)) or whole(self, part, *given, **how)
        ),
    )
    for mode in (contextlib.nullcontext(), FakeTensorMode()):
        with mode:
            x, labels = torch.ones(64, 1 << 16), torch.zeros(64, dtype=torch.long)
            loss_of = mt_fusions.LogitLoss(
                labels, x, 1 << 16, mt_fusions.LossOptions(kernel="torch")
            )
            loss_of.losses_(x, slice(0, 64), wants_grad=True)
    assert sizes == [16] * 4 + [64]


# opcheck itself asks leaves that it has copied for their gradients.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("wants_total", [True, False])
def test_opcheck(wants_total):
    x, labels = drawn(4, 6).requires_grad_(), torch.tensor([0, -1, 5, 2])
    torch.library.opcheck(_forward, (x, labels, 6, wants_total, "auto"))
    lse, target, total = _forward(x.detach(), labels, 6, wants_total, "auto")
    torch.library.opcheck(_backward, (x.detach(), labels, lse, lse, target, total, 6, "auto"))


def test_a_compiled_function_keeps_it_as_one_node_each_way():
    graph = Graph()
    x, labels = drawn(4, 6).requires_grad_(), drawn_labels((4,), 6)
    compiled = torch.compile(
        lambda a: mt_fusions.cross_entropy(a * 2, labels, in_place=True),
        backend=graph,
        fullgraph=True,
    )
    compiled(x).backward()
    assert graph.counts["mt_fusions.cross_entropy"] == 1
    assert graph.counts["mt_fusions.cross_entropy_backward"] == 1
    x64 = x.detach().double().requires_grad_()
    plain(x64 * 2, labels).backward()
    assert_close(x.grad, x64.grad, torch.float32)


def test_under_autocast_the_loss_is_fp32():
    x, labels = drawn(4, 6, dtype=torch.bfloat16).requires_grad_(), drawn_labels((4,), 6)
    with torch.autocast("cpu", torch.bfloat16):
        loss = mt_fusions.cross_entropy(x, labels, z_loss=0.1, label_smoothing=0.1)
    loss.backward()
    assert loss.dtype == torch.float32
    assert x.grad.dtype == torch.bfloat16


X, Y = torch.ones(2, 3), torch.tensor([0, 2])


@pytest.mark.parametrize(
    ("x", "labels", "options", "kind", "words"),
    [
        (X.long(), Y, {}, TypeError, "floating"),
        (X, Y.float(), {}, TypeError, "integers"),
        (X, torch.tensor([0, 1, 2]), {}, ValueError, "without the last dim"),
        (X, torch.tensor([0, 3]), {}, ValueError, "label 3 .* 0 to 2"),
        (X, torch.tensor([0, -1]), {}, ValueError, "label -1"),
        (X, Y, {"vocab_size": 4}, ValueError, "vocab_size"),
        (X, Y, {"label_smoothing": 1.5}, ValueError, "from 0 to 1"),
        (X, Y, {"z_loss": -1.0}, ValueError, "z_loss"),
        (X, Y, {"z_loss": "1"}, TypeError, "z_loss"),
        (X, Y, {"reduction": "max"}, ValueError, "reduction"),
        (X, Y, {"kernel": "fast"}, ValueError, "auto, torch"),
        (X, Y, {"softcap": 0}, ValueError, "softcap"),
        (X, Y, {"ignore_index": 0.5}, TypeError, "ignore_index"),
        (X, Y.to("meta"), {}, ValueError, "labels are on"),
    ],
)
def test_errors_say_what_is_wrong(x, labels, options, kind, words):
    with pytest.raises(kind, match=words):
        mt_fusions.cross_entropy(x, labels, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_place", [False, True])
def test_on_a_gpu_the_kernel_matches_fp64(dtype, in_place):
    x = drawn(65, 50257, dtype=dtype, device="cuda", scale=3.0)
    labels = drawn_labels((65,), 50257, "cuda")
    (loss,), (grad,) = gradients(
        lambda a: mt_fusions.cross_entropy(a * 1, labels, in_place=in_place, kernel="triton"), (x,)
    )
    (loss64,), (grad64,) = gradients(lambda a: plain(a, labels), as_fp64(x))
    assert_close(loss, loss64, torch.float32)
    assert_close(grad, grad64, dtype)
