"""The list of a trainer's parts. A new feature adds its line here."""

from __future__ import annotations

from mt_train.config.run_config import RunConfig
from mt_train.parts.activations import ActivationWatch
from mt_train.parts.clipping import LogitClip
from mt_train.parts.compilation import Compilation
from mt_train.parts.distillation import Distillation
from mt_train.parts.experts import ExpertLoads
from mt_train.parts.graphs import CudaGraphs
from mt_train.parts.part import TrainerPart
from mt_train.parts.precision import LowPrecision
from mt_train.parts.profiling import Profiling
from mt_train.parts.quantization import FakeQuantization

PARTS: tuple[type[TrainerPart], ...] = (
    LowPrecision,
    FakeQuantization,
    ExpertLoads,
    Compilation,
    CudaGraphs,
    Distillation,  # after parts that replace a stage: the teacher runs beside the replacement
    LogitClip,
    ActivationWatch,  # after all parts that change a stage, since it runs complete stages once
    Profiling,
)


def wanted_parts(config: RunConfig) -> list[type[TrainerPart]]:
    """Return the parts that a run has, in the order of their hooks."""
    return [part for part in PARTS if part.is_wanted(config)]
