"""Saving of a model on any layout to a folder of Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from mt_files import FileError
from mt_model import Stack
from torch import Tensor

from mt_hf.family.error import ExchangeError
from mt_hf.reading.pretrained import Pretrained, by_source, linked
from mt_hf.reading.registry import known_families
from mt_hf.writing.export import FILE_SIZE, Export, plan_export
from mt_hf.writing.files import check_free
from mt_hf.writing.gather import Gather


def save_pretrained(  # noqa: PLR0913 - what a folder says, all by keyword
    model: Stack[Any] | Sequence[Stack[Any]],
    folder: str | Path,
    *,
    like: str | Path | None = None,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    file_size: int = FILE_SIZE,
    beside: Mapping[str, bytes] | None = None,
    layout: str = "compressed-tensors",
) -> None:
    """Write a model as a folder that Hugging Face transformers loads.

    Every rank of the model's layout calls this. Tensors are sent one at a time to the first rank,
    which writes them, so no rank holds more than one whole tensor. The folder gets its name when it
    is complete. A quantised model must be on one process; it is written in a layout for quantised
    layers.

    Args:
        model: This rank's stage, or a list of its stages.
        folder: The folder to make; it must not exist, or be empty.
        like: A folder whose config.json, generation_config.json and tokenizer files are copied; by
            default the one from which the model was read.
        family: Name of the family; by default the family of `like`, or the first with such a model.
        dtype: Dtype of all tensors; by default the dtype of the folder from which the model was
            read, or the model's.
        file_size: Largest size of a file's tensors, in bytes; larger models get several files and
            an index.
        beside: Content of further files by name, such as a tokenizer.
        layout: Layout of quantised layers: `compressed-tensors`, for transformers and vLLM, or
            `modelopt`, for TensorRT-LLM, vLLM and SGLang.

    Raises:
        ExchangeError: The model is of no known family, or not of this one; `folder` exists; a file
            can't be read or written. The error is raised on every rank, and nothing is left at
            `folder`.
    """
    stages = [model] if isinstance(model, Stack) else list(model)
    if _has_low_bits(stages):
        from mt_hf.writing.low_bit_saving import write_low_bits

        check_free(Path(folder))
        kept = dtype or stages[0].shard.dtype
        export = replace(_plan(stages[0], like, family, kept, file_size), beside=beside or {})
        how: dict[str, Any] = {"layout": layout, "dtype": kept, "file_size": file_size}
        write_low_bits(stages[0], export, Path(folder), **how)
        return
    gather, export, problem, cause = Gather(stages), None, "", None
    if gather.is_first:
        try:
            check_free(Path(folder))
            export = _plan(stages[0], like, family, dtype, file_size)
            export = replace(export, beside=beside or {})
        except (ValueError, OSError) as error:
            problem, cause = str(error), error
    plan = None if export is None else [export.family.name, export.order]
    problem, plan = gather.tell([problem, plan])
    if problem:
        raise ExchangeError(problem) from cause
    if export is not None:
        problem, cause = _write(export, Path(folder), gather)
    else:
        name, order = plan
        chosen, config = known_families()[name], stages[0].config
        listed, shapes = linked(chosen, config)
        links = by_source(chosen, config, listed)
        for source in order:
            gather.run(links[source], shapes, None)
    problem = gather.tell(problem)
    if problem:
        raise ExchangeError(problem) from cause


def _has_low_bits(stages: Sequence[Stack[Any]]) -> bool:
    """Return whether a model is quantised, and must be on one process."""
    from mt_hf.writing.low_bit_saving import has_low_bits  # mt-quant

    if not any(has_low_bits(stage) for stage in stages):
        return False
    if len(stages) > 1 or stages[0].state.layout.world_size > 1:
        raise ExchangeError(
            "a model in low precision is written from one process; quantise it there, or read it "
            "from its folder"
        )
    return True


def _plan(
    stage: Stack[Any],
    like: str | Path | None,
    family: str | None,
    dtype: torch.dtype | None,
    file_size: int,
) -> Export:
    origin = stage.origin if isinstance(stage.origin, Pretrained) else None
    if like is None and origin is not None:
        like = origin.folder
    stored = {} if origin is None else origin.tensors
    return plan_export(
        stage.config,
        like=None if like is None else Path(like),
        family=family,
        dtype=stage.shard.dtype if dtype is None and origin is None else dtype,
        dtypes={name: tensor.dtype for name, tensor in stored.items()},
        file_size=file_size,
    )


def _write(export: Export, folder: Path, gather: Gather) -> tuple[str, Exception | None]:
    """Write the folder; after a failure, receive and discard what the other ranks send."""
    left = iter(export.order)

    def fill(name: str, into: Tensor | None) -> None:
        gather.run(export.links[name], export.shapes, into)
        next(left)

    try:
        export.write(folder, fill)
    except (ValueError, OSError) as error:
        for name in list(left):
            gather.run(export.links[name], export.shapes, None)
        says = error if isinstance(error, ValueError | FileError) else f"{folder}: {error}"
        return str(says), error
    return "", None
