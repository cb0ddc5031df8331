"""The checkpoint that a person names: a run, a folder of checkpoints, or a step directory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from mt_ckpt.hold import hold_checkpoint
from mt_ckpt.load import ArrayReader, open_arrays
from mt_ckpt.path import as_path, disk_of
from mt_ckpt.run import RunFolder


def checkpoints_of(path: Path) -> Path:
    """Return the folder of checkpoints of a run; any other path is returned unchanged."""
    path = as_path(path)
    run = RunFolder(path)
    return run.checkpoints if disk_of(path).is_folder(run.checkpoints) else path


@contextlib.contextmanager
def opened(path: Path, step: int | None = None) -> Iterator[ArrayReader]:
    """Yield a checkpoint that no save removes during the block.

    Args:
        path: A run folder, a folder of checkpoints, or a step directory.
        step: The step; by default the latest.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged.
    """
    with (
        hold_checkpoint(checkpoints_of(path), step) as found,
        open_arrays(found) as arrays,
    ):
        yield arrays
