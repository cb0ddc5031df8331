"""Conversion between folders of Hugging Face and run folders, streamed on a CPU, for any layout.

It needs mt-ckpt and mt-data, from the extra `mt-hf[cli]`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from mt_files import to_plain
from mt_model import VOCABULARY, ModelConfig, StackConfig
from torch import Tensor

from mt_hf.family.error import ExchangeError
from mt_hf.reading.adapted import open_adapted
from mt_hf.reading.files import read_config
from mt_hf.reading.finite import check_finite
from mt_hf.reading.pretrained import Pretrained, open_pretrained, stored_dtype
from mt_hf.writing.beside import files_beside, ids_of
from mt_hf.writing.export import FILE_SIZE, Export, plan_export
from mt_hf.writing.files import check_free, new_folder

if TYPE_CHECKING:
    from mt_ckpt import ArrayReader, RunFolder, SavedTokenizer, TensorShard


def import_pretrained(
    folder: str | Path,
    out: str | Path,
    *,
    vocab_multiple: int | None = None,
    eod: str | None = None,
) -> StackConfig:
    """Convert a folder of Hugging Face to a run folder with one checkpoint, at step 0.

    `mt-infer generate` reads it, and mt-train starts from it (`checkpoint.load`, with
    `load_mode: weights`), on any layout. The weights have the dtypes of the folder.

    Args:
        folder: A folder with config.json and safetensors files.
        out: The run folder; it must not exist, or be empty.
        vocab_multiple: Multiple to which the vocabulary is padded; by default 128, or 8 below 1024
            tokens.
        eod: The token that ends a document, if it is not the folder's `eos_token`.

    Returns:
        The config of the model.

    Raises:
        ExchangeError: `open_pretrained` refuses the folder, or there is something at `out`.
        FileError: A file can't be read or written.
        CheckpointError: The checkpoint can't be written.
    """
    from mt_ckpt import RunFolder, SavedModel, save_checkpoint

    check_free(Path(out))
    found = open_pretrained(folder)
    if isinstance(found.config, ModelConfig):
        found = found.padded(vocab_multiple or found.config.usual_vocab_multiple)
    with new_folder(Path(out)) as temporary:
        run = RunFolder(temporary)
        saved = SavedModel(model=found.config.to_dict(), tokenizer=_tokenizer(found, run, eod))
        save_checkpoint(run.checkpoints, 0, _shards(found), to_plain(saved))
        run.hugging_face.mkdir()
        found.copy_to(run.hugging_face)
    return found.config


def export_checkpoint(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    like: str | Path | None = None,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    ema: bool = False,
    file_size: int = FILE_SIZE,
) -> None:
    """Write a checkpoint of any layout as a folder for transformers, tensor by tensor.

    A run's tokenizer and its end-of-document token are written too, so that `generate` of
    transformers ends a text where mt-infer does.

    Args:
        checkpoint: A run folder, its folder of checkpoints, or a step directory.
        folder: The folder to make; it must not exist, or be empty.
        like: A folder whose config.json, generation_config.json and tokenizer files are copied; by
            default the one from which the run's weights came.
        family: Name of the family; by default the family of `like`, or the first with such a model.
        dtype: Dtype of all tensors; by default the one in the config.json of `like`, or the dtypes
            of the checkpoint.
        ema: Whether to write the moving average of the weights.
        file_size: Largest size of a file's tensors, in bytes.

    Raises:
        ExchangeError: The model is of no known family, or not of this one; the run's tokenizer is
            another than the trained one; or `folder` exists. Nothing was written.
        CheckpointError: The checkpoint is damaged, or holds no model.
        FileError: A file can't be read or written.
    """
    check_free(Path(folder))
    with open_checkpoint(
        checkpoint, like=like, family=family, dtype=dtype, ema=ema, file_size=file_size
    ) as (export, fill):
        export.write(Path(folder), fill)


@contextmanager
def open_checkpoint(
    checkpoint: str | Path,
    *,
    like: str | Path | None = None,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    ema: bool = False,
    file_size: int = FILE_SIZE,
) -> Iterator[tuple[Export, Callable[[str, Tensor], None]]]:
    """Yield the plan of `export_checkpoint`, and a function that fills a tensor by its name."""
    from mt_ckpt import RunFolder, SavedModel, open_arrays

    source, run = source_of(Path(checkpoint))
    if like is None and run.hugging_face.is_dir():
        like = run.hugging_face
    prefix = RunFolder.EMA if ema else RunFolder.WEIGHTS
    with ExitStack() as stack:
        arrays = stack.enter_context(open_arrays(source))
        saved = arrays.manifest.metadata_as(SavedModel)
        config = StackConfig.from_dict(saved.model)
        adapted = None
        told = None if like is None else stored_dtype(read_config(Path(like)))
        stored = _stored(arrays, prefix)
        if not stored:
            raise ExchangeError(f"{arrays.path} has no {prefix}; give a checkpoint that has")
        weights = _stored(arrays, RunFolder.WEIGHTS)
        if saved.adapters is not None:
            adapted = stack.enter_context(open_adapted(arrays, saved, ema=ema))
            stored = weights = adapted.dtypes
        if dtype is None and told not in stored.values():
            dtype = told  # training keeps wider weights than the folder had
        export = plan_export(
            config,
            like=None if like is None else Path(like),
            family=family,
            dtype=dtype,
            dtypes={**weights, **stored},
            file_size=file_size,
        )
        if saved.tokenizer is not None and run.tokenizer.is_file():
            export = _ended(export, run.tokenizer, saved.tokenizer, like, config)

        def fill(name: str, into: Tensor) -> None:
            for link in export.links[name]:
                shape = export.shapes[link.target]
                starts = tuple(start for start, _ in link.area(shape))
                window = link.window(into, shape)
                if adapted is not None:
                    adapted.fill(link.target, window, starts)
                    continue
                place = prefix if link.target in stored else RunFolder.WEIGHTS  # frozen
                _fill(arrays, f"{place}/{link.target}", window, shape, starts)

        yield export, fill


def _ended(
    export: Export, path: Path, saved: SavedTokenizer, like: str | Path | None, config: StackConfig
) -> Export:
    """Add a run's tokenizer and end token to an export."""
    from mt_tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path, eod=saved.eod)
    if tokenizer.sha256 != saved.sha256:
        raise ExchangeError(
            f"{path} is not the tokenizer with which the model was trained: its sha256 is "
            f"{tokenizer.sha256[:12]}..., the checkpoint's {saved.sha256[:12]}...; put that there"
        )
    content = export.content
    if like is None and isinstance(content, str):
        ends = {"eos_token_id": ids_of(frozenset({tokenizer.eod_id}))}
        content = json.dumps({**json.loads(content), **ends}, indent=2) + "\n"
    beside = files_beside(tokenizer, None if like is None else Path(like), path.parent, config)
    return replace(export, content=content, beside=beside)


