"""A step on a disk: its files under a hidden name first, then a rename, which is the commit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from mt_ckpt.disk import Disk, create_file, disk_errors, sync, sync_all
from mt_ckpt.lock import claim
from mt_ckpt.manifest import MANIFEST, Manifest, step_name
from mt_ckpt.root import committed_steps, hidden_name, move_latest, set_aside

# A run that went back replaces a step after this wait even if a reader still holds it.
_READERS_SECONDS = 20.0


class FolderStep:
    """A step during its save, on rank 0; `StoredStep` is its counterpart in an object store.

    Args:
        disk: The disk.
        root: Folder of the checkpoints.
        step: The step.

    Attributes:
        folder: Empty, since the files lie in the step directory itself.
        path: The temporary directory, which becomes the step directory.
    """

    folder = ""

    def __init__(self, disk: Disk, root: Path, step: int) -> None:
        self._disk, self._root, self._step = disk, root, step
        self._final = root / step_name(step)
        self.path = hidden_name(root, step_name(step), "tmp")
        self._old: Path | None = None

    def publish(
        self,
        manifest: Manifest,
        *,
        check_free: Callable[[], int | None],
        event: Callable[[str], None],
    ) -> int | None:
        """Write the manifest, rename, move `latest`, and remove a step that this one replaces.

        Returns:
            The value of `check_free`.
        """
        # The manifest comes last: a directory without it is no checkpoint.
        create_file(self._disk, self.path / MANIFEST, manifest.encode())
        sync_all(self._disk, (self.path / MANIFEST, self.path))
        event("save.manifest")
        named = check_free()  # again, for file systems without locks
        # Renaming over a directory isn't atomic, so an existing step moves aside first.
        if self._step in committed_steps(self._root):
            with claim(self._final, superseded=0.0, wait=_READERS_SECONDS):
                self._old = set_aside(self._disk, self._final)
        event("save.before_rename")
        with disk_errors("rename", self.path):
            self._disk.rename(self.path, self._final)
        sync(self._disk, self._root)
        event("save.after_rename")
        move_latest(self._disk, self._root, self._step)
        event("save.after_latest")
        if self._old is not None:
            self._disk.remove_tree(self._old)
        return named

    def discard(self) -> None:
        """Remove the temporary directory after a failure, and restore a replaced checkpoint."""
        self._disk.remove_tree(self.path)
        if self._old is None:
            return
        if self._disk.exists(self._final):  # the new checkpoint is complete; a later step failed
            self._disk.remove_tree(self._old)
        else:
            with contextlib.suppress(OSError):
                self._disk.rename(self._old, self._final)
