"""Generate text from a trained run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

if TYPE_CHECKING:
    from mt_infer.choosing.draws import LogitsError as LogitsError
    from mt_infer.choosing.draws import choose as choose
    from mt_infer.completion import Completion as Completion
    from mt_infer.completion import Delta as Delta
    from mt_infer.engine.engine import Engine as Engine
    from mt_infer.engine.options import EngineOptions as EngineOptions
    from mt_infer.engine.ranks import RankError as RankError
    from mt_infer.engine.static import StaticEngine as StaticEngine
    from mt_infer.generation import Generator as Generator
    from mt_infer.loading import RunError as RunError
    from mt_infer.loading import load_run as load_run
    from mt_infer.retrieval import Passages as Passages
    from mt_infer.retrieval import Retrieve as Retrieve
    from mt_infer.sampling import Sampling as Sampling
    from mt_infer.service import Service as Service
    from mt_infer.text import PromptError as PromptError
else:
    # Resolved at first use, so that the command line answers before torch is imported.
    __getattr__ = resolve_later(__name__)
