"""A dataset is the same whoever encodes its texts."""

import pytest
from mt_data import DataError, Document, IndexedDataset, build_corpus, dataset_tokenizer
from mt_tokenizer import Encoder, TokenizerError, train_tokenizer
from mt_tokenizer import encoder as encoder_module
from mt_tokenizer import fast as fast_module
from mt_tokenizer.fast import fast_encoder

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


def documents(texts):
    return [Document(path=str(number), text=text) for number, text in enumerate(texts)]


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
        pytest.raises(TokenizerError, match="has no place to cut it"),
    ):
        build_corpus(given, tmp_path / "a", tokenizer, encoder=encoder)
    assert list(tmp_path.iterdir()) == []


def test_lone_surrogate_names_its_document(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"^7: has a lone surrogate at character 1"):
        build_corpus([Document(path="7", text="a\ud800")], tmp_path / "a", tokenizer)


def test_tokenizer_is_kept_beside_the_data_and_checked(tmp_path, tokenizer):
    given = train_tokenizer(TEXTS, 400, special=["<end>"])
    build_corpus(documents(TEXTS), tmp_path / "a", given)
    dataset = IndexedDataset(tmp_path / "a")
    kept = dataset_tokenizer(dataset)
    assert (kept.sha256, kept.eod_token) == (given.sha256, "<end>")
    other = tmp_path / "other.json"
    tokenizer.save(other)
    with pytest.raises(TokenizerError, match="special token"):
        dataset_tokenizer(dataset, other)
    build_corpus(documents(TEXTS), tmp_path / "b", tokenizer)
    train_tokenizer(TEXTS, 300).save(other)
    with pytest.raises(DataError, match=r"other\.json: is not the tokenizer of .*b\.bin"):
        dataset_tokenizer(IndexedDataset(tmp_path / "b"), other)
    other.replace(tmp_path / "b.tokenizer.json")
    with pytest.raises(DataError, match="is not the tokenizer of"):
        dataset_tokenizer(IndexedDataset(tmp_path / "b"))
