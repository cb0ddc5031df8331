"""Checkpoints of a run: tensors out of a trainer, and into it on any layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mt_ckpt import (
    CheckpointError,
    RunFolder,
    TensorShard,
    latest_checkpoint,
    load_checkpoint,
    param_shards,
    save_checkpoint,
)

from mt_train.agreement import WORLD, summed
from mt_train.saved import ResumeError, SavedRun
from mt_train.trainer import NonFiniteLossError, Trainer


def find_checkpoint(folder: Path) -> Path | None:
    """Find the newest checkpoint of a run folder, or accept a step folder itself."""
    if (folder / "zarr.json").is_file():
        return folder
    return latest_checkpoint(RunFolder(folder).checkpoints)


def save(trainer: Trainer, root: Path, saved: SavedRun) -> Path:
    """Save the whole training state after a step; every rank calls it.

    Args:
        trainer: Its weights and moments.
        root: Folder of the run's checkpoints.
        saved: The metadata; its progress is taken from the trainer.

    Raises:
        NonFiniteLossError: A weight or a moment is not finite; nothing is saved.
        CheckpointError: Saving failed; what was saved before is as it was.
    """
    if not _is_finite(trainer):
        raise NonFiniteLossError(
            f"after step {trainer.progress.step} some weights are not finite, so it is not saved, "
            f"and what is saved is as before; lower optimizer.lr, lengthen optimizer.warmup or "
            "lower training.grad_clip, then run the same command again"
        )
    now = saved.at(trainer.progress)
    return save_checkpoint(
        root,
        trainer.progress.step,
        _shards(trainer, moments=True),
        now.metadata(dataclasses.asdict(trainer.state.layout)),
        group=trainer.state.group(WORLD),
        keep=trainer.config.checkpoint.kept,
        on_event=trainer.on_event,
    )


def fill(trainer: Trainer, path: Path, saved: SavedRun, *, weights_only: bool) -> None:
    """Fill a trainer from a checkpoint written on any layout; every rank calls it.

    Args:
        trainer: Gets the weights, and the moments and the progress with them.
        path: The checkpoint.
        saved: Its metadata.
        weights_only: Leave optimizer and progress as new.

    Raises:
        ResumeError: The weights are not finite; the message says which older step is sound.
        CheckpointError: The checkpoint is damaged, or lacks tensors.
    """
    _load(trainer, path, weights_only=weights_only)
    if not _is_finite(trainer):
        raise ResumeError(
            f"{path}: its weights are not all finite, so training can't go on from them; "
            + way_back(trainer, path)
        )
    if not weights_only:
        trainer.optimizer.step_count = saved.optimizer_step
        trainer.progress = saved.progress


def way_back(trainer: Trainer, path: Path) -> str:
    """Say how to go on from an older step than `path`, the newest that is sound.

    It reads older steps into the trainer, which is of no use after that; every rank calls it.
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
    load_checkpoint(
        path,
        _shards(trainer, moments=not weights_only),
        group=trainer.state.group(WORLD),
        ignore=(f"{RunFolder.OPTIMIZER}/",) if weights_only else (),
        cast=weights_only,
    )
    trainer.optimizer.sync_params()


def _is_finite(trainer: Trainer) -> bool:
    return summed(trainer.state, len(trainer.optimizer.non_finite()))[0] == 0


def _shards(trainer: Trainer, *, moments: bool) -> list[TensorShard]:
    """List the fp32 (fp64) weights of this rank, and the moments, in model space."""
    optimizer, layout, rank = trainer.optimizer, trainer.state.layout, trainer.state.rank
    params = dict(trainer.named_parameters)
    named = [(RunFolder.WEIGHTS, name, optimizer.master(name)) for name in params]
    if moments:
        named += [
            (f"{RunFolder.OPTIMIZER}/{key}", name, optimizer.moment(name, key))
            for name in params
            for key in optimizer.moments(name)
        ]
    shards: list[TensorShard] = []
    for prefix, name, tensor in named:
        shards += param_shards([(name, tensor)], layout, rank, prefix=prefix, params=params)
    return shards
