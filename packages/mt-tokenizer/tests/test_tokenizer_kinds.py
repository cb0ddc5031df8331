"""Tokenizers of every kind: the end of a document is never guessed, and bytes are counted."""

import json
import os

import numpy as np
import pytest
import tokenizers
from mt_tokenizer import (
    Tokenizer,
    TokenizerError,
    TokenizerFileError,
    load_tokenizer,
    train_tokenizer,
)
from tokenizers import models, processors

TEXTS = ["the quick brown fox jumps over the lazy dog"] * 20
SIGN = "\u2581"
DEEPSEEK = "<\uff5cend\u2581of\u2581sentence\uff5c>"


@pytest.fixture(params=["wordpiece", "unigram", "llama", "sentencepiece", "sentencepiece-bpe"])
def path(request, tmp_path, make_engine, make_model):
    if request.param.startswith("sentencepiece"):
        path = tmp_path / "spm.model"
        kind = "bpe" if request.param.endswith("bpe") else "unigram"
        path.write_bytes(make_model(model_type=kind))
    else:
        path = tmp_path / "tokenizer.json"
        make_engine(request.param).save(str(path))
    return path


def test_bytes_of_tokens_are_the_text_but_for_spaces(path):
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode(TEXTS[0])
    assert tokenizer.decode_bytes(ids).strip() == TEXTS[0].encode()
    assert tokenizer.token_bytes[ids].sum() in (len(TEXTS[0]), len(TEXTS[0]) + 1)
    assert tokenizer.token_bytes[tokenizer.eod_id] == 0
    assert tokenizer.decode(ids) == TEXTS[0]


def test_special_tokens_in_text_stay_text(path):
    tokenizer = load_tokenizer(path)
    name = next(name for name, at in tokenizer.special_tokens.items() if at == tokenizer.eod_id)
    assert tokenizer.eod_id not in tokenizer.encode(f"a {name} b")
    text = f"{name}{name} fox {name}"
    assert tokenizer.eod_id not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)).count("fox") == 1
    assert name in tokenizer.decode([*tokenizer.encode("the"), tokenizer.eod_id])
    assert name not in tokenizer.decode([tokenizer.eod_id], skip_special=True)


def test_special_tokens_in_a_prompt_are_these_tokens(path):
    tokenizer = load_tokenizer(path)
    text = f"the fox {tokenizer.eod_token} the dog"
    ids = tokenizer.encode_prompt(text)
    assert tokenizer.eod_id in ids[1:-1]
    assert {*tokenizer.encode("the fox"), *tokenizer.encode("the dog")} <= {*ids}
    assert tokenizer.eod_id not in tokenizer.encode(text)  # a text of data stays as it is


def test_a_prompt_begins_as_the_tokenizer_s_template_says(make_engine, tmp_path):
    engine = make_engine("llama")
    made = Tokenizer(engine)
    first = (made.eod_token, made.eod_id)
    template = {"single": f"{first[0]} $A", "special_tokens": [first]}
    engine.post_processor = processors.TemplateProcessing(**template)
    tokenizer = Tokenizer(engine)
    assert tokenizer.encode_prompt("the fox") == [made.eod_id, *tokenizer.encode("the fox")]


def test_saved_file_gives_an_equal_tokenizer(path, tmp_path):
    tokenizer = load_tokenizer(path)
    copy = tmp_path / "copy.json"  # the content decides, not the name
    tokenizer.save(copy)
    assert load_tokenizer(copy).sha256 == tokenizer.sha256
    assert load_tokenizer(copy).encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)


def special(*names):
    engine = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    engine.add_special_tokens(list(names))
    return engine


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (
            (
                "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
                "<\uff5cend\u2581of\u2581sentence\uff5c>",
            ),
            "<\uff5cend\u2581of\u2581sentence\uff5c>",
        ),
        (("[UNK]", "[CLS]", "[SEP]"), "[SEP]"),
        (("<s>", "</s>"), "</s>"),
        (("<|endoftext|>",), "<|endoftext|>"),
        (("<pad>", "<eos>", "<bos>"), "<eos>"),
    ],
)
def test_known_end_of_document_token_is_found(names, found):
    tokenizer = Tokenizer(special(*names))
    assert tokenizer.eod_token == found
    assert tokenizer.eod_id == tokenizer.special_tokens[found]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("[UNK]", "[BOS]"), "no special token is known to end documents; the tokenizer has '"),
        (
            ("<s>", "</s>", "<eos>"),
            "more than one special token may end documents: '<eos>', '</s>'",
        ),
    ],
)
def test_end_of_document_token_is_never_guessed(names, message):
    with pytest.raises(TokenizerError) as error:
        Tokenizer(special(*names))
    assert str(error.value).startswith(message)
    assert "name it: --eod NAME" in str(error.value)
    assert "data.eod" in str(error.value)
    assert Tokenizer(special(*names), eod=names[0]).eod_id == 1


