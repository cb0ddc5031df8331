"""`mt-retro peek`: chunks beside their neighbours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mt_data import PADDING, IndexedDataset, dataset_tokenizer
from mt_files import Checks, say
from numpy.typing import NDArray

from mt_retro.overlap import overlaps
from mt_retro.query import Neighbours

Decode = Callable[[NDArray[np.int64]], str]


@dataclass(frozen=True, kw_only=True)
class Peek:
    """Print chunks of a dataset beside their neighbours.

    Text is printed if a tokenizer is beside the dataset, else numbers of tokens.

    Attributes:
        neighbours: Folder of the neighbours.
        document: The document.
        chunk: First chunk of it to print.
        count: Number of chunks to print.
        max_characters: Largest number of characters to print for each.
    """

    neighbours: Path
    document: int = 0
    chunk: int = 0
    count: int = 3
    max_characters: int = 400

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(0, "chunk", "count", "max_characters")
        checks.done()

    def run(self) -> None:
        """Run the command."""
        found = Neighbours(self.neighbours)
        numbers = np.array(found.chunks.of_document(self.document), np.int64)
        last = min(self.chunk + self.count, len(numbers))
        if self.chunk >= len(numbers):
            say(f"document {self.document} has {len(numbers)} chunks")
        decode = _decoder(found.chunks.dataset)
        sources = [_decoder(source.dataset) for source in found.database.sources]
        for chunk in range(self.chunk, last):
            tokens = found.chunks.tokens(numbers[chunk : chunk + 1])[0]
            say(f"--- document {self.document}, chunk {chunk} of {len(numbers)}")
            say(self._shown(decode, tokens))
            ids = found.ids(self.document)[chunk]
            passages = found.database.tokens(ids)
            text = found.chunks.tokens(numbers[chunk : chunk + 1], continued=True)
            shares = overlaps(text, passages[None])[0]
            for number, passage, share in zip(ids.tolist(), passages, shares, strict=True):
                if number < 0:
                    say("  - no further neighbour")
                    continue
                source, document, place = found.database.place(number)
                prefix = found.database.sources[source].dataset.prefix
                say(f"  - {prefix}, document {document}, chunk {place}: overlap {share:.0%}")
                text_of = self._shown(sources[source], passage)
                say("    " + text_of.replace("\n", "\n    "))

    def _shown(self, decode: Decode, tokens: NDArray[np.int64]) -> str:
        return decode(tokens[tokens != PADDING])[: self.max_characters]


def _decoder(dataset: IndexedDataset) -> Decode:
    """Return the function from tokens to text by the tokenizer of a dataset, if it has one."""
    if "tokenizer" in (dataset.metadata() or {}):
        return dataset_tokenizer(dataset).decode
    return lambda tokens: " ".join(map(str, tokens.tolist()))
