"""Optimizers over full-precision masters, layout-independent gradient norms, schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

if TYPE_CHECKING:
    from mt_optim.adamw import AdamW, AdamWRule, fused_obstacle
    from mt_optim.bad import BadGradient
    from mt_optim.clip import clip_grad_norm, grad_norm
    from mt_optim.config import OptimizerConfig
    from mt_optim.device_step import DeviceStep, device_step_obstacle
    from mt_optim.distributed import DistributedOptimizer
    from mt_optim.ema import EMA
    from mt_optim.factory import build_optimizer
    from mt_optim.group import DecayFilter, default_decay_filter
    from mt_optim.guard import StepGuard
    from mt_optim.host import Traffic
    from mt_optim.limits import GradLimits, NormGroup
    from mt_optim.lion import Lion, LionRule
    from mt_optim.matrix import is_hidden_matrix
    from mt_optim.muon import AdaptiveMuonRule, Muon, MuonRule
    from mt_optim.optimizer import NamedOptimizer
    from mt_optim.orthogonal import Orthogonalization
    from mt_optim.override import GroupOverride, mup_overrides, override_groups
    from mt_optim.qk_clip import qk_clip_scales
    from mt_optim.result import StepResult
    from mt_optim.rule import Batch, Rule
    from mt_optim.scaler import GradScaler, LossScale, ScaleState
    from mt_optim.schedule import LRSchedule, WeightDecaySchedule
    from mt_optim.sgd import SGD, SGDRule
    from mt_optim.soap import SOAP, SOAPRule
    from mt_optim.statistics import GradStatistics, by_layer
    from mt_optim.storage import StateStorage
    from mt_optim.torch_rule import TorchRule

__all__ = [
    "EMA",
    "SGD",
    "SOAP",
    "AdamW",
    "AdamWRule",
    "AdaptiveMuonRule",
    "BadGradient",
    "Batch",
    "DecayFilter",
    "DeviceStep",
    "DistributedOptimizer",
    "GradLimits",
    "GradScaler",
    "GradStatistics",
    "GroupOverride",
    "LRSchedule",
    "Lion",
    "LionRule",
    "LossScale",
    "Muon",
    "MuonRule",
    "NamedOptimizer",
    "NormGroup",
    "OptimizerConfig",
    "Orthogonalization",
    "Rule",
    "SGDRule",
    "SOAPRule",
    "ScaleState",
    "StateStorage",
    "StepGuard",
    "StepResult",
    "TorchRule",
    "Traffic",
    "WeightDecaySchedule",
    "build_optimizer",
    "by_layer",
    "clip_grad_norm",
    "default_decay_filter",
    "device_step_obstacle",
    "fused_obstacle",
    "grad_norm",
    "is_hidden_matrix",
    "mup_overrides",
    "override_groups",
    "qk_clip_scales",
]

# Few programs use more than two or three of them.
__getattr__ = resolve_later(
    __name__,
    adamw="AdamW AdamWRule fused_obstacle",
    bad="BadGradient",
    clip="clip_grad_norm grad_norm",
    config="OptimizerConfig",
    device_step="DeviceStep device_step_obstacle",
    distributed="DistributedOptimizer",
    ema="EMA",
    factory="build_optimizer",
    group="DecayFilter default_decay_filter",
    guard="StepGuard",
    host="Traffic",
    limits="GradLimits NormGroup",
    lion="Lion LionRule",
    matrix="is_hidden_matrix",
    muon="AdaptiveMuonRule Muon MuonRule",
    optimizer="NamedOptimizer",
    orthogonal="Orthogonalization",
    override="GroupOverride mup_overrides override_groups",
    qk_clip="qk_clip_scales",
    result="StepResult",
    rule="Batch Rule",
    scaler="GradScaler LossScale ScaleState",
    schedule="LRSchedule WeightDecaySchedule",
    sgd="SGD SGDRule",
    soap="SOAP SOAPRule",
    statistics="GradStatistics by_layer",
    storage="StateStorage",
    torch_rule="TorchRule",
)
