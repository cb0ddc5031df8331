"""The description of a folder's model, from its config.json; does not import torch."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mt_files import read_json, shorten
from mt_model import StackConfig

from mt_hf.family.family import Family
from mt_hf.reading.files import (
    CARRIED,
    CONFIG,
    MAX_JSON,
    TOKENIZERS,
    WEIGHTS,
    copy_into,
    read_config,
    root_of,
    unquantized,
)
from mt_hf.reading.hub import find_folder
from mt_hf.reading.registry import family_of

_LOG = logging.getLogger("mt_hf")
_SHOWN = 5  # fields in a message


@dataclass(frozen=True, kw_only=True)
class Description:
    """A model described by a folder's config.json.

    Attributes:
        folder: The folder.
        family: Family of the model.
        config: Config of the model.
        given: The content of config.json.
    """

    folder: Path
    family: Family
    config: StackConfig
    given: Mapping[str, Any]

    @property
    def tokenizer(self) -> Path | None:
        """Path of the tokenizer's file; None without a tokenizer."""
        return next((path for path in map(self.folder.joinpath, TOKENIZERS) if path.exists()), None)

    @property
    def eos_token(self) -> str | None:
        """The end-of-text token in tokenizer_config.json, if any.

        Raises:
            FileError: The file can't be read.
        """
        path = self.folder / "tokenizer_config.json"
        if not path.exists():
            return None
        given: Any = read_json(path, limit=MAX_JSON, within=root_of(self.folder))
        token = given.get("eos_token") if isinstance(given, Mapping) else None
        token = token.get("content") if isinstance(token, Mapping) else token
        return token if isinstance(token, str) else None

    def copy_to(self, folder: Path) -> None:
        """Copy all files except the weights into a folder.

        Raises:
            FileError: A file can't be read or written.
        """
        for name in (CONFIG, *CARRIED):
            if (self.folder / name).exists():
                copy_into(self.folder / name, folder)


def read_description(folder: str | Path, *, download: bool = False) -> Description:
    """Read the config.json of a folder, and at most the names of its tensors.

    Fields that neither transformers nor mt reads are named once per folder, in a warning of the
    logger `mt_hf`.

    Args:
        folder: A folder of Hugging Face transformers, or an id of the hub; see `find_folder`.
        download: Whether to download a model of the hub that is not in the cache.

    Raises:
        ExchangeError: The architecture or a field is unknown; the message names it.
        FileError: The file can't be read.
    """
    folder = find_folder(folder, download=download)
    given = read_config(folder)
    family = family_of(given, folder / CONFIG)
    plain = unquantized(given)
    config = family.config_of(plain, folder / CONFIG, _names(family, folder))
    if unread := family.unread(plain):
        _say_ignored(folder / CONFIG, tuple(unread))
    return Description(folder=folder, family=family, config=config, given=given)


def describe(folder: str | Path, *, download: bool = False) -> StackConfig:
    """Return the config of a folder's model, from its config.json alone.

    Args:
        folder: A folder of Hugging Face transformers, or an id of the hub; it needs no weights.
        download: Whether to download a model of the hub that is not in the cache.

    Raises:
        ExchangeError: The architecture or a field is unknown; the message names it.
        FileError: The file can't be read.
    """
    return read_description(folder, download=download).config


@cache
def _say_ignored(path: Path, names: tuple[str, ...]) -> None:
    """Say which fields are ignored; the cache keeps it to once for each file."""
    shown = ", ".join(name if name.isprintable() else shorten(name) for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    text = "%s: ignored fields that transformers does not read either: %s%s"
    _LOG.warning(text, path, shown, more)


def _names(family: Family, folder: Path) -> Collection[str] | None:
    """Return the names of the folder's tensors, for a family that asks for them."""
    if family.settle is None or not any((folder / name).exists() for name in WEIGHTS):
        return None
    from mt_hf.reading.tensors import open_tensors  # brings torch

    return open_tensors(folder)
