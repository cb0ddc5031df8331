"""A run of a second in this process: real data, a real model, no other rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TINY = """\
model: {{hidden_size: 16, num_layers: 1, num_heads: 2, ffn_size: 16}}
data:
  train: [{data}/a]
  validation: {data}/held
  tokenizer: {data}/tokenizer.json
training: {{steps: 4, global_batch_size: 4, micro_batch_size: 2, sequence_length: 16, dtype: fp64}}
optimizer: {{lr: 1e-2, warmup: 1}}
evaluation: {{max_windows: 4}}
checkpoint: {{every: null}}
"""


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs the tiny configuration with changes."""

    data: Path
    config: Path

    def run(self, out: Path, *overrides: str, on_event: Callable[[str], None] | None = None) -> Any:
        from mt_parallel_state import DistributedEnv
        from mt_train import load_config, run

        return run(
            load_config(self.config, list(overrides)), DistributedEnv(), out, on_event=on_event
        )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    from mt_data import Document, build_corpus
    from mt_tokenizer import train_tokenizer

    data = tmp_path_factory.mktemp("data")
    texts = {
        name: [f"{word} {i} and {word} {i * i}\n" * 8 for i in range(40)]
        for name, word in (("a", "one"), ("b", "two"), ("held", "one"))
    }
    tokenizer = train_tokenizer((text for some in texts.values() for text in some), 300)
    tokenizer.save(data / "tokenizer.json")
    for name, some in texts.items():
        documents = [Document(text=text, path=Path(name), line=i) for i, text in enumerate(some)]
        build_corpus(documents, data / name, tokenizer)
    config = data / "tiny.yaml"
    config.write_text(TINY.format(data=data))
    return Runner(data=data, config=config)


@pytest.fixture(scope="session")
def rows() -> Callable[[Path], list[dict[str, Any]]]:
    return lambda out: [json.loads(x) for x in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def losses(rows) -> Callable[[Path], dict[int, float]]:
    return lambda out: {row["step"]: row["loss"] for row in rows(out) if "loss" in row}


@pytest.fixture(scope="session")
def weights() -> Callable[..., dict[str, Any]]:
    """Read all arrays of a step with stock zarr-python."""

    def read(out: Path, step: int) -> dict[str, Any]:
        import zarr

        group = zarr.open_group(out / "checkpoints" / f"step_{step:08d}", mode="r")
        members = dict(group.members(max_depth=None))
        return {n: a[...] for n, a in members.items() if isinstance(a, zarr.Array)}

    return read
