"""Attention to pages, for the tokens of many requests in one row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import lcm
from typing import Any

import torch
from mt_kernels import AUTO, Selector
from torch import Tensor

from mt_model.attend.cache import Pages
from mt_model.attend.context import AttendingLayer, ForwardContext, Recalled, Recurrence
from mt_model.attend.invariant import KEYS
from mt_model.attend.kept import KeptAttend, View
from mt_model.attend.seen import seen
from mt_model.attend.slots import Group, Peers, Slots

# Tokens whose keys a CPU copies from their blocks at a time. Tensors of many more leave its caches
# before they are read, and their memory is taken anew each time, several times as slow.
_MOST = 2048


@dataclass(frozen=True, kw_only=True, eq=False)
class PagedAttend(KeptAttend):
    """Causal attention of the tokens of many requests, each to the pages of its own.

    It reads the blocks that a request holds, or those that a window reaches.

    Attributes:
        cache: Pages of this stage.
        slots: Requests of the pass.
        peers: Ranks that share the tokens of the row; None for one.
    """

    cache: Pages
    slots: Slots
    peers: Peers | None = None
    _views: dict[Any, list[View]] = field(default_factory=dict)

    @property
    def room(self) -> int:
        """Number of tokens that a table has blocks for."""
        return self.slots.tables.shape[1] * self.cache.block_size

    @cached_property
    def groups(self) -> list[Group]:
        """The requests in groups that one batch of operations serves."""
        most = _MOST if self.slots.lengths.device.type == "cpu" else None
        return self.slots.groups(self.cache.block_size, most)

    @cached_property
    def by_count(self) -> list[Group]:
        """The requests in groups of equally many new tokens, whatever their lengths."""
        return self.slots.groups(self.room)

    def selector(self, layer: AttendingLayer) -> Selector[Any]:
        """Return the choice of a kernel: `invariant` where the model has it."""
        return layer.attending.get("invariant", layer.attending[AUTO])

    def put(self, layer: int, new: Mapping[str, Tensor]) -> None:
        """Store the new tokens; see `KeptAttend`."""
        peers = self.peers
        for name, x in new.items():
            if peers is None:
                self.cache.write(layer, name, x, self.slots.places)
            else:
                self.cache.write(layer, name, peers.whole(x), peers.places)

    def read(self, layer: int, name: str, dtype: torch.dtype, view: View) -> Tensor:
        """Return the values of blocks; see `KeptAttend`."""
        assert view.kept is not None, "a view of pages names its blocks"  # noqa: S101
        return self.cache.read(layer, name, dtype, view.kept)[:, : view.keys.shape[1]]

    def recur(
        self, layer: int, run: Recurrence, inputs: Sequence[Tensor], shared: ForwardContext
    ) -> Tensor:
        """Run a recurrent layer from each request's row of the states; see `Attend`."""
        del shared
        names, found = self.cache.states[layer], None
        held = {name: self.cache.layers[layer][name] for name in names}
        for group in self.by_count:
            rows, lengths = group.of(self.slots.states), group.of(self.slots.lengths)
            first = lengths <= group.count  # no token before: the row may be another request's
            before = {name: _zeroed(x.index_select(0, rows), first) for name, x in held.items()}
            outs, into, given = [], rows[:, None], [group.take(x) for x in inputs]
            if self.slots.kept is not None and group.count <= self.slots.kept.shape[1]:
                into = group.of(self.slots.kept)[:, : group.count]  # one token after the other
            for own, to in zip(_pieces(given, into.shape[1]), into.unbind(1), strict=True):
                out, before = run(*own, before, None)
                before = {name: before[name].detach().to(x.dtype) for name, x in held.items()}
                for name, x in held.items():
                    x.index_copy_(0, to, before[name])
                outs.append(out)
            found = group.put(outs[0] if len(outs) == 1 else torch.cat(outs, 1), found)
        assert found is not None, "a pass has tokens"  # noqa: S101
        return found

    def recall(self, layer: int, query: Tensor) -> list[Recalled]:
        """Return each group's queries with the memories of its requests; see `Attend`.

        Raises:
            ValueError: The slots name no memories.
        """
        slots, found = self.slots, list[Recalled]()
        if slots.memory_tables is None or slots.memory_lengths is None:
            raise ValueError(
                f"layer {layer} attends to a memory, and the slots have no memory_tables and "
                "memory_lengths; give them, as encode() has filled the blocks"
            )
        for group in self.by_count:
            tables, lengths = group.of(slots.memory_tables), group.of(slots.memory_lengths)
            kept = (self.cache.read(layer, name, query.dtype, tables) for name in ("key", "value"))
            key, value = kept
            seen = torch.arange(key.shape[1], device=key.device) < lengths[:, None]
            found.append(Recalled(group.take(query), key, value, seen, group.put))
        return found

    def views(self, window: int | None, chunk: int | None) -> list[View]:
        """Return the view of each group, made once for equal layers."""
        near = window if chunk is None else chunk
        found = self._views.get((window, chunk))
        if found is None:
            found = self._views[window, chunk] = list(self._made(window, chunk, near))
        return found

    def _made(self, window: int | None, chunk: int | None, near: int | None) -> Iterator[View]:
        size = self.cache.block_size
        for group in self.groups:
            slots, count = group.slots, group.count
            device = slots.lengths.device
            tables = group.of(slots.tables)
            queries = group.of(slots.lengths)[:, None] - count + torch.arange(count, device=device)
            queries = queries.clamp(min=0)  # a request that only fills up a row
            blocks = torch.arange(group.blocks, device=device)
            step = lcm(size, KEYS) // size  # in blocks; the kernel's blocks begin there
            reach = group.blocks if near is None else (near + count - 3) // size + 1 + step
            if near is not None and reach < group.blocks:
                first = (queries[:, :1] - near + 1).clamp(min=0)
                blocks = first.div(step * size, rounding_mode="floor") * step + blocks[:reach]
                tables = tables.gather(1, blocks.clamp(max=group.blocks - 1))
            else:
                blocks, tables = blocks.expand(len(tables), -1), tables[:, : group.blocks]
            keys = (blocks[..., None] * size + torch.arange(size, device=device)).flatten(1)
            sees_all = False
            if group.length is not None and reach >= group.blocks:
                keys = keys[:, : group.length]
                sees_all = count in (1, group.length) and (near is None or group.length <= near)
            allowed = seen(queries, keys, window, chunk=chunk)[:, None]
            yield View(group, _range_of(tables), allowed, queries, keys, sees_all)


def _range_of(tables: Tensor) -> Tensor | slice:
    """Return blocks in a row of one request as a range, which is read without a copy."""
    if len(tables) > 1 or tables.device.type != "cpu":
        return tables
    first, *others = tables[0].tolist()
    end = first + len(others) + 1
    return slice(first, end) if others == list(range(first + 1, end)) else tables


def _pieces(tensors: Sequence[Tensor], number: int) -> Iterator[tuple[Tensor, ...]]:
    """Return the tensors' tokens in a number of equal pieces, [R, S, ...] each."""
    return zip(*(x.chunk(number, 1) for x in tensors), strict=True)


def _zeroed(x: Tensor, where: Tensor) -> Tensor:
    """Return rows with zeros in place of some."""
    return x.masked_fill(where.view(-1, *(1,) * (x.dim() - 1)), 0)
