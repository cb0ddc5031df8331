"""`mt-data build`: from texts to a dataset of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mt_files import Progress, say
from mt_tokenizer import Tokenizer, load_tokenizer, train_tokenizer

from mt_data.commands.building import Recipe, Skipped
from mt_data.commands.parts import build_in_parts, parts_folder
from mt_data.documents.parts import Part
from mt_data.documents.records import Format
from mt_data.documents.source import STANDARD_INPUT
from mt_data.documents.split import HeldOut
from mt_data.error import DataError
from mt_data.jobs import Where
from mt_data.storage.indexed import check_prefix
from mt_data.storage.writer import check_free


@dataclass(frozen=True, kw_only=True)
class Build:
    """Build a dataset of tokens from texts: OUT.bin, .idx, .json, and the tokenizer beside them.

    Attributes:
        sources: Files (.jsonl, .ndjson, .json, .parquet, .arrow, or text; also .gz, .zst, .bz2,
            .xz), folders (also saved by Hugging Face's datasets), globs, - for standard input, or
            s3:// and gs:// URLs of these.
        out: Path of the dataset without ending; required.
        tokenizer: An existing tokenizer.json or sentencepiece .model. Without it, a tokenizer is
            trained on the sources.
        eod: The special token that ends a document, if the tokenizer has none of the usual ones.
        vocab_size: Vocabulary size of a trained tokenizer.
        pattern: Rule by which a trained tokenizer splits text: gpt2, code, or a regular expression.
        key: JSON field or column with the text.
        glob: Pattern of the files to read in a folder.
        format: Format of the files: auto (by their names), jsonl, json, text, parquet or
            arrow.
        skip_bad: Skip unreadable lines and files, and count them.
        overwrite: Replace a dataset of that name, unless it is in use.
        workers: Number of processes that encode, or that build parts.
        part: Build one of several equal parts, such as 3/16, on one of several machines; `mt-data
            merge` joins them.
        parts: Number of parts to build. They are kept in OUT.parts until all parts are complete, so
            a killed build goes on with the missing parts.
        held_out: Share of the documents to hold out, between 0 and 1: they go to a second dataset,
            OUT-validation. A hash of its content decides whether a document is held out.
        on: Where parts are built: in processes, or on a Ray cluster that shares the file system.
        progress: Show progress even if standard error is not a terminal.
    """

    sources: tuple[str, ...]
    out: Path | None = None
    tokenizer: Path | None = None
    eod: str | None = None
    vocab_size: int = 8192
    pattern: str = "gpt2"
    key: str = "text"
    glob: str = "**/*"
    format: Format = "auto"
    skip_bad: bool = False
    overwrite: bool = False
    workers: int = 1
    part: str | None = None
    parts: int | None = None
    held_out: float | None = None
    on: Where = "processes"
    progress: bool = False

    def run(self) -> None:
        """Run the command."""
        if self.out is None or not self.sources:
            raise DataError("sources and --out are required: mt-data build SOURCE ... --out PREFIX")
        if self.part is not None and (self.parts is not None or self.tokenizer is None):
            raise DataError(
                "--part builds one part of several, all with the same --tokenizer; --parts builds "
                "all of them here"
            )
        if self.on != "processes" and self.parts is None:
            raise DataError("--on says where --parts are built; give their number")
        progress = Progress(shown=self.progress or None)
        recipe = Recipe(
            out=self.out,
            sources=self.sources,
            key=self.key,
            glob=self.glob,
            format=self.format,
            skip_bad=self.skip_bad,
            workers=self.workers,
            overwrite=self.overwrite or self._goes_on(self.out),
            part=None if self.part is None else Part.parse(self.part),
            held_out=None if self.held_out is None else HeldOut(fraction=self.held_out),
        )
        for prefix in recipe.prefixes:
            check_free(check_prefix(prefix, writes=True), overwrite=recipe.overwrite)
        tokenizer = self._tokenizer(recipe, progress)
        if self.parts is None:
            built = recipe.build(tokenizer, progress)
        else:
            built = build_in_parts(recipe, self.parts, self.on, tokenizer, progress)
        built.skipped.say()
        sides = [built.stats, *([] if built.stats.held_out is None else [built.stats.held_out])]
        for prefix, stats in zip(recipe.prefixes, sides, strict=True):
            say(f"{prefix}.bin, .idx: {stats.documents} documents, {stats.tokens} tokens")
            say(f"{stats.bytes} bytes of text, {stats.bytes_per_token:.3f} bytes per token")
        empty = sum(stats.empty_documents for stats in sides)
        say(f"left out: {empty} empty, {built.skipped.count} unreadable")
        say(f"documents end with {tokenizer.eod_token} (id {tokenizer.eod_id})")
        say(f"encoded by {built.encoder}")

    def _goes_on(self, out: Path) -> bool:
        """Return whether an earlier build of parts was killed before its dataset was complete."""
        is_begun = self.parts is not None and parts_folder(out).is_dir()
        return is_begun and not Path(f"{out}.idx").exists()

    def _tokenizer(self, recipe: Recipe, progress: Progress) -> Tokenizer:
        if self.tokenizer is not None:
            return load_tokenizer(self.tokenizer, eod=self.eod)
        if self.eod is not None:
            raise DataError("--eod names a token of --tokenizer; a trained one has <|eod|>")
        if STANDARD_INPUT in self.sources:
            raise DataError(
                "standard input can be read only once, but training a tokenizer reads it too; "
                "give a tokenizer with --tokenizer"
            )
        skipped = Skipped()
        reader = recipe.reader(skipped)

        def texts() -> Iterator[str]:
            held_out = recipe.held_out
            for document in recipe.some(reader, skipped):
                progress.update("learning the tokenizer", reader.read_bytes, reader.total_bytes)
                if held_out is None or not held_out.holds_out(document):
                    yield document.text

        try:
            return train_tokenizer(texts(), self.vocab_size, pattern=self.pattern)
        finally:
            progress.clear()
