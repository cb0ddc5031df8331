"""Checkpoints of a run: tensors out of a trainer, and into it on any layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from mt_ckpt import (
    BackgroundSaver,
    CheckpointError,
    Keep,
    MemoryCopies,
    RunFolder,
    TensorShard,
    inspect_checkpoint,
    load_checkpoint,
    open_arrays,
    param_shards,
    save_checkpoint,
)
from mt_hf import open_pretrained
from mt_model import saved_buffers
from mt_parallel_state import ParallelState, PartitionSpec, shard_param, sharding_of, twin_group
from torch.nn import Parameter

from mt_train.agreement import WORLD, summed
from mt_train.config.run_config import RunConfig
from mt_train.parts.registry import PARTS
from mt_train.session.saved import ResumeError, SavedRun
from mt_train.training.base_codes import codes_of, fill_codes, is_code
from mt_train.training.trainer import NonFiniteLossError, Trainer


def background_saver(trainer: Trainer, root: str | Path) -> BackgroundSaver:
    """Return a saver whose threads communicate on a separate group; every rank calls it."""
    group = trainer.state.group(WORLD)
    return BackgroundSaver(
        root,
        group=None if group is None else twin_group(group, "saves"),
        keep=_kept(trainer),
        on_event=trainer.on_event,
    )


def memory_copies(
    state: ParallelState,
    config: RunConfig,
    out: Path,
    on_event: Callable[[str], None] | None = None,
) -> MemoryCopies | None:
    """Return the copies of a run in the memory of its nodes, if it has them; every rank calls it.

    Raises:
        CheckpointError: Their folder can't be made.
    """
    section = config.checkpoint
    if section.copy_every is None:
        return None
    root, group = section.folder(out), state.group(WORLD)
    return MemoryCopies(section.copy_dir, root, group=group, on_event=on_event)


def save(
    trainer: Trainer, root: str | Path, saved: SavedRun, background: BackgroundSaver | None = None
) -> Path | None:
    """Save the whole training state after a step; every rank calls it.

    Args:
        trainer: Its weights and moments.
        root: Folder of the run's checkpoints.
        saved: The metadata; its progress is taken from the trainer.
        background: Saver that copies the state, and saves the copy while training goes on.

    Returns:
        The step directory; None for a save in the background.

    Raises:
        NonFiniteLossError: A weight or a moment is not finite; nothing is saved.
        CheckpointError: Saving failed, or the last save in the background did; earlier checkpoints
            are unchanged.
    """
    step, shards, metadata = _contents(trainer, saved)
    if background is not None:
        background.save(step, shards, metadata)
        return None
    return save_checkpoint(
        root,
        step,
        shards,
        metadata,
        group=trainer.state.group(WORLD),
        keep=_kept(trainer),
        on_event=trainer.on_event,
    )


def copy(trainer: Trainer, copies: MemoryCopies, saved: SavedRun) -> None:
    """Copy the whole training state after a step into memory; see `save`."""
    copies.save(*_contents(trainer, saved))


def fill(trainer: Trainer, path: Path, saved: SavedRun | None, *, weights_only: bool) -> None:
    """Fill a trainer from a checkpoint written on any layout; every rank calls it.

    Args:
        trainer: Trainer that gets the weights, the moments, the progress and the loss scale.
        path: The checkpoint.
        saved: Its metadata; not needed for weights alone.
        weights_only: Fill only the weights; optimizer and progress stay new.

    Raises:
        ResumeError: The weights are not finite; the message names a sound older step.
        CheckpointError: The checkpoint is damaged, or lacks tensors.
    """
    _load(trainer, path, weights_only=weights_only)
    if damaged := _damaged(trainer, path):
        raise ResumeError(
            f"{path}: values of {', '.join(damaged[:3])}, or moments, are not finite, so training "
            f"can't go on from them; {way_back(trainer, path)}"
        )
    if not weights_only and saved is not None:
        trainer.optimizer.inner.step_count = saved.progress.updates
        trainer.progress = saved.progress
        if trainer.optimizer.scaler is not None and saved.loss_scale is not None:
            trainer.optimizer.scaler.restore(saved.loss_scale)


def fill_pretrained(trainer: Trainer, folder: Path, *, vocab_multiple: int) -> None:
    """Fill a trainer with the weights of a Hugging Face folder; every rank reads its own part.

    Args:
        trainer: Trainer that gets the weights; optimizer and progress stay new.
        folder: The folder.
        vocab_multiple: Multiple that the trainer's vocabulary is padded to.

    Raises:
        ExchangeError: Tensors are missing, not expected, of another shape or not finite, or a
            file is damaged.
    """
    found = open_pretrained(folder).padded(vocab_multiple)
    tensors = _tensors(trainer, moments=False)
    tensors.pop(RunFolder.EMA, None)
    shards = _to_fill(trainer, tensors) + _frozen_shards(trainer) + _buffer_shards(trainer)
    for shard in _without_new(trainer, shards, found.shapes):
        found.fill(_parameter(shard.name), shard.tensor, shard.offsets)
    _take_weights(trainer, tensors[RunFolder.WEIGHTS])
    trainer.weights_loaded()


def fill_adapters(trainer: Trainer, values: Mapping[str, torch.Tensor]) -> None:
    """Fill the adapters of a new run; every rank takes its own part.

    Args:
        trainer: Trainer that gets the adapters; optimizer and progress stay new.
        values: Whole matrices by their global names.
    """
    tensors = _tensors(trainer, moments=False)
    tensors.pop(RunFolder.EMA, None)
    for shard in _to_fill(trainer, tensors):
        sizes = zip(shard.offsets, shard.tensor.shape, strict=True)
        box = tuple(slice(start, start + size) for start, size in sizes)
        shard.tensor.copy_(values[_parameter(shard.name)][box])
    _take_weights(trainer, tensors[RunFolder.WEIGHTS])
    trainer.weights_loaded()


def fill_base(trainer: Trainer, folder: Path) -> None:
    """Fill the frozen weights under the adapters; every rank reads its own part.

    Args:
        trainer: A trainer of adapters, which stay unchanged.
        folder: A step directory, or a folder of Hugging Face.

    Raises:
        ExchangeError: The folder does not have the model's tensors.
        CheckpointError: The checkpoint is damaged, or lacks tensors.
        ResumeError: The checkpoint itself holds adapters, or lacks the attention to neighbours.
    """
    shards, codes = _frozen_shards(trainer) + _buffer_shards(trainer), codes_of(trainer.stages)
    if (folder / "zarr.json").is_file():
        if inspect_checkpoint(folder).metadata.get("adapters"):
            raise ResumeError(
                f"{folder} holds adapters alone; export the run by mt-hf export, which merges "
                "them, and name that folder with model.from"
            )
        others = (RunFolder.OPTIMIZER, RunFolder.EMA, *(p.folder for p in PARTS if p.folder))
        ignore = [f"{prefix}/" for prefix in others]
        ignore += [f"{RunFolder.WEIGHTS}/layers."] * bool(codes)  # each is read alone
        _check_base(trainer, folder, map(_parameter, inspect_checkpoint(folder).arrays))
        load_checkpoint(folder, shards, group=trainer.state.group(WORLD), ignore=ignore, cast=True)
        with open_arrays(folder) as arrays:
            fill_codes(codes, trainer.state, arrays.fill)
    else:
        model = trainer.stages[0].config
        found = open_pretrained(folder).padded(model.vocab_multiple)
        _check_base(trainer, folder, found.shapes)

        def read(shard: TensorShard) -> None:
            found.fill(_parameter(shard.name), shard.tensor, shard.offsets)

        for shard in shards:
            read(shard)
        fill_codes(codes, trainer.state, read)
    trainer.weights_loaded()


def _check_base(trainer: Trainer, folder: Path, there: Iterable[str]) -> None:
    retro = trainer.stages[0].config.retro
    if retro is not None and not any(map(retro.owns, there)):
        raise ResumeError(
            f"{folder} has no parts of model.retro, and lora would leave new ones untrained; train "
            "them without lora first, and take that run by checkpoint.load"
        )


def way_back(trainer: Trainer, path: Path) -> str:
    """Return a sentence on how to continue from the newest sound step before `path`.

    It reads older steps into the trainer, which can't be used afterwards; every rank calls it.
    """
    older = sorted((p for p in path.parent.glob("step_*") if p.name < path.name), reverse=True)
    for step in older:
        try:
            _load(trainer, step, weights_only=False)
        except CheckpointError:
            continue
        if _is_finite(trainer):
            return (
                f"{step.name} is the newest older step whose weights are: write its name into "
                f"{step.parent / 'latest'}, or start in another --out with checkpoint.load={step}"
            )
    return "there is no older step to go back to; start anew in another --out"


def _load(trainer: Trainer, path: Path, *, weights_only: bool) -> None:
    inner, tensors = trainer.optimizer.inner, _tensors(trainer, moments=not weights_only)
    saved = inspect_checkpoint(path).arrays
    has_ema = any(name.startswith(f"{RunFolder.EMA}/") for name in saved)
    continues_ema = inner.ema is not None and has_ema and not weights_only
    if not continues_ema:
        tensors.pop(RunFolder.EMA, None)
    ignored = [RunFolder.OPTIMIZER] if weights_only else []
    ignored += [] if continues_ema else [RunFolder.EMA]
    of_parts = [] if weights_only else _saved_part_shards(trainer, path)
    # A part that is no longer wanted has no use for its state.
    ignored += [part.folder for part in PARTS if part.folder]
    others = [] if trainer.config.lora else _frozen_shards(trainer) + _buffer_shards(trainer)
    weights = _to_fill(trainer, tensors) + others
    if weights_only:
        weights = _without_new(trainer, weights, [_parameter(name) for name in saved])
    load_checkpoint(
        path,
        weights + of_parts,
        group=trainer.state.group(WORLD),
        ignore=tuple(f"{prefix}/" for prefix in ignored),
        cast=weights_only or bool(others),  # frozen weights have no fp32 masters here
    )
    _take_weights(trainer, tensors[RunFolder.WEIGHTS], restart_ema=not continues_ema)
    for key in () if weights_only else inner.moment_keys:
        for name, tensor in tensors[f"{RunFolder.OPTIMIZER}/{key}"].items():
            inner.set_moment(name, key, tensor)  # some formats came as copies
    trainer.weights_loaded()


def _without_new(
    trainer: Trainer, shards: list[TensorShard], there: Iterable[str]
) -> list[TensorShard]:
    """Leave out the attention to neighbours if the given weights lack it; then it starts new.

    Args:
        trainer: The trainer.
        shards: Shards to fill.
        there: Names of the parameters with given values.
    """
    retro = trainer.stages[0].config.retro
    if retro is None or any(map(retro.owns, there)):
        return shards
    return [shard for shard in shards if not retro.owns(_parameter(shard.name))]


def _parameter(name: str) -> str:
    """Return the name of a parameter, given that of its array."""
    return name.removeprefix(f"{RunFolder.WEIGHTS}/")


def _saved_part_shards(trainer: Trainer, path: Path) -> list[TensorShard]:
    """List the state of parts to load; nothing if some of it is missing or has other shapes."""
    wanted, found = _part_shards(trainer), inspect_checkpoint(path).arrays
    others = [s for s in wanted if s.name not in found or found[s.name].shape != s.global_shape]
    return [] if summed(trainer.state, len(others))[0] else wanted


def _take_weights(
    trainer: Trainer, weights: Mapping[str, torch.Tensor], *, restart_ema: bool = True
) -> None:
    inner = trainer.optimizer.inner
    for name, tensor in weights.items():
        inner.set_master(name, tensor)  # where remainders are kept it came as a copy
    if inner.ema is not None and restart_ema:
        inner.ema.restart()


def _contents(trainer: Trainer, saved: SavedRun) -> tuple[int, list[TensorShard], dict[str, Any]]:
    if not _is_finite(trainer):
        raise NonFiniteLossError(
            f"after step {trainer.progress.step} some weights are not finite, so it is not saved, "
            f"and what is saved is as before; lower optimizer.lr, lengthen optimizer.warmup or "
            "lower training.grad_clip, then run the same command again"
        )
    scaler = trainer.optimizer.scaler
    now = saved.at(trainer.progress, None if scaler is None else scaler.state)
    metadata = now.metadata(dataclasses.asdict(trainer.state.layout))
    return trainer.progress.step, _to_write(trainer), metadata


def _kept(trainer: Trainer) -> Keep | None:
    section = trainer.config.checkpoint
    return None if section.kept is None else Keep(section.kept, every=section.keep_every)


def _is_finite(trainer: Trainer) -> bool:
    return summed(trainer.state, len(trainer.optimizer.inner.non_finite()))[0] == 0


def _damaged(trainer: Trainer, path: Path) -> list[str]:
    """Name the weights with values or moments that are not finite, on any rank."""
    own, prefix = set(trainer.optimizer.inner.non_finite()), f"{RunFolder.WEIGHTS}/"
    names = sorted(n for n in inspect_checkpoint(path).arrays if n.startswith(prefix))
    numbers = summed(trainer.state, *(name.removeprefix(prefix) in own for name in names))
    return [name for name, number in zip(names, numbers, strict=True) if number]


def _tensors(trainer: Trainer, *, moments: bool) -> dict[str, dict[str, torch.Tensor]]:
    """List the fp32 (fp64) weights that this rank steps, and the moments, by prefix and name."""
    inner, names = trainer.optimizer.inner, [shard.name for shard in trainer.optimizer.shards]
    tensors = {RunFolder.WEIGHTS: {name: inner.master(name) for name in names}}
    if inner.ema is not None:
        tensors[RunFolder.EMA] = {name: inner.ema.value(name) for name in names}
    for key in inner.moment_keys if moments else ():
        held = [name for name in names if key in inner.moments(name)]
        tensors[f"{RunFolder.OPTIMIZER}/{key}"] = {name: inner.moment(name, key) for name in held}
    return tensors


def _to_write(trainer: Trainer) -> list[TensorShard]:
    """List the tensors to save, in model space; ZeRO ranges are gathered first."""
    peers = {
        shard.name: [peer - trainer.state.offset for peer in shard.peers]
        for shard in trainer.optimizer.shards
    }
    shards: list[TensorShard] = []
    loads: dict[tuple[int, ...], list[int]] = {}
    for prefix, tensors in _tensors(trainer, moments=True).items():
        whole = trainer.buffer.assemble(tensors, loads=loads).items()
        shards += _param_shards(trainer, whole, prefix=prefix, peers=peers)
    if trainer.config.lora is None:  # else they are in the base
        shards += _frozen_shards(trainer, copies=True) + _buffer_shards(trainer)
    return shards + _factor_shards(trainer, peers=peers) + _part_shards(trainer)


def _frozen_shards(trainer: Trainer, *, copies: bool = False) -> list[TensorShard]:
    """List the parameters that are not trained, each rank its own part; codes are left out.

    Args:
        trainer: The trainer.
        copies: Copy them to the dtype of masters, to be saved like masters.
    """
    codes = codes_of(trainer.stages)
    frozen = {
        name: param.detach()
        for name, param in trainer.named_parameters
        if not (param.requires_grad or is_code(name, codes))
    }
    if copies:
        frozen = {n: x.to(torch.promote_types(x.dtype, torch.float32)) for n, x in frozen.items()}
    return _param_shards(trainer, frozen.items(), prefix=RunFolder.WEIGHTS)


def _buffer_shards(trainer: Trainer) -> list[TensorShard]:
    """List the model's buffers."""
    layout, rank = trainer.state.layout, trainer.state.rank
    found = saved_buffers(trainer.stages)
    return param_shards(found.items(), layout, rank, prefix=RunFolder.WEIGHTS, params=found)


