"""Checkpoints of a run: what is saved, and continuing from it on any layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mt_ckpt import (
    SavedModel,
    SavedTokenizer,
    TensorShard,
    latest_checkpoint,
    load_checkpoint,
    param_shards,
    read_metadata,
    save_checkpoint,
)
from mt_files import to_plain
from mt_model import ModelConfig

from mt_train.loading import to_dict
from mt_train.trainer import Progress, Trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """What must not change between two parts of a run.

    Attributes:
        model: The layer list.
        data: Fingerprint of the training tokens and their order.
        tokenizer: The tokenizer of the tokens.
    """

    model: ModelConfig
    data: str
    tokenizer: SavedTokenizer


# Changing one of these between two parts of a run would repeat or skip data, or change the model.
_FIXED = (
    ("training", "global_batch_size"),
    ("training", "sequence_length"),
    ("training", "seed"),
)

_KEYS = {"step", "elapsed", "optimizer_step", "data", "model", "config"}


class ResumeError(Exception):
    """A checkpoint does not belong to this configuration."""


def find_checkpoint(folder: Path) -> Path | None:
    """Find the newest checkpoint of a run folder, or accept a step folder itself."""
    if (folder / "zarr.json").is_file():
        return folder
    return latest_checkpoint(folder / "checkpoints")


def save(trainer: Trainer, root: Path, identity: Identity) -> Path:
    """Save the whole training state after a step; every rank calls it."""
    config = trainer.config
    return save_checkpoint(
        root,
        trainer.progress.step,
        _shards(trainer),
        {
            "step": trainer.progress.step,
            "elapsed": trainer.progress.elapsed,
            "consumed_samples": trainer.progress.step * config.training.global_batch_size,
            # Every random number is a function of the seed, a name and a global index, so the
            # seed and the step are the whole state of the generators.
            "rng": {"seed": config.training.seed, "step": trainer.progress.step},
            "optimizer_step": trainer.optimizer.step_count,
            "data": identity.data,
            **to_plain(SavedModel(model=identity.model.to_dict(), tokenizer=identity.tokenizer)),
            "config": to_dict(config),
            "layout": dataclasses.asdict(trainer.state.layout),
        },
        group=trainer.state.group("tp-cp-dp-pp"),
        keep=config.checkpoint.keep,
        on_event=trainer.on_event,
    )


def resume(trainer: Trainer, path: Path, identity: Identity) -> None:
    """Fill a trainer from a checkpoint written on any layout.

    Raises:
        ResumeError: The checkpoint was made for another model, data order or batch.
        CheckpointError: The checkpoint is damaged or lacks tensors.
    """
    metadata = read_metadata(path)
    missing = sorted(_KEYS - metadata.keys())
    if missing:
        raise ResumeError(
            f"{path} was not written by mt-train: its metadata lacks {', '.join(missing)}; name a "
            "run folder of mt-train, or use another --out"
        )
    _check_same(metadata, trainer, identity, path)
    load_checkpoint(path, _shards(trainer), group=trainer.state.group("tp-cp-dp-pp"))
    trainer.optimizer.step_count = metadata["optimizer_step"]
    trainer.optimizer.sync_params()
    trainer.progress = Progress(step=metadata["step"], elapsed=metadata["elapsed"])


def _shards(trainer: Trainer) -> list[TensorShard]:
    """List the fp32 (fp64) weights and both moments of this rank, in model space."""
    optimizer, layout, rank = trainer.optimizer, trainer.state.layout, trainer.state.rank
    params = dict(trainer.named_parameters)
    shards: list[TensorShard] = []
    for prefix, tensor_of in (
        ("model", optimizer.master),
        ("optimizer/exp_avg", optimizer.exp_avg),
        ("optimizer/exp_avg_sq", optimizer.exp_avg_sq),
    ):
        named = [(name, tensor_of(name)) for name in params]
        shards += param_shards(named, layout, rank, prefix=prefix, params=params)
    return shards


def _check_same(metadata: dict[str, Any], trainer: Trainer, identity: Identity, path: Path) -> None:
    saved, current = metadata["config"], to_dict(trainer.config)
    differences = []
    if metadata["model"] != identity.model.to_dict():
        differences.append("model: another architecture")
    if metadata["data"] != identity.data:
        differences.append("data: other training tokens, or another order of them")
    before, now = saved["training"]["dtype"], current["training"]["dtype"]
    if (before == "fp64") != (now == "fp64"):
        differences.append(
            f"training.dtype: saved with {before}, now {now}; fp32 and bf16 have fp32 master "
            "weights, fp64 has fp64 ones"
        )
    for keys in _FIXED:
        before, now = saved, current
        for key in keys:
            before, now = before[key], now[key]
        if before != now:
            differences.append(f"{'.'.join(keys)}: saved with {before}, now {now}")
    if differences:
        way_out = "Use the same configuration to continue it, or "
        if trainer.config.checkpoint.load is not None:
            way_out += "another --out or checkpoint.load"
        else:
            way_out += "another --out to start anew"
        raise ResumeError(
            f"{path} belongs to another run. {way_out}:\n  " + "\n  ".join(differences)
        )
