"""Mixture-of-experts layers that take process groups: routers, dispatchers, grouped experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_moe.error import RoutingError

if TYPE_CHECKING:
    from mt_moe.dispatch.choice import make_dispatcher
    from mt_moe.dispatch.dispatcher import Dispatcher, DispatchOutput
    from mt_moe.experts.experts import Experts
    from mt_moe.experts.form import check_form
    from mt_moe.experts.grouped_linear import GroupedLinear
    from mt_moe.experts.kernels import GroupedKernel
    from mt_moe.experts.linear_experts import LinearExperts, unfuse_experts
    from mt_moe.experts.low_precision import LowPrecisionExperts
    from mt_moe.experts.options import ExpertOptions
    from mt_moe.groups import ExpertGroups
    from mt_moe.layer import MoELayer, MoEOutput
    from mt_moe.options import MoEOptions
    from mt_moe.recomputation import in_backward
    from mt_moe.routing.capacity import Capacity
    from mt_moe.routing.choice import RouterOptions, route
    from mt_moe.routing.expert_bias import BiasOptions, update_expert_biases
    from mt_moe.routing.replay import recorded_routes, replayed_routes
    from mt_moe.routing.router import Router
    from mt_moe.routing.rules import check_choice, check_number, training_obstacle
    from mt_moe.upcycling import upcycle, upcycle_router

__all__ = [
    "BiasOptions",
    "Capacity",
    "DispatchOutput",
    "Dispatcher",
    "ExpertGroups",
    "ExpertOptions",
    "Experts",
    "GroupedKernel",
    "GroupedLinear",
    "LinearExperts",
    "LowPrecisionExperts",
    "MoELayer",
    "MoEOptions",
    "MoEOutput",
    "Router",
    "RouterOptions",
    "RoutingError",
    "check_choice",
    "check_form",
    "check_number",
    "in_backward",
    "make_dispatcher",
    "recorded_routes",
    "replayed_routes",
    "route",
    "training_obstacle",
    "unfuse_experts",
    "upcycle",
    "upcycle_router",
    "update_expert_biases",
]

# A layer imports most of three packages; a router alone does not need them.
__getattr__ = resolve_later(__name__)
