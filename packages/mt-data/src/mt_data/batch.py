"""Batches: which samples a rank trains on at a step."""

from __future__ import annotations

from typing import Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from mt_data.error import DataError
from mt_data.gpt import PADDING


class Samples(Protocol):
    """A dataset of equally long token samples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> NDArray[np.int64]: ...


class MicroBatch(TypedDict):
    """Rows for one forward pass.

    Shape:
        - tokens: [B, S]; labels: [B, S], -100 where no loss is due; sample_ids: [B]; all int64
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    sample_ids: NDArray[np.int64]


class BatchSampler:
    """Micro-batches of one data-parallel rank, computed from the step number.

    The global batch of step t is samples [t * global_batch_size, (t + 1) * global_batch_size),
    moved by `offset`, whatever the layout. It is cut into rows of micro_batch_size; micro-batch m
    takes row m * dp_size + dp_rank. There is no state: to resume, ask for the next step.

    Args:
        dataset: gives samples of S + 1 tokens; `PADDING` marks a tail that carries no loss.
        global_batch_size: samples in a step over all ranks.
        micro_batch_size: samples in one forward pass of one rank.
        dp_rank: this rank's index along the data-parallel axis.
        dp_size: ranks along that axis.
        vocab_size: when given, each token id is checked to lie below it.
        offset: added to every sample number; a run whose batch size changes at step t after n
            samples goes on exactly with `n - t * global_batch_size`.
    """

    def __init__(
        self,
        dataset: Samples,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        vocab_size: int | None = None,
        offset: int = 0,
    ) -> None:
        _check_sizes(global_batch_size, micro_batch_size, dp_rank, dp_size)
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.vocab_size = vocab_size
        self.offset = offset

    @property
    def num_microbatches(self) -> int:
        """Forward passes of this rank in a step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    def __len__(self) -> int:
        """Whole steps the dataset holds."""
        return max(0, len(self.dataset) - self.offset) // self.global_batch_size

    def sample_ids(self, step: int) -> NDArray[np.int64]:
        """Samples of this rank at a step.

        Shape:
            - Output: [num_microbatches, micro_batch_size]
        """
        first = step * self.global_batch_size + self.offset
        if step < 0 or first < 0 or step >= len(self):
            raise IndexError(
                f"step {step} needs samples {first} to "
                f"{first + self.global_batch_size - 1}; the dataset has {len(self.dataset)} "
                f"({len(self)} steps): ask it for more with num_samples"
            )
        ids = np.arange(first, first + self.global_batch_size, dtype=np.int64)
        shape = (self.num_microbatches, self.dp_size, self.micro_batch_size)
        return ids.reshape(shape)[:, self.dp_rank]

    def step(self, step: int) -> list[MicroBatch]:
        """The micro-batches of this rank at a step, counted from 0."""
        return [self._micro_batch(ids) for ids in self.sample_ids(step)]

    def _micro_batch(self, ids: NDArray[np.int64]) -> MicroBatch:
        rows = np.stack([self.dataset[int(sample)] for sample in ids])
        batch = micro_batch(rows[:, :-1], rows[:, 1:], ids)
        if self.vocab_size is not None:
            _check_ids(rows, ids, self.vocab_size)
        return batch


def micro_batch(
    tokens: NDArray[np.int64], labels: NDArray[np.int64], ids: NDArray[np.int64]
) -> MicroBatch:
    """Own, contiguous arrays; padding becomes token 0, which a causal model never looks at."""
    return {
        "tokens": np.where(tokens == PADDING, 0, tokens),
        "labels": np.ascontiguousarray(labels),
        "sample_ids": ids.copy(),
    }


def _check_ids(rows: NDArray[np.int64], ids: NDArray[np.int64], vocab_size: int) -> None:
    wrong = (rows != PADDING) & ((rows < 0) | (rows >= vocab_size))
    if wrong.any():
        row, column = (int(value) for value in np.argwhere(wrong)[0])
        raise DataError(
            f"sample {ids[row]} has token id {rows[row, column]} at position {column}; the "
            f"vocabulary has {vocab_size} ids: was the dataset built with another tokenizer?"
        )


def _check_sizes(global_batch_size: int, micro_batch_size: int, dp_rank: int, dp_size: int) -> None:
    sizes = {
        "global_batch_size": global_batch_size,
        "micro_batch_size": micro_batch_size,
        "dp_size": dp_size,
    }
    for name, size in sizes.items():
        if size < 1:
            raise DataError(f"{name} is {size}; it must be at least 1")
    if not 0 <= dp_rank < dp_size:
        raise DataError(f"dp_rank is {dp_rank}; it must lie in [0, dp_size) with dp_size {dp_size}")
    together = micro_batch_size * dp_size
    if global_batch_size % together:
        below = global_batch_size // together * together
        nearest = f"{below} or {below + together}" if below else f"{together}"
        raise DataError(
            f"global_batch_size {global_batch_size} is not divisible by micro_batch_size "
            f"{micro_batch_size} * dp_size {dp_size} = {together}; nearest valid: {nearest}"
        )
