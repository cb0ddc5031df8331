"""Loading of a folder of Hugging Face transformers on any layout."""

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
    max_sequence_length: int | None = None,
    dequantize: bool = False,
    download: bool = False,
    **arguments: Any,
) -> Stack[Any]:
    """Build a model from a folder of Hugging Face transformers, on this rank's layout.

    Each rank reads its own part of each tensor, without communication. The model is in evaluation
    mode, as in transformers. `model(tokens)` returns logits; `model(images)` of an image encoder
    returns the first output of transformers' model. Quantised layers of the folder become
    `mt_quant.QuantizedLinear`s with the same codes, each rank with its part. The folder's scales of
    keys and values become the model's `kv_schemes`.

    Args:
        folder: A folder with config.json and safetensors files, or an id of the hub; see
            `find_folder`.
        dtype: Dtype of the parameters; by default the most frequent dtype in the folder.
        state: This rank's place; None for a single process.
        vocab_multiple: Multiple to which the vocabulary is padded; by default the smallest that
            lets the ranks split it: 1 if tp divides the vocabulary, otherwise tp.
        max_sequence_length: Largest number of tokens of a sequence, instead of the folder's;
            rotary embeddings of the kind `dynamic` scale beyond the folder's.
        dequantize: Whether to load the values of quantised layers into plain layers, instead of
            layers with codes. Cached keys and values are then full.
        download: Whether to download a model of the hub that is not in the cache.
        arguments: Further arguments of `Stack`: `layers`, `sequence_parallel`, `device` and so on.

    Raises:
        ExchangeError: The architecture or a field is unknown; tensors are missing, unexpected or
            of a wrong shape; a file is damaged. The message names file and tensor.
        FileError: A file can't be read.
        ValueError: The layout does not fit the model.
    """
    state = ParallelState(ParallelLayout()) if state is None else state
    pretrained = open_pretrained(folder, download=download).with_length(max_sequence_length)
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
    """Return the folder with links to the model's layers, and its quantised layers by name."""
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
