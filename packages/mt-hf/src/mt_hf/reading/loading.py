"""From a folder of Hugging Face transformers to a model on any layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from mt_model import GPT, ModelConfig, Stack, saved_buffers
from mt_parallel_state import ParallelLayout, ParallelState

from mt_hf.family.error import ExchangeError
from mt_hf.reading.pretrained import Pretrained, open_pretrained

if TYPE_CHECKING:
    from mt_quant import StoredLinear


def from_pretrained(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    state: ParallelState | None = None,
    vocab_multiple: int | None = None,
    dequantize: bool = False,
    **arguments: Any,
) -> Stack[Any]:
    """Build a model from a folder of Hugging Face transformers, on this rank's layout.

    Each rank reads its own part of each tensor, and none waits for another. The model is in
    evaluation mode, as transformers has it; `model(tokens)` gives logits, and `model(images)` of an
    encoder of images what transformers returns first. Layers that the folder has in low precision
    are `mt_quant.QuantizedLinear`s of the same codes, each rank with its part, and the folder's
    scales of keys and values are the model's `kv_schemes`.

    Args:
        folder: With config.json and safetensors files.
        dtype: Of the parameters; that of most of the folder's elements where None.
        state: This rank's place; None is a single process.
        vocab_multiple: Of the model; where None the smallest that lets the ranks share the
            vocabulary: 1 where tp divides it, else tp.
        dequantize: Fill the weights of layers that the folder has in low precision with their
            values, in place of layers that compute with the codes. Keys and values are kept in full
            then.
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
    model.origin = pretrained
    low_bits: dict[str, StoredLinear] = {}
    if not dequantize and pretrained.given.get("quantization_config") is not None:
        pretrained, low_bits = _low_bits(model, pretrained)
    fill = pretrained.initializer(state)
    for name, param in model.named_parameters():
        if not param.is_meta and name.removesuffix(".weight") not in low_bits:
            fill(name, param)
    for name, buffer in saved_buffers([model]).items():
        if not buffer.is_meta:
            pretrained.fill(name, buffer)
    _install(model, low_bits)
    is_low = pretrained.given.get("quantization_config") is not None
    if is_low and not dequantize and isinstance(model, GPT):
        from mt_hf.reading.kv_scales import read_kv_schemes  # brings mt-quant

        model.kv_schemes = read_kv_schemes(model, pretrained)
    return model.eval()


def _low_bits(
    model: Stack[Any], pretrained: Pretrained
) -> tuple[Pretrained, dict[str, StoredLinear]]:
    """Return the folder as the model's layers are named, and those in low precision by name."""
    from mt_hf.reading.low_bit_layers import low_bit_layers  # brings mt-quant
    from mt_hf.reading.own_experts import with_own_experts

    pretrained = with_own_experts(model, pretrained)
    return pretrained, dict(low_bit_layers(model, pretrained))


def _install(model: Stack[Any], layers: dict[str, StoredLinear]) -> None:
    if not layers:
        return
    from mt_quant import QuantizationError, install

    try:
        install(model, layers)
    except QuantizationError as error:
        raise ExchangeError(str(error)) from error
