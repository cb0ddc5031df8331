"""Head and loss in blocks, split over ranks, with every term, against torch's own functions."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mt_fusions import LossOptions, cross_entropy
from mt_parallel_state import copy_to_group
from mt_tensor_parallel import TorchGemm, linear_cross_entropy, linear_cross_entropy_and_z
from mt_testing import sample
from torch import Tensor

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}
TERMS = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "padded": {"vocab_size": 21},
    "all": {"label_smoothing": 0.2, "z_loss": 1e-2, "vocab_size": 13},
}


def _rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _labels(count: int, high: int) -> Tensor:
    labels = torch.randint(0, high, (count,), generator=torch.Generator().manual_seed(3))
    labels[[0, 7, count - 1]] = -100
    return labels


def _near(actual: Tensor | None, expected: Tensor | None, dtype: torch.dtype) -> None:
    assert actual is not None
    assert expected is not None
    actual, expected = actual.detach().double(), expected.detach()
    size = float(expected.abs().max())
    assert float((actual - expected).abs().max()) <= TOLERANCE[dtype] * size


def _by_torch(logits: Tensor, labels: Tensor, terms: dict, reduction: str = "sum") -> Tensor:
    """The loss of all logits at once, by torch's functions."""
    logits = logits[:, : terms.get("vocab_size", logits.shape[1])]
    if (cap := terms.get("softcap")) is not None:
        logits = cap * torch.tanh(logits / cap)
    smoothing = terms.get("label_smoothing", 0.0)
    loss = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    square = logits.logsumexp(-1).square().masked_fill(labels == -100, 0)
    loss = loss + terms.get("z_loss", 0.0) * square
    return loss if reduction == "none" else loss.sum()


def _whole(
    hidden: Tensor, weight: Tensor, labels: Tensor, terms: dict, bias: Tensor | None = None
) -> Tensor:
    return _by_torch(F.linear(hidden, weight, bias), labels, terms)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [None, 4, 5, 64])
@pytest.mark.parametrize("name", TERMS)
def test_blocks_give_the_loss_of_all_logits_at_once(name, dtype, block_size) -> None:
    terms = TERMS[name]
    labels = _labels(18, terms.get("vocab_size", 24))
    hidden, weight = _rand(18, 16, dtype=dtype), _rand(24, 16, seed=1, dtype=dtype)
    fast = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    plain = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    loss = linear_cross_entropy(*fast, labels, options=LossOptions(block_size=block_size, **terms))
    expected = _whole(*plain, labels, terms)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    _near(loss, expected, dtype)
    (loss * 0.25).backward()
    (expected * 0.25).backward()
    for a, e in zip(fast, plain, strict=True):
        _near(a.grad, e.grad, dtype)
    assert (fast[0].grad[7] == 0).all()


@pytest.mark.parametrize(("name", "world"), sample(product(TERMS, (2, 4)), every=3))
def test_every_term_is_of_the_whole_vocabulary_for_any_split(ranks, name, world) -> None:
    """Megatron-LM smooths with the local vocabulary, which is right for one rank only."""

    def body() -> None:
        terms, group, rank = TERMS[name], dist.group.WORLD, dist.get_rank()
        labels = _labels(18, terms.get("vocab_size", 24))
        whole = [_rand(18, 16).requires_grad_(), _rand(24, 16, seed=1).requires_grad_()]
        options = LossOptions(block_size=5, **terms)
        expected = _whole(*whole, labels, terms)
        expected.backward()
        hidden = whole[0].detach().clone().requires_grad_()
        weight = whole[1].detach().chunk(world)[rank].clone().requires_grad_()
        loss = linear_cross_entropy(
            copy_to_group(hidden, group), weight, labels, group=group, options=options
        )
        loss.backward()
        _near(loss, expected, torch.float64)
        _near(hidden.grad, whole[0].grad, torch.float64)
        _near(weight.grad, whole[1].grad.chunk(world)[rank], torch.float64)

        logits = F.linear(whole[0], whole[1]).detach()
        own = logits.chunk(world, -1)[rank].clone().requires_grad_()
        cross_entropy(own, labels, group=group, reduction="sum", **terms).backward()
        real = logits.clone().requires_grad_()
        _by_torch(real, labels, terms).backward()
        _near(own.grad, real.grad.chunk(world, -1)[rank], torch.float64)

    ranks(world, body)


