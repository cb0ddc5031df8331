"""A pass of the model over the tokens of many requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from mt_model import GPT, Slots
from torch import Tensor

from mt_infer.engine.options import EngineOptions
from mt_infer.engine.request import Part


class Runner:
    """A model with the pages of its requests.

    Args:
        model: The model, whole but for its tensors, which ranks may share.
        options: Sizes.
    """

    def __init__(self, model: GPT, options: EngineOptions) -> None:
        self.model, self._options = model, options
        self.device = next(model.parameters()).device
        mixers = model.generating().values()
        self.has_states = any(not mixer.token_cache for mixer in mixers)
        longest = model.config.max_sequence_length
        rotary = [mixer.rotary for mixer in mixers if mixer.rotary is not None]
        self.by_length = any(each.angles(1) != each.angles(longest) for each in rotary)
        self.wake()

    def wake(self) -> None:
        """Make the pages."""
        options = self._options
        self._pages = self.model.new_pages(
            blocks=options.num_blocks(self.model.config),
            block_size=options.block_size,
            states=options.max_batch,
            kv_cache_dtype=options.kv_cache_dtype,
        )

    def sleep(self) -> None:
        """Free the pages."""
        self._pages = None

    def restarts(self, held: int, length: int) -> bool:
        """Return whether held keys don't serve a longer text, as longrope's factors change."""
        return self.model.config.cache_break(held, length) is not None

    def scores(self, parts: Sequence[Part], places: Sequence[Sequence[int]]) -> Tensor:
        """Run the model over the parts of a pass.

        Args:
            parts: The parts.
            places: For each part, the places among its tokens after which scores are wanted.

        Shape:
            Returns [number of places, vocab], with the vocabulary's padding.

        Raises:
            RuntimeError: The engine sleeps.
        """
        if self._pages is None:
            raise RuntimeError("the engine sleeps; call wake() before it serves requests")
        tokens, slots = slots_of(parts, places, self._options.block_size, self.device)
        batch = {"tokens": tokens, "cache": self._pages, "slots": slots}
        return cast("Tensor", self.model(None, batch))[0]


def slots_of(
    parts: Sequence[Part], places: Sequence[Sequence[int]], block_size: int, device: torch.device
) -> tuple[Tensor, Slots]:
    """Return the row of tokens of a pass, and where each belongs.

    Shape:
        Returns [1, T] and the slots.
    """
    requests = [part.request for part in parts]
    fed = [part.fed for part in parts]
    counts = np.array([len(each) for each in fed])
    starts = np.concatenate([[0], counts.cumsum()])
    held = np.array([request.held for request in requests])
    tables = np.zeros((len(parts), max(len(each.table) for each in requests)), dtype=np.int64)
    for row, request in enumerate(requests):
        tables[row, : len(request.table)] = request.table
    positions = np.arange(starts[-1]) + np.repeat(held - starts[:-1], counts)
    blocks = tables[np.repeat(np.arange(len(parts)), counts), positions // block_size]
    scored = [start + place for start, own in zip(starts, places, strict=False) for place in own]
    given = {
        "starts": starts,
        "positions": positions,
        "places": blocks * block_size + positions % block_size,
        "tables": tables,
        "lengths": held + counts,
        "states": [request.state for request in requests],
        "scored": scored,
    }
    row, *rest = (
        torch.from_numpy(np.asarray(x, dtype=np.int64)).to(device)
        for x in (np.concatenate(fed), *given.values())
    )
    return row[None], Slots(**dict(zip(given, rest, strict=True)))
