"""The corpus of a run in shards, and the description of a folder of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mt_data import HeldOut, ShardPlan, Shards, standard_library_sources
from mt_files import FileError, SchemaError, build, read_json

from mt_train.config.kinds.section import DataSection
from mt_train.config.loading import STANDARD_LIBRARY, LoadedConfig

DESCRIPTION = "corpus.json"
SHARD_BYTES = DataSection.shard_bytes
_MAX_BYTES = 1 << 20


def corpus_files(loaded: LoadedConfig) -> Path | list[Path]:
    """Return the source of `data.corpus`."""
    data = loaded.config.data
    if data.corpus is None:
        raise loaded.error("data.corpus", "missing; there are no documents to split")
    if data.corpus == STANDARD_LIBRARY:
        return standard_library_sources()[: data.max_files]
    return Path(data.corpus)


def plan_of(loaded: LoadedConfig) -> ShardPlan | None:
    """Return the shards of a corpus; None if it has one, or its kind of rows needs the whole."""
    data = loaded.config.data
    if not data.reads_shards or data.max_files is not None:
        return None
    found = corpus_files(loaded)
    sources = tuple(map(str, [found] if isinstance(found, Path) else found))
    rule = HeldOut(fraction=data.validation_fraction, seed=loaded.config.training.seed)
    size = data.shard_bytes
    plan = ShardPlan.of(sources, glob=data.glob, shard_bytes=size, held_out=rule)
    return plan if plan.count > 1 else None


def described(folder: Path) -> dict[str, Any] | None:
    """Return the settings of a folder of tokens; None if they can't be read."""
    try:
        found = read_json(folder / DESCRIPTION, limit=_MAX_BYTES, within=folder.parent)
    except FileError:
        return None
    return found if isinstance(found, dict) else None


def described_shards(loaded: LoadedConfig, plan: ShardPlan | None) -> dict[str, Any]:
    """Return the entries of a description about shards."""
    if not loaded.config.data.reads_shards:
        return {}
    size = {"shard_bytes": loaded.config.data.shard_bytes}
    return size if plan is None else {**size, "shards": plan.to_dict()}


def is_made(data: DataSection, folder: Path, description: dict[str, Any]) -> bool:
    """Return whether a folder has the tokens of these settings, or their first shard.

    Descriptions of earlier versions have no entry about shards, and mean tokens without shards.
    """
    found = described(folder)
    if found is None:
        return False
    in_shards, size = found.pop("shards", None) is not None, found.pop("shard_bytes", None)
    if found != description:
        return False
    return size in (None, data.shard_bytes) if data.reads_shards else not in_shards


def shards_of(folder: Path) -> Shards | None:
    """Return the shards of a folder of tokens; None if it has them as a whole."""
    found = (described(folder) or {}).get("shards")
    if found is None:
        return None
    try:
        return Shards(plan=build(ShardPlan, found), folder=folder)
    except SchemaError as error:
        raise FileError(folder / DESCRIPTION, f"{error}; remove {folder} to build anew") from None
