"""Train transformer models: one YAML from a laptop to a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_train.problem import ConfigError as ConfigError

if TYPE_CHECKING:
    from mt_train.config.kinds.section import DataSection as DataSection
    from mt_train.config.kinds.section import HeldOutRows as HeldOutRows
    from mt_train.config.kinds.section import Sources as Sources
    from mt_train.config.loading import LoadedConfig as LoadedConfig
    from mt_train.config.loading import load_config as load_config
    from mt_train.config.loading import to_yaml as to_yaml
    from mt_train.config.run_config import RunConfig as RunConfig
    from mt_train.session.run import Outcome as Outcome
    from mt_train.session.run import run as run
    from mt_train.training.trainer import Trainer as Trainer
else:
    # Resolved at first use, so that the command line answers before torch is imported.
    __getattr__ = resolve_later(__name__)
