"""Gathering of a model's tensors on the first rank, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from mt_model import Stack, saved_tensors
from mt_parallel_state import is_owner, offsets_of, sharding_of, shardings, share_json
from torch import Tensor
from torch.nn import Parameter

from mt_hf.family.link import Area, Link, common, inside, sizes_of

_WORLD = "tp-cp-dp-pp"


class Gather:
    """The parts of a model's tensors on each rank, and their transfer to the first rank.

    The constructor is collective over the ranks of the model's layout: they exchange the boxes of
    their parameters and saved buffers. Of the ranks with the same box, one sends it.

    Args:
        stages: This rank's stages.

    Attributes:
        is_first: Whether this rank receives the tensors.
    """

    def __init__(self, stages: Sequence[Stack[Any]]) -> None:
        state = stages[0].state
        self._group = state.group(_WORLD)
        self._rank = 0 if self._group is None else dist.get_rank(self._group)
        self._device = stages[0].shard.device
        self.is_first = self._rank == 0
        self._own: dict[str, tuple[Tensor, Area]] = {}
        for stage in stages:
            shardings(stage)
            for name, tensor in saved_tensors(stage):
                param = cast("Parameter", tensor)  # a buffer has a record too
                starts = offsets_of(param, state.layout, state.rank)
                pairs = zip(starts, param.shape, strict=True)
                area = tuple((start, start + size) for start, size in pairs)
                if is_owner(sharding_of(param), state.layout, state.rank):
                    self._own[name] = (param.detach(), area)
        reports = [[name, area, _name_of(part.dtype)] for name, (part, area) in self._own.items()]
        self._owners: dict[str, list[tuple[int, Area]]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for rank, report in enumerate(self._all(reports)):
            for name, area, dtype in report:
                self._dtypes[name] = getattr(torch, dtype)
                found = tuple((start, stop) for start, stop in area)
                self._owners.setdefault(name, []).append((rank, found))

    def tell(self, value: Any) -> Any:
        """Return the first rank's JSON value, on every rank."""
        return self._all(value if self.is_first else None)[0]

    def run(
        self, links: Sequence[Link], shapes: Mapping[str, Sequence[int]], into: Tensor | None
    ) -> None:
        """Send this rank's parts of a tensor, or assemble the parts of all ranks.

        Every rank calls this with the same links.

        Args:
            links: All links of one source tensor.
            shapes: Shapes of the parameters.
            into: The source tensor on the first rank; None to discard the parts.
        """
        for link, rank, area, shared in self._parts(links, shapes):
            if rank == self._rank:
                param, _ = self._own[link.target]
                piece = param[inside(shared, area)]
                if not self.is_first:
                    dist.send(piece.contiguous(), group=self._group, group_dst=0)
            elif self.is_first:
                dtype = self._dtypes[link.target]
                piece = torch.empty(sizes_of(shared), dtype=dtype, device=self._device)
                dist.recv(piece, group=self._group, group_src=rank)
            else:
                continue
            if into is not None:
                window = link.window(into, shapes[link.target])
                window[inside(shared, link.area(shapes[link.target]))].copy_(piece)

    def _parts(
        self, links: Sequence[Link], shapes: Mapping[str, Sequence[int]]
    ) -> Iterator[tuple[Link, int, Area, Area]]:
        """Yield each rank's part of each link: the link, the rank, its box, and the shared box."""
        for link in links:
            for rank, area in self._owners[link.target]:
                shared = common(area, link.area(shapes[link.target]))
                if shared is not None:
                    yield link, rank, area, shared

    def _all(self, value: Any) -> list[Any]:
        """Return every rank's JSON value, by rank."""
        return share_json(value, self._group, device=self._device)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
