"""Pipeline schedules as values: generate, check, simulate and run them."""

from mt_pipeline.action import Action, Mark, Op
from mt_pipeline.bridge import Box, Bridge, Move, batch_boxes, layout_boxes, plan_moves
from mt_pipeline.checker import Violation, check
from mt_pipeline.communication import forward_only, insert_communication, insert_hooks
from mt_pipeline.costs import Costs
from mt_pipeline.deferral import defer_weights
from mt_pipeline.executor import Executor
from mt_pipeline.gantt import Panel, draw_text
from mt_pipeline.ir import Schedule
from mt_pipeline.layout import LayoutError, StageContent, parse_layout
from mt_pipeline.optimise import optimise
from mt_pipeline.placement import (
    balance_layers,
    own_layers,
    place_layers,
    place_stages,
    split_layers,
)
from mt_pipeline.schedules import GENERATORS, make_schedule
from mt_pipeline.simulator import Simulation, Span, simulate
from mt_pipeline.stage import (
    DefersWeightGradients,
    RandomState,
    SplitStage,
    Stage,
    StageError,
)
from mt_pipeline.svg import draw_svg
from mt_pipeline.tied import sum_tied_gradients
from mt_pipeline.transfer import TensorSpec, TransferError

__all__ = [
    "GENERATORS",
    "Action",
    "Box",
    "Bridge",
    "Costs",
    "DefersWeightGradients",
    "Executor",
    "LayoutError",
    "Mark",
    "Move",
    "Op",
    "Panel",
    "RandomState",
    "Schedule",
    "Simulation",
    "Span",
    "SplitStage",
    "Stage",
    "StageContent",
    "StageError",
    "TensorSpec",
    "TransferError",
    "Violation",
    "balance_layers",
    "batch_boxes",
    "check",
    "defer_weights",
    "draw_svg",
    "draw_text",
    "forward_only",
    "insert_communication",
    "insert_hooks",
    "layout_boxes",
    "make_schedule",
    "optimise",
    "own_layers",
    "parse_layout",
    "place_layers",
    "place_stages",
    "plan_moves",
    "simulate",
    "split_layers",
    "sum_tied_gradients",
]
