"""The batch that a stage is called with, beside the activation of the stage before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from mt_files import RowField
from torch import Tensor

from mt_model.attend.cache import KVCache, Pages
from mt_model.attend.slots import Slots

Batch: TypeAlias = Mapping[str, Any]
# The arrays of tokens that a model reads from a batch, and those of an encoder's input.
_INPUTS = (
    RowField(name="tokens"),
    RowField(name="labels"),
    RowField(name="label_weights", dtype="float32"),
    RowField(name="documents", cut="whole"),
    RowField(name="positions"),
    RowField(name="mask", dtype="bool", cut="whole"),
    RowField(name="token_types"),
    RowField(name="sample_ids", dims=(), cut="whole"),
    RowField(name="sequence_labels", dims=(), cut="once"),
)
_ENCODER_INPUTS = (
    RowField(name="encoder_tokens", dims=("encoder",)),
    RowField(name="encoder_mask", dtype="bool", dims=("encoder",), cut="whole"),
    RowField(name="encoder_documents", dims=("encoder",), cut="whole"),
    RowField(name="encoder_positions", dims=("encoder",)),
)
_MEMORY_MASK = RowField(name="memory_mask", dtype="bool", dims=("memory",), cut="whole")


def check_fields(fields: Iterable[RowField]) -> None:
    """Check that a model can take the rows that a data set declares.

    Fields that no model reads are for others.

    Raises:
        ValueError: A field has another dtype, other dims or another cut than a model reads.
    """
    known = {each.name: each for each in (*_INPUTS, *_ENCODER_INPUTS)}
    for field in fields:
        why = field.conflict(known.get(field.name, field))
        if why is not None:
            raise ValueError(f"rows have {field.name} of {why}; declare it so, or rename it")


def new_tokens(batch: Batch) -> Tensor:
    """Return the tokens of a pass, or the embeddings given in place of them; dim 1 is tokens."""
    given = batch.get("embeddings")
    return batch["tokens"] if given is None else given


def batch_of(tokens: Tensor | None, labels: Tensor | None, sample_ids: Tensor | None) -> Batch:
    """Return the batch that `model(tokens, labels=..., sample_ids=...)` stands for."""
    if tokens is None:
        raise TypeError("model(tokens) needs int64 tokens of shape [B, S], got None")
    batch = {"tokens": tokens, "labels": labels, "sample_ids": sample_ids}
    return {name: x for name, x in batch.items() if x is not None}


def _expected_shape(field: RowField, x: Tensor, shape: torch.Size) -> tuple[int, ...]:
    if not field.dims:
        return shape[:1]
    if field.name == "positions" and x.dim() == 3:
        return (3, *shape)
    if field.cut == "whole":  # however many ranks share the sequences
        return shape[:1] + x.shape[1:2]
    return shape


def whole_of(batch: Batch, name: str, length: int) -> Tensor | None:
    """Return the entries of a batch that hold whole sequences, however many ranks share them.

    Raises:
        ValueError: An entry holds only a part of the sequences.
    """
    x = batch.get(name)
    if x is not None and x.shape[1] != length:
        raise ValueError(f"{name} must be [B, {length}], of whole sequences, got {tuple(x.shape)}")
    return x


def _check_dtype(field: RowField, x: Any) -> None:
    dtype = x.dtype if isinstance(x, Tensor) else None
    fits = dtype is not None and not dtype.is_floating_point and dtype != torch.bool
    wanted = "integers, such as int64"
    if field.dtype == "bool":
        fits, wanted = dtype == torch.bool, "bool, True where a token is"
    elif field.dtype == "float32":
        fits, wanted = dtype is not None and dtype.is_floating_point, "floats, such as float32"
    if not fits:
        raise TypeError(
            f"{field.name} must be a tensor of {wanted}, got {dtype or type(x).__name__}"
        )


def _check_memory(memory: Any, mask: Any) -> None:
    if memory is not None and (not isinstance(memory, Tensor) or memory.dim() != 3):
        raise TypeError("memory must be a floating-point tensor [B, M, size], whole on every rank")
    if mask is None:
        return
    _check_dtype(_MEMORY_MASK, mask)
    if memory is not None and mask.shape != memory.shape[:2]:
        raise ValueError(
            f"memory_mask must be {tuple(memory.shape[:2])}, as the memory is, got "
            f"{tuple(mask.shape)}"
        )


def check_batch(batch: Batch) -> None:
    """Check the dtypes and shapes of a batch.

    Raises:
        TypeError: The batch is no mapping, or an entry has another type.
        ValueError: tokens and embeddings are missing, or a shape does not fit.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch must be a mapping with 'tokens', got {type(batch).__name__}")
    given, shape = batch.get("embeddings"), None
    if given is not None:
        if not isinstance(given, Tensor) or not given.is_floating_point() or given.dim() != 3:
            raise TypeError("embeddings must be a floating-point tensor [B, S, hidden]")
        shape = given.shape[:2]
    elif batch.get("tokens") is None:
        raise ValueError("every stage needs batch['tokens'] of shape [B, S], or embeddings")
    for field in _INPUTS:
        x = batch.get(field.name)
        if x is None:
            continue
        _check_dtype(field, x)
        shape = x.shape if shape is None else shape
        if len(shape) != 2 or not shape.numel():
            raise ValueError(f"tokens must be [B, S] with at least one token, got {tuple(shape)}")
        expected = _expected_shape(field, x, shape)
        if x.shape != expected:
            raise ValueError(f"{field.name} must be {tuple(expected)} here, got {tuple(x.shape)}")
    _check_memory(batch.get("memory"), batch.get("memory_mask"))
    cache, slots = batch.get("cache"), batch.get("slots")
    if cache is not None and not isinstance(cache, KVCache | Pages):
        raise TypeError(f"cache must be a KVCache, as new_cache() makes, or pages, got {cache!r}")
    if isinstance(cache, Pages) != isinstance(slots, Slots):
        raise TypeError(
            "pages of new_pages() and a Slots go together, as batch['cache'] and batch['slots']; "
            f"got {type(cache).__name__} and {type(slots).__name__}"
        )
    if isinstance(slots, Slots):
        _check_row(batch, slots, shape)


