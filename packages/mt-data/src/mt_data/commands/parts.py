"""`mt-data build --parts` and `mt-data merge`: building and joining parts of a dataset."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from mt_files import Progress, UserError, absolute_path, say
from mt_tokenizer import Tokenizer

from mt_data.commands.building import Built, Recipe, Skipped
from mt_data.corpus import part_records
from mt_data.documents.parts import Part
from mt_data.documents.source import STANDARD_INPUT
from mt_data.error import DataError
from mt_data.jobs import Where, run_jobs
from mt_data.merge import merge_datasets
from mt_data.storage.indexed import IndexedDataset


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Join datasets of one tokenizer, or all parts of one build, into one.

    Attributes:
        prefixes: The datasets, without ending; parts of one build in any order.
        out: Path of the result without ending; required.
        overwrite: Replace a dataset of that name, unless it is in use.
    """

    prefixes: tuple[Path, ...]
    out: Path | None = None
    overwrite: bool = False

    def run(self) -> None:
        """Run the command."""
        if self.out is None:
            raise DataError("--out is required: mt-data merge PREFIX ... --out PREFIX")
        stats = merge_datasets(self.prefixes, self.out, overwrite=self.overwrite)
        say(f"{self.out}.bin, .idx: {stats.documents} documents, {stats.tokens} tokens")


class Job(NamedTuple):
    """One part to build, for another process."""

    recipe: Recipe
    tokenizer: Tokenizer

    def run(self) -> Built:
        """Build the part."""
        return self.recipe.build(self.tokenizer, Progress(shown=False))


def build_in_parts(
    whole: Recipe, count: int, on: Where, tokenizer: Tokenizer, progress: Progress
) -> Built:
    """Build the missing parts side by side, then join all parts into one dataset."""
    if STANDARD_INPUT in whole.sources:
        raise DataError("standard input can't be read in parts; give files")
    sources = tuple(map(absolute_path, whole.sources))
    folder = parts_folder(whole.out)
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        parts = [
            replace(
                whole,
                out=folder / str(count) / str(number),  # a writer locks its folder too
                sources=sources,
                part=Part(number=number, count=count),
                workers=1,
                overwrite=True,
            )
            for number in range(1, max(count, 1) + 1)
        ]
        jobs = [Job(part, tokenizer).run for part in parts if not _is_built(part, tokenizer)]
        if len(jobs) < count:
            say(f"{count - len(jobs)} of {count} parts are built; going on with the others")
        skipped, encoder = Skipped(), "an earlier run of this build"
        try:
            run = run_jobs(jobs, on, workers=whole.workers, what="mt-data build --on ray")
            for done, built in enumerate(run, 1):
                progress.update("building", count - len(jobs) + done, count, unit="parts")
                skipped.join(built.skipped)
                encoder = built.encoder
        finally:
            progress.clear()
        merged = [
            merge_datasets([part.prefixes[side] for part in parts], out, overwrite=whole.overwrite)
            for side, out in reversed([*enumerate(whole.prefixes)])  # the held-out documents first
        ]
        shutil.rmtree(folder)
    stats = replace(merged[-1], held_out=merged[0] if len(merged) > 1 else None)
    return Built(stats=stats, skipped=skipped, encoder=encoder)


def parts_folder(out: Path) -> Path:
    """Return the folder of a build's parts, which is removed after they are joined."""
    return Path(f"{out}.parts").absolute()


def _is_built(recipe: Recipe, tokenizer: Tokenizer) -> bool:
    """Return whether a part is complete and has the same source files and tokenizer."""
    expected = {"tokenizer_sha256": tokenizer.sha256, "eod_token": tokenizer.eod_token}
    parts = part_records(recipe.reader(Skipped()), recipe.held_out)
    for prefix, part in zip(recipe.prefixes, parts, strict=True):
        try:
            with IndexedDataset(prefix) as dataset:
                record = dataset.metadata() or {}
        except (UserError, OSError):
            return False
        if any(record.get(key) != value for key, value in (expected | part).items()):
            return False
    return True


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock a folder of parts against another build of the same dataset."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"another build is at work in {folder}; wait for its end") from None
        except OSError:
            pass  # this file system has no locks
        yield
    finally:
        os.close(descriptor)
