"""Pipeline schedules as values: generate, check, simulate and draw them."""

from mt_schedule.action import Action, Op
from mt_schedule.checker import Violation, check
from mt_schedule.communication import Step, forward_only, insert_communication, steps
from mt_schedule.costs import Costs
from mt_schedule.deferral import defer_weights
from mt_schedule.gantt import Panel, draw_text
from mt_schedule.ir import Schedule
from mt_schedule.notation import LayoutError, StageContent, parse_layout
from mt_schedule.schedules import SCHEDULES, make_schedule
from mt_schedule.simulator import Simulation, Span, simulate
from mt_schedule.split import balance_layers, place_stages, split_layers
from mt_schedule.svg import draw_svg

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "LayoutError",
    "Op",
    "Panel",
    "Schedule",
    "Simulation",
    "Span",
    "StageContent",
    "Step",
    "Violation",
    "balance_layers",
    "check",
    "defer_weights",
    "draw_svg",
    "draw_text",
    "forward_only",
    "insert_communication",
    "make_schedule",
    "parse_layout",
    "place_stages",
    "simulate",
    "split_layers",
    "steps",
]
