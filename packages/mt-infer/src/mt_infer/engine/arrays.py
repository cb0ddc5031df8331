"""The arrays of a pass: its row of tokens, and the slot of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from mt_model import Slots
from torch import Tensor

from mt_infer.engine.request import Part, Span

Spans: TypeAlias = Sequence[Part | Span]
Places: TypeAlias = Sequence[Sequence[int]]


def cut(parts: Spans, places: Places, sizes: Sequence[int]) -> list[tuple[Spans, Places]]:
    """Return the parts of a pass in groups with the given numbers of tokens, in their order."""
    found: list[tuple[Spans, Places]] = []
    todo = [
        (part.request, part.start, part.fed, own) for part, own in zip(parts, places, strict=True)
    ]
    for size in sizes:
        spans, wanted, room = list[Span](), list[list[int]](), size
        while room:
            request, start, fed, own = todo.pop(0)
            count = min(room, len(fed))
            spans.append(Span(request=request, start=start, fed=fed[:count]))
            wanted.append([place for place in own if place < count])
            if count < len(fed):
                rest = [place - count for place in own if place >= count]
                todo.insert(0, (request, start + count, fed[count:], rest))
            room -= count
        found.append((spans, wanted))
    return found


def slots_of(
    parts: Spans,
    places: Places,
    sizes: tuple[int, int],
    device: torch.device,
) -> tuple[Tensor, Slots]:
    """Return the row of tokens of a pass, and the slots of the tokens.

    Args:
        parts: The parts of the pass.
        places: For each part, the places among its tokens after which scores are wanted.
        sizes: Number of tokens of a block, and number of rows of states of a request.
        device: Device of the model.

    Shape:
        Returns [1, T] and the slots.
    """
    block_size, turns = sizes
    requests = [part.request for part in parts]
    fed = [part.fed for part in parts]
    counts = np.array([len(each) for each in fed])
    starts = np.concatenate([[0], counts.cumsum()])
    held = np.array([part.start for part in parts])
    tables = np.zeros((len(parts), max(len(each.table) for each in requests)), dtype=np.int64)
    for row, request in enumerate(requests):
        tables[row, : len(request.table)] = request.table
    positions = np.arange(starts[-1]) + np.repeat(held - starts[:-1], counts)
    blocks = tables[np.repeat(np.arange(len(parts)), counts), positions // block_size]
    states = [rows_of(request.state or 0, request.turn, turns) for request in requests]
    scored = [start + place for start, own in zip(starts, places, strict=False) for place in own]
    given = {
        "starts": starts,
        "positions": positions,
        "places": blocks * block_size + positions % block_size,
        "tables": tables,
        "lengths": held + counts,
        "states": [rows[0] for rows in states],
        "scored": scored,
        "adapters": [request.adapter for request in requests],
    }
    if requests[0].source:
        memories = np.zeros((len(parts), max(len(each.memory) for each in requests)), np.int64)
        for row, request in enumerate(requests):
            memories[row, : len(request.memory)] = request.memory
        given["memory_tables"] = memories
        given["memory_lengths"] = [len(each.source) for each in requests]
    if turns > 1:
        given["kept"] = [
            rows[1:] if isinstance(part, Part) and part.drafts else rows[:1] * turns
            for part, rows in zip(parts, states, strict=True)
        ]
    row, *rest = (
        torch.from_numpy(np.asarray(x, dtype=np.int64)).to(device)
        for x in (np.concatenate(fed), *given.values())
    )
    return row[None], Slots(**dict(zip(given, rest, strict=True)))


def rows_of(state: int, turn: int, turns: int) -> list[int]:
    """Return the row with a request's states, then the rows for the states after new tokens.

    The last token's row is the first row again, which has been read by then.

    Args:
        state: Number of the request's rows.
        turn: See `Request.turn`.
        turns: Number of rows of a request.
    """
    return [state * turns + (turn + token) % turns for token in range(turns + 1)]
