"""Conversion of a checkpoint of Megatron-core to a run folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mt_files import FieldError, shorten, to_plain
from mt_model import ModelConfig, Sizes, saved_tensors
from torch import Tensor

from mt_hf.family.error import ExchangeError
from mt_hf.family.link import Link, check_links
from mt_hf.megatron.arguments import read_arguments
from mt_hf.megatron.links import megatron_links
from mt_hf.writing.files import check_free, new_folder

if TYPE_CHECKING:
    from mt_ckpt import TensorShard

_EMBEDDING = "embedding.word_embeddings.weight"
_STATE = ("optimizer.", "rng_state", "rerun_state_machine_state")
_SHOWN = 5


def import_megatron(folder: str | Path, out: str | Path) -> ModelConfig:
    """Convert a step that Megatron-core's dist_checkpointing wrote to a run folder.

    Every tensor of the model is used exactly once; the optimizer's state is left out. The run has
    one checkpoint, of the same step, with the dtypes of the folder and Megatron's padded
    vocabulary. It has no tokenizer.

    Args:
        folder: A step such as `iter_0001000`, in the format torch_dist, of a GPTModel: dense or
            with experts, with the arguments of Megatron-LM.
        out: The run folder; it must not exist, or be empty.

    Returns:
        The config of the model.

    Raises:
        ExchangeError: The model is not one of these, tensors are missing, unknown or of another
            shape, or there is something at `out`.
        CheckpointError: The folder is damaged or of another format, or can't be written.
        FileError: A file can't be read or written.
    """
    from mt_ckpt import RunFolder, SavedModel, open_megatron, save_checkpoint

    folder = Path(folder)
    check_free(Path(out))
    found = open_megatron(folder)
    shapes = {
        name: tensor.shape
        for name, tensor in found.tensors.items()
        if not name.startswith(_STATE) and not name.endswith("_extra_state")
    }
    args = read_arguments(found.description.get("args"), str(folder))
    if len(shapes.get(_EMBEDDING, ())) != 2:
        raise ExchangeError(f"{folder}: has no {_EMBEDDING}, so it holds no GPTModel")
    try:
        config = args.config(shapes[_EMBEDDING][0])
    except FieldError as error:
        raise ExchangeError(f"{folder}: {error}") from error
    links, targets = _checked(folder, config, shapes)
    with new_folder(Path(out)) as temporary:
        run = RunFolder(temporary)
        saved = SavedModel(model=config.to_dict(), tokenizer=None)
        with found.reading(temporary) as read:
            shards = list(_shards(links, targets, read))
            save_checkpoint(run.checkpoints, found.step or 0, shards, to_plain(saved))
    return config


def is_megatron(folder: Path) -> bool:
    """Return whether a folder is a step of dist_checkpointing, or a folder of such steps."""
    names = ("metadata.json", "latest_checkpointed_iteration.txt")
    return (
        any((folder / name).is_file() for name in names) and not (folder / "config.json").exists()
    )


def _checked(
    folder: Path, config: ModelConfig, shapes: Mapping[str, Sizes]
) -> tuple[list[Link], dict[str, Sizes]]:
    """Return the links, and the shapes of our parameters; every element is used once."""
    targets = {
        name: tuple(tensor.shape) for name, tensor in saved_tensors(config.build(device="meta"))
    }
    links = list(megatron_links(config, shapes))
    sources = {link.source: link.shape for link in links}
    problems = [f"lacks {name}" for name in sorted(sources.keys() - shapes.keys())]
    left = sorted(shapes.keys() - sources)
    problems += [f"has {shorten(name)[1:-1]}, which no GPTModel has" for name in left]
    problems += [
        f"{name} has the shape {shorten(shapes[name])}, and {shape} is expected"
        for name, shape in sources.items()
        if name in shapes and shapes[name] != shape
    ]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ExchangeError(f"{folder}: {'; '.join(problems[:_SHOWN])}{more}")
    check_links(links, targets, family="megatron")
    return links, targets


def _shards(
    links: list[Link], targets: Mapping[str, Sizes], read: Callable[[str], Tensor]
) -> Iterator[TensorShard]:
    from mt_ckpt import RunFolder, TensorShard

    tensors: dict[str, Tensor] = {}
    for link in links:
        if link.source not in tensors:
            tensors[link.source] = read(link.source)
        shape = targets[link.target]
        starts = tuple(start for start, _ in link.area(shape))
        window = link.window(tensors[link.source], shape)
        name = f"{RunFolder.WEIGHTS}/{link.target}"
        yield TensorShard(name, window, global_shape=shape, offsets=starts)
