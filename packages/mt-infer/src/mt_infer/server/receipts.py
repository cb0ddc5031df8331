"""Receipts: what made an answer, so that it can be made again."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from mt_files import to_plain
from mt_tokenizer import Tokenizer

from mt_infer.completion import Completion
from mt_infer.server.backend import Facts
from mt_infer.server.serving import Ask

_LIBRARIES = ("mt-infer", "mt-model", "torch")
RECEIPT_VERSION = 1


def receipt_of(
    facts: Facts, tokenizer: Tokenizer | None, ask: Ask, completions: Sequence[Completion]
) -> dict[str, Any]:
    """Return the receipt of an answer, for `mt-infer replay`.

    Args:
        facts: The model and its engine.
        tokenizer: The model's tokenizer.
        ask: What the engine was asked.
        completions: What it answered.
    """
    step = completions[0].step
    return {
        "version": RECEIPT_VERSION,
        "model": facts.model,
        "step": step,
        "weights": facts.digests[step],
        "tokenizer": None if tokenizer is None else tokenizer.sha256,
        "dtype": facts.dtype,
        "layout": facts.layout,
        "kernels": facts.kernels,
        "versions": {name: version(name) for name in _LIBRARIES}
        | {"python": platform.python_version()},
        "prompts": [list(each) for each in ask.prompts],
        "sampling": to_plain(ask.sampling),
        "answers": [
            {"seed": each.seed, "tokens": each.tokens, "logprobs": each.logprobs, "end": each.end}
            for each in completions
        ],
    }
