"""Batches: the samples that a rank trains on at a step."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypeGuard, cast, get_args

import numpy as np
from mt_files import STAGES, RowField, Stage, multiples_near
from numpy.typing import NDArray

from mt_data.datasets.gpt import PADDING, text_fields
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


class RowSource(Protocol):
    """A dataset that declares the arrays of its rows and makes them, as a `RowDataset` does."""

    sequence_length: int

    @property
    def packing(self) -> Packing:
        """Whether the rows have several documents."""
        ...

    @property
    def fields(self) -> tuple[RowField, ...]:
        """The arrays of a row."""
        ...

    @property
    def sizes(self) -> Mapping[str, int]:
        """Size of each dim that `fields` name."""
        ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> Mapping[str, NDArray]:
        """Return the arrays of a row by name."""
        ...

    def empty(self) -> Mapping[str, NDArray]:
        """Return a row without labels, of the same shape."""
        ...


MicroBatch: TypeAlias = dict[str, NDArray]
"""Rows for one forward pass: the arrays that the data set's fields declare, stacked, by name, and
`sample_ids` [B], the number of each row. Of an array that is cut along its first dim there is this
rank's part."""

Packing: TypeAlias = Literal["none", "documents"]
_SAMPLE_IDS = RowField(name="sample_ids", dims=(), fill=-1, cut="whole")


class GatheredRow(Mapping[str, NDArray]):
    """A row with arrays that its data set makes later: for all rows of a batch at once, or alone.

    Args:
        dataset: Data set that makes the later arrays.
        arrays: Existing arrays.
        later: Names of the later arrays.
        content: Source of the later arrays, for the data set.

    Attributes:
        content: Source of the later arrays.
        later: Names of the later arrays.
    """

    def __init__(
        self, dataset: Gathering, arrays: dict[str, NDArray], later: Sequence[str], content: Any
    ) -> None:
        self.dataset, self.content = dataset, content
        self._arrays, self._names, self._lacking = arrays, (*arrays, *later), set(later)
        self.later = tuple(later)

    def keep(self, **arrays: NDArray) -> None:
        """Store later arrays."""
        self._arrays.update(arrays)
        self._lacking.difference_update(arrays)

    def lacks(self, names: Collection[str]) -> bool:
        """Return whether one of the named arrays does not exist yet."""
        return not self._lacking.isdisjoint(names)

    def __getitem__(self, name: str) -> NDArray:
        if name in self._lacking:
            self.dataset.gather([self])
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Gathering(Protocol):
    """A data set that makes arrays of several rows at once."""

    def gather(self, rows: Sequence[GatheredRow]) -> None:
        """Make the arrays that rows of this data set lack, and let the rows keep them."""
        ...


