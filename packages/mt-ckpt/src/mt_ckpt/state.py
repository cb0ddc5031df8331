"""Saving and loading of nested dicts of tensors and plain values by one process."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mt_ckpt.array import ArraySpec
from mt_ckpt.disk import disk_errors, make_folders
from mt_ckpt.error import CheckpointError
from mt_ckpt.hold import hold_checkpoint
from mt_ckpt.manifest import MANIFEST, Manifest, read_manifest, step_of
from mt_ckpt.path import as_path, disk_of
from mt_ckpt.ranks import Ranks
from mt_ckpt.root import (
    LATEST,
    LOCK,
    committed_steps,
    latest_checkpoint,
    lock_root,
    remove_leftovers,
)
from mt_ckpt.save import Save
from mt_ckpt.shard import TensorShard, check_name
from mt_ckpt.stored.content import open_checkpoint
from mt_ckpt.stored.filling import Filler

_KEY = "mt.state"
_MAX_DEPTH = 64
_MAX_BITS = 8192  # limit of integers, as json reads 4300 digits
_UNSAFE = re.compile(r"[^A-Za-z0-9_.@+=,-]")
_NAME_LENGTH = 150


def save(
    path: str | Path, state: dict[Any, Any], *, on_event: Callable[[str], None] | None = None
) -> None:
    """Save nested dicts, lists and tuples of tensors, numbers, strings and None, without pickle.

    A replacement for `torch.save`, for example of `{"model": model.state_dict(), "optimizer":
    optimizer.state_dict()}`. The save is atomic: if the process is killed, the previous state at
    `path` remains. Each tensor is a Zarr array below `path/step_.../`; tensors that share memory
    are stored once.

    One process saves. If several ranks hold the same state, call this on one of them; for tensors
    split over ranks use `save_checkpoint`.

    Args:
        path: Folder for the state, created if missing; a previous state is replaced.
        state: The state; keys are strings or integers.
        on_event: See `save_checkpoint`.

    Raises:
        TypeError, ValueError: A value or key has another type; the message says where.
        CheckpointError: `path` contains something else, another process is saving to it, or the
            disk fails.
    """
    if not isinstance(state, dict):
        raise TypeError(f"state must be a dict, not {type(state).__name__}")
    writer = _Writer()
    encoded = writer.encode(state, (), "state")
    root = as_path(path)
    disk = disk_of(root)
    make_folders(disk, root)
    with lock_root(root, purpose="saving") as check:
        _check_ours(root)
        remove_leftovers(disk, root)
        step = max(committed_steps(root), default=0) + 1
        metadata = {_KEY: encoded}
        event = on_event or (lambda _: None)
        found = Save(root, step, writer.shards, metadata, keep=1, event=event, disk=disk)
        found.check = check
        found.run(Ranks(None))


def load(path: str | Path, *, device: torch.device | str = "cpu") -> dict[Any, Any]:
    """Load a state that `save` wrote; no code from the file is executed.

    Every byte is checked before it is used. During a concurrent save the state is the one before or
    after it. Dicts of every class become dicts, and parameters become tensors.

    Args:
        path: The folder given to `save`.
        device: Device of the tensors.

    Raises:
        CheckpointError: There is no state, it is damaged, or `save` did not write it.
    """
    with hold_checkpoint(path) as found:
        manifest = open_checkpoint(found)
        encoded = _encoded(found, manifest)
        tensors, filler = {}, Filler(found, manifest)
        for name, spec in manifest.arrays.items():
            tensor = _allocate(found, name, spec)
            filler.fill([TensorShard(name, tensor)])
            tensors[name] = tensor.to(device)
    try:
        match _decode(encoded, tensors, 0):
            case dict(state):
                return state
        raise ValueError(f"{encoded!r:.60} is not a dict")  # noqa: TRY301 - joins the others
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{found / MANIFEST}: its metadata holds no state: {error}", file=MANIFEST
        ) from error


def _allocate(found: Path, name: str, spec: ArraySpec) -> torch.Tensor:
    """Return an empty tensor for an array; a forged shape may claim any size."""
    try:
        return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError
        raise CheckpointError(
            f"{found}: tensor {name!r} of shape {spec.shape} and dtype {spec.dtype} does not fit "
            "into memory; read a part of it with load_checkpoint and a TensorShard",
            tensor=name,
        ) from error


def _encoded(found: Path, manifest: Manifest) -> Any:
    try:
        return manifest.metadata[_KEY]
    except KeyError:
        raise CheckpointError(
            f"{found} was not written by mt_ckpt.save; load_checkpoint fills tensors from it",
            file=MANIFEST,
        ) from None


def _check_ours(root: Path) -> None:
    """Refuse a folder with other contents, as a run's checkpoints would be removed."""
    with disk_errors("list", root):
        odd = sorted(
            name
            for name in disk_of(root).names(root)
            if name not in (LATEST, LOCK)
            and step_of(root / name) is None
            and not name.startswith((".step_", ".latest."))
        )
    if not odd and (newest := latest_checkpoint(root)) is not None:
        _encoded(newest, read_manifest(newest))
    if odd:
        raise CheckpointError(
            f"{root} contains {odd[0]!r}, which mt_ckpt.save did not write; use a separate folder",
            file=str(root),
        )


