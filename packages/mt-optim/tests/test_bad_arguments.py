"""Whatever is given in the place of an argument, a ValueError or TypeError names it."""

import pytest
import torch
from mt_optim import (
    EMA,
    SGD,
    SOAP,
    AdamW,
    GradLimits,
    GroupOverride,
    Lion,
    LossScale,
    LRSchedule,
    NormGroup,
    OptimizerConfig,
    QKClip,
    ScaleState,
    StepGuard,
    WeightDecaySchedule,
    build_optimizer,
    clip_grad_norm,
    default_decay_filter,
    grad_norm,
    is_hidden_matrix,
    mup_overrides,
)
from mt_optim.gradients.scaler import GradScaler, read_scale
from mt_optim.gradients.statistics import by_layer
from mt_optim.parameters.override import override_groups
from mt_optim.rules.torch_rule import TorchRule
from mt_parallel_state import ParallelLayout, ParallelState
from torch import nn

STATE = ParallelState(ParallelLayout())
NAMED = tuple(nn.Linear(4, 2).named_parameters())
SCHEDULE = {"kind": "wsd", "max_lr": 1.0, "warmup": 2, "decay": 9, "wsd_anneal": 3}
GOOD = [
    (AdamW, {"params": NAMED, "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}),
    (AdamW, {"params": NAMED, "decay_filter": default_decay_filter}),
    (SGD, {"params": NAMED, "momentum": 0.9, "dampening": 0.0, "nesterov": True}),
    (Lion, {"params": NAMED, "lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}),
    (OptimizerConfig, {"name": "adamw", "lr": 1e-3, "max_norm": 1.0, "skip_above": 2.0}),
    (build_optimizer, {"model": NAMED, "config": OptimizerConfig(lr=1.0), "state": STATE}),
    (OptimizerConfig, {"lr": 1.0, "loss_scale": "dynamic", "count_zeros": True, "norm_groups": ()}),
    (OptimizerConfig, {"lr": 1.0, "statistics": "layer", "max_value": 1.0}),
    (StepGuard, {"named_params": NAMED, "state": STATE, "limits": GradLimits(max_norm=1.0)}),
    (
        StepGuard,
        {"named_params": NAMED, "state": STATE, "loss_scale": None, "statistics": by_layer},
    ),
    (GradLimits, {"max_norm": 1.0, "max_value": 1.0, "skip_above": 2.0, "norm_groups": ()}),
    (NormGroup, {"names": "*", "where": None, "max_norm": 1.0}),
    (LossScale, {"initial": 4.0, "growth_interval": 9, "hysteresis": 1, "minimum": 2.0}),
    (GradScaler, {"how": LossScale()}),
    (GradScaler(LossScale()).restore, {"state": ScaleState(scale=2.0, left=1)}),
    (read_scale, {"given": {"scale": 2.0, "clean": 0, "left": 1}}),
    (ScaleState, {"scale": 2.0, "clean": 1, "left": 1}),
    (by_layer, {"name": "layers.1.weight"}),
    (TorchRule, {"class_name": "RAdam", "options": {"eps": 1e-8}}),
    (AdamW(NAMED).step, {"closure": None, "lr": 1e-3}),
    (AdamW(NAMED).load_state_dict, {"state_dict": AdamW(NAMED).state_dict()}),
    (LRSchedule, {**SCHEDULE, "min_lr": 0.1, "init_lr": 0.0, "wsd_shape": "linear"}),
    (LRSchedule(**SCHEDULE).at, {"n": 3}),
    (grad_norm, {"named_params": NAMED, "state": STATE}),
    (clip_grad_norm, {"named_params": NAMED, "state": STATE, "max_norm": 1.0}),
    (default_decay_filter, {"name": "a", "param": torch.ones(2, 2)}),
    (SOAP, {"params": NAMED, "lr": 1e-3, "betas": (0.9, 0.95), "frequency": 2}),
    (EMA, {"optimizer": AdamW(NAMED), "decay": 0.9}),
    (EMA(AdamW(NAMED), 0.9).value, {"name": "weight"}),
    (GroupOverride, {"names": "*", "lr_scale": 1.0, "eps_scale": 1.0, "betas": (0.9, 0.95)}),
    (override_groups, {"named_params": NAMED, "overrides": [GroupOverride(names="*", lr_scale=2)]}),
    (mup_overrides, {"width_multiplier": 2.0, "is_hidden": is_hidden_matrix, "name": "sgd"}),
    (QKClip, {"threshold": 1.0, "alpha": 0.5}),
    (WeightDecaySchedule, {"start": 0.1, "end": 0.2, "length": 3, "kind": "linear"}),
]
BAD = (None, -1, 1.5, float("nan"), 10**12, "x", [None], [("a", None)], {}, object())


@pytest.mark.parametrize(("function", "good"), GOOD, ids=lambda x: getattr(x, "__qualname__", ""))
def test_wrong_arguments_are_value_or_type_errors(function, good):
    function(**good)
    for name in good:
        for bad in BAD:
            try:
                function(**{**good, name: bad})
            except (ValueError, TypeError, KeyError) as error:
                message = str(error)
            else:
                message = "taken"
            assert 0 < len(message) < 1000, (name, bad)
