"""`mt-data build --parts` and `mt-data merge`: a dataset that is built part by part."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import NamedTuple

from mt_files import Progress, UserError, local_path, object_url, require, say
from mt_tokenizer import Tokenizer

from mt_data.commands.building import Built, Recipe, Skipped
from mt_data.corpus import part_records
from mt_data.documents.parts import Part
from mt_data.documents.source import STANDARD_INPUT
from mt_data.error import DataError
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


Run = Callable[[Sequence[Job], int], Iterator[Built]]


def build_in_parts(
    whole: Recipe, count: int, run: Run, tokenizer: Tokenizer, progress: Progress
) -> Built:
    """Build the parts that are not there yet, side by side, then join them into one dataset."""
    if STANDARD_INPUT in whole.sources:
        raise DataError("standard input can't be read in parts; give files")
    if whole.workers < 1:
        raise DataError(f"--workers is {whole.workers}; it must be at least 1")
    local = (source if object_url(source) else local_path(source) for source in whole.sources)
    sources = tuple(source if object_url(source) else os.path.abspath(source) for source in local)
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
        jobs = [Job(part, tokenizer) for part in parts if not _is_built(part, tokenizer)]
        if len(jobs) < count:
            say(f"{count - len(jobs)} of {count} parts are built; going on with the others")
        skipped, encoder = Skipped(), "an earlier run of this build"
        try:
            for done, built in enumerate(run(jobs, whole.workers), 1):
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
    """Return the folder of a build's parts, which goes when they are joined."""
    return Path(f"{out}.parts").absolute()


def _is_built(recipe: Recipe, tokenizer: Tokenizer) -> bool:
    """Return whether a part is complete, of the same files, and encoded by the same tokenizer."""
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


def in_processes(jobs: Sequence[Job], workers: int) -> Iterator[Built]:
    """Build parts in processes of this machine; yield what each did as it ends."""
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_end_with_parent) as pool:
        futures = [pool.submit(Job.run, job) for job in jobs]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            raise DataError(
                "a process that built a part was killed, perhaps for its memory; the same command "
                "goes on with the parts that are missing"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _end_with_parent() -> None:
    """End this process when its parent does, and quietly at Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    def watch() -> None:
        if (parent := parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def on_ray(jobs: Sequence[Job], _: int) -> Iterator[Built]:
    """Build parts on the Ray cluster of `RAY_ADDRESS`, or else on this machine."""
    ray = require("ray", "mt-data build --on ray")
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    build = ray.remote(Job.run)
    waiting = [build.remote(job) for job in jobs]
    while waiting:
        done, waiting = ray.wait(waiting)
        try:
            yield from ray.get(done)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a folder of parts against another build of the same dataset."""
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
