"""Any tokenizer trains and validates, and the end of a document is never guessed."""

from __future__ import annotations

from pathlib import Path

import pytest
from mt_parallel_state import detect_env
from mt_train import ConfigError, load_config, run

RUN = """\
model: {hidden_size: 32, num_layers: 1, num_heads: 2}
data: {corpus: words, glob: "*.txt", tokenizer: words.json, EOD validation_fraction: 0.3}
training: {steps: 2, global_batch_size: 4, micro_batch_size: 2, sequence_length: 16, dtype: fp32}
"""
SPECIALS = ["[UNK]", "[CLS]", "[SEP]", "<start>", "<end>"]


def word_piece(folder: Path, specials: list[str]) -> None:
    """Train a tokenizer that is not byte-level, on a few texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts = [
        f"The quick brown fox number {i} jumps over {i * 7} lazy dogs.\n" * 8 for i in range(9)
    ]
    (folder / "words").mkdir()
    for number, text in enumerate(texts):
        (folder / "words" / f"{number}.txt").write_text(text)
    engine = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=200, special_tokens=specials)
    )
    engine.save(str(folder / "words.json"))


def configuration(folder: Path, eod: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(RUN.replace("EOD", f'eod: "{eod}",' if eod else ""))
    return path


@pytest.mark.parametrize("eod", ["", "<end>"])
def test_a_tokenizer_that_is_not_byte_level_trains_and_validates(eod: str, tmp_path: Path) -> None:
    word_piece(tmp_path, SPECIALS)
    loaded = load_config(configuration(tmp_path, eod))
    final = run(loaded, detect_env(), tmp_path / "out")
    record = getattr(final, "evaluation", final)
    assert record is not None
    assert 0 < record["bits_per_byte"] < 50
    from mt_data import IndexedDataset
    from mt_tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tmp_path / "words.json", eod=eod or None)
    document = IndexedDataset(tmp_path / "out" / "data" / "train")[0]
    assert document[-1] == tokenizer.special_tokens[eod or "[SEP]"]


def test_an_unclear_end_of_document_is_asked_for(tmp_path: Path) -> None:
    word_piece(tmp_path, ["[UNK]", "<begin>", "<end>"])
    with pytest.raises(ConfigError, match=r"data.tokenizer: .*data\.eod"):
        load_config(configuration(tmp_path, ""))
    with pytest.raises(ConfigError, match="'<stop>' is not a special token"):
        load_config(configuration(tmp_path, "<stop>"))
    assert load_config(configuration(tmp_path, "<end>")).config.data.eod == "<end>"


def test_the_end_of_document_belongs_to_a_tokenizer(tmp_path: Path) -> None:
    word_piece(tmp_path, SPECIALS)
    path = configuration(tmp_path, "<end>")
    with pytest.raises(ConfigError, match=r"data\.eod: '<end>' is a token of data\.tokenizer"):
        load_config(path, ["data.tokenizer=null"])
