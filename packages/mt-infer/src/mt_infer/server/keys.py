"""The keys of clients: read, and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mt_files import Checks, UserError, open_file

from mt_infer.client import KEY_VARIABLE

_LEAST_LETTERS = 16
_MOST_BYTES = 1 << 20
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class KeyFileError(UserError):
    """A file of keys that can't be used."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """A client's key.

    Attributes:
        secret: The key that the client sends.
        priority: Priority of its requests.
    """

    secret: str = field(repr=False)
    priority: int = 0

    def __post_init__(self) -> None:
        checks = Checks(self)
        if len(self.secret) < _LEAST_LETTERS or not self.secret.isascii():
            checks.add("secret", f"give a key of {_LEAST_LETTERS} ASCII letters or more")
        if not self.secret.isprintable() or " " in self.secret:
            checks.add("secret", "a key has no blanks and no control characters")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class Client:
    """The sender of a request.

    Attributes:
        name: Name in logs, and owner of cached blocks: a keyed hash of the key, or nothing.
        priority: Priority of its requests.
    """

    name: str = ""
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The keys that a server accepts.

    Attributes:
        clients: Keys of clients; without one, everybody may send requests.
        admins: Keys of `/admin`; without one, the route does not exist.
    """

    clients: tuple[Key, ...] = ()
    admins: tuple[Key, ...] = ()
    _salt: bytes = field(default_factory=lambda: secrets.token_bytes(32), init=False, repr=False)

    def client(self, authorization: str) -> Client | None:
        """Return the sender of a header `Authorization`; None without a valid client's key."""
        return self._owner(authorization, self.clients) if self.clients else Client()

    def admin(self, authorization: str) -> Client | None:
        """Return the sender of a header `Authorization`; None without a valid admin's key."""
        return self._owner(authorization, self.admins)

    def _owner(self, authorization: str, keys: tuple[Key, ...]) -> Client | None:
        scheme, _, given = authorization.partition(" ")
        name, found = self._hash(given.strip()), None
        for key in keys:  # all of them, so that time says nothing of a key's place
            is_same = hmac.compare_digest(self._hash(key.secret), name)
            found = key if is_same else found
        if found is None or scheme.lower() != "bearer":
            return None
        return Client(name=name[:16], priority=found.priority)

    def _hash(self, secret: str) -> str:
        return hmac.new(self._salt, secret.encode(errors="replace"), hashlib.sha256).hexdigest()


def read_keys(path: Path) -> tuple[Key, ...]:
    """Return the keys of a file: one a line, optionally followed by `priority=N`.

    Raises:
        KeyFileError: Others may read the file, or a line is no key.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_mode & _OTHERS:
            raise KeyFileError(f"{path}: others may read or write it; run chmod 600 {path}")
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise KeyFileError(f"{path} has more than {_MOST_BYTES} bytes; leave keys out")
    found = []
    for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
        words = line.split()
        if not words or line.startswith("#"):
            continue
        try:
            found.append(_key(*words))
        except (TypeError, ValueError) as error:
            raise KeyFileError(f"{path}:{number}: {error}") from error
    if not found:
        raise KeyFileError(f"{path} has no key; write one a line")
    return tuple(found)


def keys_of_environment(environment: Mapping[str, str]) -> tuple[Key, ...]:
    """Return the key of the variable MT_INFER_API_KEY, if it is set."""
    value = environment.get(KEY_VARIABLE)
    if value is None:
        return ()
    try:
        return (Key(secret=value),)
    except ValueError as error:
        raise KeyFileError(f"{KEY_VARIABLE}: {error}") from error


def _key(secret: str, priority: str = "priority=0") -> Key:
    name, _, number = priority.partition("=")
    if name != "priority":
        raise ValueError("write a key, and priority=N behind it if it has one")
    return Key(secret=secret, priority=int(number))
