"""What layers keep between forward and backward: counted, and offloaded to the host's memory."""

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

    Parameters and what all layers share are not counted, and no memory is counted twice.

    Attributes:
        device: on the device of the layer.
        host: offloaded.
    """

    device: int = 0
    host: int = 0


class SavedActivations:
    """What the layers of one pass through a stage keep, in the order in which they run.

    Args:
        plan: which layers' activations are offloaded.
        device: of the activations. On CUDA the copies run beside the computation, on a stream of
            their own: those to the host while the next layer runs, those back one layer ahead.
        counts: filled by the layer's index; None counts nothing.
    """

    def __init__(
        self, plan: RecomputePlan, device: torch.device, counts: dict[int, KeptBytes] | None
    ) -> None:
        self._plan, self._counts = plan, counts
        cuda = device.type == "cuda" and plan.offload is not None
        self._stream = torch.cuda.Stream(device) if cuda else None
        self._last: _OffloadedLayer | None = None

    @contextmanager
    def of_layer(self, index: int, *, others: Iterable[Tensor]) -> Iterator[None]:
        """Take care of what is saved for backward inside.

        Args:
            index: of the layer.
            others: tensors that stay as they are and are not counted.
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
            self._counts[index] = KeptBytes(device, layer.num_bytes if layer else 0)
        here.clear()
        if layer is not None:
            self.finish()
            self._last = layer

    def finish(self) -> None:
        """Free what the last offloaded layer has copied, once it is copied."""
        if self._last is not None:
            self._last.free()


class _Block:
    """One piece of memory, on the host until it is fetched."""

    def __init__(self, source: torch.UntypedStorage, *, pinned: bool) -> None:
        self.device = source.device
        self.host: Tensor | None = torch.empty(
            source.nbytes(), dtype=torch.uint8, pin_memory=pinned
        )
        self.host.copy_(_bytes_of(source), non_blocking=pinned)
        self.back: Tensor | None = None


@dataclass
class _Handle:
    """What autograd keeps in place of a tensor."""

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
        stream: of the copies; None copies at once.
        before: the offloaded layer that ran before it, whose backward comes next.
        blocks: what is offloaded, while somebody still needs it.
        sources: where it came from by address, until it is copied.
    """

    stream: torch.cuda.Stream | None
    before: _OffloadedLayer | None
    blocks: list[weakref.ref[_Block]] = field(default_factory=list)
    sources: dict[int, tuple[Tensor, _Block]] = field(default_factory=dict)
    copied: torch.cuda.Event | None = None
    fetched: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that it has copied to the host."""
        return sum(x.untyped_storage().nbytes() for x, _ in self.sources.values())

    def pack(self, x: Tensor) -> _Handle:
        """Start the copy to the host of all the memory behind a tensor, once."""
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
        """Let the memory on the device be used again, after the copies."""
        if self.copied is not None and self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(self.copied)
            self.copied = None
        self.sources.clear()

    def fetch(self) -> None:
        """Start the copies back."""
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
        """Return a tensor that backward asks for, and start on those of the layer before."""
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
