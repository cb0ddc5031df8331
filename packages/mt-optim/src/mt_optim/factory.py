"""One function that makes any optimizer from its configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mt_data_parallel import Piece
from mt_parallel_state import ParallelState
from torch import nn

from mt_optim.adamw import AdamWRule
from mt_optim.config import TORCH, OptimizerConfig
from mt_optim.group import default_decay_filter
from mt_optim.guard import StepGuard
from mt_optim.lion import LionRule
from mt_optim.matrix import is_hidden_matrix
from mt_optim.muon import AdaptiveMuonRule, MuonRule
from mt_optim.optimizer import NamedOptimizer
from mt_optim.override import override_groups
from mt_optim.rule import Rule
from mt_optim.sgd import SGDRule
from mt_optim.torch_rule import TorchRule


def build_optimizer(
    model: nn.Module | Iterable[tuple[str, nn.Parameter] | Piece],
    config: OptimizerConfig,
    state: ParallelState,
) -> NamedOptimizer:
    """Make the optimizer of a model on any layout.

    Its `step` measures the norm of the whole model's gradient, clips, and skips the step on all
    ranks where the gradient is not finite or too large; the result says what was done. Gradients
    must be reduced over data-parallel ranks before.

    Args:
        model: The model, or this rank's names and parameters, or pieces of a GradBuffer (for muon
            and adaptive_muon of one with `whole=is_hidden_matrix`).
        config: What to build.
        state: Process groups and this rank's place in them.

    Raises:
        ValueError: Settings and parameters do not go together.
        TypeError: An argument is of another type.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> state = ParallelState(ParallelLayout())
        >>> optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3, max_norm=1.0), state)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step().grad_norm
        3.1622776601683795
    """
    if not isinstance(config, OptimizerConfig):
        raise TypeError(f"config must be an OptimizerConfig, got {config!r:.60}")
    if not isinstance(state, ParallelState):
        raise TypeError(f"state must be a ParallelState, got {state!r:.60}")
    named = list(model.named_parameters() if isinstance(model, nn.Module) else model)
    rules = _rules(config, state)
    matrix_rule = rules[0].name
    optimizer = NamedOptimizer(
        override_groups(named, config.overrides),
        rules,
        lr=config.lr,
        weight_decay=config.weight_decay,
        rule_filter=None
        if len(rules) == 1
        else lambda name, param: matrix_rule if is_hidden_matrix(name, param) else "adamw",
        decay_filter=default_decay_filter,
        storage=config.storage(),
    )
    optimizer.guard = StepGuard(
        named,
        state,
        max_norm=config.max_norm,
        max_value=config.max_value,
        skip_above=config.skip_above,
    )
    return optimizer


def _rules(config: OptimizerConfig, state: ParallelState) -> list[Rule]:
    """Return the rule of all parameters, or that of hidden matrices and that of all others."""
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
    others = AdamWRule(eps=config.eps, **{"betas": (0.9, 0.95), **betas})
    how = {"orthogonalization": config.orthogonalization, "state": state}
    if config.name == "muon":
        return [MuonRule(**momentum, **how), others]
    beta2 = others.options["betas"][1]
    return [AdaptiveMuonRule(beta2=beta2, eps=config.eps, **momentum, **how), others]
