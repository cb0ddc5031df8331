"""A run that fills in the middle: its rows, its tokenizer, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mt_data import DataError
from mt_tokenizer import load_tokenizer
from mt_train import ConfigError, load_config

FILL = "data.fim={rate: 0.8, spm_rate: 0.5}"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the overrides that train on a corpus of short documents."""
    path = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    texts = (f"def f{n}(x):\n    return x + {n}\n" * (1 + n % 4) for n in range(60))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = f"data={{corpus: {path}, vocab_size: 300}}"
    return [data, "training.sequence_length=64", "optimizer.schedule=constant", "training.steps=6"]


def test_a_run_fills_in_the_middle_and_resumes_to_the_same_bits(
    tiny, own, tmp_path, losses
) -> None:
    tiny.run(tmp_path / "whole", *own, FILL)
    tiny.run(tmp_path / "parts", *own, FILL, "training.steps=3")
    outcome = tiny.run(tmp_path / "parts", *own, FILL)
    found = losses(tmp_path / "whole")
    assert found == losses(tmp_path / "parts")
    assert found[6] < found[1]
    assert outcome.evaluation["bits_per_byte"] > 0
    names = load_tokenizer(tmp_path / "whole" / "tokenizer.json").special_tokens
    assert {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"} < set(names)


def test_what_is_wrong_is_named(tiny, tmp_path: Path) -> None:
    for given, text in (
        ("{rate: 0}", r"data.fim.rate: 0.0 must be greater than 0"),
        ("{spm_rate: 2}", r"data.fim.spm_rate: 2.0 is too large; use 1 or less"),
        ("{middle: <|fim_prefix|>}", r"data.fim.middle: .* give each of the three a token"),
    ):
        with pytest.raises(ConfigError, match=text):
            load_config(tiny.config, [f"data.fim={given}"])
    without = ["data.tokenizer=null", "model.vocab_size=300"]
    with pytest.raises(ConfigError, match=r"data.fim: makes tokens of parts of texts"):
        load_config(tiny.config, ["data.fim={}", *without])
    with pytest.raises(DataError, match=r"no special token '<\|fim_prefix\|>' for prefix"):
        tiny.run(tmp_path / "run", FILL)
