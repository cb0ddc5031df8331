"""The export of a run's last step, and the folder that an earlier end of the run left."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mt_ckpt import RunFolder
from mt_files import FileError, read_json, write_file
from mt_hf import export_adapter, export_checkpoint
from mt_model import DTYPES

from mt_train.config.run_config import RunConfig

_RECORDS = {"hugging_face": "export.json", "adapter": "export_adapter.json"}
_MAX_BYTES = 1 << 20


def obstacle_of(folder: Path, out: Path, kind: str = "hugging_face") -> str | None:
    """Return why a run can't export to a folder; None if it is free or is the run's own export.

    Args:
        folder: Folder to export to.
        out: The run's folder.
        kind: Field of `export` that names the folder.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    try:
        record = read_json(out / _RECORDS[kind], limit=_MAX_BYTES, within=out)
    except FileError:
        record = None
    if not isinstance(record, dict) or record.get("folder") != str(folder.absolute()):
        return "exists; name a folder that does not, or is empty"
    if not folder.is_dir() or record.get("files") != _files_of(folder):
        return "has changed since this run wrote it; name another folder, or remove it"
    return None


def exports_of(config: RunConfig) -> dict[str, Path]:
    """Return the folders that a run writes at its end, by their fields."""
    named = {kind: getattr(config.export, kind) for kind in _RECORDS}
    return {kind: Path(folder) for kind, folder in named.items() if folder is not None}


def export(config: RunConfig, out: Path) -> None:
    """Write the last checkpoint for other programs, in place of earlier exports of the run.

    Raises:
        FileError: A folder can't be written, or belongs to another run or program.
        ExchangeError: The model does not belong to the family.
    """
    dtype = DTYPES[config.export.dtype or config.training.dtype]
    is_told = config.export.dtype is None and RunFolder(out).hugging_face.is_dir()
    family, folders = config.export.family, exports_of(config)
    if "hugging_face" in folders:
        how = {"family": family, "dtype": None if is_told else dtype}
        make = partial(export_checkpoint, out, **how)
        _replace(folders["hugging_face"], out, "hugging_face", make)
    if "adapter" in folders:
        make = partial(export_adapter, out, family=family)
        _replace(folders["adapter"], out, "adapter", make)


def _replace(folder: Path, out: Path, kind: str, make: Callable[[Path], None]) -> None:
    """Write an export beside its folder, then rename it to the folder."""
    problem = obstacle_of(folder, out, kind)
    if problem is not None:
        raise FileError(str(folder), problem)
    made = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")  # beside it, to be renamed
    try:
        make(made)
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)
    except FileError:
        raise
    except OSError as error:
        text = f"cannot replace the export: {error.strerror or error}"
        raise FileError(str(folder), text) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    record = {"folder": str(folder.absolute()), "files": _files_of(folder)}
    write_file(out / _RECORDS[kind], json.dumps(record))


def _files_of(folder: Path) -> dict[str, list[int]]:
    """Return the size and the time of change in nanoseconds of each file, by its path."""
    files = sorted(path for path in folder.rglob("*") if not path.is_dir())
    found = ((path.relative_to(folder).as_posix(), path.lstat()) for path in files)
    return {name: [at.st_size, at.st_mtime_ns] for name, at in found}
