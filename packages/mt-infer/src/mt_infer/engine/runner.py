"""A pass of the model over the tokens of many requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from mt_model import GPT, Slots
from mt_parallel_state import ParallelState
from mt_pipeline import Executor, TensorSpec
from mt_schedule import make_schedule
from torch import Tensor

from mt_infer.engine.options import EngineOptions
from mt_infer.engine.request import Part


class Runner:
    """A model with the pages of its requests.

    Args:
        model: The model, or this rank's stage of it, with pages of its own layers.
        options: Sizes.
        state: This rank's place in the layout.
    """

    def __init__(self, model: GPT, options: EngineOptions, state: ParallelState | None) -> None:
        self.model, self._options = model, options
        self.device = next(model.parameters()).device
        self._stages = None if state is None else _stages_of(model, state)
        # Of all stages, whose ranks have one schedule.
        layers = range(model.config.encoder_layers, model.config.num_layers)
        mixers = [mixer for index, mixer in model.config.mixers.items() if index in layers]
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
        if self._stages is None:
            return cast("Tensor", self.model(None, batch))[0]
        return self._stages.infer([batch], output=self._scored)[0][0]

    def _scored(self, batch: Mapping[str, Any]) -> TensorSpec:
        """Return what the last stage gives to all ranks."""
        shape = 1, len(batch["slots"].scored), self.model.config.vocab_size
        return TensorSpec(shape, self.model.shard.dtype)


def _stages_of(model: GPT, state: ParallelState) -> Executor[Mapping[str, Any]] | None:
    """Return the pipeline of a model's stages; None for one stage. Collective: its ranks meet."""
    group = state.group("pp")
    if group is None:
        return None
    schedule = make_schedule("1f1b", stages=dist.get_world_size(group), microbatches=1)
    return Executor(
        schedule,
        model,
        group=group,
        activation=lambda batch: TensorSpec(
            (*batch["tokens"].shape, model.config.hidden_size), model.shard.dtype
        ),
        device=state.device,
        # Ranks of other pipelines would wait for the layers that a failed one skips.
        stop_at_failure=state.layout.world_size > state.size("pp"),
    )


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
        "adapters": [request.adapter for request in requests],
    }
    row, *rest = (
        torch.from_numpy(np.asarray(x, dtype=np.int64)).to(device)
        for x in (np.concatenate(fed), *given.values())
    )
    return row[None], Slots(**dict(zip(given, rest, strict=True)))
