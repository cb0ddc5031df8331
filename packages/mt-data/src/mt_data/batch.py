"""Batches: which samples a rank trains on at a step."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal, NotRequired, Protocol, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from mt_data.error import DataError
from mt_data.gpt import PADDING


class Samples(Protocol):
    """A dataset of equally long token samples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> NDArray[np.int64]: ...


class PartialSamples(Samples, Protocol):
    """A dataset whose samples can be read in parts, and that knows their documents."""

    def sample(self, index: int, begin: int = 0, end: int | None = None) -> NDArray[np.int64]:
        """Tokens [begin, end) of a sample."""
        ...

    def sample_documents(self, index: int) -> NDArray[np.int64]:
        """Number of the document of each token of a sample."""
        ...


class MicroBatch(TypedDict):
    """Rows for one forward pass.

    Shape:
        - tokens: [B, S]; labels: [B, S], -100 where no loss is due; sample_ids: [B]; all int64
        - documents: [B, S] int64, number of each token's document in its row, from 0; only with
          `packing="documents"`
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    sample_ids: NDArray[np.int64]
    documents: NotRequired[NDArray[np.int64]]


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
        self.packing: Literal["none", "documents"] = "none"
        self.parts: tuple[tuple[int, int], ...] | None = None

    def rows(
        self,
        *,
        packing: Literal["none", "documents"] = "none",
        parts: Sequence[tuple[int, int]] | None = None,
    ) -> BatchSampler:
        """Return a sampler of the same samples whose rows are made otherwise.

        Args:
            packing: "documents" adds `documents` to micro-batches, so that attention can be kept
                within documents, and takes the labels away that belong to the next document: each
                is learnt from as if it stood alone.
            parts: Positions [begin, end) of each row that this rank holds, in order; only those
                are read. All when None.
        """
        if packing not in ("none", "documents"):
            raise DataError(f"packing is {packing!r}; choose 'none' or 'documents'")
        if parts is not None and not (parts and all(0 <= begin < end for begin, end in parts)):
            raise DataError(f"parts is {list(parts)}; give one or more with 0 <= begin < end")
        if (packing != "none" or parts is not None) and not hasattr(
            self.dataset, "sample_documents"
        ):
            raise DataError(
                f"{type(self.dataset).__name__} gives whole rows only; packing and parts need "
                "sample(index, begin, end) and sample_documents(index), as GPTDataset has them"
            )
        other = copy.copy(self)
        other.packing, other.parts = packing, None if parts is None else tuple(parts)
        return other

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
        pairs = [self._row(int(sample)) for sample in ids]
        tokens = np.stack([tokens for tokens, _ in pairs])
        labels = np.stack([labels for _, labels in pairs])
        if self.vocab_size is not None:
            for rows in (tokens, labels[:, -1:]):
                _check_ids(rows, ids, self.vocab_size)
        batch = micro_batch(tokens, labels, ids)
        if self.packing == "documents":
            self._keep_apart(batch, ids)
        return batch

    def _row(self, sample: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens and labels of this rank's part of a sample."""
        if self.parts is None:
            row = self.dataset[sample]
            return row[:-1], row[1:]
        dataset = cast("PartialSamples", self.dataset)
        pieces = [dataset.sample(sample, begin, end + 1) for begin, end in self.parts]
        return np.concatenate([p[:-1] for p in pieces]), np.concatenate([p[1:] for p in pieces])

    def _keep_apart(self, batch: MicroBatch, ids: NDArray[np.int64]) -> None:
        """Add the documents, and remove labels that are of the next one."""
        dataset = cast("PartialSamples", self.dataset)
        whole = np.stack([dataset.sample_documents(int(sample)) for sample in ids])
        parts = self.parts or ((0, whole.shape[1] - 1),)
        own = np.concatenate([np.arange(begin, end) for begin, end in parts])
        batch["documents"] = np.ascontiguousarray(whole[:, own])
        batch["labels"][whole[:, own + 1] != batch["documents"]] = PADDING


def micro_batch(
    tokens: NDArray[np.int64], labels: NDArray[np.int64], ids: NDArray[np.int64]
) -> MicroBatch:
    """Own, contiguous arrays; padding becomes token 0, which a causal model never looks at."""
    return {
        "tokens": np.where(tokens == PADDING, 0, tokens),
        "labels": labels.copy(),
        "sample_ids": ids.copy(),
    }


def count_labels(batches: Sequence[MicroBatch]) -> int:
    """Labels of micro-batches that carry a loss; counted here, no device is waited for."""
    return sum(int(np.count_nonzero(batch["labels"] != PADDING)) for batch in batches)


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
