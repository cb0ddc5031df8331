"""Optimizers over full-precision masters, layout-independent gradient norms, schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

if TYPE_CHECKING:
    from mt_optim.config import OptimizerConfig
    from mt_optim.device_step import DeviceStep, device_step_obstacle
    from mt_optim.distributed import DistributedOptimizer
    from mt_optim.factory import build_optimizer
    from mt_optim.gradients.clip import clip_grad_norm, grad_norm
    from mt_optim.gradients.guard import StepGuard
    from mt_optim.gradients.limits import GradLimits, NormGroup
    from mt_optim.gradients.result import StepResult
    from mt_optim.gradients.scaler import LossScale, ScaleState
    from mt_optim.optimizer import NamedOptimizer
    from mt_optim.optimizers import SGD, SOAP, AdamW, Lion, Muon
    from mt_optim.parameters.group import default_decay_filter
    from mt_optim.parameters.matrix import is_hidden_matrix
    from mt_optim.parameters.override import GroupOverride, mup_overrides
    from mt_optim.qk_clip import qk_clip_scales
    from mt_optim.rules.orthogonal import Orthogonalization
    from mt_optim.rules.rule import Batch, Rule
    from mt_optim.schedule import LRSchedule, WeightDecaySchedule
    from mt_optim.state.ema import EMA
    from mt_optim.state.storage import StateStorage

__all__ = [
    "EMA",
    "SGD",
    "SOAP",
    "AdamW",
    "Batch",
    "DeviceStep",
    "DistributedOptimizer",
    "GradLimits",
    "GroupOverride",
    "LRSchedule",
    "Lion",
    "LossScale",
    "Muon",
    "NamedOptimizer",
    "NormGroup",
    "OptimizerConfig",
    "Orthogonalization",
    "Rule",
    "ScaleState",
    "StateStorage",
    "StepGuard",
    "StepResult",
    "WeightDecaySchedule",
    "build_optimizer",
    "clip_grad_norm",
    "default_decay_filter",
    "device_step_obstacle",
    "grad_norm",
    "is_hidden_matrix",
    "mup_overrides",
    "qk_clip_scales",
]

# Few programs use more than two or three of them.
__getattr__ = resolve_later(__name__)
