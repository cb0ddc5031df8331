"""The plan of a folder to write, independent of the owner of the values."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from mt_files import plan_safetensors, safetensors_header, write_file
from mt_model import Sizes, StackConfig, is_buffer
from torch import Tensor

from mt_hf.family.error import ExchangeError
from mt_hf.family.family import Family, comparable
from mt_hf.family.link import Link
from mt_hf.reading.files import CARRIED, CONFIG, copy_into, read_config, unquantized
from mt_hf.reading.pretrained import by_source, linked, stored_dtype
from mt_hf.reading.registry import family_of, find_family
from mt_hf.writing.files import (
    Planned,
    new_folder,
    write_index,
    write_tensor,
)

FILE_SIZE = 5_000_000_000


@dataclass(frozen=True, kw_only=True)
class Export:
    """A folder to be written.

    Attributes:
        family: Family of the model.
        config: Config of the model.
        content: Content of config.json, or a file to copy.
        links: Links of the model, by source tensor.
        shapes: Shapes of the model's parameters and saved buffers.
        files: The tensors of each file, in order.
        carried: Files to copy unchanged.
        beside: Content of other files by name; it replaces copied files.
    """

    family: Family
    config: StackConfig
    content: str | Path
    links: Mapping[str, Sequence[Link]]
    shapes: Mapping[str, Sizes]
    files: Mapping[str, Sequence[Planned]]
    carried: Sequence[Path]
    beside: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def order(self) -> list[str]:
        """Names of the tensors in the order of writing."""
        return [tensor.name for part in self.files.values() for tensor in part]

    def write(self, folder: Path, fill: Callable[[str, Tensor], None]) -> None:
        """Write the folder, tensor by tensor; it appears when it is complete.

        Args:
            folder: The folder to make; it must not exist, or be empty.
            fill: Function that fills a tensor by name, called in the order of `order`.
        """
        with new_folder(folder) as temporary:
            for name, part in self.files.items():
                with open(temporary / name, "xb") as file:
                    file.write(safetensors_header(part))
                    for tensor in part:
                        values = torch.empty(tensor.shape, dtype=tensor.dtype)
                        fill(tensor.name, values)
                        write_tensor(file, values)
            write_index(temporary, self.files)
            if isinstance(self.content, Path):
                copy_into(self.content, temporary)
            else:
                write_file(temporary / CONFIG, self.content)
            for path in self.carried:
                if path.name not in self.beside:
                    copy_into(path, temporary)
            for name, content in self.beside.items():
                write_file(temporary / name, content)


def plan_export(
    config: StackConfig,
    *,
    like: Path | None,
    family: str | None,
    dtype: torch.dtype | None,
    dtypes: Mapping[str, torch.dtype],
    file_size: int,
) -> Export:
    """Choose the family, and plan a folder without its weights.

    Args:
        config: Config of the model.
        like: A folder of the same family whose other files are copied; None for none.
        family: Name of the family; by default the family of `like`, or the first with such a model.
        dtype: Dtype of all tensors except buffers; None for those in `dtypes`.
        dtypes: Dtypes by name of the tensor, or of a linked parameter.
        file_size: Largest size of a file's tensors, in bytes.

    Raises:
        ExchangeError: The model is not of the family.
        FileError: A file of `like` can't be read.
    """
    if file_size < 1:
        raise ExchangeError(f"file_size={file_size} is not 1 byte or more")
    given = {} if like is None else read_config(like)
    if like is not None and family is None:
        family = family_of(given, like / CONFIG).name
    chosen, fields = find_family(config, family)
    listed, shapes = linked(chosen, config)
    links = by_source(chosen, config, listed)
    planned = [
        Planned(name=name, shape=each[0].shape, dtype=_dtype_of(name, each, dtype, dtypes))
        for name, each in links.items()
    ]
    buffers = {name for name, each in links.items() if is_buffer(each[0].target)}
    carried = [] if like is None else [like / n for n in CARRIED if (like / n).exists()]
    return Export(
        family=chosen,
        config=config,
        content=_content(chosen, config, fields, given, like, planned, buffers),
        links=links,
        shapes=shapes,
        files=plan_safetensors(planned, file_size),
        carried=carried,
    )


def _dtype_of(
    name: str, links: Sequence[Link], dtype: torch.dtype | None, dtypes: Mapping[str, torch.dtype]
) -> torch.dtype:
    first = links[0]
    if is_buffer(first.target):
        dtypes = {first.target: torch.float32, **dtypes}
    elif dtype is not None:
        return dtype
    found = next((dtypes[key] for key in (name, first.source, first.target) if key in dtypes), None)
    if found is None:
        raise ExchangeError(f"nothing says which dtype {name} has; name one")
    return found


def _content(
    family: Family,
    config: StackConfig,
    fields: Mapping[str, Any],
    given: Mapping[str, Any],
    like: Path | None,
    planned: Sequence[Planned],
    buffers: Collection[str],
) -> str | Path:
    """Return the content of config.json, or the file of `like` if it describes the model."""
    dtypes = {tensor.dtype for tensor in planned if tensor.name not in buffers}
    only = next(iter(dtypes)) if len(dtypes) == 1 else None
    told = stored_dtype(given)
    if like is not None and family.name == family_of(given, like / CONFIG).name:
        plain = unquantized(given)
        before = family.config_of(plain, like / CONFIG, {tensor.name for tensor in planned})
        if comparable(before) == comparable(config):
            if plain == given and (only is None or told in (only, None)):
                return like / CONFIG
            fields = {name: given[name] for name in ("architectures",) if given.get(name)}
    content = {**unquantized(given), "architectures": [family.architectures[0]]}
    content |= {"model_type": family.model_types[0], **fields}
    if only is not None:
        content["dtype" if "dtype" in given else "torch_dtype"] = str(only).removeprefix("torch.")
    return json.dumps(content, indent=2) + "\n"
