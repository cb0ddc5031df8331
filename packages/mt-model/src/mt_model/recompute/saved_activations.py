"""Activations between forward and backward: counted, and offloaded to the host's memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mt_model.recompute.plan import RecomputePlan


@dataclass
class KeptBytes:
    """Bytes of activations that a layer keeps for the backward of one pass.

    Parameters and shared tensors are not counted, and no memory is counted twice.

    Attributes:
        device: Bytes on the device of the layer.
        host: Offloaded bytes.
    """

    device: int = 0
    host: int = 0


class SavedActivations:
    """The activations of one pass through a stage, by layer in the order of the pass.

    Args:
        plan: Plan of the layers whose activations are offloaded.
        device: Device of the activations. On CUDA the copies run on a stream of their own: to the
            host while the next layer runs, and back one layer ahead.
        counts: Mapping to fill by the layer's index; None counts nothing.
    """

    def __init__(
        self, plan: RecomputePlan, device: torch.device, counts: dict[int, KeptBytes] | None
    ) -> None:
        self._plan, self._counts = plan, counts
        cuda = device.type == "cuda" and plan.offload is not None
        self._stream = torch.cuda.Stream(device) if cuda else None
        self._last: _OffloadedLayer | None = None
        self._found: dict[int, KeptBytes] = {}  # of this pass; a layer may come in several parts

    @contextmanager
    def of_layer(self, index: int, *, others: Iterable[Tensor]) -> Iterator[None]:
        """Count and offload the tensors saved for backward inside.

        Args:
            index: Layer index in the whole model.
            others: Tensors that stay in place and are not counted.
        """
        layer = None
        if self._plan.offload is not None and self._plan.offloads(index):
            layer = _OffloadedLayer(self._stream, self._last)
        elif self._counts is None:
            yield
            return
        least = self._plan.offload.min_bytes if layer and self._plan.offload else 0
        skipped = {x.untyped_storage()._cdata for x in others}
        here: dict[int, Tensor] = {}  # by address, which no other memory gets meanwhile

        def pack(x: Tensor) -> _Saved:
            if x.layout != torch.strided:
                return x
            storage = x.untyped_storage()
            if storage._cdata in skipped:
                return x
            if layer is not None and storage.nbytes() >= max(least, 1):
                return layer.pack(x)
            here[storage._cdata] = x.detach()
            return x

        with saved_tensors_hooks(pack, _unpack):
            yield
        if self._counts is not None:
            device = sum(x.untyped_storage().nbytes() for x in here.values())  # some is freed
            before = self._found.get(index, KeptBytes())
            kept = KeptBytes(
                before.device + device, before.host + (layer.num_bytes if layer else 0)
            )
            self._counts[index] = self._found[index] = kept
        here.clear()
        if layer is not None:
            self.finish()
            self._last = layer

    def finish(self) -> None:
        """Free the memory of the last offloaded layer once its copies are done."""
        if self._last is not None:
            self._last.free()


class _Block:
    """One block of memory, on the host until backward fetches it."""

    def __init__(self, source: torch.UntypedStorage, *, pinned: bool) -> None:
        self.device = source.device
        self.host: Tensor | None = torch.empty(
            source.nbytes(), dtype=torch.uint8, pin_memory=pinned
        )
        self.host.copy_(_bytes_of(source), non_blocking=pinned)
        self.back: Tensor | None = None


@dataclass
class _Handle:
    """The handle that autograd keeps in place of a tensor."""

    layer: _OffloadedLayer
    block: _Block
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


_Saved: TypeAlias = Tensor | _Handle


@dataclass
class _OffloadedLayer:
    """The memory that one layer has offloaded.

    Attributes:
        stream: Stream of the copies; None copies at once.
        before: The offloaded layer before it in the pass, whose backward comes next.
        blocks: Offloaded blocks that backward still needs.
        sources: Source tensors by address, until they are copied.
    """

    stream: torch.cuda.Stream | None
    before: _OffloadedLayer | None
    blocks: list[weakref.ref[_Block]] = field(default_factory=list)
    sources: dict[int, tuple[Tensor, _Block]] = field(default_factory=dict)
    copied: torch.cuda.Event | None = None
    fetched: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        """Number of bytes that it has copied to the host."""
        return sum(x.untyped_storage().nbytes() for x, _ in self.sources.values())

    def pack(self, x: Tensor) -> _Handle:
        """Start the copy of a tensor's whole storage to the host, once."""
        storage = x.untyped_storage()
        if storage._cdata not in self.sources:
            if self.stream is None:
                block = _Block(storage, pinned=False)
            else:
                self.stream.wait_stream(torch.cuda.current_stream(x.device))
                with torch.cuda.stream(self.stream):
                    block = _Block(storage, pinned=True)
                    self.copied = torch.cuda.Event()
                    self.copied.record(self.stream)
            self.sources[storage._cdata] = (x.detach(), block)
            self.blocks.append(weakref.ref(block))
        block = self.sources[storage._cdata][1]
        return _Handle(self, block, x.dtype, x.shape, x.stride(), int(x.storage_offset()))

    def free(self) -> None:
        """Release the memory on the device after the copies."""
        if self.copied is not None and self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(self.copied)
            self.copied = None
        self.sources.clear()

    def fetch(self) -> None:
        """Start the copies back to the device."""
        blocks = [block for block in (ref() for ref in self.blocks) if block is not None]
        self.blocks.clear()
        self.sources.clear()
        for block in blocks:
            if block.host is not None:
                block.back = torch.empty_like(block.host, device=block.device, pin_memory=False)
        if self.stream is None:
            _copy_back(blocks)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            _copy_back(blocks)
            self.fetched = torch.cuda.Event()
            self.fetched.record(self.stream)

    def unpack(self, handle: _Handle) -> Tensor:
        """Return a tensor for backward, and start to fetch the layer before."""
        if handle.block.back is None:
            self.fetch()
        if self.before is not None:
            self.before.fetch()
            self.before = None
        if self.fetched is not None:
            torch.cuda.current_stream(handle.block.device).wait_event(self.fetched)
            self.fetched = None
        memory = cast("Tensor", handle.block.back).untyped_storage()
        x = torch.empty(0, dtype=handle.dtype, device=handle.block.device)
        return x.set_(memory, handle.offset, handle.shape, handle.stride)


def _copy_back(blocks: Iterable[_Block]) -> None:
    for block in blocks:
        if block.back is not None and block.host is not None:
            block.back.copy_(block.host, non_blocking=block.host.is_pinned())
            block.host = None


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _unpack(saved: _Saved) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.layer.unpack(saved)
