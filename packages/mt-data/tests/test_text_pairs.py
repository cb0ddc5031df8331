"""Rows of prompts and completions: their arrays, left-out pairs, and packing."""

import json

import numpy as np
import pytest
from mt_data import PADDING, DataError, DataFileError, PairDataset
from mt_tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["one two three four five"] * 3, 300, ["<|eod|>"])


def write(path, *pairs):
    lines = ({"prompt": prompt, "completion": completion} for prompt, completion in pairs)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def texts(row, prefix, name, tokenizer):
    """Return the text of each pair of a row, after the token that ends it."""
    documents, found = row[f"{prefix}documents"], []
    for number in range(documents.max() + 1):
        tokens = row[name][documents == number].tolist()
        assert tokens[-1] == tokenizer.eod_id
        assert row[f"{prefix}positions"][documents == number].tolist() == [*range(len(tokens))]
        found.append(tokenizer.decode(tokens[:-1]))
    return found


def test_each_epoch_has_each_pair_once_in_rows_of_several(tmp_path, tokenizer) -> None:
    pairs = [(f"one {n} " * (n % 3 + 1), f"two {n}") for n in range(40)]
    path = write(tmp_path / "pairs.jsonl", *pairs)
    how = {"lengths": (32, 24), "start": 7, "seed": 3}
    packed, apart = (PairDataset(path, tokenizer, packing=p, **how) for p in ("best-fit", "none"))
    assert len(packed) < len(apart) == 40
    for dataset in (packed, apart):
        for epoch in range(2):
            found = []
            for index in range(len(dataset)):
                row = dataset.row(epoch * len(dataset) + index)
                assert {x: len(row[x]) for x in ("encoder_tokens", "tokens")} == {
                    **{"encoder_tokens": 32, "tokens": 24}
                }
                asked = texts(row, "encoder_", "encoder_tokens", tokenizer)
                found += zip(asked, texts(row, "", "labels", tokenizer), strict=True)
                here = row["documents"] >= 0
                assert (row["labels"][~here] == PADDING).all()
                first = row["positions"][here] == 0
                assert (row["tokens"][here][first] == 7).all()
                shifted = np.roll(row["labels"][here], 1)[~first]
                assert (row["tokens"][here][~first] == shifted).all()
            assert sorted(found) == sorted(pairs)
    again = PairDataset(path, tokenizer, packing="best-fit", **how)
    assert again.fingerprint == packed.fingerprint != apart.fingerprint


def test_what_is_too_long_is_refused_dropped_or_cut(tmp_path, tokenizer) -> None:
    path = write(tmp_path / "pairs.jsonl", ("one", "two"), ("one " * 9, "two"), ("one", "two " * 9))
    how = {"lengths": (6, 5)}
    with pytest.raises(DataFileError, match=r"pairs.jsonl:2.*a row takes 6 and 5.*too_long"):
        PairDataset(path, tokenizer, **how)
    dropped = PairDataset(path, tokenizer, too_long="drop", **how)
    assert (len(dropped), dropped.num_dropped) == (1, 2)
    cut = PairDataset(path, tokenizer, too_long="cut", **how)
    assert (len(cut), cut.num_cut) == (3, 2)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{}", "a line has messages"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "has messages; an encoder"),
        ('{"prompt": "a", "completion": ""}', "must both be texts"),
        ('{"prompt": "\\ud800", "completion": "b"}', "pairs.jsonl:1"),
    ],
)
def test_a_line_that_is_no_pair_is_named(tmp_path, tokenizer, line, words) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(DataFileError, match=words):
        PairDataset(path, tokenizer, lengths=(8, 8))
    path.write_text("")
    with pytest.raises(DataError, match="has no pairs to learn"):
        PairDataset(path, tokenizer, lengths=(8, 8))
