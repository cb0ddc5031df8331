"""Outside files: checked reading, durable writing, locks and digests."""

from mt_files.digest import sha256_file
from mt_files.error import FileError, LockedError, MissingFileError
from mt_files.lock import FolderLock
from mt_files.reading import check_file, open_file, parse_json, read_bytes, read_json, read_text
from mt_files.writing import remove_temporaries, sync, write_file, writing

__all__ = [
    "FileError",
    "FolderLock",
    "LockedError",
    "MissingFileError",
    "check_file",
    "open_file",
    "parse_json",
    "read_bytes",
    "read_json",
    "read_text",
    "remove_temporaries",
    "sha256_file",
    "sync",
    "write_file",
    "writing",
]
