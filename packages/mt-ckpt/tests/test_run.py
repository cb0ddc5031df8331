"""What a run's folder and its checkpoints' metadata hold for others."""

from __future__ import annotations

from pathlib import Path

import pytest
from mt_ckpt import (
    CheckpointError,
    RunFolder,
    SavedModel,
    SavedTokenizer,
    inspect_checkpoint,
    save_checkpoint,
)
from mt_files import to_plain

HASH = "ab" * 32


def test_a_step_directory_leads_to_its_run(tmp_path):
    run = RunFolder(tmp_path / "run")
    step = save_checkpoint(run.checkpoints, 3, [], {})
    assert RunFolder.of(step) == RunFolder.of(run.path) == run
    assert (run.checkpoints.name, run.tokenizer.name) == ("checkpoints", "tokenizer.json")


def saved(root: Path, metadata: dict) -> SavedModel:
    save_checkpoint(root, 3, [], metadata)
    return inspect_checkpoint(root).metadata_as(SavedModel)


def test_what_a_run_saves_of_its_model_comes_back(tmp_path):
    whole = SavedModel(
        model={"layers": [{"a": 1}], "x": None}, tokenizer=SavedTokenizer(sha256=HASH, eod="</s>")
    )
    assert saved(tmp_path, {"step": 3, "more": 1, **to_plain(whole)}) == whole


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": None}, "model: "),
        ({"model": [1]}, "model: expected"),
        ({"tokenizer": HASH}, "tokenizer: expected"),
        ({"tokenizer": {}}, "tokenizer.sha256: missing"),
        ({"tokenizer": {"sha256": HASH[1:]}}, "tokenizer.sha256: .* is no SHA-256"),
        ({"tokenizer": {"sha256": HASH, "eod": 5}}, "tokenizer.eod: "),
        ({"tokenizer": {"sha256": HASH, "x" * 10**6: 5}}, "unknown key"),
        ({"step": 4}, "step is 4, and the checkpoint's 3"),
        ({"step": "3"}, "step is '3', and"),
    ],
)
def test_metadata_of_another_kind_is_refused_in_few_words(tmp_path, change, text):
    with pytest.raises(CheckpointError, match=text) as caught:
        saved(tmp_path, {"model": {}, "tokenizer": {"sha256": HASH}, **change})
    assert len(str(caught.value)) < 1000


def test_metadata_that_lacks_the_model_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="it lacks model, tokenizer; use a run of this"):
        saved(tmp_path, {})
