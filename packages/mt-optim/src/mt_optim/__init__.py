"""Optimizers over full-precision masters, layout-independent gradient norms, schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

if TYPE_CHECKING:
    from mt_optim.config import OptimizerConfig as OptimizerConfig
    from mt_optim.device_step import DeviceStep as DeviceStep
    from mt_optim.device_step import device_step_obstacle as device_step_obstacle
    from mt_optim.distributed import DistributedOptimizer as DistributedOptimizer
    from mt_optim.factory import build_optimizer as build_optimizer
    from mt_optim.gradients.clip import clip_grad_norm as clip_grad_norm
    from mt_optim.gradients.clip import grad_norm as grad_norm
    from mt_optim.gradients.guard import StepGuard as StepGuard
    from mt_optim.gradients.limits import GradLimits as GradLimits
    from mt_optim.gradients.limits import NormGroup as NormGroup
    from mt_optim.gradients.result import StepResult as StepResult
    from mt_optim.gradients.scaler import LossScale as LossScale
    from mt_optim.gradients.scaler import ScaleState as ScaleState
    from mt_optim.optimizer import NamedOptimizer as NamedOptimizer
    from mt_optim.optimizers import SGD as SGD
    from mt_optim.optimizers import SOAP as SOAP
    from mt_optim.optimizers import AdamW as AdamW
    from mt_optim.optimizers import Lion as Lion
    from mt_optim.optimizers import Muon as Muon
    from mt_optim.parameters.group import default_decay_filter as default_decay_filter
    from mt_optim.parameters.matching import GroupOverride as GroupOverride
    from mt_optim.parameters.matrix import is_hidden_matrix as is_hidden_matrix
    from mt_optim.parameters.override import mup_overrides as mup_overrides
    from mt_optim.qk_clip import QKClip as QKClip
    from mt_optim.rules.orthogonal import Orthogonalization as Orthogonalization
    from mt_optim.rules.rule import Batch as Batch
    from mt_optim.rules.rule import Rule as Rule
    from mt_optim.schedule import LRSchedule as LRSchedule
    from mt_optim.schedule import WeightDecaySchedule as WeightDecaySchedule
    from mt_optim.state.ema import EMA as EMA
    from mt_optim.state.storage import StateStorage as StateStorage
else:
    # Few programs use more than two or three of them.
    __getattr__ = resolve_later(__name__)
