"""Generate text from a trained run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

if TYPE_CHECKING:
    from mt_infer.generation import Completion, Generator, PromptError
    from mt_infer.loading import RunError, load_run
    from mt_infer.sampling import LogitsError, Sampling, choose

__all__ = [
    "Completion",
    "Generator",
    "LogitsError",
    "PromptError",
    "RunError",
    "Sampling",
    "choose",
    "load_run",
]

# Resolved at first use, so that the command line answers before torch is imported.
__getattr__ = resolve_later(__name__)
