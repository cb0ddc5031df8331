"""What the layers of a rank's stages run through in training and evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mt_model import GPT

from mt_train.config import TrainingSection
from mt_train.metrics import Record


def wrap_layers(stages: Sequence[GPT], training: TrainingSection) -> None:
    """Put around what each layer computes what the configuration asks for."""
    if training.compile:
        for stage in stages:
            stage.wrap_layers(torch.compile)


def describe(record: Record) -> str | None:
    """Say how long a run that compiles took for its first step; None for other steps."""
    if "first_step_seconds" not in record:
        return None
    return f"the first step took {record['first_step_seconds']:.1f} s, with compilation"
