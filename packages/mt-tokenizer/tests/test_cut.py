"""Long texts are encoded in parts, with the ids of the whole."""

import subprocess
import sys
import time

import numpy as np
import pytest
from mt_tokenizer import Tokenizer, TokenizerError, train_tokenizer
from mt_tokenizer import cut as cut_module
from mt_tokenizer.cut import cut

WORDS = ["the", " fox", "\n", "  ", "dog", "123", "4", ".", ", ", "\t\n", "é", "日本", "_", "(x)"]
TEXTS = ["".join(WORDS) * 30]
PATTERNS = {"gpt2": "gpt2", "code": "code", "words": r"\S+|\s+"}


@pytest.fixture
def make(make_engine):
    def make(kind):
        if kind in PATTERNS:
            return train_tokenizer(TEXTS, 400, pattern=PATTERNS[kind])
        return Tokenizer(make_engine(kind))

    return make


@pytest.mark.parametrize("kind", [*PATTERNS, "llama", "unigram", "wordpiece"])
def test_ids_of_parts_are_the_ids_of_the_whole(kind, make, monkeypatch):
    monkeypatch.setattr(cut_module, "PART", 200)
    monkeypatch.setattr(cut_module, "_WINDOW", 100)
    tokenizer = make(kind)
    encode = tokenizer.engine.encode_batch
    random = np.random.default_rng(0)
    for _ in range(40):
        text = "".join(random.choice(WORDS, 400))
        parts = list(cut(text, encode))
        assert len(parts) > 2
        assert max(map(len, parts)) < 700
        assert [n for part in encode(parts) for n in part] == encode([text])[0]


def test_text_without_a_place_to_cut_is_refused(make, monkeypatch):
    monkeypatch.setattr(cut_module, "PART", 5000)
    monkeypatch.setattr(cut_module, "LONGEST", 20_000)
    encode = make("gpt2").engine.encode_batch
    assert len(list(cut("x" * 20_000, encode))) == 1
    with pytest.raises(
        TokenizerError, match="a text of 50000 characters has no place to cut it in the"
    ):
        list(cut("x" * 50_000, encode))


def test_long_text_is_cut_by_encode(make, monkeypatch):
    tokenizer = make("gpt2")
    text = "the fox. " * 50_000
    sizes = []
    inner = tokenizer.engine.encode_batch
    monkeypatch.setattr(
        tokenizer.engine, "encode_batch", lambda t: sizes.extend(map(len, t)) or inner(t)
    )
    ids = tokenizer.encode(text)
    assert max(sizes) <= cut_module.PART
    assert ids == inner([text])[0]


def test_memory_is_bounded_whatever_a_texts_length(tmp_path):
    code = (
        "import resource, mt_tokenizer; "
        "tokenizer = mt_tokenizer.train_tokenizer(['the fox jumps. '] * 9, 300); "
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        "ids = tokenizer.encode('the fox jumps. ' * 400_000); "
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        "print(len(ids), after - before)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, kilobytes = map(int, out.stdout.split())
    assert count > 10**6
    assert kilobytes < 500_000  # 190 MB here, and 810 MB when the text is encoded at once


def test_training_time_does_not_grow_with_the_square_of_a_words_length():
    start = time.perf_counter()
    train_tokenizer(["abcdefghij" * 100_000], 400)
    assert time.perf_counter() - start < 30  # it was 5.9 s for a fifth of it: 150 s by the square
