"""Objects in stores such as S3, read by range: retried, and never two versions in one reading."""

from __future__ import annotations

import hashlib
import io
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import unquote, urlsplit

import mt_files
from mt_files import require, shorten

from mt_data.error import DataFileError

T = TypeVar("T")

SCHEMES = ("s3", "gs")
TRIES = 8
FIRST_WAIT = 0.1
LONGEST_WAIT = 10.0
BLOCK = 4 << 20
# `Path` makes one slash of two, so a prefix that was a `Path` is a URL too.
_URL = re.compile(rf"({'|'.join(SCHEMES)}):/{{1,2}}(?=[^/])")
_REASON = 300
_CACHE = "~/.cache/mt/objects"
_CREDENTIALS = "set the store's usual variables, such as AWS_ACCESS_KEY_ID and AWS_REGION"


def url_of(path: str | os.PathLike[str]) -> str | None:
    """Return the URL of an object or a prefix in a store; None for a local path."""
    text = os.fspath(path)
    match = _URL.match(text)
    return None if match is None else f"{match[1]}://{text[match.end() :]}"


def local_path(path: str | os.PathLike[str]) -> str:
    """Return the path that a `file://` URL names; any other text as it is."""
    text = os.fspath(path)
    return unquote(urlsplit(text).path) if text.startswith("file:///") else text


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """One version of an object.

    Attributes:
        url: URL for messages, such as `s3://bucket/corpus.bin`.
        store: The store of obstore, at its root.
        path: Path of the object in it.
        size: Number of bytes.
        version: The ETag, or the time of the last change where a store has none.
    """

    url: str
    store: Any
    path: str
    size: int
    version: str

    def read(self, start: int, count: int) -> memoryview:
        """Return bytes [start, start + count).

        Raises:
            DataFileError: The object has changed or ends early, or can't be read after `TRIES`
                tries.
        """
        if count == 0:
            return memoryview(b"")

        def get() -> memoryview:
            options: dict[str, Any] = {"range": (start, start + count)}
            if self.version.startswith('"'):
                options["if_match"] = self.version
            found = _library().get(self.store, self.path, options=options)
            if _version(found.meta) != self.version:
                raise self._changed()
            content = memoryview(found.bytes())
            if len(content) != count:
                raise OSError(f"{len(content)} of {count} bytes came")
            return content

        try:
            return tried(get, self.url)
        except _Changed:
            raise self._changed() from None

    def _changed(self) -> DataFileError:
        return DataFileError(
            self.url,
            f"has changed while it is read: it was version {self.version}; read it again from the "
            "start, and write new data under a new name",
        )

    def open(self) -> BinaryIO:
        """Open the object as a file that reads blocks of 4 MiB."""
        return cast("BinaryIO", io.BufferedReader(_ObjectFile(self), BLOCK))

    def content(self, *, limit: int) -> bytes:
        """Return the whole object.

        Raises:
            DataFileError: It has more than `limit` bytes, or can't be read.
        """
        if self.size > limit:
            raise DataFileError(self.url, f"has {self.size} bytes; at most {limit} are read")
        return bytes(self.read(0, self.size))

    def cached(self, folder: Path | None = None) -> Path:
        """Return a local copy of this version, made once; copies of other versions are removed.

        Args:
            folder: Folder of the copies; by default `~/.cache/mt/objects`.
        """
        folder = Path(_CACHE).expanduser() if folder is None else folder
        name = hashlib.sha256(self.url.encode()).hexdigest()[:32]
        version = hashlib.sha256(f"{self.version} {self.size}".encode()).hexdigest()[:32]
        copy = folder / f"{name}-{version}{Path(self.path).suffix}"
        if not copy.is_file() or copy.stat().st_size != self.size:
            folder.mkdir(parents=True, exist_ok=True)
            with mt_files.writing(copy) as file:
                for start in range(0, self.size, BLOCK):
                    file.write(self.read(start, min(BLOCK, self.size - start)))
        for other in folder.glob(f"{name}-*"):
            if other != copy:
                other.unlink(missing_ok=True)
        return copy


