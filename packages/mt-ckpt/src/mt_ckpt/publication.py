"""A step in an object store: its objects first, then its manifest, which is the commit."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from pathlib import Path

from mt_files import MissingFileError

from mt_ckpt.disk import Disk, disk_errors
from mt_ckpt.error import CheckpointError
from mt_ckpt.manifest import MANIFEST, Manifest, read_manifest, step_name, step_of
from mt_ckpt.objects.disk import key_of, store_of

# Uncommitted objects whose save has put nothing for this time will never be committed: a save that
# still runs renews its lock before it commits.
LEFT_SECONDS = 3600.0


class StoredStep:
    """A step during its save, on rank 0.

    Its objects lie in a folder with a random name inside the step's folder, so that no other save,
    even of the same step, writes to them. The manifest is put last, by a conditional put, and names
    that folder: from then on the step exists, or replaces another one at once.

    Args:
        disk: The store.
        root: Folder of the checkpoints.
        step: The step.
        check: Function that raises an error if the lock on `root` is lost.

    Attributes:
        folder: Name of the folder of the objects.
        path: The folder.
    """

    def __init__(self, disk: Disk, root: Path, step: int, *, check: Callable[[], None]) -> None:
        self._disk, self._root, self._check = disk, root, check
        self._store = store_of(disk)
        self._final = root / step_name(step)
        self.folder = uuid.uuid4().hex
        self.path = self._final / self.folder
        self._may_be_there = False

    def publish(
        self,
        manifest: Manifest,
        *,
        check_free: Callable[[], int | None],
        event: Callable[[str], None],
    ) -> int | None:
        """Put the manifest, and remove the objects of a replaced step.

        Returns:
            The value of `check_free`.

        Raises:
            CheckpointError: Another process has the lock now, or has saved this step.
        """
        content, path = manifest.encode(), self._final / MANIFEST
        event("save.manifest")
        self._check()
        named = check_free()
        old, version = self._replaced(path)
        event("save.before_rename")
        self._may_be_there = True
        with disk_errors("write", path):
            new = self._store.put_if(key_of(path), content, version)
        if new is None:
            self._may_be_there = False
            raise CheckpointError(
                f"{self._final} was saved by another process in the same moment; "
                "let one process at a time save there",
                file=str(path),
            )
        event("save.after_rename")
        self._move_latest()
        event("save.after_latest")
        if old is not None:
            with disk_errors("remove", self._final):
                places = (self._final / old.folder / name for name in old.files)
                self._store.delete(key_of(place) for place in places)
        return named

    def discard(self) -> None:
        """Remove the objects after a failure, unless a manifest may name them."""
        if not self._may_be_there:
            self._disk.remove_tree(self.path)

    def _replaced(self, path: Path) -> tuple[Manifest | None, dict[str, str] | None]:
        """Return the manifest to replace, and its version."""
        with disk_errors("read", path):
            info = self._store.head(key_of(path))
        if info is None:
            return None, None
        try:
            return read_manifest(self._final), info.version
        except CheckpointError:
            return None, info.version  # a damaged one: which objects it names is not known

    def _move_latest(self) -> None:
        path = self._root / "latest"
        content = f"{self._final.name}\nwrite {uuid.uuid4().hex}\n".encode()
        self._check()
        with disk_errors("write", path):
            info = self._store.head(key_of(path))
            version = None if info is None else info.version
            moved = self._store.put_if(key_of(path), content, version)
        if moved is None:
            raise CheckpointError(
                f"{path} was changed by another process in the same moment; {self._final} is "
                "complete, and is not what it names",
                file=str(path),
            )


def stray_folders(disk: Disk, root: Path) -> list[Path]:
    """Return the folders of objects that no manifest names, and no running save will name."""
    found, store = list[Path](), store_of(disk)
    steps = [root / name for name in disk.names(root) if step_of(root / name) is not None]
    for step in steps:
        named = _folder_of(disk, step)
        for name in store.names(key_of(step))[0]:
            if name == named or named == "":
                continue
            objects = store.list(key_of(step / name))
            newest = max((info.modified for info in objects), default=0.0)
            if time.time() - newest > LEFT_SECONDS:
                found.append(step / name)
    return found


def _folder_of(disk: Disk, step: Path) -> str | None:
    """Return the folder that a step's manifest names; None without a manifest.

    If the manifest of a step is damaged, or names no folder, nothing in the step counts as a
    leftover.
    """
    try:
        disk.open(step, MANIFEST)[0].close()
        return read_manifest(step).folder
    except MissingFileError:
        return None
    except CheckpointError:
        return ""
