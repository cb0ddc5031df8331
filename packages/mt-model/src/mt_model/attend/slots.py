"""The requests whose tokens one pass of generation has, in a row one after the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from mt_parallel_state import gather_rows
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Slots:
    """The requests of a pass: their tokens in the row, their pages, and the scores they want.

    All are integers on the model's device. A pass with one token of each request (T = R) has
    static shapes on an accelerator, so that a CUDA graph can replay it: fill it up with requests
    of one token whose place is in a block of nobody.

    Attributes:
        starts: Place in the row of each request's first token, then the number of tokens.
        positions: Position of each token in its text; three for each with MRoPE.
        places: Place of each token's key in the pages: block * block_size + offset.
        tables: Blocks of each request in the order of its tokens, filled up with any valid block.
        lengths: Number of tokens that each request holds after this pass.
        states: Row of each request's recurrent states.
        scored: Places in the row of the tokens after which scores are wanted.
        kept: Rows for the recurrent states after each of a request's new tokens, so that tokens can
            be taken back: the request goes on from the row of the last one that stays. A request
            of more than K new tokens, and each without `kept`, keeps the states after the last one
            alone, in its row of `states`.
        memory_tables: Blocks of the encoder's tokens of each request (`EncoderDecoder.encode`);
            None without an encoder.
        memory_lengths: Number of these tokens.
        adapters: Number of each request's adapter in the model's `AdapterBank`, 0 for none; None
            where no request has one. Reading it waits for the device.

    Shape:
        starts: [R + 1]; positions: [T] or [3, T]; places: [T]; tables: [R, P]; lengths, states,
        memory_lengths, adapters: [R]; scored: [L]; kept: [R, K]; memory_tables: [R, M].
    """

    starts: Tensor
    positions: Tensor
    places: Tensor
    tables: Tensor
    lengths: Tensor
    states: Tensor
    scored: Tensor
    kept: Tensor | None = None
    memory_tables: Tensor | None = None
    memory_lengths: Tensor | None = None
    adapters: Tensor | None = None

    def __post_init__(self) -> None:
        rows, tokens = self.lengths.shape[0], self.places.shape[0]
        wanted: dict[str, tuple[int, ...]] = {
            "starts": (rows + 1,),
            "positions": (*self.positions.shape[:-1], tokens),
            "tables": (rows, *self.tables.shape[1:2]),
            "states": (rows,),
            "adapters": (rows,),
            "kept": (rows, *(() if self.kept is None else self.kept.shape[1:2])),
        }
        for field in fields(self):
            x = getattr(self, field.name)
            if x is None:
                continue
            if x.is_floating_point() or x.dtype == torch.bool:
                raise TypeError(f"slots.{field.name} must be integers, got {x.dtype}")
            shape = wanted.get(field.name, tuple(x.shape))
            if tuple(x.shape) != shape:
                raise ValueError(
                    f"slots.{field.name} must be {list(shape)} for {rows} requests and {tokens} "
                    f"tokens, got {list(x.shape)}"
                )

    def lengths_by_token(self) -> Tensor:
        """Return the length of each token's request, [T]."""
        counts, tokens = self.starts.diff(), self.places.shape[0]
        return self.lengths.repeat_interleave(counts, output_size=tokens)

    def groups(self, block_size: int, most: int | None = None) -> list[Group]:
        """Return the requests in groups that one batch of operations serves.

        A group has requests of equally many new tokens whose lengths are within twice of each
        other, so that work follows the tokens held. Where shapes are static there is one group.

        Args:
            block_size: Number of tokens of a block.
            most: Number of tokens that a group of several requests holds at most; None for any.

        Raises:
            ValueError: A table is shorter than its request.
        """
        room = self.tables.shape[1]
        rows, tokens = self.lengths.shape[0], self.places.shape[0]
        if self.lengths.device.type != "cpu" and rows == tokens:
            return [Group(slots=self, count=1, blocks=room)]
        starts, lengths = self.starts.tolist(), self.lengths.tolist()
        found: dict[tuple[int, int], list[int]] = defaultdict(list)
        for row, length in enumerate(lengths):
            blocks, count = max(1, -(-length // block_size)), starts[row + 1] - starts[row]
            if blocks > room:
                raise ValueError(
                    f"slots.lengths[{row}] is {length}, and slots.tables has {room} blocks of "
                    f"{block_size} tokens for a request; give it {blocks}"
                )
            if count:
                found[count, (blocks - 1).bit_length()].append(row)
        groups = list[Group]()
        for (_, bits), rows_of in found.items():
            step = len(rows_of) if most is None else max(1, (most // block_size) >> bits)
            cuts = range(0, len(rows_of), step)
            groups += [
                self._group(rows_of[i : i + step], starts, lengths, block_size) for i in cuts
            ]
        return groups

    def _group(self, own: list[int], starts: list[int], lengths: list[int], size: int) -> Group:
        count = starts[own[0] + 1] - starts[own[0]]
        held = {lengths[row] for row in own}
        length, blocks = (max(held) if len(held) == 1 else None), max(1, -(-max(held) // size))
        if len(own) * count == self.places.shape[0]:
            return Group(slots=self, count=count, blocks=blocks, length=length)
        device = self.places.device
        first = torch.tensor([starts[row] for row in own], device=device)
        tokens = first[:, None] + torch.arange(count, device=device)
        rows = torch.tensor(own, device=device)
        places = {"rows": rows, "tokens": tokens}
        return Group(slots=self, count=count, blocks=blocks, length=length, **places)


@dataclass(frozen=True, kw_only=True, eq=False)
class Peers:
    """The ranks that share a row of tokens: each runs its own, and keeps the keys of all.

    Attributes:
        group: The ranks, in the order of their tokens.
        counts: Number of tokens of each rank.
        places: `Slots.places` of the whole row; the slots of a rank belong to its tokens, as if all
            earlier tokens were in the pages.
    """

    group: dist.ProcessGroup
    counts: Sequence[int]
    places: Tensor

    def whole(self, row: Tensor) -> Tensor:
        """Return a tensor of the whole row's tokens, [1, T of this rank, ...] -> [1, T, ...]."""
        return gather_rows(row[0], self.group, self.counts)[None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The requests of a pass with one number of new tokens.

    Attributes:
        slots: All requests of the pass.
        count: Number of new tokens of each request.
        blocks: Number of blocks that holds any of them.
        length: Number of tokens that each of them holds; None where they differ.
        rows: The requests; None for all.
        tokens: Places of their tokens in the row; None for all.

    Shape:
        rows: [R]; tokens: [R, S].
    """

    slots: Slots
    count: int
    blocks: int
    length: int | None = None
    rows: Tensor | None = None
    tokens: Tensor | None = None

    def of(self, by_request: Tensor) -> Tensor:
        """Return the entries of the group's requests."""
        return by_request if self.rows is None else by_request.index_select(0, self.rows)

    def take(self, row: Tensor) -> Tensor:
        """Return the group's tokens of a row, by request: [1, T, ...] -> [R, S, ...]."""
        x = row[0]
        if self.tokens is not None:
            x = x.index_select(0, self.tokens.flatten())
        return x.unflatten(0, (-1, self.count))

    def put(self, x: Tensor, row: Tensor | None) -> Tensor:
        """Return a row with the group's tokens in place, [R, S, ...] -> [1, T, ...].

        Args:
            x: Features of the group's tokens.
            row: Row with the tokens of other groups; None for none yet.
        """
        flat = x.flatten(0, 1)
        if self.tokens is None:
            return flat[None]
        if row is None:
            row = flat.new_zeros(1, self.slots.places.shape[0], *flat.shape[1:])
        row[0].index_copy_(0, self.tokens.flatten(), flat)
        return row
