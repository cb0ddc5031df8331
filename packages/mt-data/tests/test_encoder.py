"""The fast encoder and the processes give the ids of the tokenizer's own library."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_data import (
    DataError,
    Document,
    Encoder,
    IndexedDataset,
    Tokenizer,
    build_corpus,
    dataset_tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from mt_data.tokenizers import encoder as encoder_module
from mt_data.tokenizers import fast as fast_module
from mt_data.tokenizers.fast import FastEncoder, fast_encoder

TEXTS = [
    "The quick brown fox doesn't jump over 12345 lazy dogs.\r\n\tÄrger, naïve, 日本語, 🎉\n" * 20,
    "def add(first, second):\n    return first + second\n" * 20,
]


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 500)


@pytest.fixture(scope="module")
def fast(tokenizer):
    return FastEncoder(tokenizer.engine)


def documents(texts):
    return [Document(path=str(number), text=text) for number, text in enumerate(texts)]


PIECES = ("<|eod|>", "<|", "|>", " ", "  ", "\n", "\r\n", "\t", "é", "e\u0301", "日", "1", "٣", "²")
PIECES += ("'s", "'LL", "_", "a", "The", "\0", "\u00a0", "\u3000", "\u2028", "🎉", "\u200d")
awkward = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)


@settings(max_examples=400, deadline=None)
@given(texts=st.lists(st.one_of(st.text(st.characters(exclude_categories=["Cs"])), awkward)))
def test_gigatoken_gives_the_same_ids_for_every_text(tokenizer, fast, texts):
    ids, counts = fast.encode_flat(texts)
    rows = tokenizer.encode_batch(texts)
    assert counts.tolist() == [len(row) for row in rows]
    assert ids.tolist() == [number for row in rows for number in row]


def test_gigatoken_serves_our_tokenizers_and_says_why_not(tokenizer, make_engine, monkeypatch):
    served = fast_encoder(tokenizer.engine, TEXTS)
    assert isinstance(served, FastEncoder)
    assert all(map(served.serves, TEXTS))
    code = train_tokenizer(TEXTS, 400, pattern="code")
    assert "refuses this tokenizer: Unknown pre_tokenizer" in str(fast_encoder(code.engine))
    for kind in ("wordpiece", "unigram"):
        assert isinstance(fast_encoder(Tokenizer(make_engine(kind)).engine), str)
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    assert fast_encoder(tokenizer.engine) == ("it is not installed: pip install gigatoken awkward")


def test_sentencepiece_models_are_not_for_gigatoken(make_model, tmp_path):
    (tmp_path / "m.model").write_bytes(make_model())
    model = load_tokenizer(tmp_path / "m.model")
    assert fast_encoder(model.engine) == "gigatoken is used for tokenizer.json files only"


def test_a_character_that_the_libraries_class_differently_keeps_its_text_from_gigatoken(
    tmp_path, tokenizer, monkeypatch
):
    texts = [f"one {c}'s and '{c}s" for c in map(chr, range(0x80, 0x3400, 7))]
    texts += [f"{c}'s" for c in map(chr, range(0x16E00, 0x33480, 3))]
    encoder = Encoder(tokenizer, fast=True)
    build_corpus(documents(texts), tmp_path / "a", tokenizer, encoder=encoder)
    build_corpus(
        documents(texts), tmp_path / "b", tokenizer, encoder=Encoder(tokenizer, fast=False)
    )
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()

    monkeypatch.setattr(fast_module, "_other_characters", None)  # the verdict is kept
    again = fast_encoder(tokenizer.engine)
    if again.avoid:  # both libraries may come to know the same Unicode
        assert not again.serves(f"text {again.avoid[0]}")
    assert again.serves("text \u65e5")


def test_other_ids_are_noticed_and_not_used(tokenizer, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))  # where a verdict would be kept
    encode, common = FastEncoder.encode_flat, tokenizer.encode(TEXTS[1])[0]

    def wrong(self, texts):
        ids, counts = encode(self, texts)
        return np.where(ids == common, common + 1, ids), counts

    monkeypatch.setattr(FastEncoder, "encode_flat", wrong)
    obstacle = fast_encoder(tokenizer.engine, TEXTS)
    assert str(obstacle).startswith("it gives other ids for ")
    with pytest.raises(DataError, match="gigatoken cannot serve: it gives other ids"):
        Encoder(tokenizer, fast=True)


def test_cache_of_words_is_renewed(tokenizer, monkeypatch):
    monkeypatch.setattr(fast_module, "RENEW_BYTES", 100)
    loads = []
    load = fast_module._load
    monkeypatch.setattr(fast_module, "_load", lambda content: loads.append(1) or load(content))
    fast = FastEncoder(tokenizer.engine)
    for _ in range(5):
        assert fast.encode_flat(["x" * 60])[0].tolist() == tokenizer.encode("x" * 60)
    assert len(loads) == 3


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("fast", [None, True, False])
def test_dataset_is_the_same_whoever_encodes(tmp_path, tokenizer, monkeypatch, workers, fast):
    monkeypatch.setattr("mt_data.corpus.BATCH_BYTES", 3000)
    monkeypatch.setattr(encoder_module, "PROBE_CHARACTERS", 8000)
    given = documents([*TEXTS, "<|eod|> is text", "", "x"] * 10)
    build_corpus(given, tmp_path / "a", tokenizer, encoder=Encoder(tokenizer, fast=False))
    seen = []
    with Encoder(tokenizer, fast=fast, workers=workers) as encoder:
        stats = build_corpus(
            given, tmp_path / "b", tokenizer, encoder=encoder, on_progress=seen.append
        )
    assert encoder.library == ("tokenizers" if fast is False else "gigatoken")
    assert seen[-1] == stats
    assert [s.tokens for s in seen] == sorted(s.tokens for s in seen)
    for ending in ("bin", "idx", "json", "tokenizer.json"):
        assert (tmp_path / f"a.{ending}").read_bytes() == (tmp_path / f"b.{ending}").read_bytes()


def test_small_corpora_do_not_load_gigatoken(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(encoder_module, "fast_encoder", None)
    build_corpus(documents(TEXTS), tmp_path / "a", tokenizer)


def test_error_in_a_process_is_reported_and_leaves_nothing(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("mt_data.corpus.BATCH_BYTES", 1000)
    given = documents([*TEXTS * 3, "y" * 5_000_000])
    with (
        Encoder(tokenizer, fast=False, workers=2) as encoder,
        pytest.raises(DataError, match="has no place to cut it"),
    ):
        build_corpus(given, tmp_path / "a", tokenizer, encoder=encoder)
    assert list(tmp_path.iterdir()) == []


def test_lone_surrogate_names_its_document(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"^7: has a lone surrogate at character 1"):
        build_corpus([Document(path="7", text="a\ud800")], tmp_path / "a", tokenizer)


def test_tokenizer_is_kept_beside_the_data_and_checked(tmp_path, tokenizer, make_engine):
    engine = make_engine("llama")
    engine.add_special_tokens(["<end>"])
    given = Tokenizer(engine, eod="<end>")
    build_corpus(documents(TEXTS), tmp_path / "a", given)
    dataset = IndexedDataset(tmp_path / "a")
    kept = dataset_tokenizer(dataset)
    assert (kept.sha256, kept.eod_token) == (given.sha256, "<end>")
    other = tmp_path / "other.json"
    tokenizer.save(other)
    with pytest.raises(DataError, match="special token"):
        dataset_tokenizer(dataset, other)
    build_corpus(documents(TEXTS), tmp_path / "b", tokenizer)
    train_tokenizer(TEXTS, 300).save(other)
    with pytest.raises(DataError, match=r"other\.json: is not the tokenizer of .*b\.bin"):
        dataset_tokenizer(IndexedDataset(tmp_path / "b"), other)
    other.replace(tmp_path / "b.tokenizer.json")
    with pytest.raises(DataError, match="is not the tokenizer of"):
        dataset_tokenizer(IndexedDataset(tmp_path / "b"))
