"""Objects in stores such as S3: bounded tries, and writes that find out when an answer was lost."""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from mt_files.error import FileError, MissingFileError, ObjectError
from mt_files.field import shorten
from mt_files.later import require
from mt_files.writing import writing

T = TypeVar("T")

BLOCK = 4 << 20
_CACHE = "~/.cache/mt/objects"
_REASON = 300
_VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
    "gs": "GOOGLE_SERVICE_ACCOUNT",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_PURPOSE = "an object store"


@dataclass(frozen=True, kw_only=True)
class ObjectTries:
    """How often a request is tried.

    Attributes:
        count: Number of tries.
        first_wait: Seconds between the first two; each further wait is twice as long.
        longest_wait: Limit of the waits in seconds.
    """

    count: int = 8
    first_wait: float = 0.1
    longest_wait: float = 10.0


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """One version of an object, as the store describes it.

    Attributes:
        path: Path of the object in its bucket.
        size: Number of bytes.
        modified: Time of its last change by the store's clock, in seconds since the epoch.
        version: Identification of the version, for conditional requests.
    """

    path: str
    size: int
    modified: float
    version: dict[str, str]

    @property
    def tag(self) -> str:
        """The version as a text: the ETag, or the time of the last change where there is none."""
        return self.version.get("e_tag") or str(self.modified)


