"""Batches: the samples that a rank trains on at a step."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NotRequired, Protocol, TypeAlias, TypedDict, cast, get_args

import numpy as np
from mt_files import multiples_near
from numpy.typing import NDArray

from mt_data.datasets.gpt import PADDING
from mt_data.error import DataError, at_least


class Samples(Protocol):
    """A dataset of equally long token samples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> NDArray[np.int64]: ...


class PartialSamples(Samples, Protocol):
    """A dataset whose samples can be read in parts, and that knows their documents."""

    def sample(self, index: int, begin: int = 0, end: int | None = None) -> NDArray[np.int64]:
        """Return tokens [begin, end) of a sample."""
        ...

    def sample_documents(self, index: int) -> NDArray[np.int64]:
        """Return the document number of each token of a sample; `PADDING` for padding."""
        ...


class MadeRows(Protocol):
    """A dataset that makes inputs and labels of whole rows itself, as `MaskedDataset` does."""

    sequence_length: int

    def __len__(self) -> int: ...

    def row(self, index: int) -> Mapping[str, NDArray]:
        """Return the arrays of a row by name, including `tokens` and `labels`."""
        ...

    def empty(self) -> Mapping[str, NDArray]:
        """Return a row without labels, of the same shape."""
        ...


class MicroBatch(TypedDict):
    """Rows for one forward pass. Of the S tokens of a row, this rank holds P.

    Shape:
        - tokens: [B, P]; labels: [B, P], -100 for tokens without a loss; sample_ids: [B]; all int64
        - documents: [B, S] int64, equal for tokens of the same document; positions: [B, P] int64,
          positions of the tokens in their documents; both only with `packing="documents"`
        - encoder_tokens: [B, Q] int64, this rank's part of E, in rows for an encoder and a decoder;
          packed rows also have encoder_documents: [B, E] and encoder_positions: [B, Q]
        - token_types: [B, P] int64; mask: [B, S] bool, False at padding; sequence_labels: [B]
          int64, -100 on ranks without the first token; only of datasets that make whole rows
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    sample_ids: NDArray[np.int64]
    documents: NotRequired[NDArray[np.int64]]
    positions: NotRequired[NDArray[np.int64]]
    encoder_tokens: NotRequired[NDArray[np.int64]]
    encoder_documents: NotRequired[NDArray[np.int64]]
    encoder_positions: NotRequired[NDArray[np.int64]]
    token_types: NotRequired[NDArray[np.int64]]
    mask: NotRequired[NDArray[np.bool_]]
    sequence_labels: NotRequired[NDArray[np.int64]]


Packing: TypeAlias = Literal["none", "documents"]

_CUT = {"tokens", "labels", "token_types", "positions", "encoder_tokens", "encoder_positions"}


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The parts of a batch's rows that a rank needs; only these are read.

    Attributes:
        packing: "documents" adds document numbers, so that attention can stay within documents.
            Positions begin at 0 in each document, and a label that belongs to the next document
            does not count, so the model learns each document as if it stood alone.
        parts: Positions [begin, end) of each row that this rank holds, in order; None means all.
        reads: Whether this rank needs token values. If not, nothing is read: tokens and counting
            labels are 0, which is enough for a middle stage of a pipeline.
    """

    packing: Packing = "none"
    parts: tuple[tuple[int, int], ...] | None = None
    reads: bool = True

    def __post_init__(self) -> None:
        if self.packing not in get_args(Packing):
            raise DataError(f"packing is {self.packing!r}; choose 'none' or 'documents'")
        if self.parts is not None and not (
            self.parts and all(0 <= begin < end for begin, end in self.parts)
        ):
            raise DataError(f"parts is {self.parts}; give one or more with 0 <= begin < end")

    def read(self, samples: Samples | MadeRows, ids: NDArray[np.int64]) -> MicroBatch:
        """Make the rows of some samples. Padding becomes token 0, which causal attention ignores.

        Raises:
            DataError: Parts or packing are requested, but the dataset only has whole rows.
        """
        if hasattr(samples, "row"):
            return self._made(cast("MadeRows", samples), ids)
        samples = cast("Samples", samples)
        if self != Rows() and not hasattr(samples, "sample_documents"):
            raise DataError(
                f"{type(samples).__name__} has whole rows only; packing, parts and reads=False "
                "need the methods sample(index, begin, end) and sample_documents(index) of "
                "GPTDataset"
            )
        pairs = [self._row(samples, int(sample)) for sample in ids]
        tokens, labels = (np.stack(rows) for rows in zip(*pairs, strict=True))
        tokens[tokens == PADDING] = 0
        batch: MicroBatch = {"tokens": tokens, "labels": labels, "sample_ids": ids.copy()}
        if self.packing == "documents":
            whole = [cast("PartialSamples", samples).sample_documents(int(n)) for n in ids]
            self._keep_apart(batch, np.stack(whole))
        return batch

    def columns(self, length: int) -> NDArray[np.int64]:
        """Return the positions of this rank in rows of `length` tokens, [P]."""
        parts = self.parts or ((0, length),)
        return np.concatenate([np.arange(begin, end) for begin, end in parts])

    def _scaled(self, length: int, *, of: int) -> NDArray[np.int64]:
        """Return this rank's positions in rows of another length, scaled to the same share."""
        ends = [[end * length / of for end in part] for part in self.parts or ((0, of),)]
        if any(end % 1 for part in ends for end in part):
            raise DataError(
                f"rows of {length} tokens can't be cut like rows of {of} tokens, at {self.parts}; "
                f"use a length that divides like {of}"
            )
        return np.concatenate([np.arange(int(begin), int(end)) for begin, end in ends])

    def _made(self, samples: MadeRows, ids: NDArray[np.int64]) -> MicroBatch:
        """Take this rank's part of rows that the dataset makes; number -1 means an empty row."""
        rows = [samples.row(int(n)) if n >= 0 else samples.empty() for n in ids]
        packing = "documents" if "documents" in rows[0] else "none"
        if self.packing != packing:
            raise DataError(
                f"{type(samples).__name__} makes whole rows with packing={packing!r}; use that "
                f"packing, or a dataset with {self.packing!r}"
            )
        batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        for name in _CUT & batch.keys():
            own = self._scaled(batch[name].shape[1], of=samples.sequence_length)
            batch[name] = np.ascontiguousarray(batch[name][:, own])
        own = self.columns(samples.sequence_length)
        if own[0] and "sequence_labels" in batch:  # the rank with the first token counts it
            batch["sequence_labels"][:] = PADDING
        return cast("MicroBatch", batch | {"sample_ids": ids.copy()})

    def _row(self, samples: Samples, sample: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return tokens and labels of this rank's part of a sample."""
        if self.reads and self.parts is None:
            row = samples[sample]
            return row[:-1], row[1:]
        partial = cast("PartialSamples", samples)
        if self.reads:
            pieces = [partial.sample(sample, begin, end + 1) for begin, end in self.parts or ()]
        else:
            row = np.where(partial.sample_documents(sample) == PADDING, PADDING, 0)
            parts = self.parts or ((0, len(row) - 1),)
            pieces = [row[begin : end + 1] for begin, end in parts]
        return np.concatenate([p[:-1] for p in pieces]), np.concatenate([p[1:] for p in pieces])

    def _keep_apart(self, batch: MicroBatch, whole: NDArray[np.int64]) -> None:
        """Add documents and positions, and remove labels that belong to the next document."""
        documents = np.ascontiguousarray(whole[:, :-1])
        place, own = np.arange(documents.shape[1]), self.columns(documents.shape[1])
        begins = np.diff(documents, axis=1, prepend=documents[:, :1]) != 0
        starts = np.maximum.accumulate(np.where(begins, place, 0), axis=1)
        batch["documents"] = documents
        batch["positions"] = (place - starts)[:, own]
        batch["labels"][whole[:, own + 1] != documents[:, own]] = PADDING


class BatchSampler:
    """Micro-batches of one data-parallel rank, computed from the step number.

    The global batch of step t consists of samples [t * global_batch_size, (t + 1) *
    global_batch_size), shifted by `offset`, for every layout. It is cut into rows of
    micro_batch_size; micro-batch m takes row m * dp_size + dp_rank. There is no state: to resume,
    call `step` with the next number.

    Args:
        dataset: Dataset of samples of S + 1 tokens; `PADDING` marks a tail without loss.
        global_batch_size: Number of samples in a step, over all ranks.
        micro_batch_size: Number of samples in one forward pass of one rank.
        dp_rank: This rank's index along the data-parallel axis.
        dp_size: Number of ranks along that axis.
        vocab_size: Vocabulary size to check token ids against; None checks nothing.
        offset: Number to add to every sample number. A run that changes its batch size at step t,
            after n samples, continues exactly with `n - t * global_batch_size`.
    """

    def __init__(
        self,
        dataset: Samples | MadeRows,
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
        self.rows = Rows()

    def with_rows(self, rows: Rows) -> BatchSampler:
        """Return a copy that draws the same samples and builds its rows with `rows`."""
        other = copy.copy(self)
        other.rows = rows
        return other

    @property
    def num_microbatches(self) -> int:
        """Number of forward passes of this rank in a step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    def __len__(self) -> int:
        """Return the number of whole steps in the dataset."""
        return max(0, len(self.dataset) - self.offset) // self.global_batch_size

    def sample_ids(self, step: int) -> NDArray[np.int64]:
        """Return the numbers of this rank's samples at a step.

        Shape:
            - Output: [num_microbatches, micro_batch_size]
        """
        first = step * self.global_batch_size + self.offset
        if step < 0 or first < 0 or step >= len(self):
            raise IndexError(
                f"step {step} needs samples {first} to "
                f"{first + self.global_batch_size - 1}; the dataset has {len(self.dataset)} "
                f"({len(self)} steps): create it with a larger num_samples"
            )
        ids = np.arange(first, first + self.global_batch_size, dtype=np.int64)
        shape = (self.num_microbatches, self.dp_size, self.micro_batch_size)
        return ids.reshape(shape)[:, self.dp_rank]

    def step(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of this rank at a step, counted from 0."""
        return [self._micro_batch(ids) for ids in self.sample_ids(step)]

    def _micro_batch(self, ids: NDArray[np.int64]) -> MicroBatch:
        batch = self.rows.read(self.dataset, ids)
        if self.vocab_size is not None:
            for rows in (batch["tokens"], batch["labels"][:, -1:]):
                _check_ids(rows, ids, self.vocab_size)
        return batch


def count_labels(
    batches: Sequence[MicroBatch], name: Literal["labels", "sequence_labels"] = "labels"
) -> int:
    """Count the labels with a loss on the host, so that no device is waited for.

    Args:
        batches: The micro-batches of this rank.
        name: Name of the labels; a batch without them counts 0.
    """
    found = (batch.get(name) for batch in batches)
    return sum(int(np.count_nonzero(labels != PADDING)) for labels in found if labels is not None)


def _check_ids(rows: NDArray[np.int64], ids: NDArray[np.int64], vocab_size: int) -> None:
    wrong = (rows != PADDING) & ((rows < 0) | (rows >= vocab_size))
    if wrong.any():
        row, column = (int(value) for value in np.argwhere(wrong)[0])
        raise DataError(
            f"sample {ids[row]} has token id {rows[row, column]} at position {column}; the "
            f"vocabulary has {vocab_size} ids: was the dataset built with another tokenizer?"
        )


def _check_sizes(global_batch_size: int, micro_batch_size: int, dp_rank: int, dp_size: int) -> None:
    at_least(
        1,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        dp_size=dp_size,
    )
    if not 0 <= dp_rank < dp_size:
        raise DataError(f"dp_rank is {dp_rank}; it must lie in [0, dp_size) with dp_size {dp_size}")
    together = micro_batch_size * dp_size
    if global_batch_size % together:
        raise DataError(
            f"global_batch_size {global_batch_size} is not divisible by micro_batch_size "
            f"{micro_batch_size} * dp_size {dp_size} = {together}; nearest valid: "
            f"{multiples_near(global_batch_size, together)}"
        )
