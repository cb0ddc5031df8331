"""A corpus in shards: training begins with the first, while the others are built beside it."""

from __future__ import annotations

import fcntl
import json
import os
import random
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from mt_data import IndexedDataset
from mt_files import FileError
from mt_parallel_state import DistributedEnv
from mt_train import ConfigError, load_config, run
from mt_train.data.corpus import prepare_corpus

SHARDS = 4
STEPS = 40  # of 16 samples; an epoch has 33


class KillError(BaseException):
    """The process ends here."""


@pytest.fixture(scope="module")
def options(tiny, tmp_path_factory):
    path, draw = tmp_path_factory.mktemp("texts") / "texts.jsonl", random.Random(3)
    words = ["one", "two", "three", "four"]
    lines = [json.dumps({"text": f"{i} " + " ".join(draw.choices(words, k=2))}) for i in range(900)]
    path.write_text("\n".join(lines))
    data = f"data={{corpus: {path}, tokenizer: {tiny.data}/tokenizer.json, shard_bytes: 7000}}"
    batch = ("training.global_batch_size=16", "training.micro_batch_size=16")
    return data, f"training.steps={STEPS}", *batch, "logging.every=1", "evaluation.every=20"


def killed_at(step):
    """Return a hook that ends a run in the forward pass of a step, counted from 0."""
    steps = iter(range(step))

    def on_event(name):
        if name == "train.forward_backward" and next(steps, None) is None:
            raise KillError

    return on_event


def built(out):
    return len([*(out / "data").glob("shard-0000?.idx")])


@contextmanager
def held_back(config, out, options):
    """Prepare a run, and hold its builder back; yields a function that lets it go."""
    prepare_corpus(load_config(config, list(options)), out)
    lock = os.open(out / "data" / ".build.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield lambda: fcntl.flock(lock, fcntl.LOCK_UN)
    finally:
        os.close(lock)


def evaluations(found):
    return {row["step"]: row["val_loss"] for row in found if "val_loss" in row}


@pytest.fixture(scope="module")
def finished(tiny, options, tmp_path_factory):
    """A run with all shards built before it."""
    out = tmp_path_factory.mktemp("finished")
    tiny.run(out, *options)
    assert built(out) == SHARDS
    return out


def test_training_begins_with_the_first_shard_and_has_the_numbers_of_the_finished_build(
    tiny, options, finished, tmp_path, rows, losses, weights
) -> None:
    ahead = (*options, "data.build=ahead")
    steps = iter(range(STEPS))
    with held_back(tiny.config, tmp_path, ahead) as let_go:

        def on_event(name):
            if name == "train.forward_backward" and next(steps) == 5:
                assert built(tmp_path) == 1
                let_go()

        tiny.run(tmp_path, *ahead, on_event=on_event)
    assert losses(tmp_path) == losses(finished)
    assert evaluations(rows(tmp_path)) == evaluations(rows(finished))
    ours, theirs = weights(tmp_path, STEPS), weights(finished, STEPS)
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value)


def test_a_build_that_was_killed_goes_on_and_changes_no_number(
    tiny, options, finished, tmp_path, losses
) -> None:
    ahead = (*options, "data.build=ahead", "checkpoint.every=2")
    with held_back(tiny.config, tmp_path, ahead), pytest.raises(KillError):
        tiny.run(tmp_path, *ahead, on_event=killed_at(3))
    assert built(tmp_path) == 1
    with pytest.raises(KillError):
        tiny.run(tmp_path, *ahead, on_event=killed_at(15))
    tiny.run(tmp_path, *ahead)
    assert losses(tmp_path) == losses(finished)
    for path in sorted((finished / "data").glob("shard-*.bin")):
        assert path.read_bytes() == (tmp_path / "data" / path.name).read_bytes()


def test_shards_hold_each_document_once_and_the_held_out_ones_apart(finished) -> None:
    names = sorted(path.with_suffix("") for path in (finished / "data").glob("shard-*.idx"))
    assert len(names) == 2 * SHARDS
    documents = [
        bytes(IndexedDataset(name)[at]) for name in names for at in range(len(IndexedDataset(name)))
    ]
    assert len(documents) == len(set(documents)) == 900


def test_a_source_that_changes_before_its_build_ends_is_refused(tiny, tmp_path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"{i} and one"}) for i in range(900)))
    data = f"data={{corpus: {path}, tokenizer: {tiny.data}/tokenizer.json, shard_bytes: 7000"
    ahead = (f"{data}, build: ahead}}", "training.steps=2")
    out = tmp_path / "out"
    with held_back(tiny.config, out, ahead):
        tiny.run(out, *ahead)
    with path.open("a") as file:
        file.write(json.dumps({"text": "two"}))
    with pytest.raises(ValueError, match=r"texts\.jsonl: the files have changed"):
        tiny.run(out, *ahead, f"training.steps={STEPS}")
    with pytest.raises(ValueError, match=r"texts\.jsonl: the files have changed"):
        tiny.run(out, f"{data}}}", "training.steps=3")


@pytest.mark.parametrize(
    ("example", "rows_of"),
    [
        pytest.param("bert", "kind: masked, masking: {pairs: true}", marks=pytest.mark.campaign),
        ("t5", "kind: spans"),
    ],
)
def test_rows_of_every_kind_are_read_from_shards(
    example, rows_of, options, tmp_path, losses, rows
) -> None:
    config = Path(__file__).parents[1] / "examples" / f"{example}.yaml"
    corpus = options[0].partition(", tokenizer")[0].removeprefix("data={")
    data = f"data={{{corpus}, vocab_size: 300, shard_bytes: 7000, {rows_of}, build: BUILD}}"
    batch = "{steps: 24, global_batch_size: 24, micro_batch_size: 24, sequence_length: 16}"
    given = [data, f"training={batch}", "logging.every=1", "evaluation.every=7"]
    ahead = [text.replace("BUILD", "ahead") for text in given]
    before = [text.replace("BUILD", "before") for text in given]
    out, finished, steps = tmp_path / "ahead", tmp_path / "before", iter(range(100))
    with held_back(config, out, ahead) as let_go:

        def on_event(name):
            if name == "train.forward_backward" and next(steps) == 0:
                assert built(out) == 1
                let_go()

        run(load_config(config, ahead), DistributedEnv(), out, on_event=on_event)
    run(load_config(config, before), DistributedEnv(), finished)
    assert len(losses(out)) == 24
    assert losses(out) == losses(finished)
    assert evaluations(rows(out)) == evaluations(rows(finished))


def test_what_can_not_be_built_ahead_is_refused(tiny) -> None:
    with pytest.raises(ConfigError, match=r"data.build: ahead is for texts that data.corpus"):
        load_config(tiny.config, ["data.build=ahead"])


@pytest.mark.parametrize("damage", ['{"sources": []}', "[1]"])
def test_a_damaged_plan_is_one_error(damage, tiny, options, tmp_path) -> None:
    prepare_corpus(load_config(tiny.config, list(options)), tmp_path)
    path = tmp_path / "data" / "corpus.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, "shards": json.loads(damage)}))
    with pytest.raises(FileError, match="remove"):
        tiny.run(tmp_path, *options)
