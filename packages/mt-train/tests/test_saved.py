"""A checkpoint's metadata is checked before anything is done with it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from mt_train.reporting.history import changes, read_history, record_part
from mt_train.session.saved import ResumeError, SavedRun, read_saved


@pytest.fixture(scope="module")
def metadata(tiny, tmp_path_factory) -> dict[str, Any]:
    from mt_ckpt import inspect_checkpoint

    out = tmp_path_factory.mktemp("run")
    tiny.run(out, "training.steps=1")
    return inspect_checkpoint(out / "checkpoints" / "step_00000001").metadata


def write(folder: Path, metadata: dict[str, Any]) -> Path:
    """Save a sealed checkpoint with any metadata."""
    import torch
    from mt_ckpt import TensorShard, save_checkpoint

    shard = TensorShard("w", torch.ones(2), global_shape=(2,), offsets=(0,))
    return save_checkpoint(folder, 1, [shard], metadata)


def changed(metadata: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    result = copy.deepcopy(metadata)
    *parents, last = path.split(".")
    inner: Any = result
    for name in parents:
        inner = inner[int(name)] if isinstance(inner, list) else inner[name]
    inner[last] = value
    return result


def test_metadata_comes_back_as_it_was(metadata, tmp_path) -> None:
    saved = read_saved(write(tmp_path, metadata))
    assert isinstance(saved, SavedRun)
    assert saved.metadata(metadata["layout"]) == metadata
    assert saved.progress.samples == 4


BAD = [
    ("step", "1"),
    ("step", -1),
    ("step", 1.0),
    ("step", True),
    ("step", 2),
    ("step", 10**30),
    ("elapsed", "NaN"),
    ("elapsed", -1.0),
    ("elapsed", None),
    ("consumed_samples", "4"),
    ("consumed_samples", -4),
    ("skipped_steps", -1),
    ("skipped_steps", 1000),
    ("loss_scale", {"scale": -1.0, "clean": 0, "left": 2}),
    ("loss_scale", {"scale": 1.0, "clean": 0.5, "left": 2}),
    ("loss_scale", {"scale": 1.0}),
    ("loss_scale", 5),
    ("config", None),
    ("config", []),
    ("config", {}),
    ("config.training", 5),
    ("model", "gpt"),
    ("tokenizer", {"sha256": "short"}),
    ("tokenizer", {}),
    ("data", {}),
    ("data.start", 1000),
    ("data.sources", []),
    ("data.sources", [{"fingerprint": "x", "weight": 0.0, "start": 0}]),
    ("data.sources.0.weight", 0),
    ("data.sources.0.start", -1),
]


@pytest.mark.parametrize(("path", "value"), BAD)
def test_crafted_metadata_is_one_error(path, value, metadata, tmp_path) -> None:
    checkpoint = write(tmp_path, changed(metadata, path, value))
    with pytest.raises(ResumeError) as caught:
        read_saved(checkpoint)
    assert str(checkpoint) in str(caught.value)
    assert path.partition(".")[0] in str(caught.value)


@pytest.mark.parametrize(
    "key", ["step", "skipped_steps", "loss_scale", "tokenizer", "data", "config", "model"]
)
def test_missing_metadata_is_named(key, metadata, tmp_path) -> None:
    rest = {name: value for name, value in metadata.items() if name != key}
    with pytest.raises(ResumeError, match=f"it lacks {key}"):
        read_saved(write(tmp_path, rest))


def test_changes_are_named_by_their_dotted_field() -> None:
    before = {"optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}, "data": {"train": ["a"]}}
    now = {"optimizer": {"lr": 0.2, "betas": [0.9, 0.95]}, "data": {"train": ["a", "b"], "x": "y"}}
    assert changes(before, now) == [
        "optimizer.lr: 0.1 -> 0.2",
        'data.train: ["a"] -> ["a", "b"]',
        "data.x: null -> y",
    ]


def test_a_lost_part_leaves_no_row(tmp_path) -> None:
    path = tmp_path / "history.jsonl"
    record_part(path, 0, {"a": {"b": 1}}, None)
    record_part(path, 10, {"a": {"b": 2}}, None)
    record_part(path, 10, {"a": {"b": 2}}, None)  # the same again
    record_part(path, 20, {"a": {"b": 3}}, None)  # killed before it saved
    record_part(path, 10, {"a": {"b": 4}}, None)
    rows = read_history(path)
    assert [(row["step"], row["config"]["a"]["b"]) for row in rows] == [(0, 1), (10, 4)]
    assert rows[1]["changes"] == ["a.b: 1 -> 4"]


@pytest.mark.parametrize("bad", [b"\xff\n", b"[" * 50_000 + b"\n", b'{"step": "x"}\n', b"[]\n"])
def test_a_damaged_history_does_not_stop_a_run(bad, tmp_path) -> None:
    path = tmp_path / "history.jsonl"
    record_part(path, 0, {"a": {"b": 1}}, None)
    path.write_bytes(path.read_bytes() + bad)
    record_part(path, 5, {"a": {"b": 2}}, None)
    assert [row["step"] for row in read_history(path)] == [0, 5]
    for line in path.read_text().splitlines():
        json.loads(line)
