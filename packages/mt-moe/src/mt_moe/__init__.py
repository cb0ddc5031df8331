"""Mixture-of-experts layers that take process groups: routers, dispatchers, grouped experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_moe.error import RoutingError

if TYPE_CHECKING:
    from mt_moe.all_gather import AllGatherDispatcher
    from mt_moe.all_to_all import AllToAllDispatcher
    from mt_moe.backward import in_backward
    from mt_moe.balance import LossSum, balance_loss, count_choices, shares_of, z_loss
    from mt_moe.capacity import Capacity, kept_choices
    from mt_moe.deep_ep import DeepEPDispatcher
    from mt_moe.dispatch import Dispatcher, LocalDispatcher, Sent
    from mt_moe.dispatchers import DISPATCHERS, DispatcherKind, make_dispatcher
    from mt_moe.expert_bias import BiasOptions, ExpertBias, update_expert_biases
    from mt_moe.expert_options import ExpertOptions
    from mt_moe.experts import Experts, GroupedLinear
    from mt_moe.grouped import GROUPED_KERNELS, GroupedKernel, grouped_obstacles
    from mt_moe.groups import ExpertGroups
    from mt_moe.layer import MoELayer, MoEOutput
    from mt_moe.linear_experts import LinearExperts, unfuse_experts
    from mt_moe.moe_options import MoEOptions
    from mt_moe.replay import recorded_routes, replayed_routes
    from mt_moe.router import Routed, Router
    from mt_moe.routing import RouterOptions, Routing, route
    from mt_moe.rules import Choice, check_choice, check_form, check_number
    from mt_moe.shared import SharedExpert
    from mt_moe.sinkhorn_scaling import sinkhorn, sinkhorn_bias
    from mt_moe.upcycling import upcycle, upcycle_router

__all__ = [
    "DISPATCHERS",
    "GROUPED_KERNELS",
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "BiasOptions",
    "Capacity",
    "Choice",
    "DeepEPDispatcher",
    "Dispatcher",
    "DispatcherKind",
    "ExpertBias",
    "ExpertGroups",
    "ExpertOptions",
    "Experts",
    "GroupedKernel",
    "GroupedLinear",
    "LinearExperts",
    "LocalDispatcher",
    "LossSum",
    "MoELayer",
    "MoEOptions",
    "MoEOutput",
    "Routed",
    "Router",
    "RouterOptions",
    "Routing",
    "RoutingError",
    "Sent",
    "SharedExpert",
    "balance_loss",
    "check_choice",
    "check_form",
    "check_number",
    "count_choices",
    "grouped_obstacles",
    "in_backward",
    "kept_choices",
    "make_dispatcher",
    "recorded_routes",
    "replayed_routes",
    "route",
    "shares_of",
    "sinkhorn",
    "sinkhorn_bias",
    "unfuse_experts",
    "upcycle",
    "upcycle_router",
    "update_expert_biases",
    "z_loss",
]

# A layer imports most of three packages; whoever needs a router alone does not.
__getattr__ = resolve_later(
    __name__,
    all_gather="AllGatherDispatcher",
    all_to_all="AllToAllDispatcher",
    deep_ep="DeepEPDispatcher",
    backward="in_backward",
    balance="LossSum balance_loss count_choices shares_of z_loss",
    capacity="Capacity kept_choices",
    dispatch="Dispatcher LocalDispatcher Sent",
    dispatchers="DISPATCHERS DispatcherKind make_dispatcher",
    expert_bias="BiasOptions ExpertBias update_expert_biases",
    expert_options="ExpertOptions",
    experts="Experts GroupedLinear",
    grouped="GROUPED_KERNELS GroupedKernel grouped_obstacles",
    groups="ExpertGroups",
    layer="MoELayer MoEOutput",
    linear_experts="LinearExperts unfuse_experts",
    moe_options="MoEOptions",
    replay="recorded_routes replayed_routes",
    router="Routed Router",
    routing="RouterOptions Routing route",
    rules="Choice check_choice check_form check_number",
    shared="SharedExpert",
    sinkhorn_scaling="sinkhorn sinkhorn_bias",
    upcycling="upcycle upcycle_router",
)
