"""A T5 tuned on prompts and completions has the losses of transformers', on every layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from mt_data import PairDataset
from mt_tokenizer import load_tokenizer, train_tokenizer
from torch import nn

LENGTHS = (12, 16)
RATE, STEPS = 0.05, 3
LAYOUTS = {
    "one": (1, []),
    "tp2": (2, ["parallel.tp=2"]),
    "cp2": (2, ["parallel.cp=2"]),
    "pp2": (2, ["parallel.pp=2"]),
    "dp2": (2, ["training.micro_batch_size=1"]),
}
GRID = [(layout, packing) for layout in LAYOUTS for packing in ("best-fit", "none")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a T5 of transformers, a tokenizer and pairs."""
    from transformers import T5Config, T5ForConditionalGeneration

    path: Path = tmp_path_factory.mktemp("t5")
    tokenizer = train_tokenizer(["one two three four"] * 3, 284, ["<|eod|>"])
    torch.manual_seed(5)
    config = T5Config(
        vocab_size=tokenizer.vocab_size,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    T5ForConditionalGeneration(config).save_pretrained(path / "model")
    tokenizer.save(path / "model/tokenizer.json")
    pairs = [
        {"prompt": "one two three "[: 4 + 2 * n], "completion": "four "[: 1 + n % 5] * (1 + n % 2)}
        for n in range(8)
    ]
    (path / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, float]:
    """Return the losses of plain gradient descent on transformers' model, by step."""
    from transformers import T5ForConditionalGeneration

    model = T5ForConditionalGeneration.from_pretrained(folder / "model").double().eval()
    tokenizer = load_tokenizer(folder / "model/tokenizer.json")
    lines = map(json.loads, (folder / "pairs.jsonl").read_text().splitlines())
    pairs = [
        [[*tokenizer.encode(line[name]), tokenizer.eod_id] for name in ("prompt", "completion")]
        for line in lines
    ]
    return {step: descend(model, pairs) for step in range(1, STEPS + 1)}


def descend(model: nn.Module, pairs: list[list[list[int]]]) -> float:
    """Take a step on all pairs, and return the mean loss of their labels before it."""
    model.zero_grad()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for source, target in pairs:
        labels = torch.tensor([target])
        logits = model(input_ids=torch.tensor([source]), labels=labels).logits
        total = total + F.cross_entropy(logits[0], labels[0], reduction="sum")
        count += len(target)
    (total / count).backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight -= RATE * weight.grad
    return float(total.detach()) / count


@pytest.mark.parametrize(("layout", "packing"), [
    pytest.param(*each, marks=() if each == ("one", "best-fit") else pytest.mark.campaign)
    for each in GRID
])  # fmt: skip
def test_losses_of_pairs_are_those_of_transformers(
    tiny, folder, expected, losses, tmp_path, layout, packing
) -> None:
    tokenizer = load_tokenizer(folder / "model/tokenizer.json")
    rows = len(PairDataset(folder / "pairs.jsonl", tokenizer, lengths=LENGTHS, packing=packing))
    assert rows == (8 if packing == "none" else 4)
    nproc, overrides = LAYOUTS[layout]
    config = {
        "model": {"from": str(folder / "model")},
        "data": {
            **{"kind": "pairs", "train": [str(folder / "pairs.jsonl")], "packing": packing},
            "decoder_length": LENGTHS[1],
        },
        "training": {
            **{"steps": STEPS, "global_batch_size": rows, "micro_batch_size": 2},
            **{"sequence_length": LENGTHS[0], "dtype": "fp64", "grad_clip": 1e9},
        },
        "optimizer": {
            **{"name": "sgd", "momentum": 0.0, "lr": RATE, "schedule": "constant"},
            "weight_decay": 0.0,
        },
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    run = replace(tiny, config=path).train(tmp_path / "run", *overrides, nproc=nproc)
    assert losses(run) == pytest.approx(expected, rel=1e-6)
    assert len(set(expected.values())) == STEPS
