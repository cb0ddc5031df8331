"""Run pipeline schedules in any training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later
from mt_schedule import check as check
from mt_schedule import make_schedule as make_schedule
from mt_schedule import simulate as simulate

from mt_pipeline.stage import DefersWeightGradients as DefersWeightGradients
from mt_pipeline.stage import SplitStage as SplitStage
from mt_pipeline.stage import Stage as Stage
from mt_pipeline.stage import StageError as StageError
from mt_pipeline.transfer import TensorSpec as TensorSpec
from mt_pipeline.transfer import TransferError as TransferError

if TYPE_CHECKING:
    from mt_pipeline.executor import Executor as Executor
else:
    # Resolved at first use, so that an import stays light.
    __getattr__ = resolve_later(__name__)
