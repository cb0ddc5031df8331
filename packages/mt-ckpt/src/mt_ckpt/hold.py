"""Finding a checkpoint, and protecting it from removal while it is read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from mt_files import MissingFileError, check_type

from mt_ckpt.error import CheckpointError
from mt_ckpt.lock import POLL_SECONDS, share
from mt_ckpt.manifest import MANIFEST, step_of
from mt_ckpt.path import as_path, disk_of
from mt_ckpt.root import committed_steps, latest_checkpoint

_PATIENCE_SECONDS = 20.0
# These mark a step directory under another name, such as a copy.
_STEP_FILES = (MANIFEST, "zarr.json")


@contextlib.contextmanager
def hold_checkpoint(path: str | Path, step: int | None = None) -> Iterator[Path]:
    """Yield a step directory that no save removes until the block ends.

    Use it to read during a training run: `keep=` of `save_checkpoint` skips a held step and removes
    it at a later save. The hold is a shared lock of the kernel (flock), so it ends with the
    process. On a file system without such locks a step stays for a minute after a newer one was
    committed, and in an object store for ten minutes.

    Args:
        path: A folder of checkpoints, or a step directory.
        step: The step in the folder; by default the choice of `latest_checkpoint`, which is
            repeated if the step is removed before it is held.

    Raises:
        CheckpointError: There is no such checkpoint, or `latest` names none.
    """
    folder, deadline = as_path(path), time.monotonic() + _PATIENCE_SECONDS
    while (file := _try_share(target := _choose(folder, step), again=folder)) is None:
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{target} is removed or replaced repeatedly; is it being saved in a loop? "
                "Name another step",
                file=str(target),
            )
        time.sleep(POLL_SECONDS)
    with file:
        yield target


def _try_share(target: Path, again: Path) -> BinaryIO | None:
    try:
        return share(target)
    except CheckpointError as error:
        if target != again and isinstance(error.__cause__, MissingFileError):
            return None  # removed after it was chosen: choose again
        raise


def _choose(folder: Path, step: int | None) -> Path:
    disk = disk_of(folder)
    if step is not None:
        check_type("step", step, int)
        steps = committed_steps(folder)
        if step not in steps:
            have = ", ".join(map(str, list(steps)[-20:])) or "none"
            raise CheckpointError(
                f"{folder} has no checkpoint of step {step!r} (there: {have})", file=str(folder)
            )
        return steps[step]
    if step_of(folder) is not None or any(disk.exists(folder / name) for name in _STEP_FILES):
        return folder
    if not disk.is_folder(folder):
        raise CheckpointError(f"{folder}: no such checkpoint directory", file=str(folder))
    found = latest_checkpoint(folder)
    if found is None:
        raise CheckpointError(
            f"{folder} has no committed checkpoint; pass a folder with saved checkpoints, or one "
            "of its step directories",
            file=str(folder),
        )
    return found
