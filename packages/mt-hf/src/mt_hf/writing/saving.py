"""From a model on any layout to a folder of Hugging Face transformers."""

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

    Every rank of the model's layout calls it. The tensors are sent one by one to the first rank,
    which writes them: nobody has more than one whole tensor. The folder appears under its name
    when it is complete. A model with layers in low precision, which is written from one process,
    becomes a folder in a layout for them.

    Args:
        model: This rank's stage, or its stages where a schedule has several on it.
        folder: Does not exist, or is empty.
        like: A folder whose config.json, generation_config.json and tokenizer files are carried
            over; the one that the model was read from where None.
        family: Name of the family; that of `like`, or the first that has such a model, where None.
        dtype: Of all tensors; where None that of the tensors which the model was read from, or of
            the model.
        file_size: Bytes of tensors in a file; where there are more, there are several files and
            an index.
        beside: Content of files that stand beside the weights, such as a tokenizer, by name.
        layout: Of layers in low precision: `compressed-tensors`, which transformers and vLLM read,
            or `modelopt`, which TensorRT-LLM, vLLM and SGLang do.

    Raises:
        ExchangeError: The model is of no known family, or not of this one; there is something at
            `folder`; a file can't be read or written. It is raised on every rank, and nothing is
            left at `folder`.
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
    """Whether a model has layers in low precision, which are written from one process."""
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
    """Write the folder; where that fails, let the other ranks get rid of what they send."""
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
