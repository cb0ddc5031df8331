"""Generate text from a trained run."""

from mt_infer.generation import Generator, PromptError
from mt_infer.loading import RunError, load_run
from mt_infer.sampling import Sampling, choose

__all__ = ["Generator", "PromptError", "RunError", "Sampling", "choose", "load_run"]
