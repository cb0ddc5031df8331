"""Writes `.bin/.idx` pairs that Megatron-LM reads, committed all or nothing."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mt_data.disk import sync_directory, temporary_path, write_atomic
from mt_data.error import DataError
from mt_data.index import Index, storable_dtype
from mt_data.indexed import IndexedDataset, check_prefix

MAX_SEQUENCE = 2**31 - 1


class IndexedWriter:
    """Writes sequences of tokens, grouped into documents, to `<prefix>.bin` and `<prefix>.idx`.

    Nothing appears under the final names before `finalize`, which syncs and renames `.bin`, then
    `<prefix>.json` (counts and sha256 of both files), and `.idx` last: a dataset with an `.idx`
    is complete. As a context manager it finalizes on success and discards on an exception.

    Args:
        prefix: path without ending; its folder is created.
        dtype: how tokens are stored; see `token_dtype` for Megatron's choice.
        multimodal: write a mode for each sequence.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: DTypeLike = np.int32,
        *,
        multimodal: bool = False,
    ) -> None:
        self.prefix = check_prefix(prefix)
        self.dtype = storable_dtype(dtype)
        self.multimodal = multimodal
        self._path = Path(f"{self.prefix}.bin")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = temporary_path(self._path)
        self._file = open(self._temporary, "wb")  # noqa: SIM115 - closed by finalize or discard
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
        """Documents ended so far."""
        return len(self._boundaries) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens added so far."""
        return self._num_tokens

    def add_sequence(self, tokens: ArrayLike, *, mode: int = 0) -> None:
        """Append one sequence to the current document."""
        self._require_open()
        stored = self._stored(tokens)
        if mode and not self.multimodal:
            raise DataError(f"mode is {mode}, but the writer was opened with multimodal=False")
        data = stored.tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._lengths.append(len(stored))
        self._num_tokens += len(stored)
        self._modes.append(mode)

    def end_document(self) -> None:
        """Close the current document at the sequences added so far."""
        self._require_open()
        self._boundaries.append(len(self._lengths))

    def add_document(self, tokens: ArrayLike, lengths: Sequence[int] | None = None) -> None:
        """Append a document: one sequence, or several with the given lengths."""
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

    def add_dataset(self, dataset: IndexedDataset) -> None:
        """Append every document of another dataset (its tokens must fit this dtype)."""
        for document in range(dataset.num_documents):
            first, last = dataset.document_index[document : document + 2]
            for sequence in range(int(first), int(last)):
                mode = 0 if dataset.modes is None else int(dataset.modes[sequence])
                self.add_sequence(dataset[sequence], mode=mode)
            self.end_document()

    def finalize(self, metadata: Mapping[str, object] | None = None) -> None:
        """Commit the dataset.

        Args:
            metadata: JSON values to record in `<prefix>.json` beside the counts and digests.
        """
        self._require_open()
        if self._boundaries[-1] != len(self._lengths):
            raise DataError(
                f"{self.prefix}: {len(self._lengths) - self._boundaries[-1]} sequences belong to "
                "no document; call end_document before finalize"
            )
        index = self._index()
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
        self._file.close()
        index_path = Path(f"{self.prefix}.idx")
        # A new .bin must never be seen beside the .idx of an older dataset.
        index_path.unlink(missing_ok=True)
        sync_directory(index_path.parent)
        os.replace(self._temporary, self._path)
        write_atomic(Path(f"{self.prefix}.json"), text.encode())
        write_atomic(index_path, content)

    def discard(self) -> None:
        """Drop what was written; an older dataset under the same prefix stays as it is."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _index(self) -> Index:
        return Index.build(
            self.dtype,
            np.array(self._lengths, np.int32),
            np.array(self._boundaries, np.int64),
            np.array(self._modes, np.int8) if self.multimodal else None,
        )

    def _stored(self, tokens: ArrayLike) -> NDArray:
        values = np.asarray(tokens)
        if values.ndim != 1:
            raise DataError(f"a sequence must have one dim, got shape {values.shape}")
        if len(values) > MAX_SEQUENCE:
            raise DataError(
                f"a sequence of {len(values)} tokens does not fit the format's limit of "
                f"{MAX_SEQUENCE}; split it"
            )
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
