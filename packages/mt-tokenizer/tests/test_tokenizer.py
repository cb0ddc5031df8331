"""Byte-level BPE: every text comes back, bytes are counted exactly, specials stay special."""

import itertools
import json
import pickle
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_files import MissingExtraError
from mt_tokenizer import TokenizerError, TokenizerFileError, load_tokenizer, train_tokenizer
from mt_tokenizer.pieces import byte_characters
from mt_tokenizer.training import PATTERNS

WORDS = " ".join(f"w{n * n}x{n}" for n in range(300))
TEXTS = [
    "def add(first, second):\n    return first + second\n" * 20,
    "The quick brown fox doesn't jump over 12345 lazy dogs.\r\n\tÄrger, naïve, 日本語, 🎉\n" * 20,
    WORDS,
]


@pytest.fixture(scope="module", params=["gpt2", "code", r"\S+|\s+"])
def tokenizer(request):
    return train_tokenizer(TEXTS, 400, pattern=request.param)


@pytest.fixture(scope="module")
def plain():
    return train_tokenizer(TEXTS, 400)


text_or_tokens = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(
        st.sampled_from(
            ["<|eod|>", "<|", "|>", " ", "  ", "\n", "\r\n", "\t", "é", "日", "def ", "\0"]
        )
    ).map("".join),
)


@settings(max_examples=150, deadline=None)
@given(text=text_or_tokens)
def test_every_text_comes_back_and_its_bytes_are_counted(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special=True) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert tokenizer.eod_id not in ids
    assert all(0 <= number < tokenizer.vocab_size for number in ids)


def test_special_token_is_not_made_by_text_even_when_the_corpus_spells_it():
    for pattern in (*PATTERNS, r"[\s\S]+"):
        trained = train_tokenizer(["<|eod|>" * 50, "a <|eod|> b" * 50], 300, pattern=pattern)
        ids = trained.encode("x<|eod|>y")
        assert trained.eod_id not in ids
        assert trained.decode([*ids, trained.eod_id]) == "x<|eod|>y<|eod|>"
        assert trained.decode([*ids, trained.eod_id], skip_special=True) == "x<|eod|>y"


def test_special_tokens_come_first_and_count_no_bytes():
    trained = train_tokenizer(TEXTS, 300, ("<|eod|>", "<|pad|>"))
    assert trained.special_tokens == {"<|eod|>": 0, "<|pad|>": 1}
    assert trained.eod_id == trained.special_tokens["<|eod|>"] == 0
    assert trained.token_bytes[:2].tolist() == [0, 0]
    assert trained.token_bytes[2:].min() == 1
    assert trained.decode_bytes([0, 1]) == b""


def test_all_bytes_are_in_the_alphabet(plain):
    singles = {plain.decode_bytes([n]) for n in range(plain.vocab_size)}
    assert {bytes([value]) for value in range(256)} <= singles
    assert len(set(byte_characters())) == 256


def test_vocabulary_is_as_large_as_asked_and_compresses(plain):
    assert plain.vocab_size == len(plain.token_bytes) == 400
    assert len(plain.encode(TEXTS[0])) < len(TEXTS[0]) / 3


def test_smallest_vocabulary_is_bytes_only():
    trained = train_tokenizer(TEXTS, 257)
    assert len(trained.encode("naïve")) == 6


def test_code_pattern_needs_fewer_tokens_on_code():
    source = [
        "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n",
        "for index in range(10):\n    if index % 2:\n        total_count += index\n",
    ] * 5
    counts = {
        pattern: sum(map(len, train_tokenizer(source, 330, pattern=pattern).encode_batch(source)))
        for pattern in PATTERNS
    }
    assert counts["code"] < counts["gpt2"]


def test_training_is_deterministic(plain):
    again = train_tokenizer(iter(TEXTS), 400)
    assert again.to_bytes() == plain.to_bytes()
    assert again.sha256 == plain.sha256
    assert train_tokenizer(TEXTS, 399).sha256 != plain.sha256


def test_one_file_round_trips(tokenizer, tmp_path):
    path = tmp_path / "new" / "tokenizer.json"
    tokenizer.save(path)
    assert [p.name for p in path.parent.iterdir()] == ["tokenizer.json"]
    loaded = load_tokenizer(path)
    assert loaded.sha256 == tokenizer.sha256
    assert loaded.eod_id == tokenizer.eod_id
    sample = "def add <|eod|> 日本"
    assert loaded.encode(sample) == tokenizer.encode(sample)
    assert np.array_equal(loaded.token_bytes, tokenizer.token_bytes)
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode(sample) == tokenizer.encode(sample)
    assert copy.eod_id == tokenizer.eod_id


def test_batch_equals_one_by_one(plain):
    texts = ["", "a", "日本", TEXTS[0], " "]
    assert plain.encode_batch(texts) == [plain.encode(text) for text in texts]
    assert plain.encode_batch([]) == []


