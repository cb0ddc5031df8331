"""A run folder as mt-train leaves one behind, and the command called in this process."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mt_ckpt import RunFolder, SavedModel, SavedTokenizer, param_shards, save_checkpoint
from mt_files import to_plain
from mt_hf import save_pretrained
from mt_infer.cli import main
from mt_model import GPT, ModelConfig, gpt
from mt_parallel_state import ParallelLayout, ParallelState
from mt_tokenizer import train_tokenizer

sys.path.insert(0, str(Path(__file__).parent))  # test_drafts has the requests of test_engine


def _write_run(
    path: Path, config: ModelConfig, change: Callable[[GPT], object] | None = None
) -> Path:
    """Two steps of a drawn model, of which the second is another."""
    folder = RunFolder(path)
    tokenizer = train_tokenizer(["to be or not to be"], 260)
    tokenizer.save(folder.tokenizer)
    digest = SavedTokenizer(sha256=tokenizer.sha256, eod=tokenizer.eod_token)
    with ParallelState(ParallelLayout(), device="cpu") as state:
        model = GPT(config, state)
        if change is not None:
            change(model)
        shards = param_shards(model.named_parameters(), state.layout, state.rank, prefix="model")
        metadata = to_plain(SavedModel(model=config.to_dict(), tokenizer=digest))
        save_checkpoint(folder.checkpoints, 1, shards, metadata)
        for shard in shards:
            shard.tensor.detach().mul_(-1.5)
        save_checkpoint(folder.checkpoints, 2, shards, metadata)
    return folder.path


@pytest.fixture
def write_run() -> Callable[..., Path]:
    return _write_run


@pytest.fixture(scope="module")
def module_run() -> Callable[..., Path]:
    return _write_run


@pytest.fixture(scope="session")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = gpt(
        vocab_size=264,
        hidden_size=16,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        max_sequence_length=16,
    )
    return _write_run(tmp_path_factory.mktemp("saved"), config)


@pytest.fixture
def run(saved_run: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(saved_run, tmp_path / "run"))


@pytest.fixture
def forge(run: Path) -> Callable[[Callable[[dict], None]], None]:
    """Change a copy's newest checkpoint's metadata, sealed as the real one is."""

    def call(change: Callable[[dict], None]) -> None:
        path = run / "checkpoints" / "step_00000002" / "mt-manifest.json"
        body = json.loads(path.read_text())
        del body["sha256"]
        change(body["metadata"])
        rest = json.dumps(body, indent=0).removeprefix("{\n").encode()
        seal = hashlib.sha256(rest).hexdigest().encode()
        path.write_bytes(b'{"sha256": "' + seal + b'",\n' + rest)

    return call


@pytest.fixture
def generate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str, str]]:
    """Exit code, stdout and stderr of `mt-infer generate`, started by no launcher."""
    for name in os.environ:
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") or name.startswith(("SLURM_", "PET_")):
            monkeypatch.delenv(name)

    def call(run: Path, *options: object, prompt: str | None = "to be") -> tuple[object, str, str]:
        asked = [] if prompt is None else ["--prompt", prompt]
        with pytest.raises(SystemExit) as stop:
            main(["generate", str(run), *asked, *map(str, options)])
        return stop.value.code, *capsys.readouterr()

    return call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of Hugging Face with a tokenizer."""
    config = gpt(
        vocab_size=261,
        hidden_size=16,
        num_layers=2,
        num_heads=4,
        max_sequence_length=32,
        init_std=1,
    )
    save_pretrained(GPT(config, seed=3), tmp_path / "model")
    train_tokenizer(["to be or not to be"], 260).save(tmp_path / "model/tokenizer.json")
    return tmp_path / "model"
