"""`mt-data peek` and `mt-data stats`: the content of a dataset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mt_files import say
from numpy.typing import NDArray

from mt_data.corpus import dataset_tokenizer
from mt_data.datasets.gpt import GPTDataset
from mt_data.error import DataError
from mt_data.storage.indexed import IndexedDataset

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.99, 1.0)


@dataclass(frozen=True, kw_only=True)
class Peek:
    """Print decoded documents, or training samples if a sequence length is given.

    Attributes:
        prefix: The dataset, without ending.
        tokenizer: Its tokenizer; by default the file beside the dataset.
        start: First document or sample to print.
        count: Number of documents or samples to print.
        sequence_length: Print samples of this length instead of documents.
        seed: Seed of the sample order.
        max_characters: Largest number of characters to print for each.
    """

    prefix: Path
    tokenizer: Path | None = None
    start: int = 0
    count: int = 3
    sequence_length: int | None = None
    seed: int = 0
    max_characters: int = 400

    def run(self) -> None:
        """Run the command."""
        with IndexedDataset(self.prefix) as dataset:
            tokenizer = dataset_tokenizer(dataset, self.tokenizer)
            if self.sequence_length is None:
                noun, total, get = "document", dataset.num_documents, dataset.document
            else:
                samples = GPTDataset(dataset, sequence_length=self.sequence_length, seed=self.seed)
                noun, total, get = "sample", len(samples), samples.__getitem__
            if not 0 <= self.start < total:
                raise DataError(f"{noun} {self.start} does not exist; there are {total}")
            for index in range(self.start, min(self.start + self.count, total)):
                tokens = get(index)
                text = tokenizer.decode(tokens)
                say(f"--- {noun} {index} of {total}: {len(tokens)} tokens")
                say(text[: self.max_characters])


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Print counts of a dataset.

    Attributes:
        prefix: The dataset, without ending.
        verify: Also compare the files with their recorded sha256.
    """

    prefix: Path
    verify: bool = False

    def run(self) -> None:
        """Run the command."""
        with IndexedDataset(self.prefix) as dataset:
            say(f"documents  {dataset.num_documents}")
            say(f"sequences  {len(dataset)}")
            say(f"tokens     {dataset.num_tokens} of {dataset.dtype.name}")
            recorded = dataset.metadata() or {}
            if isinstance(end := recorded.get("eod_token"), str):
                say(f"tokenizer  {recorded.get('vocab_size')} tokens, documents end with {end}")
            text_bytes = recorded.get("bytes")
            if isinstance(text_bytes, int) and dataset.num_tokens:
                ratio = text_bytes / dataset.num_tokens
                say(f"bytes      {text_bytes} of text, {ratio:.3f} per token")
            if len(dataset):
                say(f"lengths    {quantiles(dataset.lengths)} (tokens of a sequence, by quantile)")
            if self.verify:
                dataset.verify()
                say("verified   both files match their recorded sha256")


def quantiles(lengths: NDArray[np.integer]) -> str:
    """Return some quantiles of lengths as text."""
    found = np.quantile(lengths, QUANTILES, method="nearest")
    return ", ".join(f"{at:.0%} {int(n)}" for at, n in zip(QUANTILES, found, strict=True))
