"""Batches: which samples a rank trains on at a step."""

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
        """Tokens [begin, end) of a sample."""
        ...

    def sample_documents(self, index: int) -> NDArray[np.int64]:
        """A number for the document of each token of a sample; `PADDING` where there is none."""
        ...


class MadeRows(Protocol):
    """A dataset that makes inputs and labels of whole rows itself, as `MaskedDataset` does."""

    sequence_length: int

    def __len__(self) -> int: ...

    def row(self, index: int) -> Mapping[str, NDArray]:
        """Arrays of a row by name, `tokens` and `labels` among them."""
        ...

    def empty(self) -> Mapping[str, NDArray]:
        """A row without labels, of the same shape."""
        ...


class MicroBatch(TypedDict):
    """Rows for one forward pass; P are the tokens of a row that this rank holds, of S.

    Shape:
        - tokens: [B, P]; labels: [B, P], -100 where no loss is due; sample_ids: [B]; all int64
        - documents: [B, S] int64, equal for tokens of one document; positions: [B, P] int64, places
          of the tokens in their documents; both only with `packing="documents"`
        - encoder_tokens: [B, Q] int64, of E as P are of S; of rows for an encoder and a decoder,
          packed ones of which have encoder_documents: [B, E] and encoder_positions: [B, Q] too
        - token_types: [B, P] int64; mask: [B, S] bool, False at padding; sequence_labels: [B]
          int64, -100 on ranks without the first token; all of datasets that make rows themselves
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
    """What a rank needs of the rows of a batch, and so what is read for it.

    Attributes:
        packing: "documents" tells which tokens are of one document, so that attention can be kept
            within documents: positions begin anew with each, and a label that is the first token of
            the next document does not count. Each is learnt from as if it stood alone.
        parts: Positions [begin, end) of each row that this rank holds, in order; only those are
            read. All where None.
        reads: Whether this rank looks at tokens. Without, nothing is read, tokens are 0, and so are
            the labels that count: enough for a stage in the middle of a pipeline.
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
        """Make the rows of some samples; padding becomes token 0, which no causal model looks at.

        Raises:
            DataError: The dataset gives whole rows only, and these are not.
        """
        if hasattr(samples, "row"):
            return self._made(cast("MadeRows", samples), ids)
        samples = cast("Samples", samples)
        if self != Rows() and not hasattr(samples, "sample_documents"):
            raise DataError(
                f"{type(samples).__name__} gives whole rows only; packing, parts and reads=False "
                "need sample(index, begin, end) and sample_documents(index), as GPTDataset has them"
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
        """Positions that this rank holds of rows of `length` tokens, [P]."""
        parts = self.parts or ((0, length),)
        return np.concatenate([np.arange(begin, end) for begin, end in parts])

    def _scaled(self, length: int, *, of: int) -> NDArray[np.int64]:
        """Positions of rows of another length than that of the parts: the same share of them."""
        ends = [[end * length / of for end in part] for part in self.parts or ((0, of),)]
        if any(end % 1 for part in ends for end in part):
            raise DataError(
                f"rows of {length} tokens can't be cut as those of {of} are, at {self.parts}; use "
                f"a length that divides like {of}"
            )
        return np.concatenate([np.arange(int(begin), int(end)) for begin, end in ends])

    def _made(self, samples: MadeRows, ids: NDArray[np.int64]) -> MicroBatch:
        """Take this rank's part of rows that a dataset makes; number -1 is an empty one."""
        rows = [samples.row(int(n)) if n >= 0 else samples.empty() for n in ids]
        packing = "documents" if "documents" in rows[0] else "none"
        if self.packing != packing:
            raise DataError(
                f"{type(samples).__name__} makes rows itself, with packing={packing!r}; use that, "
                f"or a data set with {self.packing!r}"
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
        """Tokens and labels of this rank's part of a sample."""
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
        """Add documents and positions, and remove labels that are of the next document."""
        documents = np.ascontiguousarray(whole[:, :-1])
        place, own = np.arange(documents.shape[1]), self.columns(documents.shape[1])
        begins = np.diff(documents, axis=1, prepend=documents[:, :1]) != 0
        starts = np.maximum.accumulate(np.where(begins, place, 0), axis=1)
        batch["documents"] = documents
        batch["positions"] = (place - starts)[:, own]
        batch["labels"][whole[:, own + 1] != documents[:, own]] = PADDING


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
        """Return a sampler of the same samples that makes `rows` of them."""
        other = copy.copy(self)
        other.rows = rows
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
        batch = self.rows.read(self.dataset, ids)
        if self.vocab_size is not None:
            for rows in (batch["tokens"], batch["labels"][:, -1:]):
                _check_ids(rows, ids, self.vocab_size)
        return batch


def count_labels(
    batches: Sequence[MicroBatch], name: Literal["labels", "sequence_labels"] = "labels"
) -> int:
    """Labels of micro-batches that carry a loss; counted here, no device is waited for.

    Args:
        batches: Of this rank.
        name: Which labels; there are none where a batch has none of the name.
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
