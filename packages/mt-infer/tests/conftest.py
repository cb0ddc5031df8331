"""A run folder as mt-train leaves one behind, and the command called in this process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from mt_ckpt import param_shards, save_checkpoint
from mt_data import train_tokenizer
from mt_infer.cli import main
from mt_model import GPT, gpt
from mt_parallel_state import ParallelLayout, ParallelState


@pytest.fixture(scope="session")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    train_tokenizer(["to be or not to be"], 257).save(folder / "tokenizer.json")
    config = gpt(
        vocab_size=264,
        hidden_size=16,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        max_sequence_length=16,
    )
    with ParallelState(ParallelLayout(), device="cpu") as state:
        model = GPT(config, state)
        shards = param_shards(model.named_parameters(), state.layout, state.rank, prefix="model")
        save_checkpoint(folder / "checkpoints", 1, shards, {"model": config.to_dict()})
    return folder


@pytest.fixture
def run(saved_run: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(saved_run, tmp_path / "run"))


@pytest.fixture
def generate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str, str]]:
    """Exit code, stdout and stderr of `mt-infer generate`, started by no launcher."""
    for name in os.environ:
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") or name.startswith(("SLURM_", "PET_")):
            monkeypatch.delenv(name)

    def call(run: Path, *options: object, prompt: str = "to be") -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(["generate", str(run), "--prompt", prompt, *map(str, options)])
        return stop.value.code, *capsys.readouterr()

    return call
