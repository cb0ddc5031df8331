"""How far a student's distribution over tokens is from its teacher's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_quant.error import QuantizationError


def distillation_loss(
    student: Tensor, teacher: Tensor, *, temperature: float = 1.0, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sum over tokens of the divergence KL(teacher || student), and their count.

    Both logits are divided by the temperature and the sum is multiplied by its square, so that
    gradients stay of one size (Hinton et al. 2015, https://arxiv.org/abs/1503.02531). Computed in
    fp32, or fp64 for fp64. No gradient goes to the teacher.

    Args:
        student: Logits, over the whole vocabulary.
        teacher: Logits of the model before quantisation.
        temperature: Above 1 weighs what the teacher finds unlikely.
        mask: Which tokens count; None for all.

    Shape:
        student, teacher: [..., vocabulary]. mask: [...]. Returns two scalars.

    Raises:
        QuantizationError: Shapes differ, or the temperature is not above 0.
    """
    if not 0 < temperature < float("inf"):
        raise QuantizationError(f"temperature must be above 0 and finite, got {temperature}")
    if student.shape != teacher.shape or student.dim() < 1:
        raise QuantizationError(
            f"student has shape {tuple(student.shape)} and teacher {tuple(teacher.shape)}; they "
            "must be logits of the same tokens over the same vocabulary"
        )
    if mask is not None and mask.shape != student.shape[:-1]:
        raise QuantizationError(
            f"mask has shape {tuple(mask.shape)}, expected one value for each token, "
            f"{tuple(student.shape[:-1])}"
        )
    wide = torch.promote_types(student.dtype, torch.float32)
    ours = F.log_softmax(student.to(wide) / temperature, dim=-1)
    theirs = F.log_softmax(teacher.detach().to(wide) / temperature, dim=-1)
    kept = (theirs.exp() * (theirs - ours).where(theirs > -torch.inf, 0.0)).sum(-1)
    if mask is None:
        return kept.sum() * temperature**2, kept.new_tensor(kept.numel())
    weights = mask.to(wide)
    return torch.where(mask > 0, kept * weights, 0.0).sum() * temperature**2, weights.sum()
