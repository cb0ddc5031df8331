"""Writing of `.bin/.idx` pairs that Megatron-LM reads, committed atomically."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import mt_files
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mt_data.error import DataError
from mt_data.storage.index import Index, storable_dtype
from mt_data.storage.indexed import IndexedDataset, check_prefix

MAX_SEQUENCE = 2**31 - 1
COPIED = 1 << 20  # tokens of another dataset at a time


class IndexedWriter:
    """A writer of token sequences, grouped into documents, to `<prefix>.bin` and `<prefix>.idx`.

    Nothing appears under the final names before `finalize`, which syncs and renames `.bin`, then
    `<prefix>.json` (counts and sha256 of both files), and `.idx` last: a dataset with an `.idx` is
    complete. As a context manager it finalizes on success and discards on an exception. The next
    writer in the folder removes the files of a killed writer.

    Args:
        prefix: Path without ending; its folder is created.
        dtype: Dtype of stored tokens; see `token_dtype` for Megatron's choice.
        multimodal: Whether to write a mode for each sequence.
        overwrite: Whether to replace a dataset of that name, unless a process has it open.

    Raises:
        DataError: There is a dataset of that name, and it is in use or `overwrite` is False.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: DTypeLike = np.int32,
        *,
        multimodal: bool = False,
        overwrite: bool = False,
    ) -> None:
        self.prefix = check_prefix(prefix, writes=True)
        self.dtype = storable_dtype(dtype)
        self.multimodal = multimodal
        self.overwrite = overwrite
        self._path = Path(f"{self.prefix}.bin")
        check_free(self.prefix, overwrite=overwrite)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        mt_files.remove_temporaries(self._path.parent)
        self._stack = contextlib.ExitStack()  # ended by finalize or discard
        self._file = self._stack.enter_context(mt_files.writing(self._path))
        self._digest = hashlib.sha256()
        self._lengths = array("i")
        self._modes = array("b")
        self._boundaries = array("q", [0])
        self._num_tokens = 0

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.discard()
        elif not self._file.closed:
            self.finalize()

    @property
    def num_documents(self) -> int:
        """Number of documents ended so far."""
        return len(self._boundaries) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens added so far."""
        return self._num_tokens

    def add_sequence(self, tokens: ArrayLike, *, mode: int = 0) -> None:
        """Append one sequence to the current document."""
        stored = self._stored(tokens)
        if mode and not self.multimodal:
            raise DataError(f"mode is {mode}, but the writer was opened with multimodal=False")
        if len(stored) > MAX_SEQUENCE:
            raise DataError(
                f"a sequence of {len(stored)} tokens does not fit the format's limit of "
                f"{MAX_SEQUENCE}; split it"
            )
        self._write(stored)
        self._lengths.append(len(stored))
        self._modes.append(mode)

    def _write(self, stored: NDArray) -> None:
        self._require_open()
        data = stored.data.cast("B") if stored.size else b""
        self._file.write(data)
        self._digest.update(data)
        self._num_tokens += len(stored)

    def end_document(self) -> None:
        """End the current document after the sequences added so far."""
        self._require_open()
        self._boundaries.append(len(self._lengths))

    def add_document(self, tokens: ArrayLike, lengths: Sequence[int] | None = None) -> None:
        """Append a document: one sequence, or several sequences with the given lengths."""
        flat = np.asarray(tokens)
        if lengths is None:
            self.add_sequence(flat)
        else:
            if any(length < 0 for length in lengths) or sum(lengths) != len(flat):
                raise DataError(
                    f"lengths {list(lengths)} must be 0 or more and sum to the {len(flat)} tokens "
                    "of the document"
                )
            start = 0
            for length in lengths:
                self.add_sequence(flat[start : start + length])
                start += length
        self.end_document()

    def add_documents(self, tokens: ArrayLike, lengths: ArrayLike) -> None:
        """Append documents of one sequence each, from concatenated tokens and their lengths."""
        flat, counts = np.asarray(tokens), np.asarray(lengths, np.int64)
        if counts.size and (counts.min() < 0 or counts.max() > MAX_SEQUENCE):
            raise DataError(f"lengths must lie in [0, {MAX_SEQUENCE}]")
        if counts.sum() != len(flat):
            raise DataError(f"lengths sum to {counts.sum()}, but there are {len(flat)} tokens")
        self._require_ended("adding other documents")
        first = len(self._lengths) + 1
        self._write(self._stored(flat))
        self._lengths.frombytes(counts.astype(np.int32).tobytes())
        self._modes.frombytes(bytes(len(counts)))
        ends = np.arange(first, first + len(counts), dtype=np.int64)
        self._boundaries.frombytes(ends.tobytes())

    def add_dataset(self, dataset: IndexedDataset) -> None:
        """Append all documents of another dataset, which must store the same dtype."""
        if dataset.dtype != self.dtype or self.multimodal != dataset.multimodal:
            raise DataError(
                f"{dataset.prefix} stores {dataset.dtype.name} (multimodal: {dataset.multimodal}), "
                f"but {self.prefix} is of {self.dtype.name} (multimodal: {self.multimodal}); "
                "build one of them anew"
            )
        self._require_ended("adding a dataset")
        for start in range(0, dataset.num_tokens, COPIED):
            self._write(dataset.stream(start, min(COPIED, dataset.num_tokens - start)))
        ends = dataset.document_index[1:] + len(self._lengths)
        modes = np.zeros(len(dataset), np.int8) if dataset.modes is None else dataset.modes
        self._lengths.frombytes(dataset.lengths.astype(np.int32).tobytes())
        self._modes.frombytes(modes.tobytes())
        self._boundaries.frombytes(ends.astype(np.int64).tobytes())

    def finalize(
        self,
        metadata: Mapping[str, object] | None = None,
        *,
        beside: Mapping[str, bytes] | None = None,
    ) -> None:
        """Commit the dataset.

        Args:
            metadata: JSON values to record in `<prefix>.json` with the counts and digests.
            beside: Content of further files of the dataset, by the ending of their names, such as
                `.tokenizer.json`.
        """
        self._require_open()
        self._require_ended("finalize")
        index = Index.build(
            self.dtype,
            np.array(self._lengths, np.int32),
            np.array(self._boundaries, np.int64),
            np.array(self._modes, np.int8) if self.multimodal else None,
        )
        content = index.to_bytes()
        record = {
            **(metadata or {}),
            "format": 1,
            "dtype": self.dtype.name,
            "sequences": len(index.lengths),
            "documents": self.num_documents,
            "tokens": index.num_tokens,
            "bin_sha256": self._digest.hexdigest(),
            "idx_sha256": index.sha256,
        }
        text = json.dumps(record, indent=2, allow_nan=False) + "\n"
        self._file.flush()
        os.fsync(self._file.fileno())
        index_path = Path(f"{self.prefix}.idx")
        try:
            with _alone(index_path.parent), _unused(self.prefix):
                _check_absent(self.prefix, overwrite=self.overwrite)
                # Remove the old .idx first: a new .bin must never be seen with it.
                index_path.unlink(missing_ok=True)
                mt_files.sync(index_path.parent)
                for ending, file in (beside or {}).items():
                    mt_files.write_file(f"{self.prefix}{ending}", file)
                self._stack.close()
                mt_files.write_file(f"{self.prefix}.json", text)
                mt_files.write_file(index_path, content)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Discard the new files; an older dataset under the same prefix is unchanged."""
        if not self._file.closed:
            with contextlib.suppress(_DiscardedError):
                self._stack.__exit__(_DiscardedError, _DiscardedError(), None)

    def _require_ended(self, before: str) -> None:
        if open_sequences := len(self._lengths) - self._boundaries[-1]:
            raise DataError(
                f"{self.prefix}: {open_sequences} sequences belong to no document; call "
                f"end_document before {before}"
            )

    def _stored(self, tokens: ArrayLike) -> NDArray:
        values = np.asarray(tokens)
        if values.ndim != 1:
            raise DataError(f"a sequence must have one dim, got shape {values.shape}")
        if values.size == 0:
            return np.empty(0, self.dtype)
        if self.dtype.kind == "f":
            return values.astype(self.dtype)
        if values.dtype.kind not in "iu":
            raise DataError(f"tokens must be integers, got dtype {values.dtype.name}")
        low, high, limits = int(values.min()), int(values.max()), np.iinfo(self.dtype)
        if low < limits.min or high > limits.max:
            raise DataError(
                f"token id {low if low < limits.min else high} does not fit {self.dtype.name} "
                f"({limits.min} to {limits.max}); use a wider dtype"
            )
        return values.astype(self.dtype)

    def _require_open(self) -> None:
        if self._file.closed:
            raise DataError(f"{self.prefix}: the writer is already finalized or discarded")