class ObjectStore:
    """The objects of one bucket.

    Every request is tried several times. A request whose answer is lost may have been carried out;
    reading, `put` and `delete` may be repeated all the same, and `put_if` reads back.

    Args:
        url: URL of the bucket, or of anything in it.
        tries: How often to try.

    Attributes:
        url: URL of the bucket.

    Raises:
        ObjectError: There is no such kind of store, or its settings are incomplete.
        MissingExtraError: obstore is not installed.
    """

    def __init__(self, url: str, tries: ObjectTries | None = None) -> None:
        self._library = require("obstore", _PURPOSE)
        self._errors = self._library.exceptions
        self._tries = tries or ObjectTries()
        scheme, _, rest = url.partition("://")
        self.url = f"{scheme}://{rest.partition('/')[0]}"
        named = _VARIABLES.get(scheme, "those of its credentials")
        self._advice = f"set the store's usual variables, such as {named}"
        stores = require("obstore.store", _PURPOSE)
        try:  # tries are counted here, in one place
            self._store = stores.from_url(self.url, retry_config={"max_retries": 0})
        except (ValueError, self._errors.BaseError) as error:
            text = f"can't be opened; {self._advice} ({_first_line(error)})"
            raise ObjectError(url, text) from None

    def head(self, path: str) -> ObjectInfo | None:
        """Return a description of an object; None if there is none."""
        try:
            return _info(self._tried(path, lambda: self._library.head(self._store, path)))
        except MissingFileError:
            return None

    def get(self, path: str) -> tuple[bytes, ObjectInfo]:
        """Return the content and the description of an object.

        Raises:
            MissingFileError: There is no such object.
        """

        def get() -> tuple[bytes, ObjectInfo]:
            found = self._library.get(self._store, path)
            return _complete(bytes(found.bytes()), found.meta["size"]), _info(found.meta)

        return self._tried(path, get)

    def start(self, path: str, count: int) -> tuple[memoryview, ObjectInfo]:
        """Return the first bytes of an object, up to `count`, and its description.

        Raises:
            MissingFileError: There is no such object.
        """

        def get() -> tuple[memoryview, ObjectInfo]:
            found = self._library.get(self._store, path, options={"range": (0, count)})
            size = min(count, found.meta["size"])
            return _complete(memoryview(found.bytes()), size), _info(found.meta)

        return self._tried(path, get)

    def read(
        self, path: str, start: int, count: int, version: ObjectInfo | None = None
    ) -> memoryview:
        """Return bytes [start, start + count) of an object.

        Args:
            path: Path of the object.
            start: The first byte.
            count: Number of bytes.
            version: The version to read; None reads the current one.

        Raises:
            MissingFileError: There is no such object.
            ObjectError: It has another version, or can't be read.
        """
        if count == 0:
            return memoryview(b"")
        options: dict[str, Any] = {"range": (start, start + count)}
        if version is not None and version.tag.startswith('"'):
            options["if_match"] = version.tag

        def read() -> memoryview:
            try:
                found = self._library.get(self._store, path, options=options)
            except self._errors.PreconditionError:
                found = None
            if found is None or (version is not None and _info(found.meta).tag != version.tag):
                text = "has changed while it is read; read it again from the start, and write new "
                raise ObjectError(f"{self.url}/{path}", f"{text}data under a new name")
            return _complete(memoryview(found.bytes()), count)

        return self._tried(path, read)

    def put(self, path: str, content: bytes | bytearray | memoryview) -> None:
        """Create or replace an object; a large one goes in parts, and is there at the end."""
        self._tried(path, lambda: self._library.put(self._store, path, content))

    def put_if(
        self, path: str, content: bytes, version: dict[str, str] | None
    ) -> dict[str, str] | None:
        """Create or replace an object if nobody else has done so.

        Args:
            path: Path of the object.
            content: Its content, which no other writer writes; put a random id into it. If an
                answer is lost, the next try fails against the own object, and its content tells so.
            version: The version to replace; None creates the object.

        Returns:
            The new version; None if the object has another version, or, to be created, exists.

        Raises:
            ObjectError: The store does not answer. The object may have been put.
        """
        mode: Any = "create" if version is None else version
        refused = (self._errors.AlreadyExistsError, self._errors.PreconditionError)

        def put() -> dict[str, str] | None:
            try:
                answer = self._library.put(
                    self._store, path, content, mode=mode, use_multipart=False
                )
            except (*refused, FileNotFoundError) as error:
                try:
                    found, info = self.get(path)
                except MissingFileError:
                    if version is None:  # a conflict of two writers, none of whom has come through
                        raise OSError(_first_line(error)) from None
                    return None
                if found == content:
                    return info.version
                if info.version == version:
                    raise OSError(_first_line(error)) from None
                return None
            return _version(answer)

        return self._tried(path, put)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete objects; those that don't exist are passed over."""
        names = list(paths)
        for start in range(0, len(names), 1000):
            some = names[start : start + 1000]
            self._tried(some[0], lambda some=some: self._library.delete(self._store, some))

    def list(self, folder: str) -> list[ObjectInfo]:
        """Return the objects below a folder, in order of their paths."""

        def listed() -> list[ObjectInfo]:
            blocks = self._library.list(self._store, prefix=folder or None)
            return sorted((_info(meta) for block in blocks for meta in block), key=_path_of)

        return self._tried(folder, listed)

    def names(self, folder: str) -> tuple[list[str], list[ObjectInfo]]:
        """Return the folders and the objects that lie directly in a folder."""

        def listed() -> tuple[list[str], list[ObjectInfo]]:
            found = self._library.list_with_delimiter(self._store, prefix=folder or None)
            folders = [prefix.rstrip("/").rpartition("/")[2] for prefix in found["common_prefixes"]]
            return folders, [_info(meta) for meta in found["objects"]]

        return self._tried(folder, listed)

    def has_any(self, folder: str) -> bool:
        """Return whether there is an object below a folder."""

        def look() -> bool:
            blocks: Iterator[Any] = iter(self._library.list(self._store, prefix=folder or None))
            return any(len(block) > 0 for block in blocks)

        return self._tried(folder, look)

    def _tried(self, path: str, action: Callable[[], T]) -> T:
        """Return what an action returns, tried several times with growing waits between.

        Raises:
            MissingFileError: There is no such object.
            ObjectError: It failed each time, or in a way that would not change.
        """
        url, reason, errors = f"{self.url}/{path}", "", self._errors
        for number in range(self._tries.count):
            if number:
                wait = self._tries.first_wait * 2 ** (number - 1)
                time.sleep(min(wait, self._tries.longest_wait))
            try:
                return action()
            except FileError:
                raise
            except FileNotFoundError:
                raise MissingFileError(url, "no such object or bucket") from None
            except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
                text = f"is refused by the store; {self._advice} ({_first_line(error)})"
                raise ObjectError(url, text) from None
            except errors.NotSupportedError as error:
                text = f"needs what this store does not do: {_first_line(error)}; use another store"
                raise ObjectError(url, text) from None
            except (errors.BaseError, OSError) as error:
                reason = _first_line(error)
        text = f"the store fails, after {self._tries.count} tries: {reason}"
        raise ObjectError(url, text)


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """One version of an object, for reading.

    Attributes:
        store: The store.
        info: The version.
    """

    store: ObjectStore
    info: ObjectInfo

    @property
    def url(self) -> str:
        """URL, such as `s3://bucket/corpus.bin`."""
        return f"{self.store.url}/{self.info.path}"

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.info.size

    @property
    def version(self) -> str:
        """Text that identifies the version."""
        return self.info.tag

    def read(self, start: int, count: int) -> memoryview:
        """Return bytes [start, start + count).

        Raises:
            ObjectError: The object has changed or ends early, or can't be read.
        """
        return self.store.read(self.info.path, start, count, self.info)

    def open(self, block: int | None = None, first: memoryview | None = None) -> BinaryIO:
        """Open the object as a file.

        Args:
            block: Smallest number of bytes of a read; None reads blocks of 4 MiB, and 0 exactly the
                requested bytes.
            first: The first bytes, if they were read already.
        """
        file = _ObjectFile(self, memoryview(b"") if first is None else first)
        block = BLOCK if block is None else block
        return cast("BinaryIO", io.BufferedReader(file, block) if block else file)

    def content(self, *, limit: int) -> bytes:
        """Return the whole object.

        Raises:
            ObjectError: It has more than `limit` bytes, or can't be read.
        """
        if self.size > limit:
            raise ObjectError(self.url, f"has {self.size} bytes; at most {limit} are read")
        return bytes(self.read(0, self.size))

    def cached(self, folder: Path | None = None) -> Path:
        """Return a local copy of this version, made once; copies of other versions are removed.

        Args:
            folder: Folder of the copies; by default `~/.cache/mt/objects`.
        """
        folder = Path(_CACHE).expanduser() if folder is None else folder
        name = hashlib.sha256(self.url.encode()).hexdigest()[:32]
        version = hashlib.sha256(f"{self.version} {self.size}".encode()).hexdigest()[:32]
        copy = folder / f"{name}-{version}{Path(self.info.path).suffix}"
        if not copy.is_file() or copy.stat().st_size != self.size:
            folder.mkdir(parents=True, exist_ok=True)
            with writing(copy) as file:
                for start in range(0, self.size, BLOCK):
                    file.write(self.read(start, min(BLOCK, self.size - start)))
        for other in folder.glob(f"{name}-*"):
            if other != copy:
                other.unlink(missing_ok=True)
        return copy


