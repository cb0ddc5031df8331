"""Tokenizers in the files of other libraries give the ids of those libraries."""

import base64
import json
import random
from pathlib import Path

import pytest
from mt_tokenizer import TokenizerError, load_tokenizer, train_tokenizer

SOURCES = Path(json.__file__).read_text() + Path(random.__file__).read_text()
CHARACTERS = (
    "aeiou tns\n\t  'éüñ日本語한국123²½🎉👩\u2019\u200d👧İßǅ_.,;!?-()[]{}<>/\\\"@#"
    "\u0440\u00a0\u3000"
)
WORDS = ("I'm", "we'LL", "<s>", "[INST]", "<|endoftext|>", "HTTPServer", "naïve", "12345", "\r\n")
TEXTS = ["The quick brown fox doesn't jump over 12345 lazy dogs.\n"] * 20 + [SOURCES[:20_000]]


def drawn_texts(count, seed=0):
    rng = random.Random(seed)
    ranges = ((32, 127), (160, 0x3000), (0x4E00, 0x9FFF), (0x1F300, 0x1F700))
    for number in range(count):
        length = rng.randrange(1, 60)
        if number % 4 == 0:
            yield "".join(rng.choices(CHARACTERS, k=length))
        elif number % 4 == 1:
            start = rng.randrange(len(SOURCES) - 300)
            yield SOURCES[start : start + 4 * length]
        elif number % 4 == 2:
            yield " ".join(rng.choices(WORDS, k=length % 15 + 1))
        else:
            yield "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(length))


COUNTS = [2_000, pytest.param(10_000, marks=pytest.mark.campaign)]


@pytest.fixture(scope="module")
def tekken():
    """A tokenizer that Mistral published."""
    import mistral_common

    return Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"


@pytest.mark.parametrize("count", COUNTS)
def test_tekken(tekken, count):
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    theirs, ours = Tekkenizer.from_file(tekken), load_tokenizer(tekken)
    texts = list(drawn_texts(count))
    assert ours.encode_batch(texts) == [theirs.encode(each, bos=False, eos=False) for each in texts]
    assert ours.vocab_size == theirs.n_words
    assert (ours.eod_token, ours.eod_id) == ("</s>", theirs.eos_id)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("ranks", [50_256, 128_000])
def test_ranks_of_tiktoken(tekken, tmp_path, ranks, count):
    import tiktoken

    # The ranks of another published tokenizer; GPT-2's and Llama 3's own can't be fetched here.
    entries = json.loads(tekken.read_text())["vocab"][:ranks]
    path = tmp_path / "tokenizer.model"
    path.write_text("".join(f"{each['token_bytes']} {each['rank']}\n" for each in entries))
    ours = load_tokenizer(path)
    assert ours.vocab_size == {50_256: 50_257, 128_000: 128_256}[ranks]
    splits = {
        50_256: r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        128_000: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
    known = {base64.b64decode(each["token_bytes"]): each["rank"] for each in entries}
    how = {"mergeable_ranks": known, "special_tokens": {}}
    theirs = tiktoken.Encoding("theirs", pat_str=splits[ranks], **how)
    texts = list(drawn_texts(count))
    assert ours.encode_batch(texts) == [theirs.encode_ordinary(each) for each in texts]


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_vocabulary_with_merges(tmp_path, kind):
    import transformers

    record = json.loads(train_tokenizer(TEXTS, 600, ["<|endoftext|>"]).to_bytes())
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in record["model"]["merges"]
    ]
    (tmp_path / "vocab.json").write_text(json.dumps(record["model"]["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    theirs = getattr(transformers, kind).from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path / "vocab.json")
    texts = [each for each in drawn_texts(2_000) if "<|endoftext|>" not in each]
    assert ours.encode_batch(texts) == [theirs(each)["input_ids"] for each in texts]


@pytest.mark.parametrize("lower", [True, False])
def test_word_pieces(tmp_path, lower):
    import transformers

    letters = sorted({c for text in TEXTS for c in text if not c.isspace()})
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    words += ["the", "The", "fox", "##ing", "naive", "日"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    told = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    theirs = transformers.BertTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path / "vocab.txt")
    texts = list(drawn_texts(2_000))
    assert ours.encode_batch(texts) == [
        theirs(each, add_special_tokens=False)["input_ids"] for each in texts
    ]
    assert ours.encode_prompt("The fox") == theirs("The fox")["input_ids"]


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("a.tiktoken", "AA== 0\nAQ== 2\n", "line 2"),
        ("a.tiktoken", "AA== 0\nAQ== 1\n", "convert"),
        ("tekken.json", '{"config": {}, "vocab": []}', "default_vocab_size"),
        ("vocab.txt", "the\n", r"\[CLS\]"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, name, content, word):
    (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerError, match=word):
        load_tokenizer(tmp_path / name)
