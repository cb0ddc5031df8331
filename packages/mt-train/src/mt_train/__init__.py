"""Train transformer models: one YAML from a laptop to a cluster."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mt_train.problem import ConfigError, Problem

if TYPE_CHECKING:
    from mt_train.config import RunConfig
    from mt_train.loading import LoadedConfig, load_config, to_yaml
    from mt_train.session import Outcome, run
    from mt_train.trainer import Trainer

__all__ = [
    "ConfigError",
    "LoadedConfig",
    "Outcome",
    "Problem",
    "RunConfig",
    "Trainer",
    "load_config",
    "run",
    "to_yaml",
]

# Resolved at first use, so that the command line answers before torch is imported.
_HOMES = {
    "LoadedConfig": "loading",
    "Outcome": "session",
    "RunConfig": "config",
    "Trainer": "trainer",
    "load_config": "loading",
    "run": "session",
    "to_yaml": "loading",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
