"""Pipeline schedules as values: generate, check, simulate and run them."""

from mt_pipeline.action import Action, Mark, Op
from mt_pipeline.checker import Violation, check
from mt_pipeline.communication import forward_only, insert_communication, insert_hooks
from mt_pipeline.costs import Costs
from mt_pipeline.executor import Executor, Stage, StageError
from mt_pipeline.ir import Schedule
from mt_pipeline.placement import own_layers, split_layers
from mt_pipeline.schedules import make_schedule, one_forward_one_backward
from mt_pipeline.simulator import Simulation, Span, simulate
from mt_pipeline.transfer import TensorSpec, TransferError

__all__ = [
    "Action",
    "Costs",
    "Executor",
    "Mark",
    "Op",
    "Schedule",
    "Simulation",
    "Span",
    "Stage",
    "StageError",
    "TensorSpec",
    "TransferError",
    "Violation",
    "check",
    "forward_only",
    "insert_communication",
    "insert_hooks",
    "make_schedule",
    "one_forward_one_backward",
    "own_layers",
    "simulate",
    "split_layers",
]
