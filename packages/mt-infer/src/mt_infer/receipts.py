"""Receipts of a server's answers, with everything needed to make an answer again."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from mt_files import Checks, FileError, build, read_json

from mt_infer.completion import Completion
from mt_infer.sampling import Sampling

_LIBRARIES = ("mt-infer", "mt-model", "torch")
_MOST_BYTES = 1 << 26


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A continuation.

    Attributes:
        seed: Seed of the choice of its tokens.
        tokens: Its tokens.
        logprobs: Their logprobs.
        end: Reason for its end.
    """

    seed: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    end: str

    def __post_init__(self) -> None:
        checks = Checks(self)
        if "logprobs" not in checks.errors and len(self.logprobs) != len(self.tokens):
            checks.add("logprobs", f"{len(self.logprobs)} for {len(self.tokens)} tokens")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """Everything that decided an answer.

    Attributes:
        model: Name of the model.
        step: Step of the weights; None for a folder of Hugging Face.
        weights: Digest of the weights.
        tokenizer: Digest of the tokenizer; None without one.
        dtype: Dtype of the weights.
        layout: Ranks that shared the model.
        kernels: Kernel of each operation, and the format of cached keys and values.
        versions: Versions of the libraries.
        prompts: Tokens of the prompts.
        sampling: Parameters of the choice.
        answers: The continuations; n of a prompt follow one another.
        version: Version of this form.
    """

    model: str
    step: int | None = None
    weights: str
    tokenizer: str | None = None
    dtype: str
    layout: str
    kernels: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling
    answers: tuple[Answered, ...]
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        checks = Checks(self)
        whole = len(self.prompts) * self.sampling.n
        if not checks.errors and len(self.answers) != whole:
            checks.add("answers", f"{len(self.answers)}, and there must be {whole}")
        checks.done()


def answered(completions: Sequence[Completion]) -> tuple[Answered, ...]:
    """Return the records of continuations for a receipt."""
    return tuple(
        Answered(
            seed=each.seed,
            tokens=tuple(each.tokens),
            logprobs=tuple(each.logprobs or ()),
            end=each.end,
        )
        for each in completions
    )


def versions() -> dict[str, str]:
    """Return the versions of the libraries that make an answer."""
    return {"python": platform.python_version()} | {name: version(name) for name in _LIBRARIES}


def read_receipt(path: Path) -> Receipt:
    """Read a receipt, or the answer that brought one.

    Raises:
        FileError: The file can't be read, or has no receipt.
        SchemaError: The content is no receipt.
    """
    value: Any = read_json(path, limit=_MOST_BYTES)
    if isinstance(value, dict) and "receipt" in value:
        value = value["receipt"]
    if not isinstance(value, dict):
        raise FileError(path, 'has no receipt; ask the server with "receipt": true')
    return build(Receipt, value)