class _Writer:
    """Converts a state to JSON, and its tensors to arrays named by their keys."""

    def __init__(self) -> None:
        self.shards: list[TensorShard] = []
        self._names: dict[Any, str] = {}
        self._taken: set[str] = set()

    def encode(self, value: Any, path: tuple[str, ...], where: str) -> Any:
        """Return JSON whose objects are tags: {"tensor": name}, {"dict": [[key, value], ...]}."""
        if len(path) > _MAX_DEPTH:
            raise ValueError(f"{where}: nested deeper than {_MAX_DEPTH}, or within itself")
        if value is None or type(value) in (bool, str):
            return value
        if type(value) is int:
            if value.bit_length() > _MAX_BITS:
                raise ValueError(f"{where}: an integer of more than {_MAX_BITS} bits")
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value, path, where)}
        if isinstance(value, dict):
            return {"dict": self._items(value, path, where)}
        if type(value) in (list, tuple):
            items = dict(enumerate(value))
            values = [item for _, item in self._items(items, path, where)]
            return values if type(value) is list else {"tuple": values}
        raise TypeError(
            f"{where}: a {type(value).__name__} is not saved; use tensors, numbers, strings, None, "
            "and dicts, lists and tuples of them"
        )

    def _items(self, value: dict[Any, Any], path: tuple[str, ...], where: str) -> list[list[Any]]:
        items = []
        for key, item in value.items():
            if type(key) not in (str, int):
                raise TypeError(f"{where}: key {key!r} is neither a string nor an integer")
            below = (*path, self._component(path, str(key)))
            items.append([key, self.encode(item, below, f"{where}[{key!r}]")])
        return items

    def _component(self, path: tuple[str, ...], key: str) -> str:
        """Return the part of an array's name for a key: safe on every disk, and unique."""
        part = _UNSAFE.sub("_", key)[:_NAME_LENGTH]
        try:
            check_name(part)
        except ValueError:
            part = f"key-{part}"
        name, number = part, 1
        while (full := "/".join((*path, name)).lower()) in self._taken:
            number += 1
            name = f"{part}@{number}"
        self._taken.add(full)
        return name

    def _tensor(self, tensor: torch.Tensor, path: tuple[str, ...], where: str) -> str:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(
                f"{where}: a {type(tensor).__name__} is not saved; use plain tensors, or "
                "save_checkpoint for tensors split over ranks"
            )
        try:
            shard = TensorShard("/".join(path), tensor.detach())
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        place = (tensor.device, tensor.data_ptr(), tensor.is_neg())
        memory = (*place, tensor.dtype, tensor.shape, tensor.stride())
        known = self._names.get(memory) if tensor.numel() else None
        if known is not None:
            return known
        self._names[memory] = shard.name
        self.shards.append(shard)
        return shard.name


def _decode(value: Any, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError(f"values are nested deeper than {_MAX_DEPTH}")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [_decode(item, tensors, depth + 1) for item in value]
    match value:
        case {"tensor": str(name)} if len(value) == 1:
            return tensors[name]
        case {"float": "nan" | "inf" | "-inf" as text} if len(value) == 1:
            return float(text)
        case {"tuple": list(items)} if len(value) == 1:
            return tuple(_decode(item, tensors, depth + 1) for item in items)
        case {"dict": list(items)} if len(value) == 1:
            return {_checked_key(key): _decode(item, tensors, depth + 1) for key, item in items}
    raise ValueError(f"{value!r:.60} is not a value")


def _checked_key(key: Any) -> str | int:
    if type(key) not in (str, int):
        raise ValueError(f"key {key!r:.60} is neither a string nor an integer")
    return key
