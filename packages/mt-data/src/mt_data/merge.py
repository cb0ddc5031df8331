"""Joining datasets, such as parts built on several machines, into one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from mt_files import shorten

from mt_data.corpus import CorpusStats, dataset_tokenizer
from mt_data.documents.parts import MAX_PARTS
from mt_data.error import DataError, DataFileError
from mt_data.storage.indexed import IndexedDataset
from mt_data.storage.writer import IndexedWriter

SUMMED = ("bytes", "empty_documents")
EQUAL = ("append_eod", "tokenizer", "tokenizer_sha256", "vocab_size", "eod_token", "eod_id")


def merge_datasets(
    prefixes: Iterable[str | os.PathLike[str]],
    out_prefix: str | os.PathLike[str],
    *,
    overwrite: bool = False,
) -> CorpusStats:
    """Join datasets of one tokenizer into one; all their tokens are read and checked.

    The parts of one source (`read_documents(..., part=)`) are joined in their order, whatever the
    order of `prefixes`, and none may be missing: the result has the same bytes as a build in one
    process. Other datasets are joined in the given order.

    Args:
        prefixes: Paths of the datasets, without ending.
        out_prefix: Path of the result, without ending.
        overwrite: Whether to replace a dataset of that name, unless it is in use.

    Raises:
        DataError: A part is missing or of another source, the datasets differ in their tokenizer,
            none has a document, or there is a dataset of that name.
        DataFileError: A dataset is damaged.
    """
    with ExitStack() as stack:
        datasets = [stack.enter_context(IndexedDataset(prefix)) for prefix in prefixes]
        if not datasets:
            raise DataError("there is no dataset to merge; name at least one")
        datasets = _in_order(datasets)
        records = [dataset.metadata() or {} for dataset in datasets]
        about = _common(datasets, records)
        beside = {}
        if "tokenizer" in about:
            beside[str(about["tokenizer"])] = dataset_tokenizer(datasets[0]).to_bytes()
        with IndexedWriter(out_prefix, datasets[0].dtype, overwrite=overwrite) as writer:
            for dataset, record in zip(datasets, records, strict=True):
                if record:
                    dataset.verify()
                writer.add_dataset(dataset)
            if not writer.num_documents:
                first = datasets[0].prefix
                raise DataError(
                    f"none of {len(datasets)} datasets has a document, the first is {first}; use a "
                    "source with text"
                )
            writer.finalize(about, beside=beside)
        return CorpusStats(
            documents=writer.num_documents,
            tokens=writer.num_tokens,
            bytes=about.get("bytes", 0),
            empty_documents=about.get("empty_documents", 0),
        )


def _in_order(datasets: Sequence[IndexedDataset]) -> list[IndexedDataset]:
    """Return parts of one source in their order; keep the order of other datasets."""
    parts = [_part_of(dataset) for dataset in datasets]
    first = parts[0]
    for dataset, part in zip(datasets, parts, strict=True):
        if (part is None) != (first is None) or (part and first and part[1:] != first[1:]):
            raise DataError(
                f"{dataset.prefix} is {_name(part)}, but {datasets[0].prefix} is {_name(first)}; "
                "merge parts that were built of the same files"
            )
    if first is None:
        return list(datasets)
    by_number = {part[0]: dataset for dataset, part in zip(datasets, parts, strict=True) if part}
    missing = sorted(set(range(1, first[1] + 1)) - set(by_number))
    if missing or len(by_number) < len(datasets):
        what = f"part {missing[0]} is missing" if missing else "one is given twice"
        raise DataError(f"of {first[1]} parts {what}; give each of them once")
    return [by_number[number] for number in sorted(by_number)]


def _part_of(dataset: IndexedDataset) -> tuple[int, int, str] | None:
    """Return a part's number, the count of parts, and the identity that all parts share."""
    part = (dataset.metadata() or {}).get("part")
    match part:
        case None:
            return None
        case {"number": int(number), "count": int(count), "sources": str(sources), **others}:
            if 1 <= number <= count <= MAX_PARTS:
                side = json.dumps(others, sort_keys=True) if others else ""
                return number, count, sources + side
    raise DataFileError(f"{dataset.prefix}.json", f"part is {shorten(part)}; build it anew")


def _name(part: tuple[int, int, str] | None) -> str:
    if part is None:
        return "no part of a source"
    digest, rule = part[2][:12], part[2][64:]
    side = f", with {rule}" if rule else ""
    return f"part {part[0]}/{part[1]} of the source {digest}{side}"


def _common(
    datasets: Sequence[IndexedDataset], records: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the record of the joined dataset: the common fields, and the sums of the counts."""
    for dataset, record in zip(datasets, records, strict=True):
        for key in EQUAL:
            mine, other = record.get(key), records[0].get(key)
            if mine != other:
                raise DataError(
                    f"{dataset.prefix} and {datasets[0].prefix} can't be one dataset: {key} is "
                    f"{shorten(mine)} and {shorten(other)}; build them with the same tokenizer"
                )
    sums = {
        key: sum(int(record[key]) for record in records)
        for key in SUMMED
        if all(isinstance(record.get(key), int) for record in records)
    }
    return sums | {key: records[0][key] for key in EQUAL if key in records[0]}
