"""Files from outside: checked reading, typed content, durable writing, locks and digests."""

from typing import TYPE_CHECKING

from mt_files.argument import check_type, multiples_near
from mt_files.digest import sha256_file
from mt_files.error import FileError, LockedError, MissingFileError, UserError
from mt_files.experimental import ExperimentalWarning, experimental
from mt_files.field import (
    Checks,
    FieldError,
    describe,
    did_you_mean,
    divisors,
    hints_of,
    shorten,
)
from mt_files.later import import_failure, quick_imports, resolve_later
from mt_files.lock import FolderLock
from mt_files.reading import open_file, parse_json, read_bytes, read_json, read_text
from mt_files.schema import (
    MAX_PROBLEMS,
    Bound,
    FieldProblem,
    PlainText,
    SchemaError,
    bind,
    build,
    to_plain,
)
from mt_files.writing import remove_temporaries, sync, write_file, writing

if TYPE_CHECKING:
    from mt_files.document import Document, parse_yaml, read_yaml

__all__ = [
    "MAX_PROBLEMS",
    "Bound",
    "Checks",
    "Document",
    "ExperimentalWarning",
    "FieldError",
    "FieldProblem",
    "FileError",
    "FolderLock",
    "LockedError",
    "MissingFileError",
    "PlainText",
    "SchemaError",
    "UserError",
    "bind",
    "build",
    "check_type",
    "describe",
    "did_you_mean",
    "divisors",
    "experimental",
    "hints_of",
    "import_failure",
    "multiples_near",
    "open_file",
    "parse_json",
    "parse_yaml",
    "quick_imports",
    "read_bytes",
    "read_json",
    "read_text",
    "read_yaml",
    "remove_temporaries",
    "resolve_later",
    "sha256_file",
    "shorten",
    "sync",
    "to_plain",
    "write_file",
    "writing",
]

__getattr__ = resolve_later(__name__)  # YAML needs an extra
