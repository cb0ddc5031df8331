"""Distillation against torch's divergence and finite differences."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from mt_quant import QuantizationError, distillation_loss


def logits(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_it_is_the_divergence_of_torch_times_the_squared_temperature(temperature: float) -> None:
    student, teacher = logits(3, 5, 11, seed=0), logits(3, 5, 11, seed=1)
    loss, count = distillation_loss(student, teacher, temperature=temperature)
    expected = F.kl_div(
        F.log_softmax(student / temperature, -1),
        F.log_softmax(teacher / temperature, -1),
        reduction="sum",
        log_target=True,
    )
    torch.testing.assert_close(loss, expected * temperature**2, rtol=1e-12, atol=1e-12)
    assert int(count) == 15


@pytest.mark.parametrize("temperature", [0.7, 3.0])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_are_those_of_finite_differences(masked: bool, temperature: float) -> None:
    student, teacher = logits(4, 7, seed=0).requires_grad_(), logits(4, 7, seed=1)
    mask = torch.tensor([1, 0, 1, 1]) if masked else None

    def loss(x: torch.Tensor) -> torch.Tensor:
        return distillation_loss(x, teacher, temperature=temperature, mask=mask)[0]

    assert torch.autograd.gradcheck(loss, student)


def test_a_student_that_is_the_teacher_has_no_loss_and_no_gradient() -> None:
    student = logits(4, 7, seed=0).requires_grad_()
    loss, _ = distillation_loss(student, student.detach(), temperature=2.0)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0, abs=1e-14)
    assert float(student.grad.abs().max()) < 1e-14


def test_no_gradient_goes_to_the_teacher() -> None:
    student, teacher = (logits(2, 5, seed=i).requires_grad_() for i in range(2))
    distillation_loss(student, teacher)[0].backward()
    assert teacher.grad is None


def test_masked_tokens_may_be_anything() -> None:
    student, teacher = logits(3, 5, seed=0), logits(3, 5, seed=1)
    expected, _ = distillation_loss(student[:2], teacher[:2])
    student[2] = float("nan")
    student.requires_grad_()
    loss, count = distillation_loss(student, teacher, mask=torch.tensor([True, True, False]))
    torch.testing.assert_close(loss, expected)
    assert int(count) == 2


def test_tokens_that_the_teacher_excludes_add_nothing() -> None:
    student, teacher = logits(2, 5, seed=0).requires_grad_(), logits(2, 5, seed=1)
    teacher[:, 3] = -torch.inf
    loss, _ = distillation_loss(student, teacher)
    loss.backward()
    assert bool(loss.isfinite())
    assert bool(student.grad.isfinite().all())


def test_bf16_logits_are_summed_in_fp32() -> None:
    student, teacher = (logits(64, 300, seed=i).bfloat16() for i in range(2))
    loss, _ = distillation_loss(student, teacher)
    exact, _ = distillation_loss(student.double(), teacher.double())
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(exact), rel=1e-5)


def test_bad_arguments_are_named() -> None:
    x = torch.zeros(2, 5)
    with pytest.raises(QuantizationError, match="temperature must be above 0"):
        distillation_loss(x, x, temperature=0.0)
    with pytest.raises(QuantizationError, match="same vocabulary"):
        distillation_loss(x, torch.zeros(2, 6))
    with pytest.raises(QuantizationError, match="one value for each token"):
        distillation_loss(x, x, mask=torch.ones(5))