def edited(**changes):
    record = json.loads(train_tokenizer(TEXTS, 300).to_bytes())
    for key, value in changes.items():
        part, _, name = key.partition("__")
        if name:
            record[part][name] = value
        else:
            record[part] = value
    return record


def replace(old, new):
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


BOMBS = [
    replace("e", "e" * 300),
    {"type": "Sequence", "normalizers": [replace("e", "ee")] * 40},
    {
        "type": "Sequence",
        "normalizers": [{"type": "Sequence", "normalizers": [replace("e", "e" * 20)] * 2}],
    },
    {"type": "Replace", "pattern": {"Regex": ""}, "content": "e" * 300},
    {"type": "Prepend", "prepend": "e" * 10**6},
    {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="},
    {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAB" + "YWFh" * 200 + "AA=="},
]


@pytest.mark.parametrize("normalizer", BOMBS)
def test_normaliser_that_blows_texts_up_is_refused(tmp_path, normalizer):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(edited(normalizer=normalizer)))
    with pytest.raises(TokenizerFileError, match=r"is not a tokenizer.json \(") as error:
        load_tokenizer(path)
    assert len(str(error.value)) < 1000


def test_usual_normalisers_are_accepted(tmp_path):
    path = tmp_path / "tokenizer.json"
    steps = [{"type": "Prepend", "prepend": SIGN}, replace(" ", SIGN), {"type": "NFKC"}]
    path.write_text(json.dumps(edited(normalizer={"type": "Sequence", "normalizers": steps})))
    assert load_tokenizer(path).vocab_size > 256


@pytest.mark.parametrize("number", [4294967295, -1, True, 1.5, "7", 1 << 22])
def test_id_that_no_vocabulary_has_is_refused(tmp_path, number):
    path = tmp_path / "tokenizer.json"
    record = edited()
    record["model"]["vocab"]["zz"] = number
    path.write_text(json.dumps(record))
    with pytest.raises(
        TokenizerFileError, match=r"token 'zz' has the id .*an id must be an integer from"
    ):
        load_tokenizer(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"model__continuing_subword_prefix": "éé"},
        {"model__end_of_word_suffix": "x" * 10**6},
        {"decoder": {"type": "BPEDecoder", "suffix": "x" * 10**6}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////"}},
        {"added_tokens": [{"id": 2**32 - 1, "content": "x"}]},
        {"model": {"type": "BPE", "vocab": [1], "merges": []}},
    ],
)
def test_hostile_tokenizer_is_a_typed_error(tmp_path, changes):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(edited(**changes)))
    with pytest.raises(TokenizerFileError, match=r"is not a tokenizer\.json"):
        load_tokenizer(path)


def test_panic_of_the_library_is_a_typed_error(monkeypatch):
    class PanicException(BaseException):
        pass

    tokenizer = train_tokenizer(TEXTS, 300)

    class Engine:
        def encode_batch_fast(self, *_, **__):
            raise PanicException("index out of bounds")

    monkeypatch.setattr(tokenizer.engine, "_inner", Engine())
    with pytest.raises(TokenizerError, match=r"cannot encode this text .index out of bounds."):
        tokenizer.encode("x")


def test_random_edits_of_a_tokenizer_are_typed_errors_or_load(tmp_path):
    content = bytearray(train_tokenizer(TEXTS, 300).to_bytes())
    path = tmp_path / "tokenizer.json"
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(200):
        damaged = bytearray(content)
        for at in random.integers(0, len(content), 2):
            damaged[at] ^= 1 << int(random.integers(0, 8))
        path.write_bytes(damaged)
        try:
            tokenizer = load_tokenizer(path)
            _ = tokenizer.encode("the fox"), tokenizer.token_bytes
        except TokenizerError:
            refused += 1
    assert refused > 50


def test_what_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("fifo", "zero"):
        with pytest.raises(OSError, match="a regular file is needed"):
            load_tokenizer(tmp_path / name)
