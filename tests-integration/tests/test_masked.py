"""Masked language modelling: a BERT learns alike on every layout, and is read by transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "packages" / "mt-train" / "examples" / "bert.yaml"
SP = "parallel.sequence_parallel=true"
ROWS = {
    "tp2-sp": (2, ["parallel.tp=2", SP, "training.micro_batch_size=4"]),
    "cp2": (2, ["parallel.cp=2"]),
    "pp2-dp2": (4, ["parallel.pp=2", "training.micro_batch_size=2"]),
    "tp2-pp2": (4, ["parallel.tp=2", "parallel.pp=2", "training.micro_batch_size=1"]),
    "tp2-cp2": (4, ["parallel.tp=2", "parallel.cp=2", SP]),
}
IN_CI = ("tp2-cp2", "pp2-dp2")
NAMES = ("loss", "nsp_loss", "total_loss")


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def bert(tmp_path_factory, tiny):
    """The example, with a corpus made once."""
    from mt_data import build_corpus, read_documents
    from mt_data import standard_library_sources as sources
    from mt_tokenizer import DEFAULT_SPECIAL, train_tokenizer

    folder = tmp_path_factory.mktemp("bert")
    documents = list(read_documents(sources()[:24]))
    special = (*DEFAULT_SPECIAL, "[CLS]", "[SEP]", "[MASK]", "[PAD]")
    tokenizer = train_tokenizer((each.text for each in documents), 384, special)
    tokenizer.save(folder / "tokenizer.json")
    build_corpus(documents[:20], folder / "train", tokenizer)
    build_corpus(documents[20:], folder / "validation", tokenizer)
    text = EXAMPLE.read_text()
    begin, end = text.index("  corpus:"), text.index("  kind:")
    own = f"  train: [{folder}/train]\n  validation: {folder}/validation\n"
    own += f"  tokenizer: {folder}/tokenizer.json\n  eod: {tokenizer.eod_token}\n"
    config = folder / "bert.yaml"
    config.write_text(text[:begin] + own + text[end:])
    return replace(tiny, config=config)


SMALL = (
    *("training.dtype=fp64", "training.steps=4", "training.sequence_length=32"),
    # No number of rows that batches or ranks divide evenly.
    *("evaluation.max_windows=5", "checkpoint.every=null", "model.num_layers=2"),
)


@pytest.fixture(scope="module")
def one_process(bert, tmp_path_factory):
    return bert.train(tmp_path_factory.mktemp("one"), *SMALL, "training.micro_batch_size=8")


def test_both_losses_are_reported_and_fall(one_process):
    steps = [row for row in metrics(one_process) if "loss" in row]
    assert all(row["total_loss"] == pytest.approx(row["loss"] + row["nsp_loss"]) for row in steps)
    assert steps[0]["loss"] == pytest.approx(np.log(384), rel=0.05)
    assert steps[0]["nsp_loss"] == pytest.approx(np.log(2), rel=0.2)
    assert steps[-1]["loss"] < steps[0]["loss"]
    (evaluation,) = [row for row in metrics(one_process) if "val_loss" in row]
    assert evaluation["val_nsp_loss"] > 0
    assert "bits_per_byte" not in evaluation


@pytest.mark.parametrize(
    "layout",
    [pytest.param(n, marks=() if n in IN_CI else pytest.mark.campaign) for n in ROWS],
)
def test_every_layout_learns_like_one_process(bert, one_process, tmp_path, layout):
    nproc, overrides = ROWS[layout]
    run = bert.train(tmp_path, *SMALL, "training.micro_batch_size=8", *overrides, nproc=nproc)
    rows = zip(metrics(run), metrics(one_process), strict=True)
    for ours, theirs in rows:
        for name in (*NAMES, *(f"val_{each}" for each in NAMES)):
            assert (name in ours) == (name in theirs)
            if name in ours:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-9), (ours["step"], name)


def test_means_of_micro_batches_count_sequences_too(bert, tmp_path):
    options = (*SMALL, "training.loss_mean=micro-batches", "training.micro_batch_size=2")
    options += ("training.steps=2",)
    one = metrics(bert.train(tmp_path / "one", *options))
    two = metrics(bert.train(tmp_path / "two", *options, "parallel.cp=2", nproc=2))
    for ours, theirs in zip(two, one, strict=True):
        for name in NAMES:
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-9)


def test_what_was_learnt_is_read_by_transformers(bert, tmp_path):
    import torch
    from transformers import BertForPreTraining

    out = tmp_path / "hugging_face"
    options = ("training.dtype=fp32", "training.steps=1", f"export.hugging_face={out}")
    bert.train(tmp_path / "run", *SMALL, *options)
    assert json.loads((out / "config.json").read_text())["architectures"] == ["BertForPreTraining"]
    model, info = BertForPreTraining.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.isfinite(model(torch.arange(8)[None]).prediction_logits).all()
