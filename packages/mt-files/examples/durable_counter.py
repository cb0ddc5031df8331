"""A counter on disk that survives any kill, and that only one process may count at a time."""

import tempfile
from pathlib import Path

from mt_files import FolderLock, LockedError, MissingFileError, read_json, write_file


def count(folder: Path) -> int:
    with FolderLock(folder, purpose="counting"):
        try:
            value = read_json(folder / "count.json", limit=64)
        except MissingFileError:
            value = 0
        write_file(folder / "count.json", str(value + 1))
        return value + 1


if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp())
    print([count(folder) for _ in range(3)])
    with FolderLock(folder, purpose="holding it"):
        try:
            count(folder)
        except LockedError as error:
            print(error)