def test_huge_logits_stay_finite() -> None:
    hidden = torch.tensor([[1000.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    loss = linear_cross_entropy(
        hidden, weight, torch.tensor([1]), options=LossOptions(label_smoothing=0.3)
    )
    loss.backward()
    assert loss.item() == pytest.approx(2000 * 0.7 + 1000 * 0.3)
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()


def test_a_frozen_weight_costs_no_gradient() -> None:
    hidden, weight, labels = _rand(9, 4).requires_grad_(), _rand(12, 4, seed=1), _labels(9, 12)
    linear_cross_entropy(hidden, weight, labels, options=LossOptions(block_size=4)).backward()
    both = [hidden.detach().clone().requires_grad_(), weight.clone().requires_grad_()]
    linear_cross_entropy(*both, labels, options=LossOptions(block_size=4)).backward()
    assert weight.grad is None
    torch.testing.assert_close(hidden.grad, both[0].grad, rtol=1e-12, atol=0)


def test_without_gradients_nothing_is_kept() -> None:
    hidden, weight = _rand(4, 8), _rand(6, 8).requires_grad_()
    labels = torch.tensor([0, 1, 2, 3])
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels)
    assert not loss.requires_grad
    assert torch.allclose(loss, _whole(hidden, weight, labels, {}))


def test_shapes_that_do_not_match_are_named() -> None:
    with pytest.raises(ValueError, match=r"hidden \(4, 8\), weight \(6, 7\) and labels \(4,\)"):
        linear_cross_entropy(_rand(4, 8), _rand(6, 7), torch.zeros(4).long())


def test_a_label_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="label 5 is outside the vocabulary of 5: 0 to 4"):
        linear_cross_entropy(
            _rand(1, 8), _rand(6, 8), torch.tensor([5]), options=LossOptions(vocab_size=5)
        )


@pytest.mark.parametrize("block_size", [None, 4])
def test_no_tokens_give_zeros(block_size) -> None:
    hidden, weight = torch.empty(0, 8).requires_grad_(), _rand(6, 8).float().requires_grad_()
    loss = linear_cross_entropy(
        hidden, weight, torch.empty(0).long(), options=LossOptions(block_size=block_size)
    )
    loss.backward()
    assert loss == 0
    assert hidden.grad.shape == (0, 8)
    assert torch.equal(weight.grad, torch.zeros(6, 8))


def test_dtypes_that_differ_are_named() -> None:
    with pytest.raises(TypeError, match=r"hidden is torch\.bfloat16 and the weight torch\.float6"):
        linear_cross_entropy(_rand(4, 8).bfloat16(), _rand(6, 8), torch.zeros(4).long())


TOTALS = [576, 6144, 983040]


def _common_factor(grad: Tensor | None, exact: Tensor) -> float:
    """By how much all elements are too large together."""
    assert grad is not None
    return float((grad.double() * exact.sign()).sum() / exact.abs().sum() - 1)


def _bf16_operands() -> tuple[list[Tensor], Tensor]:
    """Leaves in bf16, and labels.

    Logits are small and the vocabulary large, so that bf16 holds the gradient of a logit as well.
    """
    leaves = [_rand(256, 64).bfloat16(), _rand(32768, 64, seed=1).mul(0.02).bfloat16()]
    return [x.requires_grad_() for x in leaves], _labels(256, 32768)


def _exact_gradients(leaves: list[Tensor], labels: Tensor) -> list[Tensor]:
    """Return the gradients of the summed loss, in fp64."""
    exact = [x.detach().double().requires_grad_() for x in leaves]
    return list(torch.autograd.grad(_whole(*exact, labels, {}), exact))


@pytest.mark.parametrize(
    ("block_size", "compiled"),
    [
        (100, False),
        pytest.param(256, False, marks=pytest.mark.campaign),
        pytest.param(None, True, marks=pytest.mark.campaign),
    ],
)
def test_the_mean_over_tokens_puts_no_common_factor_on_bf16_gradients(
    block_size: int | None, compiled: bool
) -> None:
    """1 / total in bf16 is off by 2.5e-3, and so was every gradient of the model."""
    leaves, labels = _bf16_operands()
    function = linear_cross_entropy
    if compiled:  # which takes all tokens as one block
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    loss = function(*leaves, labels, options=LossOptions(block_size=block_size))
    exact = _exact_gradients(leaves, labels)
    for total in TOTALS:
        found = torch.autograd.grad(loss / total, leaves, retain_graph=True)
        for ours, reference in zip(found, exact, strict=True):
            assert abs(_common_factor(ours, reference / total)) < 2e-4


def test_split_bf16_gradients_have_no_common_factor(ranks) -> None:
    def body() -> None:
        group, rank = dist.group.WORLD, dist.get_rank()
        (hidden, weight), labels = _bf16_operands()
        of_hidden, of_weight = _exact_gradients([hidden, weight], labels)
        own = weight.detach().chunk(2)[rank].clone().requires_grad_()
        loss = linear_cross_entropy(copy_to_group(hidden, group), own, labels, group=group)
        for total in TOTALS:
            found = torch.autograd.grad(loss / total, (hidden, own), retain_graph=True)
            assert abs(_common_factor(found[0], of_hidden / total)) < 2e-4
            assert abs(_common_factor(found[1], of_weight.chunk(2)[rank] / total)) < 2e-4

    ranks(2, body)


def test_a_compiled_loss_is_the_eager_one_and_checks_labels() -> None:
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    options, labels, results = LossOptions(**TERMS["all"]), _labels(18, 13), []
    for function in (linear_cross_entropy, compiled):
        leaves = [_rand(18, 16).requires_grad_(), _rand(24, 16, seed=1).requires_grad_()]
        loss = function(*leaves, labels, options=options)
        (loss * 0.25).backward()
        results.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-14)
    with pytest.raises(RuntimeError, match="a label is outside the vocabulary of 13: 0 to 12"):
        compiled(_rand(18, 16), _rand(24, 16), torch.full((18,), 13), options=options)


