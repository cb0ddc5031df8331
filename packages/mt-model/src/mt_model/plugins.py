"""Kinds of layers from a user's own file, or from an installed package.

Loading executes the code. A file that the user names is loaded as it is. A file that a checkpoint
names is loaded only if this account has loaded the same bytes before, so that nobody's checkpoint
brings code with it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

from mt_files import FileError, UserError, read_bytes

GROUP = "mt.layers"
_MAX_BYTES = 1 << 20
_PREFIX = "mt_plugin_"


class PluginError(UserError):
    """A plugin is missing, has changed, can't be executed, or is not this account's own."""


def load_plugin(path: str | Path) -> str:
    """Execute a file of the user's own, which makes its kinds of layers known.

    The same bytes are executed once in a process.

    Args:
        path: A Python file.

    Returns:
        The SHA-256 of the file, for `load_recorded_plugins`.

    Raises:
        PluginError: The file can't be read, or fails.
    """
    digest = _execute(Path(path), _read(path))
    if digest not in _known():
        file = _known_file()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="ascii") as known:
                known.write(f"{digest}\n")
        except OSError:  # a home that can't be written: what the user names works all the same
            pass
    return digest


def load_recorded_plugins(plugins: Mapping[str, str]) -> None:
    """Load the plugins that a checkpoint names.

    Args:
        plugins: SHA-256 of each file, by its path.

    Raises:
        PluginError: A file is missing or has changed, or was never loaded by this account.
    """
    for path, digest in plugins.items():
        if f"{_PREFIX}{digest}" in sys.modules:
            continue
        source = _read(path)
        if hashlib.sha256(source).hexdigest() != digest:
            raise PluginError(
                f"{path} has changed since the checkpoint was written; restore the file (sha256 "
                f"{digest[:12]}...) to use the checkpoint"
            )
        if digest not in _known():
            raise PluginError(
                f"the checkpoint needs the code of {path}, which this account has not run before; "
                "read it, and if you trust it, name it under plugins: in a YAML file and call "
                "mt-train config with that"
            )
        _execute(Path(path), source)


@cache
def load_installed_plugins() -> None:
    """Import the modules that installed packages name under the entry points `mt.layers`."""
    for point in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        point.load()


def _execute(path: Path, source: bytes) -> str:
    digest = hashlib.sha256(source).hexdigest()
    name = f"{_PREFIX}{digest}"
    if name in sys.modules:
        return digest
    spec = spec_from_loader(name, loader=None, origin=str(path))
    assert spec is not None, "a name alone makes one"  # noqa: S101
    module = module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses look their module up while they are made
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)  # noqa: S102 - the user's own
    except Exception as error:
        del sys.modules[name]
        raise PluginError(f"{path} failed: {type(error).__name__}: {error}") from error
    return digest


def _read(path: str | Path) -> bytes:
    try:
        return read_bytes(Path(path), limit=_MAX_BYTES)
    except FileError as error:
        raise PluginError(f"the plugin can't be read: {error}; restore the file") from error


def _known() -> list[str]:
    """Return the digests of all files that this account has loaded by name."""
    try:
        return _known_file().read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return []


def _known_file() -> Path:
    return Path("~/.local/state/mt/plugins").expanduser()
