"""From a folder of Hugging Face transformers to a model on any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from mt_parallel_state import ParallelLayout, ParallelState

from mt_model.config import ModelConfig
from mt_model.hugging_face.folder import open_pretrained
from mt_model.stack import Stack


def from_pretrained(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    state: ParallelState | None = None,
    vocab_multiple: int | None = None,
    **arguments: Any,
) -> Stack[Any]:
    """Build a model from a folder of Hugging Face transformers, on this rank's layout.

    Each rank reads its own part of each tensor, and none waits for another. The model is in
    evaluation mode, as transformers has it; `model(tokens)` gives logits, and `model(images)` of an
    encoder of images what transformers returns first.

    Args:
        folder: With config.json and safetensors files.
        dtype: Of the parameters; that of most of the folder's elements where None.
        state: This rank's place; None is a single process.
        vocab_multiple: Of the model; where None the smallest that lets the ranks share the
            vocabulary: 1 where tp divides it, else tp.
        arguments: Others of `Stack`: `layers`, `sequence_parallel`, `device` and so on.

    Raises:
        ExchangeError: The architecture or a field is not known; tensors are missing, not expected
            or of another shape; a file is damaged. The message names file and tensor.
        FileError: A file can't be read.
        ValueError: The layout does not fit the model.
    """
    state = ParallelState(ParallelLayout()) if state is None else state
    pretrained = open_pretrained(folder)
    if vocab_multiple is None and isinstance(pretrained.config, ModelConfig):
        vocab_multiple = state.size("tp") if pretrained.config.vocab_size % state.size("tp") else 1
    if vocab_multiple is not None and vocab_multiple > 1:
        pretrained = pretrained.padded(vocab_multiple)
    chosen = pretrained.dtype if dtype is None else dtype
    model = cast("Stack[Any]", pretrained.config.build(state, dtype=chosen, seed=None, **arguments))
    fill = pretrained.initializer(state)
    for name, param in model.named_parameters():
        if not param.is_meta:
            fill(name, param)
    model.origin = pretrained
    return model.eval()
