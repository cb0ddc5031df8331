"""The fast encoder gives the ids of the tokenizer's own library."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_tokenizer import Encoder, Tokenizer, TokenizerError, load_tokenizer, train_tokenizer
from mt_tokenizer import fast as fast_module
from mt_tokenizer.fast import LIBRARIES, FastEncoder, fast_encoder

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


@pytest.fixture(scope="module", params=LIBRARIES)
def fast(tokenizer, request):
    return FastEncoder(tokenizer.engine, library=request.param)


PIECES = ("<|eod|>", "<|", "|>", " ", "  ", "\n", "\r\n", "\t", "é", "e\u0301", "日", "1", "٣", "²")
PIECES += ("'s", "'LL", "_", "a", "The", "\0", "\u00a0", "\u3000", "\u2028", "🎉", "\u200d")
awkward = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)


@settings(max_examples=400, deadline=None)
@given(texts=st.lists(st.one_of(st.text(st.characters(exclude_categories=["Cs"])), awkward)))
def test_fast_libraries_give_the_same_ids_for_every_text(tokenizer, fast, texts):
    ids, counts = fast.encode_flat(texts)
    rows = tokenizer.encode_batch(texts)
    assert counts.tolist() == [len(row) for row in rows]
    assert ids.tolist() == [number for row in rows for number in row]


def test_the_first_library_that_gives_the_same_ids_serves(tokenizer, make_engine, monkeypatch):
    served = fast_encoder(tokenizer.engine, TEXTS)
    assert isinstance(served, FastEncoder)
    assert served.library == "gigatoken"
    assert all(map(served.serves, TEXTS))
    code = train_tokenizer(TEXTS, 400, pattern="code")
    by_code = fast_encoder(code.engine, TEXTS)
    assert isinstance(by_code, FastEncoder)
    assert by_code.library == "fastokens"
    for kind in ("wordpiece", "unigram"):
        assert isinstance(fast_encoder(Tokenizer(make_engine(kind)).engine), str)
    for library in LIBRARIES:
        monkeypatch.setitem(sys.modules, library, None)
    reasons = fast_encoder(tokenizer.engine)
    assert str(reasons).count("is not installed: pip install 'mt-tokenizer[fast]'") == 2


def test_sentencepiece_models_are_not_for_fast_libraries(make_model, tmp_path):
    (tmp_path / "m.model").write_bytes(make_model())
    model = load_tokenizer(tmp_path / "m.model")
    assert "are used for tokenizer.json files only" in str(fast_encoder(model.engine))


def test_a_library_takes_over_at_once_where_its_verdict_is_kept(tokenizer, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    much = TEXTS * (1 + (1 << 16) // len("".join(TEXTS)))
    first = Encoder(tokenizer)
    first.encode(much)
    assert first.library == "tokenizers"
    fast_encoder(tokenizer.engine)
    second = Encoder(tokenizer)
    ids, counts = second.encode(much)
    assert second.library == "gigatoken"
    rows = tokenizer.encode_batch(much)
    assert counts.tolist() == [len(row) for row in rows]
    assert ids.tolist() == [number for row in rows for number in row]
    little = Encoder(tokenizer)
    little.encode(TEXTS[:1])
    assert little.library == "tokenizers"


def test_other_ids_are_noticed_and_not_used(tokenizer, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))  # where a verdict would be kept
    encode, common = FastEncoder.encode_flat, tokenizer.encode(TEXTS[1])[0]

    def wrong(self, texts):
        ids, counts = encode(self, texts)
        return np.where(ids == common, common + 1, ids), counts

    monkeypatch.setattr(FastEncoder, "encode_flat", wrong)
    obstacle = fast_encoder(tokenizer.engine, TEXTS)
    assert str(obstacle).count(" gives other ids for ") == 2
    with pytest.raises(TokenizerError, match="no faster library can serve: gigatoken gives other"):
        Encoder(tokenizer, fast=True)


def test_cache_of_words_is_renewed(tokenizer, monkeypatch):
    monkeypatch.setattr(fast_module, "RENEW_BYTES", 100)
    loads = []
    load = fast_module._load
    monkeypatch.setattr(fast_module, "_load", lambda *given: loads.append(1) or load(*given))
    fast = FastEncoder(tokenizer.engine)
    for _ in range(5):
        assert fast.encode_flat(["x" * 60])[0].tolist() == tokenizer.encode("x" * 60)
    assert len(loads) == 3
