"""Building a dataset: gigatoken against tokenizers, ids compared, and the cost of verifying it.

    python build_corpus.py [MEGABYTES]

All build the same JSON lines of the standard library's sources, reading and writing included.
Ratios are to tokenizers in this run: of the whole build, in which gigatoken is first checked, and
of its second half, which is what a large corpus tends to.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from mt_data import (
    CorpusStats,
    IndexedDataset,
    build_corpus,
    read_documents,
    standard_library_sources,
)
from mt_tokenizer import Encoder, Tokenizer, train_tokenizer


def write_lines(path: Path, megabytes: int) -> int:
    """Write JSON lines of about this size; give the bytes of their texts."""
    texts = [source.read_text() for source in standard_library_sources()]
    written = 0
    with open(path, "w") as file:
        while written < megabytes * 1_000_000:
            for text in texts:
                file.write(json.dumps({"text": text}) + "\n")
                written += len(text.encode())
    return written


def build(
    lines: Path, out: Path, tokenizer: Tokenizer, *, fast: bool | None, workers: int
) -> tuple[CorpusStats, float, float, str]:
    """Build; give tokens a second over all and over the second half, and who encoded."""
    begin = time.perf_counter()
    seen = []
    with Encoder(tokenizer, fast=fast, workers=workers) as encoder:
        stats = build_corpus(
            read_documents(lines),
            out,
            tokenizer,
            encoder=encoder,
            on_progress=lambda stats: seen.append((stats.tokens, time.perf_counter())),
        )
    end = time.perf_counter()
    half = next(point for point in seen if point[0] > stats.tokens / 2)
    late = (seen[-1][0] - half[0]) / (seen[-1][1] - half[1])
    return stats, stats.tokens / (end - begin), late, encoder.library


def main() -> None:
    """Print one row for each way."""
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    folder = Path(tempfile.mkdtemp())
    lines = folder / "lines.jsonl"
    write_lines(lines, megabytes)
    sample = [document.text for document, _ in zip(read_documents(lines), range(300), strict=False)]
    for pattern in ("gpt2", "code"):
        tokenizer = train_tokenizer(sample, 8192, pattern=pattern)
        base, digest = (0.0, 0.0), ""
        for name, fast, workers in (
            ("tokenizers", False, 1),
            ("tokenizers, 2 processes", False, 2),
            ("chosen", None, 1),
            ("chosen, 2 processes", None, 2),
        ):
            out = folder / f"{pattern}-{name}"
            stats, whole, late, library = build(lines, out, tokenizer, fast=fast, workers=workers)
            base = base if base[0] else (whole, late)
            dataset = IndexedDataset(out)
            digest = digest or dataset.fingerprint
            assert dataset.fingerprint == digest, "other ids"
            size = stats.bytes / stats.tokens
            print(
                f"{pattern:5s} {name:24s} {whole / 1e6:6.2f} M tokens/s {whole / base[0]:5.1f}x; "
                f"second half {late / 1e6:6.2f} M tokens/s, {late * size / 1e6:6.1f} MB/s "
                f"{late / base[1]:5.1f}x ({library})",
                flush=True,
            )
    size = os.path.getsize(dataset.token_path)
    start = time.perf_counter()
    dataset.verify()
    print(f"verify {size / (time.perf_counter() - start) / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
