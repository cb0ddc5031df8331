"""Mixture-of-experts layers that take process groups: routers, dispatchers, grouped experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_moe.error import RoutingError as RoutingError

if TYPE_CHECKING:
    from mt_moe.dispatch.choice import make_dispatcher as make_dispatcher
    from mt_moe.dispatch.dispatcher import Dispatcher as Dispatcher
    from mt_moe.dispatch.dispatcher import DispatchOutput as DispatchOutput
    from mt_moe.experts.experts import Experts as Experts
    from mt_moe.experts.form import check_form as check_form
    from mt_moe.experts.grouped_linear import GroupedLinear as GroupedLinear
    from mt_moe.experts.kernels import GroupedKernel as GroupedKernel
    from mt_moe.experts.linear_experts import LinearExperts as LinearExperts
    from mt_moe.experts.linear_experts import unfuse_experts as unfuse_experts
    from mt_moe.experts.low_precision import LowPrecisionExperts as LowPrecisionExperts
    from mt_moe.experts.options import ExpertOptions as ExpertOptions
    from mt_moe.groups import ExpertGroups as ExpertGroups
    from mt_moe.layer import MoELayer as MoELayer
    from mt_moe.layer import MoEOutput as MoEOutput
    from mt_moe.options import MoEOptions as MoEOptions
    from mt_moe.recomputation import in_backward as in_backward
    from mt_moe.routing.capacity import Capacity as Capacity
    from mt_moe.routing.choice import RouterOptions as RouterOptions
    from mt_moe.routing.choice import route as route
    from mt_moe.routing.expert_bias import BiasOptions as BiasOptions
    from mt_moe.routing.expert_bias import update_expert_biases as update_expert_biases
    from mt_moe.routing.replay import recorded_routes as recorded_routes
    from mt_moe.routing.replay import replayed_routes as replayed_routes
    from mt_moe.routing.router import Router as Router
    from mt_moe.routing.rules import check_choice as check_choice
    from mt_moe.routing.rules import check_number as check_number
    from mt_moe.routing.rules import training_obstacle as training_obstacle
    from mt_moe.upcycling import upcycle as upcycle
    from mt_moe.upcycling import upcycle_router as upcycle_router
else:
    # A layer imports most of three packages; a router alone does not need them.
    __getattr__ = resolve_later(__name__)
