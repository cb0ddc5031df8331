"""A folder of Hugging Face is generated from once it is imported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mt_data import load_tokenizer, train_tokenizer
from mt_model import GPT, from_pretrained, gpt, import_pretrained, save_pretrained

PROMPT = "to be"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
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


def test_the_greedy_text_is_that_of_the_folder(folder, tmp_path, generate) -> None:
    import_pretrained(folder, tmp_path / "run")
    code, out, _ = generate(tmp_path / "run", "--max-tokens", 12, "--temperature", 0, prompt=PROMPT)
    tokenizer, model = load_tokenizer(folder / "tokenizer.json"), from_pretrained(folder)
    ids = given = tokenizer.encode(PROMPT)
    for _ in range(12):
        best = int(model.logits(torch.tensor([ids]))[0, -1, : tokenizer.vocab_size].argmax())
        if best == tokenizer.eod_id:
            break
        ids = [*ids, best]
    assert code == 0
    assert len(ids) > len(given)
    assert tokenizer.decode(ids[len(given) :]) in out


def test_weights_without_a_tokenizer_are_refused(folder, tmp_path, generate) -> None:
    (folder / "tokenizer.json").unlink()
    import_pretrained(folder, tmp_path / "run")
    code, _, err = generate(tmp_path / "run")
    assert code != 0
    assert "tokenizer" in err
