"""A folder of step directories: listing, the latest one, and removal."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from mt_files import FileError, FolderLock, MissingFileError

from mt_ckpt.disk import Disk, create_file, disk_errors, in_threads, sync
from mt_ckpt.error import CheckpointError
from mt_ckpt.lock import claim
from mt_ckpt.manifest import MANIFEST, check_step, claimed_step, step_name, step_of
from mt_ckpt.path import as_path, disk_of

LATEST = "latest"
LOCK = ".lock"
_LATEST_BYTES = 64
_NAMED = re.compile(rb"(step_\d{8,18})\n(?:write [0-9a-f]{32}\n)?")  # the id is a store's
_STALE = re.compile(r"\.(step_\d{8,18}|latest)\.(tmp|old)-[0-9a-f]{32}")


@contextlib.contextmanager
def lock_root(root: Path, *, purpose: str) -> Iterator[Callable[[], None]]:
    """Keep other saves and `clean` out of a folder of checkpoints during the block.

    On a file system without locks, nobody is kept out. The lock of an object store can be lost.

    Yields:
        Function that raises a CheckpointError if the lock is lost.

    Raises:
        CheckpointError: Another process holds the lock; the message names the process.
    """
    disk = disk_of(root)
    with contextlib.ExitStack() as stack:
        if not disk.has_folders:
            from mt_ckpt.objects.lease import Lease

            lease = Lease(disk, root / LOCK, purpose=purpose)
            lease.take()
            stack.callback(lease.give_back)
            yield lease.check
            return
        with disk_errors("lock", root):
            stack.enter_context(FolderLock(root, purpose=purpose, name=LOCK))
        yield lambda: None


def committed_steps(root: Path) -> dict[int, Path]:
    """Return the committed step directories, oldest step first."""
    disk = disk_of(root)
    if disk.has_folders and not disk.is_folder(root):
        return {}
    with disk_errors("list", root):
        names = disk.names(root)
    found = {step: root / name for name in names if (step := step_of(root / name)) is not None}
    steps = dict(sorted(found.items()))
    if disk.has_folders:
        return {step: path for step, path in steps.items() if disk.exists(path / MANIFEST)}
    # Each question to a store takes long, and there may be many steps.
    manifests = [path / MANIFEST for path in steps.values()]
    there = in_threads(disk.exists, manifests, threads=2 * disk.threads)
    return {
        step: path for (step, path), is_there in zip(steps.items(), there, strict=True) if is_there
    }


def named_checkpoint(root: Path) -> Path | None:
    """Return the checkpoint that the file `latest` names; None without this file."""
    before = None
    while (content := _read_latest(root)) is not None:
        match = _NAMED.fullmatch(content)
        path = None if match is None else root / match[1].decode()
        if path is not None and step_of(path) is not None and disk_of(root).exists(path / MANIFEST):
            return path
        if content == before:
            steps = committed_steps(root).values()
            have = ", ".join(step.name for step in steps) or "none"
            raise CheckpointError(
                f"{root / LATEST}: its content {content!r} names no checkpoint in {root} (there: "
                f"{have}). Write the name of one of them and a newline into it, or delete it to "
                "resume from the newest",
                file=LATEST,
            )
        before = content  # a save may just have moved `latest` and removed that step: look again
    return None


def _read_latest(root: Path) -> bytes | None:
    try:
        return disk_of(root).read(root, LATEST, limit=_LATEST_BYTES)
    except MissingFileError:
        return None
    except FileError as error:
        raise CheckpointError(
            f"{error}. Write the name of a step directory and a newline into it, or delete it to "
            "resume from the newest",
            file=LATEST,
        ) from error


def latest_checkpoint(root: str | Path) -> Path | None:
    """Return the checkpoint to resume from.

    This is the step that the file `latest` names, even if a newer step was committed: a save that
    was killed just before it moved `latest` is repeated. Without a file `latest` (the first save
    was killed at that point) it is the newest committed step.

    A concurrent save may remove the step before it is read; `hold_checkpoint` prevents that.

    Returns:
        The step directory, or None if there is no checkpoint yet.

    Raises:
        CheckpointError: `latest` is unreadable or names no checkpoint.
    """
    root = as_path(root)
    path = named_checkpoint(root)
    if path is None:
        path = next(reversed(committed_steps(root).values()), None)
    if path is not None:
        check_step(path, claimed_step(path))
    return path


def clean(root: str | Path) -> list[Path]:
    """Remove the leftovers of killed saves.

    A checkpoint that a killed save had moved aside, and that nothing replaced, is restored. Call
    this on one rank when a run starts.

    Returns:
        The removed paths.

    Raises:
        CheckpointError: A save is under way in `root`; the message names its process, and nothing
            is removed.
    """
    root = as_path(root)
    if not _leftovers(root):  # most often, and then nothing is written, not even a lock
        return []
    with lock_root(root, purpose="removing the leftovers of killed saves"):
        return remove_leftovers(disk_of(root), root)


def _leftovers(root: Path) -> list[Path]:
    disk = disk_of(root)
    if disk.has_folders and not disk.is_folder(root):
        return []
    if not disk.has_folders:
        from mt_ckpt.publication import stray_folders

        with disk_errors("list", root):
            return stray_folders(disk, root)
    with disk_errors("list", root):
        return [root / name for name in disk.names(root) if _STALE.fullmatch(name)]


def remove_leftovers(disk: Disk, root: Path) -> list[Path]:
    """Do the work of `clean` in a folder that `lock_root` holds."""
    stale = _leftovers(root)
    for path in list(stale):
        if not disk.has_folders:
            disk.remove_tree(path)
            continue
        name, kind = cast("re.Match[str]", _STALE.fullmatch(path.name)).groups()
        # A save was killed after it moved the first checkpoint aside and before its rename.
        whole = kind == "old" and disk.exists(path / MANIFEST)
        if whole and not disk.exists(root / LATEST) and not disk.exists(root / name):
            with disk_errors("rename", path):
                disk.rename(path, root / name)
            sync(disk, root)
            stale.remove(path)
            continue
        with disk_errors("remove", path):
            if disk.is_folder(path) and not path.is_symlink():
                disk.remove_tree(path)
            else:
                disk.unlink(path)
    return stale


def hidden_name(root: Path, name: str, kind: str) -> Path:
    """Return a new path for an unfinished or replaced checkpoint, which `clean` removes."""
    return root / f".{name}.{kind}-{uuid.uuid4().hex}"


def set_aside(disk: Disk, path: Path) -> Path:
    """Make a step directory no checkpoint, so that no reader sees half of it.

    It is renamed to a hidden name; in an object store, it loses its manifest.

    Returns:
        The path of its contents.
    """
    if not disk.has_folders:
        with disk_errors("remove", path):
            disk.unlink(path / MANIFEST)
        return path
    aside = hidden_name(path.parent, path.name, "old")
    with disk_errors("rename", path):
        disk.rename(path, aside)
    return aside


def move_latest(disk: Disk, root: Path, step: int) -> None:
    """Write the step's name to `latest`, durably."""
    new = hidden_name(root, LATEST, "tmp")
    try:
        create_file(disk, new, f"{step_name(step)}\n".encode())
        sync(disk, new)
        with disk_errors("replace", root / LATEST):
            disk.rename(new, root / LATEST)
    except CheckpointError:
        with contextlib.suppress(OSError):
            disk.unlink(new)
        raise
    sync(disk, root)


