"""Open a run that mt-train left behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_ckpt import latest_checkpoint, load_checkpoint, param_shards, read_metadata
from mt_data import Tokenizer, load_tokenizer
from mt_model import DTYPES, GPT, ModelConfig
from mt_parallel_state import ParallelState

from mt_infer.generation import Generator


class RunError(Exception):
    """A folder is not a usable run."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run folder holds, checked, before any weight is read.

    Attributes:
        checkpoint: The newest committed checkpoint.
        config: The model's layer list.
        tokenizer: The one the model was trained with.
    """

    checkpoint: Path
    config: ModelConfig
    tokenizer: Tokenizer


def open_run(folder: Path) -> Run:
    """Find and check what a run folder holds.

    Raises:
        RunError: The folder is no run, or has no committed checkpoint.
        CheckpointError: The checkpoint's metadata is damaged.
        DataError: `tokenizer.json` is none.
    """
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder; pass the --out folder of an mt-train run")
    tokenizer_path = folder / "tokenizer.json"
    if not tokenizer_path.exists():
        raise RunError(f"{tokenizer_path} is missing; pass the --out folder of an mt-train run")
    path = latest_checkpoint(folder / "checkpoints")
    if path is None:
        raise RunError(
            f"{folder / 'checkpoints'} has no committed checkpoint; let the run save one first"
        )
    metadata = read_metadata(path)
    if "model" not in metadata:
        raise RunError(
            f"{path} was not written by mt-train: its metadata has no model; pass the --out folder "
            "of an mt-train run"
        )
    try:
        config = ModelConfig.from_dict(metadata["model"])
    except ValueError as error:
        raise RunError(
            f"{path}: its metadata holds no model that this version can build: {error}; use the "
            "version that trained it"
        ) from error
    tokenizer = load_tokenizer(tokenizer_path, eod=_end_of_document(metadata))
    return Run(checkpoint=path, config=config, tokenizer=tokenizer)


def _end_of_document(metadata: Mapping[str, Any]) -> str | None:
    """Return the token that the run was told ends a document; None for the tokenizer's own."""
    data: Any = metadata
    for name in ("config", "data", "eod"):
        data = data.get(name) if isinstance(data, Mapping) else None
    return data if isinstance(data, str) else None


def load_run(folder: Path, state: ParallelState, *, dtype: str | None = None) -> Generator:
    """Load the newest checkpoint of a run on this rank's layout.

    Args:
        folder: A run folder, with `checkpoints/latest` and `tokenizer.json`.
        state: This rank's place; only tensor parallelism is used.
        dtype: `fp64`, `fp32` or `bf16`; by default fp32 on a CPU, bf16 on a GPU.

    Raises:
        RunError: The folder is no run, or has no committed checkpoint.
        CheckpointError: The checkpoint is damaged.
        DataError: `tokenizer.json` is none.
    """
    return load_weights(open_run(folder), state, dtype=dtype)


def load_weights(run: Run, state: ParallelState, *, dtype: str | None = None) -> Generator:
    """Build an opened run's model on this rank's layout and fill it; see `load_run`."""
    chosen = DTYPES[dtype or ("bf16" if state.device.type == "cuda" else "fp32")]
    model = GPT(run.config, state, dtype=chosen)
    model.eval()
    # The stored weights are the optimizer's fp32 (fp64) masters; casting down is what training did.
    shards = param_shards(model.named_parameters(), state.layout, state.rank, prefix="model")
    group = state.group("tp")
    load_checkpoint(run.checkpoint, shards, group=group, ignore=("optimizer/",), cast=True)
    return Generator(model=model, config=run.config, tokenizer=run.tokenizer)