def empty_array(field: RowField, sizes: Mapping[str, int]) -> NDArray:
    """Return the array of an empty row."""
    shape = [sizes[dim] for dim in field.dims]
    return np.full([0, *shape[1:]] if field.joined else shape, field.fill, field.dtype)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The parts of a batch's rows that a rank needs; only these are read.

    Attributes:
        packing: For samples of running text, "documents" adds the number of each token's document,
            so that attention can stay within documents. Positions begin at 0 in each document, and
            a label that belongs to the next document does not count, so the model learns each
            document as if it stood alone.
        parts: Positions [begin, end) of each row that this rank holds, in order; None means all.
        stages: Stages of a pipeline on this rank. Fields that none of them reads are not read here
            either: a middle stage gets the `fill` of tokens, and knows only which labels count.
    """

    packing: Packing = "none"
    parts: tuple[tuple[int, int], ...] | None = None
    stages: tuple[Stage, ...] = STAGES

    def __post_init__(self) -> None:
        if self.packing not in get_args(Packing):
            raise DataError(f"packing is {self.packing!r}; choose 'none' or 'documents'")
        if self.parts is not None and not (
            self.parts and all(0 <= begin < end for begin, end in self.parts)
        ):
            raise DataError(f"parts is {self.parts}; give one or more with 0 <= begin < end")

    def fields(self, samples: Samples | RowSource) -> tuple[RowField, ...]:
        """Return the arrays of the batches that `read` makes."""
        packed = self.packing == "documents"
        own = samples.fields if _makes_rows(samples) else text_fields(packed=packed)
        return (*own, _SAMPLE_IDS)

    def read(self, samples: Samples | RowSource, ids: NDArray[np.int64]) -> MicroBatch:
        """Make the rows of some samples. Padding becomes token 0, which causal attention ignores.

        Raises:
            DataError: Parts or packing are requested, but the dataset only has whole rows; or a row
                is not as the dataset declares it.
        """
        if _makes_rows(samples):
            return self._made(samples, ids)
        samples = cast("Samples", samples)
        if self != Rows() and not hasattr(samples, "sample_documents"):
            raise DataError(
                f"{type(samples).__name__} has whole rows only; packing, parts and other stages "
                "need the methods sample(index, begin, end) and sample_documents(index) of "
                "GPTDataset"
            )
        pairs = [self._row(samples, int(sample)) for sample in ids]
        tokens, labels = (np.stack(rows) for rows in zip(*pairs, strict=True))
        tokens[tokens == PADDING] = 0
        batch = {"tokens": tokens, "labels": labels, _SAMPLE_IDS.name: ids.copy()}
        if self.packing == "documents":
            whole = [cast("PartialSamples", samples).sample_documents(int(n)) for n in ids]
            self._keep_apart(batch, np.stack(whole))
        return batch

    def columns(self, length: int) -> NDArray[np.int64]:
        """Return the positions of this rank in rows of `length` tokens, [P]."""
        parts = self.parts or ((0, length),)
        return np.concatenate([np.arange(begin, end) for begin, end in parts])

    def _scaled(self, length: int, *, of: int) -> NDArray[np.int64]:
        """Return this rank's positions in rows of another length, scaled in proportion."""
        ends = [[end * length / of for end in part] for part in self.parts or ((0, of),)]
        if any(end % 1 for part in ends for end in part):
            raise DataError(
                f"rows of {length} tokens can't be cut like rows of {of} tokens, at {self.parts}; "
                f"use a length that divides like {of}"
            )
        return np.concatenate([np.arange(int(begin), int(end)) for begin, end in ends])

    def _made(self, samples: RowSource, ids: NDArray[np.int64]) -> MicroBatch:
        """Take this rank's part of rows that the dataset makes; number -1 means an empty row."""
        if self.packing not in ("none", samples.packing):
            raise DataError(
                f"{type(samples).__name__} makes whole rows with packing={samples.packing!r}; use "
                f"that packing, or a dataset with {self.packing!r}"
            )
        rows = [samples.row(int(n)) if n >= 0 else samples.empty() for n in ids]
        fields, sizes = samples.fields, samples.sizes
        names = {field.name for field in fields}
        for row, number in zip(rows, ids, strict=True):
            if set(row) != names:
                raise DataError(
                    f"row {number} of {type(samples).__name__} has {sorted(row)}, and its fields "
                    f"are {sorted(names)}; make both the same"
                )
        read = {field.name for field in fields if self._reads(field)}
        _gather([row for row in rows if isinstance(row, GatheredRow)], read)
        length, what = samples.sequence_length, type(samples).__name__
        first = rows[0]
        later = first.later if isinstance(first, GatheredRow) else ()
        batch = {}
        for field in fields:
            if field.name in read:
                arrays = [row[field.name] for row in rows]
                _check_arrays(field, arrays, sizes, what)
            else:
                arrays = [empty_array(field, sizes)] * len(rows)
            whole = _undivided(arrays, joined=field.joined) if field.name in later else None
            if whole is None:
                whole = np.concatenate(arrays if field.joined else [x[None] for x in arrays])
            batch[field.name] = self._own(field, whole, length)
        return batch | {_SAMPLE_IDS.name: ids.copy()}

    def _reads(self, field: RowField) -> bool:
        """Return whether this rank reads the values of a field."""
        has_first = self.parts is None or self.parts[0][0] == 0
        return field.is_read(self.stages) and (field.cut != "once" or has_first)

    def _own(self, field: RowField, whole: NDArray, length: int) -> NDArray:
        """Return this rank's part of an array of whole rows."""
        if field.cut != "along" or self.parts is None:
            return whole
        own = self._scaled(whole.shape[1], of=length)
        return np.ascontiguousarray(whole[:, own])

    def _row(self, samples: Samples, sample: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return tokens and labels of this rank's part of a sample."""
        reads = text_fields(packed=False)[0].is_read(self.stages)
        if reads and self.parts is None:
            row = samples[sample]
            return row[:-1], row[1:]
        partial = cast("PartialSamples", samples)
        if reads:
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
        dataset: Samples | RowSource,
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
    def fields(self) -> tuple[RowField, ...]:
        """The arrays of a micro-batch."""
        return self.rows.fields(self.dataset)

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
            for field in self.fields:
                if field.is_tokens:
                    _check_ids(batch[field.name], ids, self.vocab_size, fill=field.fill)
        return batch


def count_labels(batches: Sequence[MicroBatch], name: str = "labels") -> int:
    """Count the labels with a loss on the host, so that no device is waited for.

    Args:
        batches: The micro-batches of this rank.
        name: Name of the labels; a batch without them counts 0.
    """
    found = (batch.get(name) for batch in batches)
    return sum(int(np.count_nonzero(labels != PADDING)) for labels in found if labels is not None)


def _gather(rows: Sequence[GatheredRow], names: Collection[str]) -> None:
    """Make the named arrays that rows lack, for all rows of a data set together."""
    lacking: dict[int, list[GatheredRow]] = {}
    for row in rows:
        if row.lacks(names):
            lacking.setdefault(id(row.dataset), []).append(row)
    for own in lacking.values():
        own[0].dataset.gather(own)


def _undivided(arrays: Sequence[NDArray], *, joined: bool) -> NDArray | None:
    """Return the array whose parts, in order and without a gap, are the arrays of rows, or None.

    Arrays that are made for all rows at once are such parts, and large: they need no copy.
    """
    whole = arrays[0].base
    if not isinstance(whole, np.ndarray) or not whole.flags.c_contiguous:
        return None
    if whole.dtype != arrays[0].dtype or whole.nbytes != sum(each.nbytes for each in arrays):
        return None
    address = whole.__array_interface__["data"][0]
    for each in arrays:
        is_next = each.__array_interface__["data"][0] == address
        if each.base is not whole or not each.flags.c_contiguous or not is_next:
            return None
        address += each.nbytes
    if joined:
        return whole.reshape(sum(map(len, arrays)), *arrays[0].shape[1:])
    return whole.reshape(len(arrays), *arrays[0].shape)


def _check_arrays(
    field: RowField, arrays: Sequence[NDArray], sizes: Mapping[str, int], what: str
) -> None:
    """Check that arrays of rows have the shape and dtype that the data set declares."""
    dtype, dims = np.dtype(field.dtype), tuple(sizes[dim] for dim in field.dims)
    for array in arrays:
        if array.shape[field.joined :] != dims[field.joined :] or array.dtype != dtype:
            raise DataError(
                f"{field.name} of a row of {what} is {array.dtype} {list(array.shape)}, and its "
                f"field says {dtype} {[0] * field.joined + list(dims[field.joined :])}"
            )


def _makes_rows(samples: Samples | RowSource) -> TypeGuard[RowSource]:
    return hasattr(samples, "row")


def _check_ids(
    rows: NDArray[np.int64], ids: NDArray[np.int64], vocab_size: int, *, fill: float
) -> None:
    if rows.min() >= 0 and rows.max() < vocab_size:
        return
    wrong = (rows != fill) & ((rows < 0) | (rows >= vocab_size))
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
