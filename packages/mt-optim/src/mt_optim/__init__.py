"""AdamW over fp32 masters, layout-independent gradient norms, learning-rate schedules."""

from mt_optim.adamw import AdamW, fused_obstacle
from mt_optim.clip import clip_grad_norm, grad_norm
from mt_optim.group import DecayFilter, default_decay_filter
from mt_optim.schedule import LRSchedule

__all__ = [
    "AdamW",
    "DecayFilter",
    "LRSchedule",
    "clip_grad_norm",
    "default_decay_filter",
    "fused_obstacle",
    "grad_norm",
]
