"""A corpus in shards, built one after the other, even while the first ones are read."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from mt_files import FileError, build, read_text, write_file
from mt_tokenizer import Tokenizer, load_tokenizer

from mt_data.corpus import build_corpus, prefixes
from mt_data.documents.parts import MAX_PARTS, Part
from mt_data.documents.reader import Document, DocumentReader, read_documents
from mt_data.documents.split import HeldOut
from mt_data.error import DataError, at_least
from mt_data.storage.indexed import IndexedDataset

BLOCKS = 16
FEWEST_DOCUMENTS = 200
_FAILED = "build.failed"
_LOCK = ".build.lock"
_MAX_TEXT = 1 << 14
_PAUSE = 0.05


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """A corpus in shards of equal size, each a sample of blocks of the whole corpus.

    A shard is a dataset of `build_corpus` in the folder, with its held-out documents beside it. It
    appears as a whole or not at all, and has the same bytes whenever it is built.

    Attributes:
        sources: Files, folders or globs.
        glob: Pattern of the files to read in a folder.
        count: Number of shards.
        held_out: Rule by which documents are held out of each shard.
        digest: Digest of the sources' names and sizes.
        size: Number of bytes of the sources.
    """

    sources: tuple[str, ...]
    glob: str
    count: int
    held_out: HeldOut
    digest: str
    size: int

    @classmethod
    def of(
        cls, sources: tuple[str, ...], *, glob: str, shard_bytes: int, held_out: HeldOut
    ) -> ShardPlan:
        """Return the plan of a corpus, after a read of its first documents.

        A shard has `shard_bytes` of the source, and at least about 200 documents, so that some are
        held out of the first shard; there are at most 6,250 shards.
        """
        at_least(1, shard_bytes=shard_bytes)
        reader = read_documents(sources, glob=glob)
        size = reader.total_bytes or 0
        found = sum(len(each.text.encode()) for each in islice(reader, FEWEST_DOCUMENTS))
        most = min(size // max(found, 1), MAX_PARTS // BLOCKS)
        count = max(min(-(-size // shard_bytes), most), 1)
        plan = cls(sources=sources, glob=glob, count=count, held_out=held_out, digest="", size=size)
        return cls(**{**vars(plan), "digest": plan.found_digest()})

    def documents(self, shard: int) -> DocumentReader:
        """Read the documents of a shard, numbered from 0, including held-out ones."""
        part = Part(number=shard + 1, count=self.count, blocks=BLOCKS)
        return read_documents(self.sources, glob=self.glob, part=part)

    def split(self, shard: int) -> tuple[Callable[[], Iterator[Document]], ...]:
        """Return two functions that read a shard's training documents and its held-out ones."""

        def read(*, held_out: bool) -> Iterator[Document]:
            rule = self.held_out
            return (each for each in self.documents(shard) if rule.holds_out(each) == held_out)

        return partial(read, held_out=False), partial(read, held_out=True)

    def found_digest(self) -> str:
        """Return the current digest of the sources."""
        part = self.documents(0).part
        return "" if part is None else str(part["sources"])

    def build(self, shard: int, folder: Path, tokenizer: Tokenizer) -> None:
        """Build a shard.

        Raises:
            DataError: No document is held out of the first shard, or all are.
        """
        prefix = shard_prefix(folder, shard)
        stats = build_corpus(
            self.documents(shard), prefix, tokenizer, overwrite=True, held_out=self.held_out
        )
        if shard:  # one copy of the tokenizer is enough
            for side in prefixes(prefix, self.held_out):
                Path(f"{side}.tokenizer{tokenizer.suffix}").unlink(missing_ok=True)
        sides = stats.documents, stats.held_out.documents if stats.held_out else 0
        if shard == 0 and not all(sides):
            raise DataError(
                f"the first of {self.count} shards has {sides[0]} documents for training and "
                f"{sides[1]} held out; hold out another share (data.validation_fraction in a run's "
                "YAML file), or make larger shards"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, from which `plan_from` makes the plan."""
        return asdict(self)


def shard_prefix(folder: Path, shard: int) -> Path:
    """Return the prefix of a shard's tokens; the prefix of its held-out documents is longer."""
    return folder / f"shard-{shard + 1:05d}"


def is_built(folder: Path, shard: int) -> bool:
    """Return whether a shard is built; its index is written last."""
    return Path(f"{shard_prefix(folder, shard)}.idx").exists()


def build_shards(plan: ShardPlan, folder: Path, tokenizer: Tokenizer) -> None:
    """Build the missing shards, in their order.

    One process at a time builds in a folder; another process waits for it, and continues.

    Raises:
        DataError: A document can't be read, or the sources have changed since the plan was made.
    """
    with _alone(folder):
        missing = [shard for shard in range(plan.count) if not is_built(folder, shard)]
        if missing and plan.found_digest() != plan.digest:
            raise DataError(
                f"{' '.join(plan.sources[:3])}: the files have changed, and {len(missing)} of "
                f"{plan.count} shards are not built yet; restore them, or start anew in another "
                "folder"
            )
        for shard in missing:
            plan.build(shard, folder, tokenizer)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process builds in a folder; without locks all processes build."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            lock = os.open(folder / _LOCK, flags, 0o666)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@dataclass(kw_only=True, eq=False)
class Shards:
    """The shards of a folder, for a reader that waits for unfinished ones.

    Attributes:
        plan: The plan.
        folder: The folder.
    """

    plan: ShardPlan
    folder: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _closed: threading.Event = field(default_factory=threading.Event, init=False)

    @property
    def num_built(self) -> int:
        """Number of finished shards."""
        return sum(is_built(self.folder, shard) for shard in range(self.plan.count))

    @property
    def identity(self) -> list[object]:
        """JSON values that name the source, its division, and the tokens of its first shard."""
        rule = asdict(self.plan.held_out)
        first = self.open(0).fingerprint
        return [self.plan.digest, self.plan.count, BLOCKS, self.plan.glob, rule, first]

    def open(self, shard: int) -> IndexedDataset:
        """Wait for a shard, open it, and compare its files with the recorded digests.

        Raises:
            DataError: The shard can't be built, or it is damaged.
        """
        self._wait(shard)
        dataset = IndexedDataset(shard_prefix(self.folder, shard))
        dataset.verify(remember=True)
        return dataset

    def build(self, tokenizer: Path, *, eod: str | None = None) -> None:
        """Build the missing shards in this process.

        Args:
            tokenizer: File of the tokenizer.
            eod: Its end-of-document token, if it has several candidates.
        """
        if self.num_built < self.plan.count:
            build_shards(self.plan, self.folder, load_tokenizer(tokenizer, eod=eod))

    @contextlib.contextmanager
    def building(self, tokenizer: Path, *, eod: str | None = None) -> Iterator[None]:
        """Build the missing shards in a child process, which ends with the block or with us.

        Args:
            tokenizer: File of the tokenizer.
            eod: Its end-of-document token, if it has several candidates.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            if self.num_built < self.plan.count:
                (self.folder / _FAILED).unlink(missing_ok=True)
                task = {"folder": str(self.folder), "tokenizer": str(tokenizer), "eod": eod}
                self._process = stack.enter_context(_process({**task, "plan": self.plan.to_dict()}))
            yield

    def close(self) -> None:
        """End all waiting for shards; each waiting call raises an error."""
        self._closed.set()

    def _wait(self, shard: int) -> None:
        while not is_built(self.folder, shard):
            ended = self._process is not None and self._process.poll() is not None
            with contextlib.suppress(FileError):
                raise DataError(read_text(self.folder / _FAILED, limit=_MAX_TEXT))
            if ended and not is_built(self.folder, shard):
                text = "the process that builds the data was killed, perhaps for its memory; the "
                text += "same command goes on with the shards that are missing"
                note_failure(self.folder, text)
                raise DataError(text)
            if self._closed.wait(_PAUSE):
                raise DataError(f"shard {shard + 1} of {self.plan.count} is not built")


@contextlib.contextmanager
def _process(task: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """Run `mt_data.shard_process` as a child process, which ends when its input ends."""
    command = [sys.executable, "-P", "-m", "mt_data.shard_process"]
    # A session of its own: Ctrl-C asks the trainer to stop, which may still need a shard for it.
    with subprocess.Popen(  # noqa: S603 - our own module
        command, stdin=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            assert process.stdin is not None, "a pipe"  # noqa: S101
            process.stdin.write(json.dumps(task).encode() + b"\n")
            process.stdin.flush()
            yield process
        finally:
            process.kill()


def plan_from(plain: object) -> ShardPlan:
    """Return the plan of plain values.

    Raises:
        SchemaError: The values are no plan.
    """
    return build(ShardPlan, plain)


def note_failure(folder: Path, text: str) -> None:
    """Record a failure, so that each process that waits for a shard stops waiting."""
    write_file(folder / _FAILED, text)
