"""Finding a checkpoint to read, and keeping it while it is read."""

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
from mt_ckpt.root import committed_steps, latest_checkpoint

_PATIENCE_SECONDS = 20.0
_STEP_FILES = (MANIFEST, "zarr.json")  # a step directory under another name, a copy say, has them


@contextlib.contextmanager
def hold_checkpoint(path: str | Path, step: int | None = None) -> Iterator[Path]:
    """Yield a step directory, which no save removes until the block ends.

    Reading beside a training run needs it: `keep=` of `save_checkpoint` passes over a step that is
    held and removes it at a later save. The hold is a shared lock by the kernel (flock), so it
    ends with the process, however that ends. On a file system without such locks a step stays for
    a minute after a newer one was committed.

    Args:
        path: A folder of checkpoints, or a step directory.
        step: Which step of the folder. None: the one that `latest_checkpoint` chooses; it is
            chosen again if it was removed before it could be held.

    Raises:
        CheckpointError: There is no such checkpoint, or `latest` names none.
    """
    folder, deadline = Path(path), time.monotonic() + _PATIENCE_SECONDS
    while (file := _try_share(target := _choose(folder, step), again=folder)) is None:
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{target} is removed or replaced again and again; is it being saved in a loop? "
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
            return None  # it was removed after it was chosen: choose again
        raise


def _choose(folder: Path, step: int | None) -> Path:
    if step is not None:
        check_type("step", step, int)
        steps = committed_steps(folder)
        if step not in steps:
            have = ", ".join(map(str, list(steps)[-20:])) or "none"
            raise CheckpointError(
                f"{folder} has no checkpoint of step {step!r} (there: {have})", file=str(folder)
            )
        return steps[step]
    if step_of(folder) is not None or any((folder / name).exists() for name in _STEP_FILES):
        return folder
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint directory", file=str(folder))
    found = latest_checkpoint(folder)
    if found is None:
        raise CheckpointError(
            f"{folder} has no committed checkpoint; give a folder in which some were saved, or one "
            "of its step directories",
            file=str(folder),
        )
    return found
