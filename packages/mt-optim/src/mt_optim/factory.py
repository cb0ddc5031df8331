"""The function that makes an optimizer from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from mt_data_parallel import ParamShard, param_shards
from mt_files import check_type
from mt_parallel_state import ParallelState
from torch import Tensor, nn

from mt_optim.config import TORCH, OptimizerConfig
from mt_optim.gradients.guard import StepGuard
from mt_optim.gradients.statistics import by_layer
from mt_optim.optimizer import NamedOptimizer
from mt_optim.parameters.group import default_decay_filter
from mt_optim.parameters.matrix import by_matrix
from mt_optim.parameters.override import override_groups
from mt_optim.rules.adamw import AdamWRule
from mt_optim.rules.lion import LionRule
from mt_optim.rules.muon import AdaptiveMuonRule, MuonRule
from mt_optim.rules.rule import Rule
from mt_optim.rules.sgd import SGDRule
from mt_optim.rules.soap import SOAPRule
from mt_optim.rules.torch_rule import TorchRule
from mt_optim.state.ema import EMA


def build_optimizer(
    model: nn.Module | Iterable[tuple[str, nn.Parameter] | ParamShard],
    config: OptimizerConfig,
    state: ParallelState,
) -> NamedOptimizer:
    """Make the optimizer of a model on any layout.

    Its `step` measures the norm of the whole model's gradient, clips, and is skipped on all ranks
    if the gradient is not finite or too large; it returns a `StepResult`. Gradients must be reduced
    over data-parallel ranks before.

    Args:
        model: The model, or this rank's names and parameters, or the shards of a GradBuffer (with
            `whole=is_hidden_matrix` for muon, adaptive_muon and soap).
        config: The settings.
        state: Process groups and this rank's place in them.

    Raises:
        ValueError: Settings and parameters do not fit together.
        TypeError: An argument has the wrong type.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> state = ParallelState(ParallelLayout())
        >>> optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3, max_norm=1.0), state)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step().grad_norm
        3.1622776601683795
    """
    check_type("config", config, OptimizerConfig)
    check_type("state", state, ParallelState)
    named = list(model.named_parameters() if isinstance(model, nn.Module) else model)
    _check_scale(named, config)
    rules = _rules(config, state)
    rule_of = by_matrix(rules[0].name, rules[-1].name)
    groups = override_groups(named, config.overrides)
    _check_settings(groups, {rule.name: rule for rule in rules}, rule_of)
    optimizer = NamedOptimizer(
        groups,
        rules,
        lr=config.lr,
        weight_decay=config.weight_decay,
        rule_filter=rule_of,
        decay_filter=default_decay_filter,
        storage=config.storage(),
    )
    optimizer.guard = StepGuard(
        named,
        state,
        limits=config.limits,
        loss_scale=config.loss_scale,
        zeros=config.count_zeros,
        statistics=by_layer if config.statistics == "layer" else config.statistics,
    )
    if config.ema is not None:
        optimizer.ema = EMA(optimizer, config.ema)
    return optimizer


def _check_settings(
    groups: Iterable[Mapping[str, Any]],
    rules: Mapping[str, Rule],
    rule_of: Callable[[str, Tensor], str],
) -> None:
    """Refuse overrides of options that a parameter's rule does not have."""
    for group in groups:
        for shard in group["params"]:
            rule = rules[rule_of(shard.name, shard.source)]
            for key, option in (("betas", "betas"), ("eps_scale", "eps")):
                if key in group and option not in rule.options:
                    raise ValueError(
                        f"an override sets {key} of parameter {shard.name!r}, which {rule.name} "
                        f"steps, and that has no {option}; let it match what has"
                    )


def _check_scale(named: Iterable[Any], config: OptimizerConfig) -> None:
    """Check that a loss scale is given for fp16 models, and not for bf16 ones.

    Raises:
        ValueError: It is missing, or has no use.
    """
    for shard in param_shards(named):
        dtype = shard.source.dtype
        if dtype == torch.float16 and config.loss_scale is None:
            raise ValueError(
                f"parameter {shard.name!r} is fp16 and loss_scale is None: small gradients would "
                "be zero. Use loss_scale='dynamic' or a number, or a bf16 model"
            )
        if dtype == torch.bfloat16 and config.loss_scale is not None:
            raise ValueError(
                f"parameter {shard.name!r} is bf16, which holds gradients as small as fp32 does, "
                f"and loss_scale is {config.loss_scale!r}; leave it out, or use an fp16 model"
            )


def _rules(config: OptimizerConfig, state: ParallelState) -> list[Rule]:
    """Return the rule of all parameters, or one for hidden matrices and one for all others."""
    given: dict[str, Any] = {
        "betas": config.betas,
        "momentum": config.momentum,
        "nesterov": config.nesterov,
    }
    given = {key: value for key, value in given.items() if value is not None}
    betas = {key: value for key, value in given.items() if key == "betas"}
    momentum = {key: value for key, value in given.items() if key != "betas"}
    if config.name in ("adamw", "adam"):
        return [AdamWRule(decoupled=config.name == "adamw", eps=config.eps, **betas)]
    if config.name == "lion":
        return [LionRule(**betas)]
    if config.name == "sgd":
        return [SGDRule(**{"momentum": 0.9, **momentum})]
    if config.name.startswith(TORCH):
        return [TorchRule(config.name.removeprefix(TORCH), config.options, state=state)]
    if config.name == "soap":
        sizes = {"frequency": config.soap_frequency, "max_dim": config.soap_max_dim}
        rule = SOAPRule(eps=config.eps, state=state, **sizes, **betas)
        return [rule, AdamWRule(eps=config.eps, betas=rule.options["betas"])]
    others = AdamWRule(eps=config.eps, **{"betas": (0.9, 0.95), **betas})
    how = {"orthogonalization": config.orthogonalization, "state": state}
    if config.name == "muon":
        return [MuonRule(**momentum, **how), others]
    beta2 = others.options["betas"][1]
    return [AdaptiveMuonRule(beta2=beta2, eps=config.eps, **momentum, **how), others]
