"""The optimizer of a run, from its section."""

from __future__ import annotations

from collections.abc import Callable

import torch
from mt_optim import OptimizerConfig, Orthogonalization, is_hidden_matrix

from mt_train.config import RunConfig

_ADAMW_SIZE = 0.2  # of a spectral step: the size that a step of AdamW has


def optimizer_config(config: RunConfig) -> OptimizerConfig:
    """Return what mt-optim builds the run's optimizer of.

    A run in fp64 also makes matrices orthogonal in fp64, so that it shows that the layout changes
    nothing; the others do that in bf16.
    """
    section = config.optimizer
    spectral = section.muon_scale == "spectral"
    return OptimizerConfig(
        name=section.name,
        lr=section.lr,
        weight_decay=section.weight_decay,
        betas=section.betas,
        eps=section.eps,
        momentum=section.momentum,
        nesterov=section.nesterov,
        orthogonalization=Orthogonalization(
            coefficients=section.muon_coefficients,
            scale=section.muon_scale,
            extra_scale=_ADAMW_SIZE if spectral else 1.0,
            tp=section.muon_tp,
            dtype=torch.float64 if config.training.dtype == "fp64" else torch.bfloat16,
        ),
        moments_dtype=section.moments_dtype,
        masters=section.masters,
        offload=section.offload,
        offload_dir=section.offload_dir,
        max_norm=config.training.grad_clip,
    )


def kept_whole(config: RunConfig) -> Callable[[str, torch.Tensor], bool] | None:
    """Return which parameters one data-parallel rank has to step whole; None for any."""
    return is_hidden_matrix if config.optimizer.name in ("muon", "adaptive_muon") else None
