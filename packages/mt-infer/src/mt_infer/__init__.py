"""Generate text from a trained run."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mt_infer.generation import Completion, Generator, PromptError
    from mt_infer.loading import RunError, load_run
    from mt_infer.sampling import Sampling, choose

__all__ = ["Completion", "Generator", "PromptError", "RunError", "Sampling", "choose", "load_run"]

# Resolved at first use, so that the command line answers before torch is imported.
_HOMES = {
    "Completion": "generation",
    "Generator": "generation",
    "PromptError": "generation",
    "RunError": "loading",
    "Sampling": "sampling",
    "choose": "sampling",
    "load_run": "loading",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