class _ObjectFile(io.RawIOBase):
    """The bytes of an object, for `io.BufferedReader`."""

    def __init__(self, source: StoredObject) -> None:
        self._source, self._at = source, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size}[whence]
        if begin + offset < 0:
            raise OSError(f"{self._source.url}: position {begin + offset} is before the start")
        self._at = begin + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._source.size - self._at))
        view[:count] = self._source.read(self._at, count)
        self._at += count
        return count


def find_object(url: str) -> StoredObject:
    """Find an object as it is now.

    Raises:
        MissingFileError: There is no such object.
        DataFileError: The store does not answer, or refuses.
        MissingExtraError: obstore is not installed.
    """
    store, path = _open_store(url)
    if not path:
        raise mt_files.MissingFileError(url, "names no object; add its path behind the bucket")
    return _object(url, store, tried(lambda: _library().head(store, path), url))


def objects_under(url: str) -> Iterator[StoredObject]:
    """Yield the objects whose path begins with the folders of a URL, in order of their paths.

    Raises:
        DataFileError: The store does not answer, or refuses.
    """
    store, path = _open_store(url)
    prefix = path.rstrip("/")

    def listed() -> list[Any]:
        chunks = _library().list(store, prefix=prefix or None)
        return sorted((meta for chunk in chunks for meta in chunk), key=lambda meta: meta["path"])

    root = url[: len(url) - len(path)]
    for meta in tried(listed, url):
        yield _object(f"{root}{meta['path']}", store, meta)


class _Changed(Exception):  # noqa: N818 - no error by itself
    """Another version of an object is in the store."""


def tried(action: Callable[[], T], url: str) -> T:
    """Return what an action returns, tried up to `TRIES` times, with growing waits between.

    Raises:
        MissingFileError: The store has no such object.
        DataFileError: It failed each time, or in a way that would not change.
    """
    errors = _library().exceptions
    reason = ""
    for number in range(TRIES):
        if number:
            time.sleep(min(FIRST_WAIT * 2 ** (number - 1), LONGEST_WAIT))
        try:
            return action()
        except (DataFileError, mt_files.UserError):
            raise
        except errors.PreconditionError:
            raise _Changed from None
        except FileNotFoundError:
            raise mt_files.MissingFileError(url, "no such object or bucket") from None
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
            text = f"is refused by the store; {_CREDENTIALS} ({_first_line(error)})"
            raise DataFileError(url, text) from None
        except (errors.BaseError, OSError) as error:
            reason = _first_line(error)
    raise DataFileError(url, f"can't be read, after {TRIES} tries: {reason}")


def _first_line(error: Exception) -> str:
    """Return the words of an error, without the library's debugging lines."""
    return shorten(str(error).partition("\n")[0], _REASON).strip("'\"")


def _library() -> Any:
    return require("obstore", "reading from an object store")


def _open_store(url: str) -> tuple[Any, str]:
    """Return the store of a URL at its root, and the path in it."""
    _library()
    stores = require("obstore.store", "reading from an object store")
    parts = urlsplit(url)
    root = f"{parts.scheme}://{parts.netloc}"
    try:  # tries are counted here, in one place
        store = stores.from_url(root, retry_config={"max_retries": 0})
    except (ValueError, _library().exceptions.BaseError) as error:
        text = f"can't be opened; {_CREDENTIALS} ({_first_line(error)})"
        raise DataFileError(url, text) from None
    return store, url[len(root) :].lstrip("/")


def _object(url: str, store: Any, meta: Any) -> StoredObject:
    return StoredObject(
        url=url, store=store, path=meta["path"], size=meta["size"], version=_version(meta)
    )


def _version(meta: Any) -> str:
    return meta["e_tag"] or str(meta["last_modified"])
