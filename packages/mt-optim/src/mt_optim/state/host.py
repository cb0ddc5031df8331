"""The host as a place for states: memory, choice of shards, and copies to and from the device."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from mt_files import FileError
from torch import Tensor

_ALIGN = 64  # bytes, at which every tensor of a buffer starts


def choose_offloaded(numels: Sequence[int], target: float) -> list[int]:
    """Choose whole shards with about `target` elements together.

    The largest shards come first, as long as they fit. If the smallest remaining shard brings the
    sum closer to the target, it is taken too. So the error is at most half of the smallest shard
    that was not chosen.

    Args:
        numels: Number of elements of each shard.
        target: Number of elements to choose.

    Returns:
        Indices of the chosen shards, in order.
    """
    chosen: list[int] = []
    missing = target
    left: int | None = None
    for place in sorted(range(len(numels)), key=lambda i: (-numels[i], i)):
        if numels[place] <= missing:
            chosen.append(place)
            missing -= numels[place]
        else:
            left = place
    if left is not None and abs(missing - numels[left]) < abs(missing):
        chosen.append(left)
    return sorted(chosen)


class HostMemory:
    """Makes tensors on the host, in memory or in memory-mapped files.

    A file is unlinked once it is mapped, so nothing remains after the process ends. The system can
    evict its pages from memory at any time.

    Args:
        folder: The folder of the files; None for memory.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = None if folder is None else Path(folder)

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a tensor that nobody else has on the host: itself where it lies there."""
        is_there = tensor.device.type == "cpu" and self._folder is None
        return tensor if is_there else self.copy(tensor)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy on the host, in the same order of memory.

        Raises:
            FileError: The folder does not exist, can't be written or has no room.
        """
        made = torch.empty_like(tensor, device="cpu", requires_grad=False)
        if self._folder is not None and tensor.numel():
            made = (
                self._mapped(made.numel() * made.element_size())
                .view(made.dtype)
                .as_strided(made.shape, made.stride())
            )
        return made.copy_(tensor.detach())

    def require(self, size: int) -> None:
        """Check that the folder has room for files of `size` bytes together.

        Raises:
            FileError: The folder does not exist, or has no room.
        """
        if self._folder is not None:
            with self._naming(size):
                if size > shutil.disk_usage(self._folder).free:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _mapped(self, size: int) -> Tensor:
        """Map a new file of `size` bytes, which has its place on the disk already."""
        with self._naming(size):
            handle, name = tempfile.mkstemp(prefix="mt-optim-", dir=self._folder)
            try:
                os.posix_fallocate(handle, 0, size)
                return torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
            finally:
                os.close(handle)
                os.unlink(name)

    @contextmanager
    def _naming(self, size: int) -> Iterator[None]:
        """Name the folder in an error of the system, with what it needs and has."""
        folder = self._folder or Path()
        try:
            yield
        except OSError as error:
            problem = f"offload_dir does not take {size} bytes: {error.strerror or error}"
            with suppress(OSError):
                problem += f"; {shutil.disk_usage(folder).free} bytes are free"
            raise FileError(folder, f"{problem}. Name a folder with more room") from error


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a step copied between the device and the host.

    Attributes:
        to_host: Bytes of gradients.
        to_device: Bytes of new parameters.
    """

    to_host: int = 0
    to_device: int = 0


@dataclass(slots=True, eq=False)
class _Staging:
    """Host memory for a copy, and the event after which it can be reused."""

    event: Any
    is_pinned: bool
    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return places for tensors, in their order of memory; waits for the last copy."""
        # The last copy may still be reading or writing this memory.
        self.event.synchronize()
        sizes = [-(-t.numel() * t.element_size() // _ALIGN) * _ALIGN for t in tensors]
        if sum(sizes) > self.memory.numel():
            self.memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self.is_pinned)
        places: list[Tensor] = []
        for tensor, part in zip(tensors, self.memory[: sum(sizes)].split(sizes), strict=True):
            strides = torch.empty_like(tensor, device="meta").stride()
            flat = part[: tensor.numel() * tensor.element_size()].view(tensor.dtype)
            places.append(flat.as_strided(tensor.shape, strides))
        return places


class Mover:
    """Copies gradients to the host and new parameters back, while device and host compute.

    Copies run in a stream of their own, through two pinned buffers in each direction that take
    turns: while the host steps one portion, the next one's gradients arrive and the last one's
    parameters leave. On the CPU the same code runs, and copies are plain ones to other memory.

    Args:
        device: Device of gradients and parameters.

    Attributes:
        traffic: Bytes copied since `begin`.
    """

    def __init__(self, device: torch.device) -> None:
        self.traffic = Traffic()
        self._module: Any = torch.get_device_module(device)
        self._device = device
        self._stream: Any = self._module.Stream(device)
        pinned = device.type != "cpu"
        self._grads = [_Staging(self._module.Event(), pinned) for _ in range(2)]
        self._params = [_Staging(self._module.Event(), pinned) for _ in range(2)]
        self._fetched: dict[int, list[Tensor | None]] = {}

    def begin(self) -> None:
        """Make the stream of the copies wait for all work submitted to the device so far."""
        self.traffic = Traffic()
        self._stream.wait_stream(self._module.current_stream(self._device))

    def fetch(self, turn: int, grads: Sequence[Tensor | None]) -> None:
        """Start to copy gradients to the host, for `fetched` of the same turn."""
        staging = self._grads[turn % 2]
        there = [grad for grad in grads if grad is not None]
        places = staging.like(there)
        with self._module.stream(self._stream):
            for place, grad in zip(places, there, strict=True):
                place.copy_(grad, non_blocking=True)
            staging.event.record(self._stream)
        self._count(to_host=_bytes(there))
        arrived = iter(places)
        self._fetched[turn] = [None if grad is None else next(arrived) for grad in grads]

    def fetched(self, turn: int) -> list[Tensor | None]:
        """Wait for gradients; they stay until the next but one `fetch`."""
        self._grads[turn % 2].event.synchronize()
        return self._fetched.pop(turn)

    def send(self, turn: int, params: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
        """Start to set parameters on the device to masters on the host, rounded there."""
        staging = self._params[turn % 2]
        places = staging.like(params)
        torch._foreach_copy_(places, list(masters))
        with self._module.stream(self._stream):
            for param, place in zip(params, places, strict=True):
                param.copy_(place, non_blocking=True)
            staging.event.record(self._stream)
        self._count(to_device=_bytes(params))

    def end(self) -> None:
        """Make the device's next work wait for the copies."""
        self._module.current_stream(self._device).wait_stream(self._stream)

    def _count(self, *, to_host: int = 0, to_device: int = 0) -> None:
        self.traffic = Traffic(
            to_host=self.traffic.to_host + to_host,
            to_device=self.traffic.to_device + to_device,
        )


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
