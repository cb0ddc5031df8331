"""The files of a folder of Hugging Face transformers, except files of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mt_files import open_file, read_json, writing

from mt_hf.family.error import ExchangeError

CONFIG = "config.json"
# Names of tokenizers' files, the preferred first.
TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "spiece.model", "tekken.json"),
    *("tiktoken.model", "qwen.tiktoken", "vocab.json", "vocab.txt"),
)
# Files that do not describe the weights.
CARRIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "tiktoken.model",
    "qwen.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)
ONE_FILE, INDEX = WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
MAX_JSON = 1 << 26
_BLOCK = 1 << 20


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json.

    Raises:
        ExchangeError: The file holds no mapping.
        FileError: The file can't be read.
    """
    path = folder / CONFIG
    given = read_json(path, limit=MAX_JSON, within=root_of(folder), constant=infinity)
    if not isinstance(given, dict):
        raise ExchangeError(f"{path}: is no mapping of fields; restore it")
    return given


def infinity(name: str) -> dict[str, str]:
    """Return infinity as newer transformers writes it; older wrote a bare `Infinity`."""
    if name != "Infinity":
        raise ValueError(f"{name} is no JSON number")
    return {"__float__": name}


def unquantized(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a config.json without the description of quantised weights."""
    return {name: value for name, value in given.items() if name != "quantization_config"}


def root_of(folder: Path) -> Path:
    """Return the folder that symbolic links must stay within.

    A snapshot in the cache of the Hugging Face hub consists of links into its model's folder.
    """
    real = folder.resolve()
    return real.parents[1] if real.parent.name == "snapshots" else real


def copy_into(path: Path, folder: Path) -> None:
    """Copy a file of a folder of Hugging Face into another folder, under the same name."""
    with (
        open_file(path, within=root_of(path.parent)) as source,
        writing(folder / path.name) as target,
    ):
        while block := source.read(_BLOCK):
            target.write(block)