class _ObjectFile(io.RawIOBase):
    """The bytes of an object, some of which may be there already."""

    def __init__(self, source: StoredObject, first: memoryview) -> None:
        self._source, self._first, self._at = source, first, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size}[whence]
        if begin + offset < 0:
            raise FileError(self._source.url, f"position {begin + offset} is before the start")
        self._at = begin + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._source.size - self._at))
        if self._at < len(self._first):
            count = min(count, len(self._first) - self._at)
            view[:count] = self._first[self._at : self._at + count]
        else:
            view[:count] = self._source.read(self._at, count)
        self._at += count
        return count


def find_object(url: str) -> StoredObject:
    """Find an object as it is now.

    Raises:
        MissingFileError: There is no such object.
        ObjectError: The store does not answer, or refuses.
        MissingExtraError: obstore is not installed.
    """
    store, path = _split(url)
    if not path:
        raise MissingFileError(url, "names no object; add its path behind the bucket")
    if (info := store.head(path)) is None:
        raise MissingFileError(url, "no such object or bucket")
    return StoredObject(store=store, info=info)


def objects_under(url: str) -> Iterator[StoredObject]:
    """Yield the objects whose path begins with the folders of a URL, in order of their paths.

    Raises:
        ObjectError: The store does not answer, or refuses.
    """
    store, path = _split(url)
    return (StoredObject(store=store, info=each) for each in store.list(path.rstrip("/")))


def _split(url: str) -> tuple[ObjectStore, str]:
    """Return the store of a URL, and the path in it."""
    store = ObjectStore(url)
    return store, url[len(store.url) :].lstrip("/")


def _complete(content: T, size: int) -> T:
    if len(content) != size:  # pyright: ignore[reportArgumentType] - bytes or a view of them
        raise OSError(f"{len(content)} of {size} bytes came")  # pyright: ignore[reportArgumentType]
    return content


def _info(meta: Any) -> ObjectInfo:
    return ObjectInfo(
        path=meta["path"],
        size=meta["size"],
        modified=meta["last_modified"].timestamp(),
        version=_version(meta),
    )


def _version(meta: Any) -> dict[str, str]:
    """Return what identifies a version; stores state an ETag, a number, or both."""
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}


def _path_of(info: ObjectInfo) -> str:
    return info.path


def _first_line(error: Exception) -> str:
    """Return the words of an error, without the library's debugging lines."""
    return shorten(str(error).partition("\n")[0], _REASON).strip("'\"")