def _fill(
    arrays: ArrayReader, name: str, into: Tensor, shape: tuple[int, ...], starts: tuple[int, ...]
) -> None:
    from mt_ckpt import TensorShard

    arrays.fill(TensorShard(name, into, global_shape=shape, offsets=starts))


def _stored(arrays: ArrayReader, prefix: str) -> dict[str, torch.dtype]:
    """Return the dtypes of the arrays under a prefix, by the rest of their names."""
    return {
        name.removeprefix(f"{prefix}/"): getattr(torch, spec.dtype)
        for name, spec in arrays.manifest.arrays.items()
        if name.startswith(f"{prefix}/")
    }


def source_of(checkpoint: Path) -> tuple[Path, RunFolder]:
    """Return the checkpoint to read, and the run that it belongs to."""
    from mt_ckpt import RunFolder

    whole = RunFolder(checkpoint)
    if whole.checkpoints.is_dir():
        return whole.checkpoints, whole
    run = RunFolder.of(checkpoint)
    return checkpoint, run if run.path != checkpoint else RunFolder(checkpoint.resolve().parent)


def _shards(found: Pretrained) -> Iterator[TensorShard]:
    """Yield the weights as mapped pages, and padded vocabularies as copies."""
    from mt_ckpt import RunFolder, TensorShard

    config = found.config
    is_padded = isinstance(config, ModelConfig) and config.vocab_rows > config.vocab_size
    for target, shape in found.shapes.items():
        name, links = f"{RunFolder.WEIGHTS}/{target}", found.links[target]
        if is_padded and target in VOCABULARY:
            rows = torch.empty(shape, dtype=found.tensors[links[0].source].dtype)
            found.fill(target, rows)
            yield TensorShard(name, rows)
            continue
        for link in links:
            starts = tuple(start for start, _ in link.area(shape))
            stored = found.tensors[link.source]
            window = link.window(stored.map(), shape)
            check_finite(window, stored)
            yield TensorShard(name, window, global_shape=shape, offsets=starts)


def _tokenizer(found: Pretrained, run: RunFolder, eod: str | None) -> SavedTokenizer | None:
    """Copy the tokenizer of a folder into a run; return None without a tokenizer."""
    from mt_ckpt import SavedTokenizer
    from mt_tokenizer import TokenizerError, load_tokenizer

    path = found.tokenizer
    if path is None:
        return None
    try:
        tokenizer = load_tokenizer(path, eod=eod or found.eos_token)
    except TokenizerError as error:
        raise ExchangeError(f"{error}; name its token with --eod, or remove the file") from error
    tokenizer.save(run.tokenizer)
    return SavedTokenizer(sha256=tokenizer.sha256, eod=tokenizer.eod_token)