def _factor_shards(trainer: Trainer, **options: Any) -> list[TensorShard]:
    """List optimizer state in shapes of its own, which each rank has for whole parameters."""
    params = dict(trainer.named_parameters)
    shards: list[TensorShard] = []
    for name in [shard.name for shard in trainer.optimizer.shards]:
        is_copy = sharding_of(params[name]).is_copy
        for key, factor in trainer.optimizer.inner.factors(name).items():
            record = shard_param(cast("Parameter", factor), PartitionSpec(), is_copy=is_copy)
            shards += param_shards(
                [(name, factor)],
                trainer.state.layout,
                trainer.state.rank,
                prefix=f"{RunFolder.OPTIMIZER}/{key}",
                params={name: record},
                **options,
            )
    return shards


def _part_shards(trainer: Trainer) -> list[TensorShard]:
    """List the state of the trainer's parts, each in its own folder."""
    layout, rank, shards = trainer.state.layout, trainer.state.rank, list[TensorShard]()
    for part in trainer.parts:
        found = part.state_tensors()
        shards += param_shards(found.items(), layout, rank, prefix=part.folder, params=found)
    return shards


def _to_fill(
    trainer: Trainer, tensors_of: Mapping[str, Mapping[str, torch.Tensor]]
) -> list[TensorShard]:
    """List the ranges that this rank steps, as boxes in model space, to load into."""
    ranges = {
        shard.name: (shard.start, shard.end)
        for shard in trainer.optimizer.shards
        if not shard.is_whole
    }
    shards: list[TensorShard] = []
    for prefix, tensors in tensors_of.items():
        shards += _param_shards(trainer, tensors.items(), prefix=prefix, ranges=ranges)
    has_moments = any(prefix.startswith(RunFolder.OPTIMIZER) for prefix in tensors_of)
    return shards + (_factor_shards(trainer) if has_moments else [])


def _param_shards(
    trainer: Trainer, named: Iterable[tuple[str, torch.Tensor]], **options: Any
) -> list[TensorShard]:
    params = dict(trainer.named_parameters)
    return param_shards(named, trainer.state.layout, trainer.state.rank, params=params, **options)
