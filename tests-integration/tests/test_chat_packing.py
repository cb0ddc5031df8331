"""Conversations that share a row are learnt as if each had a row of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from mt_data import ChatDataset, Rows
from mt_model import GPT, Mamba2Config, gpt
from mt_tokenizer import ChatTemplate, load_tokenizer, train_tokenizer

TEMPLATE = """\
{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
MAMBA = Mamba2Config(num_heads=4, head_dim=8, state_size=8, chunk_size=8)
# The first layer of four, by the kind of model; context parallel ranks share no Mamba layer.
LAYERS = {
    "attention": [],
    "mamba": [
        "model.layers=[{mixer: {type: mamba2, num_heads: 4, head_dim: 8, state_size: 8, "
        "chunk_size: 8}}, {mixer: {num_heads: 4, num_kv_heads: 2, head_dim: 8, rope: {}}, "
        "feed_forward: {ffn_size: 64}, repeat: 3}]",
        *(f"model.{n}=null" for n in ("num_layers", "num_heads", "num_kv_heads", "ffn_size")),
        "model.qk_norm=null",
    ],
}
LAYOUTS = {
    "tp2": ["parallel.tp=2"],
    "cp2": ["parallel.cp=2"],
    "pp2": ["parallel.pp=2"],
    "dp2": ["training.micro_batch_size=1"],
}
GRID = [each for each in product(LAYERS, LAYOUTS) if each != ("mamba", "cp2")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with conversations, their tokenizer and a template."""
    path: Path = tmp_path_factory.mktemp("chat")
    talks = []
    for number in range(26):
        answer = {"role": "assistant", "content": "two " * (number % 5 + 1)}
        answer |= {"weight": 0.5} if number % 4 == 0 else {}
        question = {"role": "user", "content": "one " * (number % 3 + 1)}
        talks.append({"messages": [question, answer] * (1 + number % 2)})
    (path / "talks.jsonl").write_text("".join(f"{json.dumps(talk)}\n" for talk in talks))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    special = ["<|eod|>", "<|user|>", "<|assistant|>", "<|end|>"]
    train_tokenizer(["one two"] * 3, 280, special).save(path / "tokenizer.json")
    return path


@pytest.fixture(scope="module")
def datasets(folder: Path) -> list[ChatDataset]:
    """Return the same conversations packed and apart."""
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    with ChatTemplate(TEMPLATE, tokenizer) as template:
        how = {"tokenizer": tokenizer, "template": template, "sequence_length": 64}
        return [
            ChatDataset(folder / "talks.jsonl", packing=packing, **how)
            for packing in ("best-fit", "none")
        ]


@pytest.mark.parametrize("kind", ["attention", "mamba"])
def test_loss_and_gradients_of_packed_rows_are_those_of_rows_apart(
    datasets: list[ChatDataset], kind: str
) -> None:
    config = gpt(vocab_size=284, hidden_size=16, num_layers=2, num_heads=2, max_sequence_length=64)
    if kind == "mamba":
        first, *rest = config.layers
        config = replace(config, layers=(replace(first, mixer=MAMBA), *rest))
    packed, apart = datasets
    assert len(packed) < len(apart) / 2
    found = []
    for dataset in (packed, apart):
        model = GPT(config, seed=1, dtype=torch.float64)
        rows = Rows().read(dataset, np.arange(len(dataset)))
        batch = {name: torch.from_numpy(array) for name, array in rows.items()}
        losses = model(None, batch)
        losses["lm"].backward()
        found.append((losses, [weight.grad for weight in model.parameters()]))
    (ours, own), (theirs, other) = found
    assert ours["tokens"] == theirs["tokens"] == packed.report.labels
    torch.testing.assert_close(ours["lm"], theirs["lm"], rtol=1e-10, atol=0)
    for one, two in zip(own, other, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-10)


@pytest.fixture(scope="module")
def train(tiny, folder: Path, datasets: list[ChatDataset], tmp_path_factory):
    """Train for two epochs, each of which is one step, with the gradient as the first one's."""
    given = yaml.safe_load(tiny.config.read_text())
    given["data"] = {"kind": "chat", "train": [str(folder / "talks.jsonl")]}
    given["data"] |= {"tokenizer": str(folder / "tokenizer.json")}
    given["training"] |= {"steps": 2, "sequence_length": 64, "dtype": "fp64", "grad_clip": 1e9}
    given["optimizer"] = {"name": "sgd", "momentum": 0.0, "lr": 0.1, "weight_decay": 0.0}
    given["optimizer"] |= {"warmup": 0, "schedule": "constant"}
    del given["evaluation"]
    path = tmp_path_factory.mktemp("config") / "chat.yaml"
    path.write_text(yaml.safe_dump(given))
    runner = replace(tiny, config=path)

    def run(out: Path, packing: str, *overrides: str, nproc: int = 1) -> Path:
        rows = len(datasets[packing == "none"])
        sizes = [f"training.global_batch_size={rows}", "training.micro_batch_size=2"]
        return runner.train(out, f"data.packing={packing}", *sizes, *overrides, nproc=nproc)

    return run


@pytest.fixture(scope="module")
def apart(train, tmp_path_factory):
    """The run of a kind of model on one rank with a conversation a row, once."""
    known: dict[str, Path] = {}

    def run(kind: str) -> Path:
        if kind not in known:
            known[kind] = train(tmp_path_factory.mktemp(kind) / "run", "none", *LAYERS[kind])
        return known[kind]

    return run


@pytest.mark.parametrize(("kind", "layout"), [
    pytest.param(*each, marks=() if each == ("attention", "cp2") else pytest.mark.campaign)
    for each in GRID
])  # fmt: skip
def test_packed_rows_on_a_layout_have_loss_and_gradients_of_rows_apart_on_one_rank(
    train, apart, datasets, losses, arrays, tmp_path, kind, layout
) -> None:
    assert len(datasets[0]) % 2 == 0
    overrides = [*LAYERS[kind], *LAYOUTS[layout]]
    run = train(tmp_path / "run", "best-fit", *overrides, nproc=2)
    expected = losses(apart(kind))
    assert losses(run) == pytest.approx(expected, rel=1e-10)
    assert len(set(expected.values())) == 2
    found, wanted = arrays(run, 2), arrays(apart(kind), 2)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-10, atol=1e-10, err_msg=name)
