"""The section `distillation` of a run's configuration: a teacher whose scores are learnt."""

from __future__ import annotations

from dataclasses import dataclass, fields

from mt_files import Checks

from mt_train.config.limits import path_field


@dataclass(frozen=True, kw_only=True)
class DistillationSection:
    """A trained model whose scores of the next token are learnt beside the text.

    The loss `distillation` is the divergence KL(teacher || student) of a token, times the square of
    the temperature (Hinton et al., 2015). The teacher lies on the same layout, whole on each
    data-parallel rank, and learns nothing.

    Attributes:
        teacher: A run folder, one of its step folders, or a folder of Hugging Face transformers,
            with the vocabulary of the model. For a model that is trained as it will be rounded
            (`quantization`) it is usually the folder that it starts from.
        weight: Of the loss `distillation`.
        lm_weight: Of the language model's own loss; 0 learns from the teacher alone.
        temperature: Divides the scores of both; above 1 weighs what the teacher finds unlikely.
    """

    teacher: str | None = path_field("")
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
