"""Train transformer models: one YAML from a laptop to a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_train.problem import ConfigError

if TYPE_CHECKING:
    from mt_train.config.loading import LoadedConfig, load_config, to_yaml
    from mt_train.config.run_config import RunConfig
    from mt_train.session.run import Outcome, run
    from mt_train.training.trainer import Trainer

__all__ = [
    "ConfigError",
    "LoadedConfig",
    "Outcome",
    "RunConfig",
    "Trainer",
    "load_config",
    "run",
    "to_yaml",
]

# Resolved at first use, so that the command line answers before torch is imported.
__getattr__ = resolve_later(__name__)
