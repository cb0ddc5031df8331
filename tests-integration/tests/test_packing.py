"""Packed documents, from the data to the loss: every layout, and each document alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

LENGTH = 32
SCHEDULES = ("gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min")
SCHEDULES += ("dualpipe", "dualpipe-v")
PACKED = ["data.packing=documents", "training.dtype=fp64", "training.steps=6"]
HARD = [  # windows, sinks and learned positions, and layers that differ
    "model.window=12",
    "model.sinks=learned",
    "model.positions=learned",
    "model.attention_dropout=0.1",
    "model.softcap=20",
]
SAME_RATE = ["optimizer.schedule=constant"]  # whatever the number of steps
SP = "parallel.sequence_parallel=true"
CP4 = ["parallel.cp=4", "parallel.cp_inner=2"]
# Processes, micro-batch size and overrides by name.
LAYOUTS = {
    "tp2-sp": (2, 4, ["parallel.tp=2", SP]),
    "pp2": (2, 2, ["parallel.pp=2"]),
    "pp4": (4, 2, ["parallel.pp=4"]),
    "dp2": (2, 2, []),
    "cp2": (2, 8, ["parallel.cp=2"]),
    "cp4-ring": (4, 8, ["parallel.cp=4"]),
    "cp4-all_gather": (4, 8, ["parallel.cp=4", "parallel.cp_algorithm=all_gather"]),
    "cp4-ulysses": (4, 8, ["parallel.cp=4", "parallel.cp_algorithm=ulysses"]),
    "cp4-hierarchical": (4, 8, [*CP4, "parallel.cp_algorithm=hierarchical"]),
    "tp2-cp2-pp2": (8, 2, ["parallel.tp=2", "parallel.cp=2", "parallel.pp=2", SP]),
    "tp2-pp2-dp2": (8, 2, ["parallel.tp=2", "parallel.pp=2", SP]),
    "dualpipe": (2, 2, ["pipeline.schedule=dualpipe", "pipeline.stages=2"]),
    "zb-v": (4, 2, ["pipeline.schedule=zb-v", "pipeline.stages=2", "parallel.cp=2"]),
    "recompute": (2, 2, ["parallel.cp=2", "training.recompute=full"]),
    "selective": (2, 2, ["parallel.tp=2", SP, "training.recompute=selective"]),
}


def in_ci(name: str, hard: bool, number: int) -> bool:
    return name not in FOR_CAMPAIGN and hard == (number % 2 == 0)


# What other rows have: pp2, dp2 and cp2 are those of the mean over micro-batches.
FOR_CAMPAIGN = (
    "pp4",
    "cp4-ring",
    "cp4-ulysses",
    "cp4-hierarchical",
    "recompute",
    "selective",
    "tp2-cp2-pp2",
    "tp2-pp2-dp2",
    "tp2-sp",
    "pp2",
    "dp2",
    "cp2",
    "zb-v",
)
# Both kinds of model with every layout; CI takes every other one.
CASES = [
    pytest.param(
        name,
        hard,
        id=f"{name}-{'hard' if hard else 'plain'}",
        marks=() if in_ci(name, hard, number) else pytest.mark.campaign,
    )
    for number, name in enumerate(LAYOUTS)
    for hard in (False, True)
]


@pytest.fixture(scope="module")
def train(tiny, short):
    """Train on the short documents."""

    def run(out: Path, *overrides: str, nproc: int = 1) -> Path:
        data = [f"data.train=[{short}/a,{short}/b]", "data.weights=[3,1]"]
        data.append(f"data.validation={short}/held")
        return tiny.train(out, *data, *PACKED, *overrides, nproc=nproc)

    return run


@pytest.fixture(scope="module")
def reference(train, tmp_path_factory):
    made = {
        hard: train(tmp_path_factory.mktemp("one") / "run", *(HARD if hard else []))
        for hard in (False, True)
    }
    return made.__getitem__


def last_held_out(run: Path) -> float:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(row["val_loss"] for row in reversed(rows) if "val_loss" in row)


def assert_same_run(run, expected, losses, arrays) -> None:
    ours, theirs = losses(run), losses(expected)
    assert ours.keys() == theirs.keys()
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-10)
    np.testing.assert_allclose(last_held_out(run), last_held_out(expected), rtol=1e-9)
    for name, value in arrays(run, step=6).items():
        np.testing.assert_allclose(
            value, arrays(expected, step=6)[name], rtol=0, atol=1e-9, err_msg=name
        )


@pytest.mark.parametrize(("layout", "hard"), CASES)
def test_packed_documents_train_alike_on_every_layout(
    layout, hard, train, reference, tmp_path, losses, arrays
) -> None:
    nproc, micro, overrides = LAYOUTS[layout]
    overrides = [*overrides, f"training.micro_batch_size={micro}", *(HARD if hard else [])]
    run = train(tmp_path / "run", *overrides, nproc=nproc)
    assert_same_run(run, reference(hard), losses, arrays)


def losses_alone(model, rows, eod: int) -> tuple[float, int]:
    """Sum the cross entropies of rows [N, S + 1], each document of a row on its own."""
    import torch

    total, count = 0.0, 0
    for row in rows:
        for piece in np.split(row, np.flatnonzero(row[:-1] == eod) + 1):
            tokens = torch.from_numpy(piece)[None]
            if tokens.shape[1] > 1:
                scores = model(tokens[:, :-1])[0].log_softmax(-1)
                total -= float(scores.gather(1, tokens[0, 1:, None]).sum().detach())
                count += tokens.shape[1] - 1
    return total, count


@pytest.mark.parametrize(
    ("nproc", "layout"),
    [
        (1, []),
        pytest.param(8, LAYOUTS["tp2-cp2-pp2"][2], marks=pytest.mark.campaign),
        (2, [*LAYOUTS["cp2"][2], "parallel.cp_algorithm=ulysses"]),
    ],
)
def test_a_packed_document_has_the_loss_it_has_alone(
    nproc, layout, tiny, short, train, tmp_path, losses
) -> None:
    import torch
    from mt_data import BlendedDataset, GPTDataset, IndexedDataset
    from mt_model import GPT
    from mt_tokenizer import load_tokenizer
    from mt_train import load_config

    options = [option for option in HARD if "dropout" not in option]
    still = ["training.steps=1", "optimizer.lr=1e-30", "optimizer.warmup=0"]
    run = train(tmp_path / "run", *options, *still, *layout, nproc=nproc)
    tokenizer = load_tokenizer(tiny.config.parent / "data" / "tokenizer.json")
    config = load_config(tiny.config, [*options, *PACKED]).model(tokenizer.vocab_size)
    model = GPT(config, dtype=torch.float64, seed=1234).eval()
    parts = [
        GPTDataset(IndexedDataset(short / name), sequence_length=LENGTH, seed=1234) for name in "ab"
    ]
    blend = BlendedDataset(parts, [3, 1], num_samples=8, order="split")
    total, count = losses_alone(model, [blend[index] for index in range(8)], tokenizer.eod_id)
    assert 8 * LENGTH > count > 8 * LENGTH - 30
    assert losses(run)[1] == pytest.approx(total / count, rel=1e-10)
    stream = np.concatenate(
        [[tokenizer.eod_id], IndexedDataset(short / "held").stream(0, 16 * LENGTH)]
    )
    rows = [stream[n * LENGTH : (n + 1) * LENGTH + 1].astype(np.int64) for n in range(16)]
    total, count = losses_alone(model, rows, tokenizer.eod_id)
    assert last_held_out(run) == pytest.approx(total / count, rel=1e-10)


def test_a_packed_run_goes_on_elsewhere_in_the_middle_of_an_epoch(
    train, tmp_path, losses, arrays
) -> None:
    options = [*HARD, "checkpoint.every=2"]
    first = [*LAYOUTS["tp2-cp2-pp2"][2], "training.micro_batch_size=4"]
    train(tmp_path / "run", *options, *first, "training.steps=2", *SAME_RATE, nproc=8)
    second = [*LAYOUTS["cp4-all_gather"][2], *SAME_RATE]
    train(tmp_path / "run", *options, *second, "training.steps=4", nproc=4)
    train(tmp_path / "run", *options, *SAME_RATE, "training.micro_batch_size=1", nproc=2)
    whole = train(tmp_path / "whole", *HARD, *SAME_RATE)
    assert_same_run(tmp_path / "run", whole, losses, arrays)


@pytest.mark.campaign
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_packed_documents_train_alike_with_every_schedule(
    schedule, train, reference, tmp_path, losses, arrays
) -> None:
    options = [f"pipeline.schedule={schedule}", "parallel.pp=2", "training.micro_batch_size=2"]
    options += ["pipeline.chunks=2"] if schedule in ("interleaved", "bfs") else []
    run = train(tmp_path / "run", *options, *HARD, nproc=2)
    assert_same_run(run, reference(True), losses, arrays)


def test_packing_changes_what_is_learnt(train, reference, tmp_path, losses) -> None:
    plain = train(tmp_path / "run", "data.packing=none")
    assert abs(losses(plain)[1] - losses(reference(False))[1]) > 1e-4
    assert abs(last_held_out(plain) - last_held_out(reference(False))) > 1e-4


BY_BATCH = ["training.loss_mean=micro-batches", "training.micro_batch_size=1"]


@pytest.fixture(scope="module")
def by_micro_batch(train, tmp_path_factory):
    return train(tmp_path_factory.mktemp("one") / "run", *BY_BATCH)


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(n, marks=pytest.mark.campaign) for n in ("tp2-sp", "pp2", "dp2")), "cp2"],
)
def test_the_mean_over_micro_batches_is_the_same_on_every_layout(
    name, train, by_micro_batch, tmp_path, losses, arrays
) -> None:
    nproc, _, options = LAYOUTS[name]
    run = train(tmp_path / "run", *BY_BATCH, *options, nproc=nproc)
    assert_same_run(run, by_micro_batch, losses, arrays)


def test_the_mean_over_micro_batches_weighs_them_alike(
    train, reference, by_micro_batch, tmp_path, losses
) -> None:
    """One micro-batch has the mean over tokens; several, with other counts of labels, another."""
    whole = train(tmp_path / "run", "training.loss_mean=micro-batches")
    assert losses(whole) == losses(reference(False))
    first, *later = losses(by_micro_batch).values()
    other, *others = losses(reference(False)).values()
    assert first == pytest.approx(other, rel=1e-12)  # nothing was learnt yet
    assert all(abs(a - b) > 1e-7 for a, b in zip(later[1:], others[1:], strict=True))
