"""Open a run that mt-train left behind."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from mt_ckpt import (
    Manifest,
    RunFolder,
    SavedModel,
    SavedTokenizer,
    hold_checkpoint,
    inspect_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    param_shards,
)
from mt_data import Tokenizer, load_tokenizer
from mt_files import UserError
from mt_model import DTYPES, GPT, Kernels, KernelSet, ModelConfig, saved_buffers
from mt_parallel_state import ParallelState
from mt_schedule import split_layers

from mt_infer.generation import Generator

_WORLD = "tp-cp-dp-pp"


class RunError(UserError):
    """A folder is not a usable run."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run folder holds, checked, before any weight is read.

    Attributes:
        folder: The run folder.
        checkpoint: The step directory.
        step: Its step.
        config: The model's layer list.
        tokenizer: The one the model was trained with.
    """

    folder: RunFolder
    checkpoint: Path
    step: int
    config: ModelConfig
    tokenizer: Tokenizer


@contextmanager
def open_run(folder: Path, step: int | None = None) -> Iterator[Run]:
    """Find and check what a run folder holds; training beside does not remove it meanwhile.

    Args:
        folder: A run folder, with `checkpoints/` and `tokenizer.json`.
        step: Which checkpoint; None: the latest.

    Raises:
        RunError: The folder is no run, or has no committed checkpoint, or its parts don't fit.
        CheckpointError: There is no such step, or its manifest is damaged.
        DataError: `tokenizer.json` is none.
    """
    run = RunFolder(folder)
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder; pass the --out folder of an mt-train run")
    if not run.tokenizer.exists():
        raise RunError(f"{run.tokenizer} is missing; pass the --out folder of an mt-train run")
    if step is None and latest_checkpoint(run.checkpoints) is None:
        raise RunError(f"{run.checkpoints} has no committed checkpoint; let the run save one first")
    with hold_checkpoint(run.checkpoints, step) as path:
        manifest = inspect_checkpoint(path)
        saved = manifest.metadata_as(SavedModel)
        config = _model(saved, manifest, path)
        if saved.tokenizer is None:
            raise RunError(f"{path} came without a tokenizer; import it from a folder that has one")
        tokenizer = load_tokenizer(run.tokenizer, eod=saved.tokenizer.eod)
        _check_tokenizer(run, saved.tokenizer, tokenizer, config)
        yield Run(
            folder=run, checkpoint=path, step=manifest.step, config=config, tokenizer=tokenizer
        )


def _model(saved: SavedModel, manifest: Manifest, path: Path) -> ModelConfig:
    """The model of the metadata, which fits the arrays: checked before anything is built."""
    try:
        config = ModelConfig.from_dict(saved.model)
    except ValueError as error:
        problems = str(error).replace("\n", "; ")
        raise RunError(
            f"{path}: its metadata holds no model that this version can build: {problems}; use the "
            "version that trained it"
        ) from error
    writing = config.layers[config.encoder_layers :]
    if any(not getattr(layer.mixer, "causal", True) for layer in writing):
        raise RunError(
            f"{path}: its model sees tokens on both sides (causal: false), so it can't continue a "
            "text; use mt_model.GPT for its scores of hidden tokens"
        )
    prefix = f"{RunFolder.WEIGHTS}/"
    weights = [spec for name, spec in manifest.arrays.items() if name.startswith(prefix)]
    stored = sum(math.prod(spec.shape) for spec in weights)
    if stored != config.num_parameters + config.num_buffers:
        raise RunError(
            f"{path}: its metadata describes a model of {config.num_parameters} parameters, and "
            f"{stored} are stored; use another step"
        )
    return config


def _check_tokenizer(
    run: RunFolder, saved: SavedTokenizer, tokenizer: Tokenizer, config: ModelConfig
) -> None:
    expected = saved.sha256
    if tokenizer.sha256 != expected:
        raise RunError(
            f"{run.tokenizer} is not the tokenizer with which the model was trained: its sha256 is "
            f"{tokenizer.sha256[:12]}..., the checkpoint's {expected[:12]}...; put that one there"
        )
    if tokenizer.vocab_size > config.vocab_size:
        raise RunError(
            f"{run.tokenizer} has {tokenizer.vocab_size} tokens, and the model's vocabulary "
            f"{config.vocab_size}; use another step"
        )


@contextmanager
def same_run(run: Run, state: ParallelState) -> Iterator[Run]:
    """Yield the run as the first rank opened it: a save may have come between two ranks."""
    chosen = torch.tensor(run.step)
    group = state.group(_WORLD)
    if group is not None:
        dist.broadcast(chosen, group=group, group_src=0)
    if int(chosen) == run.step:
        yield run
        return
    with open_run(run.folder.path, int(chosen)) as other:
        yield other


def load_run(
    folder: Path,
    state: ParallelState,
    *,
    step: int | None = None,
    dtype: str | None = None,
    ema: bool = False,
    kernels: KernelSet | Kernels = "auto",
) -> Generator:
    """Load a checkpoint of a run on this rank's layout.

    Args:
        folder: A run folder, with `checkpoints/` and `tokenizer.json`.
        state: This rank's place; tensor parallelism and pipeline stages are used.
        step: Which checkpoint; None: the latest, as the first rank sees it.
        dtype: `fp64`, `fp32`, `bf16` or `fp16`; by default fp32 on a CPU, bf16 on a GPU.
        ema: Take the average of the weights over the steps (`optimizer.ema` of mt-train).
        kernels: What computes each operation: a word for all, or mt-model's `Kernels`.

    Raises:
        KernelError: A kernel that was asked for does not serve.
        RunError: The folder is no run, or has no committed checkpoint, or its parts don't fit, or
            the run kept no average.
        CheckpointError: There is no such step, or it is damaged.
        DataError: `tokenizer.json` is none.
    """
    with open_run(folder, step) as own, same_run(own, state) as run:
        return load_weights(run, state, dtype=dtype, ema=ema, kernels=kernels)


def check_ema(run: Run) -> None:
    """Raise RunError unless the checkpoint has an average of the weights."""
    arrays = inspect_checkpoint(run.checkpoint).arrays
    if not any(name.startswith(f"{RunFolder.EMA}/") for name in arrays):
        raise RunError(
            f"{run.checkpoint} has no average of the weights; train with optimizer.ema, or leave "
            "--ema out"
        )


def load_weights(
    run: Run,
    state: ParallelState,
    *,
    dtype: str | None = None,
    ema: bool = False,
    kernels: KernelSet | Kernels = "auto",
) -> Generator:
    """Build an opened run's model on this rank's layout and fill it; see `load_run`."""
    chosen = DTYPES[dtype or ("bf16" if state.device.type == "cuda" else "fp32")]
    layers = split_layers(run.config.num_layers, state.size("pp"))[state.index("pp")]
    config = replace(run.config, mtp=None)  # what serves training alone is not read
    how = {"layers": layers, "kernels": kernels, "dtype": chosen, "seed": None}
    model = cast("GPT", config.build(state, **how))
    model.eval()
    # The stored weights are the optimizer's fp32 (fp64) masters; casting down is what training did.
    named = model.named_parameters()
    wanted, other = RunFolder.WEIGHTS, RunFolder.EMA
    if ema:
        check_ema(run)
        wanted, other = other, wanted
    shards = param_shards(named, state.layout, state.rank, prefix=wanted)
    buffers = saved_buffers([model])  # of which no average is kept
    place = (state.layout, state.rank)
    shards += param_shards(buffers.items(), *place, prefix=RunFolder.WEIGHTS, params=buffers)
    unused = (f"{prefix}/" for prefix in (RunFolder.OPTIMIZER, RunFolder.SCALING, other))
    ignore = (*unused, f"{wanted}/mtp.")
    load_checkpoint(run.checkpoint, shards, group=state.group(_WORLD), ignore=ignore, cast=True)
    return Generator(model=model, config=config, tokenizer=run.tokenizer, stages=state.group("pp"))
