"""Run pipeline schedules, and join modules with different parallel layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later
from mt_schedule import check, make_schedule, simulate

from mt_pipeline.stage import DefersWeightGradients, SplitStage, Stage, StageError
from mt_pipeline.transfer import TensorSpec, TransferError

if TYPE_CHECKING:
    from mt_pipeline.bridge import Box, Bridge, Move, batch_boxes, layout_boxes, plan_moves
    from mt_pipeline.executor import Executor

__all__ = [
    "Box",
    "Bridge",
    "DefersWeightGradients",
    "Executor",
    "Move",
    "SplitStage",
    "Stage",
    "StageError",
    "TensorSpec",
    "TransferError",
    "batch_boxes",
    "check",
    "layout_boxes",
    "make_schedule",
    "plan_moves",
    "simulate",
]

# Resolved at first use, so that an import stays light.
__getattr__ = resolve_later(__name__)