class _DiscardedError(Exception):
    """Raised to end the writing of a file without keeping it."""


def check_free(prefix: str, *, overwrite: bool) -> None:
    """Refuse the prefix of a dataset that must not be overwritten or is in use.

    Raises:
        DataError: There is such a dataset.
    """
    _check_absent(prefix, overwrite=overwrite)
    with _unused(prefix):
        pass


def _check_absent(prefix: str, *, overwrite: bool) -> None:
    taken = [f"{prefix}{ending}" for ending in (".idx", ".bin") if os.path.exists(prefix + ending)]
    if taken and not overwrite:
        raise DataError(
            f"{taken[0]} exists; choose another place, or replace the dataset with --overwrite "
            "(overwrite=True)"
        )


@contextlib.contextmanager
def _unused(prefix: str) -> Iterator[None]:
    """Lock a dataset's `.bin`, if it exists, against readers, which hold a shared lock."""
    path = f"{prefix}.bin"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(mt_files.MissingFileError):
            file = stack.enter_context(mt_files.open_file(path))
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(
                    f"{path} is in use: a process, such as a training run, has it open; choose "
                    "another place, or wait until it is done"
                ) from None
            except OSError:
                pass  # this file system has no locks
        yield


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process at a time commit a dataset in a folder, so that all its files match."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