def _check_row(batch: Batch, slots: Slots, shape: Sequence[int] | None) -> None:
    for name in ("mask", "documents", "positions", "labels"):
        if batch.get(name) is not None:
            raise ValueError(f"batch has {name}, which slots say of each request; leave it out")
    row = 1, slots.places.shape[0]
    if shape is None or tuple(shape) != row:
        raise ValueError(f"tokens must be one row, {list(row)}, as the slots say, got {shape}")


def check_encoder_batch(batch: Batch) -> None:
    """Check the entries for a model with an encoder, beside those that `check_batch` checks.

    Raises:
        TypeError: An entry has another type.
        ValueError: The encoder's tokens are missing or given twice, a shape does not fit, or there
            is an entry that such a model does not take.
    """
    for name in ("memory", "memory_mask", "embeddings", "pixel_values"):
        if batch.get(name) is not None:
            raise ValueError(f"batch has {name}, which a model with an encoder does not take")
    if (batch.get("documents") is None) != (batch.get("encoder_documents") is None):
        raise ValueError(
            "documents and encoder_documents go together: a token of the decoder sees the tokens "
            "of the encoder that have its document's id. Give both, or neither"
        )
    tokens, cache = batch.get("encoder_tokens"), batch.get("cache")
    if isinstance(cache, Pages) or (cache is not None and cache.length):
        if tokens is not None:
            raise ValueError(
                "the cache holds what the encoder gave; leave encoder_tokens out, or make a new one"
            )
        return
    if tokens is None:
        raise ValueError("every stage needs batch['encoder_tokens'] of shape [B, E]")
    _check_dtype(_ENCODER_INPUTS[0], tokens)
    rows = batch["tokens"].shape[0]
    if tokens.dim() != 2 or not tokens.numel() or tokens.shape[0] != rows:
        raise ValueError(
            f"encoder_tokens must be [{rows}, E] with at least one token, as there are {rows} rows "
            f"of tokens, got {tuple(tokens.shape)}"
        )
    for field in _ENCODER_INPUTS[1:]:
        x, name = batch.get(field.name), field.name
        if x is None:
            continue
        _check_dtype(field, x)
        if x.shape[:1] != tokens.shape[:1] or x.dim() != 2:
            raise ValueError(f"{name} must be [{rows}, E], got {tuple(x.shape)}")
        if field.cut == "along" and x.shape != tokens.shape:
            raise ValueError(f"{name} must be {tuple(tokens.shape)} here, got {tuple(x.shape)}")
