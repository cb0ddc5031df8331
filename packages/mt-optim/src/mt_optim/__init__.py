"""Optimizers over full-precision masters, layout-independent gradient norms, schedules."""

from mt_optim.adamw import AdamW, AdamWRule, fused_obstacle
from mt_optim.clip import clip_grad_norm, grad_norm
from mt_optim.config import OptimizerConfig
from mt_optim.distributed import DistributedOptimizer
from mt_optim.ema import EMA
from mt_optim.factory import build_optimizer
from mt_optim.group import DecayFilter, default_decay_filter
from mt_optim.guard import StepGuard
from mt_optim.host import Traffic
from mt_optim.lion import Lion, LionRule
from mt_optim.matrix import is_hidden_matrix
from mt_optim.muon import AdaptiveMuonRule, Muon, MuonRule
from mt_optim.optimizer import NamedOptimizer
from mt_optim.orthogonal import Orthogonalization
from mt_optim.override import GroupOverride, mup_overrides, override_groups
from mt_optim.qk_clip import qk_clip_scales
from mt_optim.result import StepResult
from mt_optim.rule import Batch, Rule
from mt_optim.schedule import LRSchedule, WeightDecaySchedule
from mt_optim.sgd import SGD, SGDRule
from mt_optim.soap import SOAP, SOAPRule
from mt_optim.storage import StateStorage
from mt_optim.torch_rule import TorchRule

__all__ = [
    "EMA",
    "SGD",
    "SOAP",
    "AdamW",
    "AdamWRule",
    "AdaptiveMuonRule",
    "Batch",
    "DecayFilter",
    "DistributedOptimizer",
    "GroupOverride",
    "LRSchedule",
    "Lion",
    "LionRule",
    "Muon",
    "MuonRule",
    "NamedOptimizer",
    "OptimizerConfig",
    "Orthogonalization",
    "Rule",
    "SGDRule",
    "SOAPRule",
    "StateStorage",
    "StepGuard",
    "StepResult",
    "TorchRule",
    "Traffic",
    "WeightDecaySchedule",
    "build_optimizer",
    "clip_grad_norm",
    "default_decay_filter",
    "fused_obstacle",
    "grad_norm",
    "is_hidden_matrix",
    "mup_overrides",
    "override_groups",
    "qk_clip_scales",
]
