"""The section `distillation` of a run's configuration: a teacher for the model."""

from __future__ import annotations

from dataclasses import dataclass, fields

from mt_files import Checks

from mt_train.config.limits import path_field


@dataclass(frozen=True, kw_only=True)
class DistillationSection:
    """A trained model whose next-token scores the model learns beside the text.

    The loss `distillation` is the divergence KL(teacher || student) of a token, times the square of
    the temperature (Hinton et al., 2015). The teacher lies on the same layout, whole on each
    data-parallel rank, and learns nothing.

    Attributes:
        teacher: Folder of the teacher: a run, one of its steps, or Hugging Face transformers, or an
            id of the Hugging Face hub, with the model's vocabulary. For a model that trains with
            rounding (`quantization`) the teacher is usually the folder it starts from.
        weight: Weight of the loss `distillation`.
        lm_weight: Weight of the language model's own loss; with 0 the model learns from the teacher
            alone.
        temperature: Divisor of both models' scores; above 1 the teacher's unlikely tokens count
            more.
    """

    teacher: str | None = path_field("", is_model=True)
    weight: float = 1.0
    lm_weight: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(0, "lm_weight")
        checks.above(0, "weight", "temperature")
        for item in fields(self) if self.teacher is None and not checks.errors else ():
            value = getattr(self, item.name)
            if value != item.default:
                text = f"{value} needs distillation.teacher, which is null; name a run or a folder"
                checks.add(item.name, f"{text}, or leave it out")
        checks.done()