def test_cut_character_is_bytes_first_and_a_mark_in_text(plain):
    ids = plain.encode("🦆")
    assert len(ids) > 1
    assert plain.decode(ids[:1]) == "\N{REPLACEMENT CHARACTER}"
    assert b"".join(plain.decode_bytes([n]) for n in ids).decode() == "🦆"


@pytest.mark.parametrize("ids", [[400], [-1], [3, 10**9]])
def test_id_outside_the_vocabulary_is_refused(plain, ids):
    for decode in (plain.decode, plain.decode_bytes):
        with pytest.raises(
            TokenizerError, match=rf"token id {ids[-1]} is outside the vocabulary of 400"
        ):
            decode(ids)


def test_ids_must_be_a_row_of_integers(plain):
    with pytest.raises(TokenizerError, match="one row of integers, got float64"):
        plain.decode([0.5])
    with pytest.raises(TokenizerError, match=r"of shape \(1, 2\)"):
        plain.decode([[1, 2]])
    assert plain.decode([]) == plain.decode(np.array([], np.int64)) == ""


def test_text_that_is_no_text_is_named(plain):
    with pytest.raises(
        TokenizerError, match=r"text 1 has a lone surrogate '\\ud800' at position 2"
    ):
        plain.encode_batch(["fine", "ab\ud800"])
    with pytest.raises(TokenizerError, match="text 0 is int, not str"):
        plain.encode_batch([5])
    with pytest.raises(TokenizerError, match="text 0 is bytes, not str"):
        train_tokenizer([b"x"], 300)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"vocab_size": 256},
            "vocab_size is 256; it must be at least 257: 256 bytes and 1 special",
        ),
        ({"vocab_size": 300, "special": ()}, "give one or more distinct names"),
        ({"vocab_size": 300, "special": ("<a>", "<a>")}, "distinct names"),
        ({"vocab_size": 300, "special": ("a",)}, "two or more printable ASCII"),
        ({"vocab_size": 300, "special": ("é!",)}, "two or more printable ASCII"),
        ({"vocab_size": 300, "pattern": "("}, "neither one of .'code', 'gpt2'. nor a regular"),
    ],
)
def test_impossible_training_says_why(options, message):
    with pytest.raises(TokenizerError, match=message):
        train_tokenizer(TEXTS, **options)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"model": 5}', b"[" * 10_000])
def test_broken_tokenizer_file_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(TokenizerFileError) as error:
        load_tokenizer(path)
    assert str(error.value).startswith(f"{path}: is not a tokenizer.json (")
    assert str(error.value).endswith(
        "); give the file of a Hugging Face model, or one written by mt-data or mt-train"
    )


def test_folder_given_as_a_tokenizer_is_named(tmp_path):
    with pytest.raises(TokenizerFileError, match="folder"):
        load_tokenizer(tmp_path)


def test_end_of_document_token_is_found_or_asked_for(tmp_path):
    path = tmp_path / "tokenizer.json"
    train_tokenizer(TEXTS, 300, ("<|first|>", "</s>")).save(path)
    assert load_tokenizer(path).eod_id == 1
    assert load_tokenizer(path, eod="<|first|>").eod_id == 0
    with pytest.raises(TokenizerFileError, match=r"'<x>' is not a special token .*'<|first|>'"):
        load_tokenizer(path, eod="<x>")
    record = json.loads(path.read_text())
    record["added_tokens"] = []
    path.write_text(json.dumps(record))
    with pytest.raises(
        TokenizerFileError, match=r"json: the tokenizer has no special token"
    ) as error:
        load_tokenizer(path)
    assert "add one, such as '<|eod|>', with the tokenizers library" in str(error.value)


def test_bytes_of_other_tokenizers_are_not_guessed(tmp_path):
    path = tmp_path / "tokenizer.json"
    record = json.loads(train_tokenizer(TEXTS, 300).to_bytes())
    record["decoder"] = {"type": "CTC", "pad_token": "_", "word_delimiter_token": "|"}
    record["decoder"]["cleanup"] = False
    path.write_text(json.dumps(record))
    with pytest.raises(TokenizerError, match="unknown for a tokenizer that decodes with 'CTC'"):
        _ = load_tokenizer(path).token_bytes


def test_missing_library_says_how_to_install_it(monkeypatch, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "spm.model").write_bytes(b"\n\0")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(MissingExtraError, match="pip install sentencepiece"):
        load_tokenizer(tmp_path / "spm.model")
    for call, what in (
        (lambda: train_tokenizer(TEXTS, 300), "training a tokenizer"),
        (lambda: load_tokenizer(tmp_path / "tokenizer.json"), "loading a tokenizer"),
    ):
        with pytest.raises(MissingExtraError) as error:
            call()
        assert str(error.value) == f"{what} needs: pip install tokenizers"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_short_strings_of_awkward_characters_come_back(pattern):
    trained = train_tokenizer(TEXTS, 300, pattern=pattern)
    texts = ["".join(t) for n in range(1, 4) for t in itertools.product("a_1.\n\r\t é", repeat=n)]
    assert [trained.decode(ids) for ids in trained.encode_batch(texts)] == texts
