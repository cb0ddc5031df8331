"""Conversations that share a row are learnt as if each had a row of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from mt_data import ChatDataset, Rows
from mt_model import GPT, Mamba2Config, gpt
from mt_tokenizer import ChatTemplate, train_tokenizer

TEMPLATE = """\
{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
MAMBA = Mamba2Config(num_heads=4, head_dim=8, state_size=8, chunk_size=8)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> list[ChatDataset]:
    """Return the same conversations packed and apart."""
    path: Path = tmp_path_factory.mktemp("chat") / "talks.jsonl"
    talks = []
    for number in range(24):
        answer = {"role": "assistant", "content": "two " * (number % 5 + 1)}
        answer |= {"weight": 0.5} if number % 4 == 0 else {}
        question = {"role": "user", "content": "one " * (number % 3 + 1)}
        talks.append({"messages": [question, answer] * (1 + number % 2)})
    path.write_text("".join(f"{json.dumps(talk)}\n" for talk in talks))
    special = ["<|eod|>", "<|user|>", "<|assistant|>", "<|end|>"]
    tokenizer = train_tokenizer(["one two"] * 3, 280, special)
    with ChatTemplate(TEMPLATE, tokenizer) as template:
        return [
            ChatDataset(path, tokenizer, template, sequence_length=64, packing=packing)
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