@dataclass(frozen=True)
class Keep:
    """The steps that stay after a save.

    Attributes:
        newest: Number of newest steps.
        every: Every step divisible by this number stays too. None: no others.

    Raises:
        ValueError: A field is not an int of at least 1.
    """

    newest: int
    every: int | None = None

    def __post_init__(self) -> None:
        for value in (self.newest, 1 if self.every is None else self.every):
            if type(value) is not int or value < 1:
                raise ValueError(f"keep must be None or an int of at least 1, not {value!r}")


def retain(disk: Disk, root: Path, keep: Keep, step: int, *, after: int | None) -> None:
    """Remove the steps up to `step`, which `latest` names, except the ones to keep.

    Steps newer than `step` (from before a run went back) are kept. A step that a reader holds stays
    until a later save.

    Args:
        disk: The disk.
        root: Folder of the checkpoints.
        keep: The steps that stay, all from this run.
        step: The step just saved.
        after: The step from which this run continued; steps in between belong to an abandoned run
            and are removed first.
    """
    steps = {number: path for number, path in committed_steps(root).items() if number <= step}
    given_up = [number for number in steps if after is not None and after < number < step]
    own = [number for number in steps if number not in given_up]
    going = [*given_up, *own][: -keep.newest]
    milestones = {number for number in own if keep.every and number % keep.every == 0}
    remove_steps(disk, root, steps, [number for number in going if number not in milestones])


def remove_steps(
    disk: Disk, root: Path, steps: Mapping[int, Path], numbers: Iterable[int]
) -> list[int]:
    """Remove steps that nobody reads, and return the numbers of the others.

    Args:
        disk: The disk.
        root: Folder of the checkpoints.
        steps: Committed steps in their order, for the time since a step had a newer one.
        numbers: Numbers of the steps to remove.
    """
    with disk_errors("look at the steps in", root):
        committed = [disk.modified(path / MANIFEST) for path in steps.values()]
    superseded = dict(zip(steps, [*committed[1:], *committed[-1:]], strict=True))
    held = []
    for number in numbers:
        with claim(steps[number], superseded=superseded[number]) as free:
            if free:
                aside = set_aside(disk, steps[number])
                sync(disk, root)
                disk.remove_tree(aside)
            else:
                held.append(number)
    return held
