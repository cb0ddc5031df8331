"""A student's divergence from its teacher: the formula, its gradients, and a shared vocabulary."""

import pytest
import torch
import torch.nn.functional as F
from mt_model import GPT, gpt
from mt_model.language.divergence import Scoring, Teaching, divergence
from mt_parallel_state import ParallelLayout, ParallelState, copy_to_group
from torch import distributed as dist

F64 = torch.float64
SIZES = {"vocab_size": 30, "hidden_size": 8, "num_layers": 1, "num_heads": 2}


def distillation_loss(student, teacher, *, temperature, mask):
    """Return the sum of KL(teacher || student) over tokens, from logits of the whole vocabulary."""
    ours, theirs = (F.log_softmax(x / temperature, dim=-1) for x in (student, teacher.detach()))
    losses = F.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1)
    return losses[mask].sum() * temperature**2


def drawn(*shape, seed):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def sides(*, rows=32, bias=True, softcap=None, seed=0):
    biases = drawn(rows, seed=seed + 2) if bias else None
    return Scoring(drawn(2, 5, 8, seed=seed), drawn(rows, 8, seed=seed + 1), biases, softcap)


def expected(student, teacher, counted, temperature, vocab_size):
    logits = [F.linear(x.hidden, x.weight, x.bias)[..., :vocab_size] for x in (student, teacher)]
    caps = (student.softcap, teacher.softcap)
    logits = [
        x if cap is None else cap * torch.tanh(x / cap) for x, cap in zip(logits, caps, strict=True)
    ]
    return distillation_loss(*logits, temperature=temperature, mask=counted)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("form", [{}, {"bias": False}, {"softcap": 3.0}], ids=str)
def test_it_is_the_loss_of_whole_logits_with_its_gradients(form, temperature, monkeypatch):
    monkeypatch.setitem(divergence.__globals__, "block_rows", lambda *_: 512)
    student, teacher = sides(seed=0, **form), sides(seed=7)
    student = student._replace(hidden=drawn(3, 400, 8, seed=0))
    teacher = teacher._replace(hidden=drawn(3, 400, 8, seed=7))
    counted = drawn(3, 400, seed=5) > 0
    learns = [x.requires_grad_() for x in student[:3] if x is not None]
    found = divergence(student, Teaching(teacher, temperature), counted, vocab_size=30)
    wanted = expected(student, teacher, counted, temperature, 30)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    pairs = (torch.autograd.grad(3 * loss, learns) for loss in (found, wanted))
    for own, other in zip(*pairs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10)


def test_gradcheck_and_a_frozen_head():
    student, teacher = sides(seed=0), sides(seed=7)
    counted = torch.ones(2, 5, dtype=torch.bool)

    def loss(hidden, weight, bias):
        side = Scoring(hidden, weight, bias, None)
        return divergence(side, Teaching(teacher, 1.0), counted, vocab_size=30)

    assert torch.autograd.gradcheck(loss, [x.requires_grad_() for x in student[:3]])
    hidden = student.hidden.detach().requires_grad_()
    loss(hidden, student.weight.detach(), None).backward()
    assert hidden.grad.abs().sum() > 0
    assert not divergence(teacher, Teaching(teacher, 2.0), counted, vocab_size=30).abs() > 1e-12


def test_a_vocabulary_that_ranks_share_gives_the_numbers_of_one(ranks):
    def body():
        group, rank = dist.group.WORLD, dist.get_rank()
        student, teacher = sides(rows=32, softcap=2.0, seed=0), sides(rows=32, seed=7)
        counted = drawn(2, 5, seed=5) > 0
        whole = [x.clone().requires_grad_() for x in student[:3]]
        wanted = divergence(Scoring(*whole, 2.0), Teaching(teacher, 1.5), counted, vocab_size=13)
        wanted.backward()
        own = slice(rank * 8, rank * 8 + 8)  # of which the last two have padding alone
        parts = [student.hidden, student.weight[own], student.bias[own]]
        parts = [x.clone().requires_grad_() for x in parts]
        cut = teacher._replace(weight=teacher.weight[own], bias=teacher.bias[own])
        side = Scoring(copy_to_group(parts[0], group), *parts[1:], 2.0)
        found = divergence(side, Teaching(cut, 1.5), counted, vocab_size=13, group=group)
        found.backward()
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
        grads = [whole[0].grad, whole[1].grad[own], whole[2].grad[own]]
        for part, grad in zip(parts, grads, strict=True):
            torch.testing.assert_close(part.grad, grad, rtol=1e-10, atol=1e-12)

    ranks(4, body)


def test_a_model_has_the_loss_of_a_batch_with_a_teacher():
    teacher = GPT(gpt(**SIZES, max_sequence_length=8), seed=1, dtype=F64).eval()
    student = GPT(gpt(**SIZES, max_sequence_length=8, tied=False), seed=2, dtype=F64)
    tokens = torch.arange(16).view(2, 8)
    labels = tokens.roll(-1, 1).masked_fill(tokens == 3, -100)
    x, shared = teacher.begin(None, {"tokens": tokens})
    teaching = teacher.teach(teacher.run_layers(x, shared)[0], 2.0)
    losses = student(None, {"tokens": tokens, "labels": labels, "teaching": teaching})
    scores = student(None, {"tokens": tokens}), teacher(None, {"tokens": tokens})
    wanted = distillation_loss(*scores, temperature=2.0, mask=labels != -100)
    torch.testing.assert_close(losses["distillation"], wanted, rtol=1e-12, atol=0)
    assert losses["lm"] == student(None, {"tokens": tokens, "labels": labels})["lm"]
    with ParallelState(ParallelLayout()) as state:
        other = GPT(gpt(**{**SIZES, "vocab_size": 40}, max_sequence_length=8), state, dtype=F64)
        with pytest.raises(ValueError, match="equal vocab_rows"):
            other(None, {"tokens": tokens, "labels": labels, "teaching": teaching})