HEADS = {
    "bias": {},
    "capped": {"softcap": 1.5},
    "all": {"softcap": 2.0, "label_smoothing": 0.2, "z_loss": 1e-2, "vocab_size": 13},
}


def _head(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Hidden states, and a head with a bias."""
    sizes = (18, 16), (24, 16), (24,)
    return [_rand(*size, seed=seed, dtype=dtype) for seed, size in enumerate(sizes)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [None, 5])
@pytest.mark.parametrize("name", HEADS)
def test_a_bias_and_a_cap_of_the_logits_match_the_formula(name, dtype, block_size) -> None:
    terms = HEADS[name]
    labels = _labels(18, terms.get("vocab_size", 24))
    fast = [x.requires_grad_() for x in _head(dtype)]
    plain = [x.detach().double().requires_grad_() for x in fast]
    loss = linear_cross_entropy(
        *fast[:2], labels, bias=fast[2], options=LossOptions(block_size=block_size, **terms)
    )
    expected = _whole(*plain[:2], labels, terms, plain[2])
    _near(loss, expected, dtype)
    (loss * 0.25).backward()
    (expected * 0.25).backward()
    for ours, exact in zip(fast, plain, strict=True):
        _near(ours.grad, exact.grad, dtype)


@pytest.mark.parametrize("name", HEADS)
def test_a_split_head_with_a_bias_and_a_cap_is_the_whole_one(ranks, name) -> None:
    def body() -> None:
        terms, group, rank = HEADS[name], dist.group.WORLD, dist.get_rank()
        labels = _labels(18, terms.get("vocab_size", 24))
        whole = [x.requires_grad_() for x in _head()]
        expected = _whole(*whole[:2], labels, terms, whole[2])
        expected.backward()
        hidden = whole[0].detach().clone().requires_grad_()
        weight, bias = (x.detach().chunk(2)[rank].clone().requires_grad_() for x in whole[1:])
        options = LossOptions(block_size=5, **terms)
        given = copy_to_group(hidden, group), weight, labels
        loss = linear_cross_entropy(*given, bias=bias, group=group, options=options)
        loss.backward()
        _near(loss, expected, torch.float64)
        _near(hidden.grad, whole[0].grad, torch.float64)
        for own, all_rows in zip((weight, bias), whole[1:], strict=True):
            _near(own.grad, all_rows.grad.chunk(2)[rank], torch.float64)

        logits = F.linear(*whole).detach().requires_grad_()
        _by_torch(logits, labels, terms).backward()
        part = logits.detach().chunk(2, -1)[rank].clone().requires_grad_()
        each = cross_entropy(part, labels, group=group, reduction="sum", **terms)
        each.backward()
        _near(each, expected, torch.float64)
        _near(part.grad, logits.grad.chunk(2, -1)[rank], torch.float64)

    ranks(2, body)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_cross_entropy_and_the_square_are_the_loss_with_both(compiled) -> None:
    labels, results = _labels(18, 24), []
    for split in (False, True):
        leaves = [x.requires_grad_() for x in _head()]
        options = LossOptions(softcap=2.0, z_loss=0.1)
        function = linear_cross_entropy_and_z if split else linear_cross_entropy
        if compiled:
            function = torch.compile(function, backend="aot_eager", fullgraph=True)
        found = function(*leaves[:2], labels, bias=leaves[2], options=options)
        loss = found
        if split:
            loss = found[0] + 0.1 * found[1]
            assert not found[1].requires_grad
            plain = linear_cross_entropy(
                *leaves[:2], labels, bias=leaves[2], options=LossOptions(softcap=2.0)
            )
            torch.testing.assert_close(found[0], plain, rtol=1e-12, atol=0)
        (loss * 0.5).backward()
        results.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-14)


def test_a_bias_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bias \(5,\) must have one number for each of the"):
        linear_cross_entropy(_rand(4, 8), _rand(6, 8), torch.zeros(4).long(), bias=_rand(5))


KERNELS = ["torch", "fused", "reference"]
KERNEL_TERMS = {
    "plain": {},
    "all": {"softcap": 2.0, "label_smoothing": 0.2, "z_loss": 1e-2, "vocab_size": 13},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", KERNEL_TERMS)
def test_every_kernel_gives_the_loss_by_the_formula(name, kernel, dtype) -> None:
    terms = KERNEL_TERMS[name]
    labels = _labels(18, terms.get("vocab_size", 24))
    fast = [x.requires_grad_() for x in _head(dtype)]
    plain = [x.detach().double().requires_grad_() for x in fast]
    options = LossOptions(kernel=kernel, block_size=5, **terms)
    loss, square = linear_cross_entropy_and_z(*fast[:2], labels, bias=fast[2], options=options)
    expected = _whole(*plain[:2], labels, terms, plain[2])
    _near(loss + options.z_loss * square, expected, dtype)
    (loss * 0.25).backward()
    (expected * 0.25).backward()
    for ours, exact in zip(fast, plain, strict=True):
        _near(ours.grad, exact.grad, dtype)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", KERNEL_TERMS)
def test_every_kernel_takes_a_split_vocabulary(ranks, name, kernel) -> None:
    def body() -> None:
        terms, group, rank = KERNEL_TERMS[name], dist.group.WORLD, dist.get_rank()
        labels = _labels(18, terms.get("vocab_size", 24))
        options = LossOptions(kernel=kernel, block_size=5, **terms)
        whole = [x.requires_grad_() for x in _head()]
        expected = _whole(*whole[:2], labels, terms, whole[2])
        expected.backward()
        hidden = whole[0].detach().clone().requires_grad_()
        own = [x.detach().chunk(2)[rank].clone().requires_grad_() for x in whole[1:]]
        loss = linear_cross_entropy(
            *(copy_to_group(hidden, group), own[0], labels),
            bias=own[1],
            group=group,
            options=options,
        )
        loss.backward()
        _near(loss, expected, torch.float64)
        for ours, exact in zip((hidden, *own), whole, strict=True):
            part = exact.grad if ours is hidden else exact.grad.chunk(2)[rank]
            _near(ours.grad, part, torch.float64)

    ranks(2, body)


def test_a_kernel_stays_in_a_compiled_graph() -> None:
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    options, labels, results = LossOptions(kernel="reference", **TERMS["all"]), _labels(18, 13), []
    for function in (linear_cross_entropy, compiled):
        leaves = [_rand(18, 16).requires_grad_(), _rand(24, 16, seed=1).requires_grad_()]
        loss = function(*leaves, labels, options=options)
        (loss * 0.25).backward()
        results.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-14)


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="auto, torch, fused, reference"):
        linear_cross_entropy(
            _rand(4, 8), _rand(6, 8), torch.zeros(4).long(), options=LossOptions(kernel="fast")
        )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_labels_of_any_integers_give_the_loss_of_int64(kernel, dtype) -> None:
    hidden, weight, labels = _rand(3, 6), _rand(7, 6, seed=1), torch.tensor([0, 6, 99])
    options = LossOptions(ignore_index=99, kernel=kernel)
    found = linear_cross_entropy(hidden, weight, labels.to(dtype), options=options)
    assert torch.equal(found, linear_cross_entropy(hidden, weight, labels, options=options))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HEADS)
def test_losses_of_tokens_have_gradients_of_their_own(name, dtype, kernel) -> None:
    terms, labels = HEADS[name], _labels(18, HEADS[name].get("vocab_size", 24))
    fast = [x.requires_grad_() for x in _head(dtype)]
    plain = [x.detach().double().requires_grad_() for x in fast]
    options = LossOptions(reduction="none", block_size=5, kernel=kernel, **terms)
    given = fast[0].view(3, 6, 16), fast[1], labels.view(3, 6)
    losses = linear_cross_entropy(*given, bias=fast[2], options=options)
    assert losses.shape == (3, 6)
    grad = _rand(3, 6, seed=5)
    expected = _by_torch(F.linear(*plain), labels, terms, "none").view(3, 6)
    _near(losses, expected, dtype)
    losses.backward(grad.to(losses.dtype))
    expected.backward(grad)
    for ours, exact in zip(fast, plain, strict=True):
        _near(ours.grad, exact.grad, dtype)


def test_losses_of_tokens_of_a_split_vocabulary_send_nothing_in_backward(
    ranks, monkeypatch
) -> None:
    def body() -> None:
        terms, group, rank = HEADS["all"], dist.group.WORLD, dist.get_rank()
        labels, grad = _labels(18, 13), _rand(18, seed=5)
        whole = [x.requires_grad_() for x in _head()]
        expected = _by_torch(F.linear(*whole), labels, terms, "none")
        expected.backward(grad)
        hidden = whole[0].detach().clone().requires_grad_()
        weight, bias = (x.detach().chunk(2)[rank].clone().requires_grad_() for x in whole[1:])
        options = LossOptions(reduction="none", block_size=5, **terms)
        losses = linear_cross_entropy(
            hidden, weight, labels, bias=bias, group=group, options=options
        )
        _near(losses, expected, torch.float64)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", None)
            losses.backward(grad)
        for own, all_rows in zip((weight, bias), whole[1:], strict=True):
            _near(own.grad, all_rows.grad.chunk(2)[rank], torch.float64)
        dist.all_reduce(hidden.grad)
        _near(hidden.grad, whole[0].grad, torch.float64)

    ranks(2, body)


def test_the_mean_is_over_the_tokens_that_count() -> None:
    hidden, weight, labels = _rand(9, 4), _rand(12, 4, seed=1), _labels(9, 12)
    found = linear_cross_entropy(hidden, weight, labels, options=LossOptions(reduction="mean"))
    torch.testing.assert_close(found, F.cross_entropy(hidden @ weight.T, labels))


class Watched(TorchGemm):
    """Counts products, and remembers the most logits that one of them makes."""

    def __init__(self) -> None:
        self.products, self.logits = 0, 0

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = super().forward(x, weight, bias)
        self.products, self.logits = self.products + 1, max(self.logits, out.numel())
        return out

    def dgrad(self, grad_y: Tensor, weight: Tensor) -> Tensor:
        self.products += 1
        return super().dgrad(grad_y, weight)

    def wgrad(self, grad_y: Tensor, x: Tensor) -> Tensor:
        self.products += 1
        return super().wgrad(grad_y, x)


@pytest.mark.parametrize(
    ("reduction", "frozen", "products"),
    [("sum", False, 3), ("sum", True, 2), ("none", False, 4), ("none", True, 3)],
)
def test_there_are_three_products_and_a_fourth_for_gradients_of_tokens(
    reduction, frozen, products
) -> None:
    gemm, options = Watched(), LossOptions(reduction=reduction)
    hidden, weight = _rand(9, 4).requires_grad_(), _rand(12, 4, seed=1).requires_grad_(not frozen)
    linear_cross_entropy(
        hidden, weight, _labels(9, 12), options=options, gemm=gemm
    ).sum().backward()
    assert gemm.products == products


def test_no_more_logits_are_held_than_a_block() -> None:
    gemm = Watched()
    hidden, weight = torch.zeros(1024, 4), torch.zeros(20000, 4)
    linear_cross_entropy(hidden, weight, torch.zeros(1024).long(), gemm=gemm)
    assert gemm.logits == 512 * 20000


def test_what_ignored_tokens_hold_does_not_matter() -> None:
    results = []
    for fill in (1.0, torch.nan):
        hidden, weight, labels = _rand(9, 4), _rand(12, 4, seed=1).requires_grad_(), _labels(9, 12)
        hidden[labels == -100] = fill
        hidden.requires_grad_()
        loss = linear_cross_entropy(hidden, weight, labels)
        loss.backward()
        results.append((loss.detach(), weight.grad))
        assert not hidden.grad[labels == -100].any()
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
