"""Checkpoints of Megatron-core's `dist_checkpointing` in its format torch_dist."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from mt_files import read_json, shorten

from mt_ckpt.error import CheckpointError
from mt_ckpt.exchange.dcp import open_dcp, read_archive
from mt_ckpt.exchange.foreign import ForeignCheckpoint
from mt_ckpt.exchange.inert_pickle import Record

CONFIG, COMMON = "metadata.json", "common.pt"
_BACKEND = "torch_dist"
_MAX_CONFIG = 1 << 20
_MAX_DEPTH = 32
_MAX_PLAIN = 1 << 20  # characters of all values
_VALUE = 16  # characters that a value counts, besides its own


def open_megatron(folder: Path) -> ForeignCheckpoint:
    """Return the tensors of a checkpoint that Megatron-core wrote, by Megatron's names.

    Tensors of all layers are one, with the layer as the first dim, unless the model was saved with
    layers of different shapes.

    Returns:
        The checkpoint; its description holds `args`, the run's arguments as plain values, if they
        were saved.

    Raises:
        CheckpointError: The checkpoint has another format, or is damaged.
        FileError: A file can't be read.
    """
    path = folder / CONFIG
    if not path.exists():
        steps = sorted(each.name for each in folder.glob("iter_*")) if folder.is_dir() else []
        hint = f"; name one of its steps, such as {folder / steps[-1]}" if steps else ""
        raise CheckpointError(
            f"{folder} has no {CONFIG}, so Megatron-core's dist_checkpointing did not write it"
            f"{hint}",
            file=str(path),
        )
    config = read_json(path, limit=_MAX_CONFIG, within=folder)
    backend = config.get("sharded_backend") if isinstance(config, dict) else None
    if backend != _BACKEND:
        raise CheckpointError(
            f"{path}: its format is {shorten(backend)}, and {_BACKEND!r} is read; save it again "
            "with --ckpt-format torch_dist",
            file=str(path),
        )
    common = read_archive(folder / COMMON) if (folder / COMMON).exists() else {}
    if not isinstance(common, dict):
        raise CheckpointError(f"{folder / COMMON}: is no mapping; restore it", file=COMMON)
    step, args = common.get("iteration"), common.get("args")
    found: dict[str, Any] = {}
    if isinstance(args, Record) and isinstance(args.state, Mapping):
        try:
            found["args"] = plain(dict(args.state))
        except ValueError as error:
            path = folder / COMMON
            raise CheckpointError(f"{path}: args: {error}; restore it", file=str(path)) from error
    return dataclasses.replace(
        open_dcp(folder),
        step=step if isinstance(step, int) and 0 <= step < 10**18 else None,
        description=found,
    )


def plain(value: Any) -> Any:
    """Return a value that JSON can hold, with texts that describe other values in it.

    Raises:
        ValueError: The value is too large. A small pickle may hold very many values, by references.
    """
    return _Plain().of(value, 0)


class _Plain:
    """Values as JSON, of bounded size in all."""

    def __init__(self) -> None:
        self._left = _MAX_PLAIN

    def of(self, value: Any, depth: int) -> Any:
        """Return one value."""
        self._left -= _VALUE + (len(value) if isinstance(value, str) else 0)
        if self._left < 0:
            raise ValueError(f"it holds more than {_MAX_PLAIN} characters of values")
        if isinstance(value, Record):
            return json.dumps([value.kind, self.of(list(value.args), depth + 1)])
        if isinstance(value, list | tuple) and depth < _MAX_DEPTH:
            return [self.of(each, depth + 1) for each in value]
        if isinstance(value, dict) and depth < _MAX_DEPTH:
            return {self._key(name): self.of(each, depth + 1) for name, each in value.items()}
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int) and abs(value) < 1 << 62:
            return value
        if isinstance(value, float) and math.isfinite(value):
            return value
        return str(value) if isinstance(value, float | torch.dtype) else shorten(value)

    def _key(self, name: Any) -> str:
        text = name if isinstance(name, str) else shorten(name)
        self._left -= len(text)
        return text
