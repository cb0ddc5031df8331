"""From documents to a dataset, in the library and on the command line."""

import json
import os
import subprocess
import sys

import pytest
import sentencepiece
import tokenizers
from mt_data import DataError, Document, IndexedDataset, build_corpus, count_text_bytes
from mt_data import corpus as corpus_module
from mt_data.cli import main
from mt_tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = ["def one():\n    return 1\n", "", "naïve 日本 <|eod|>\n", "x" * 300]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


def documents(texts=TEXTS):
    return [Document(path=str(number), text=text) for number, text in enumerate(texts)]


def word_piece(texts, folder):
    engine = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    engine.normalizer = normalizers.BertNormalizer(lowercase=True)
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    engine.train_from_iterator(texts, trainer)
    return Tokenizer(engine)


def sentence_pieces(texts, folder):
    with (folder / "spm.model").open("wb") as file:
        how = {"vocab_size": 340, "byte_fallback": True, "hard_vocab_limit": False}
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=file, minloglevel=9, **how
        )
    return load_tokenizer(folder / "spm.model")


@pytest.mark.parametrize("make", [word_piece, sentence_pieces])
def test_any_tokenizer_builds_and_its_text_bytes_are_counted_exactly(make, tmp_path):
    texts = ["the quick brown fox jumps over the lazy dog"] * 20 + [
        "naïve café, 日本語 and 🎉!"
    ] * 5
    tokenizer = make(texts, tmp_path)
    documents = [Document(path="x", text=text) for text in texts]
    stats = build_corpus(documents, tmp_path / "c", tokenizer)
    dataset = IndexedDataset(tmp_path / "c")
    exact = sum(len(text.encode()) for text in texts)
    assert stats.bytes == count_text_bytes(dataset, tokenizer) == exact
    assert all(document[-1] == tokenizer.eod_id for document in map(dataset.document, range(25)))
    # Without the record they are counted by decoding: near, and exact where nothing is normalised.
    (tmp_path / "c.json").unlink()
    counted = count_text_bytes(IndexedDataset(tmp_path / "c"), tokenizer)
    assert counted == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("batch", [1, 2, 512])
@pytest.mark.parametrize("append_eod", [True, False])
def test_corpus_holds_every_document(tmp_path, tokenizer, monkeypatch, batch, append_eod):
    monkeypatch.setattr(corpus_module, "BATCH_DOCUMENTS", batch)
    stats = build_corpus(iter(documents()), tmp_path / "c", tokenizer, append_eod=append_eod)
    dataset = IndexedDataset(tmp_path / "c")
    full = [text for text in TEXTS if text]
    end = [tokenizer.eod_id] * append_eod
    assert [d.tolist() for d in dataset] == [tokenizer.encode(t) + end for t in full]
    assert stats.documents == dataset.num_documents == 3
    assert stats.empty_documents == 1
    assert stats.tokens == dataset.num_tokens
    assert stats.bytes == sum(len(text.encode()) for text in full)
    assert stats.bytes == tokenizer.token_bytes[dataset.stream(0, dataset.num_tokens)].sum()
    assert stats.bytes_per_token == stats.bytes / stats.tokens


def test_record_names_the_tokenizer(tmp_path, tokenizer):
    stats = build_corpus(documents(), tmp_path / "c", tokenizer)
    record = json.loads((tmp_path / "c.json").read_text())
    assert record["tokenizer_sha256"] == tokenizer.sha256
    assert record["vocab_size"] == tokenizer.vocab_size
    assert record["eod_id"] == tokenizer.eod_id
    assert record["bytes"] == stats.bytes
    assert record["dtype"] == "uint16"
    IndexedDataset(tmp_path / "c").verify()


def test_same_documents_give_the_same_files(tmp_path, tokenizer):
    for name in "ab":
        build_corpus(documents(), tmp_path / name, tokenizer)
    for ending in ("bin", "idx", "json"):
        assert (tmp_path / f"a.{ending}").read_bytes() == (tmp_path / f"b.{ending}").read_bytes()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([], "no document was given"),
        ([Document(path="notes.txt", text="")], "notes.txt has none"),
        (
            [Document(path="a.jsonl", text="", line=line) for line in (4, 5)],
            "none of 2 documents has any, the first is a.jsonl:4",
        ),
    ],
)
def test_a_corpus_without_text_is_named_and_leaves_nothing(tmp_path, tokenizer, given, reason):
    with pytest.raises(DataError) as error:
        build_corpus(given, tmp_path / "validation", tokenizer)
    assert str(error.value) == (
        f"there is no text for 'validation': {reason}; use a corpus with more text, or if this "
        "is a held-out part, hold out another share (mt-data build --held-out; "
        "data.validation_fraction in a run's YAML file)"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def run(capsys, *arguments):
    code = 0
    try:
        main([os.fspath(a) for a in arguments])
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


def test_command_builds_peeks_and_counts(tmp_path, source, capsys):
    prefix = tmp_path / "out" / "c"
    code, out, err = run(capsys, "build", source, "--out", prefix, "--vocab-size", "300")
    assert (code, err) == (0, "")
    assert "3 documents" in out
    assert "left out: 1 empty, 0 unreadable" in out
    assert 257 < load_tokenizer(f"{prefix}.tokenizer.json").vocab_size <= 300

    code, out, err = run(capsys, "peek", prefix, "--count", "2")
    assert (code, err) == (0, "")
    assert "def one():\n    return 1\n<|eod|>" in out
    assert "--- document 1 of 3: " in out

    code, out, err = run(capsys, "peek", prefix, "--sequence-length", "8", "--count", "1")
    assert (code, err) == (0, "")
    assert out.startswith("--- sample 0 of ")
    assert ": 9 tokens\n" in out

    code, out, err = run(capsys, "stats", prefix, "--verify")
    assert (code, err) == (0, "")
    assert "documents  3\n" in out
    assert "of text" in out
    assert "100% " in out
    assert "verified   both files match" in out


def test_command_uses_a_given_tokenizer(tmp_path, source, tokenizer, capsys):
    tokenizer.save(tmp_path / "tokenizer.json")
    arguments = ("--tokenizer", tmp_path / "tokenizer.json")
    code, _, err = run(capsys, "build", source, "--out", tmp_path / "c", *arguments)
    assert (code, err) == (0, "")
    assert load_tokenizer(tmp_path / "c.tokenizer.json").sha256 == tokenizer.sha256
    code, out, _ = run(capsys, "peek", tmp_path / "c", *arguments, "--start", "1", "--count", "1")
    assert "naïve 日本 <|eod|>\n<|eod|>" in out
    assert code == 0


def test_command_reads_a_folder_and_a_text_file(tmp_path, capsys):
    folder = tmp_path / "src"
    folder.mkdir()
    for name in ("a.py", "b.py", "c.md"):
        (folder / name).write_text(f"text of {name}")
    common = ("--vocab-size", "260")
    code, out, _ = run(capsys, "build", folder, "--out", tmp_path / "c", "--glob", "*.py", *common)
    assert code == 0
    assert "2 documents" in out
    code, out, _ = run(capsys, "build", folder / "c.md", "--out", tmp_path / "d", *common)
    assert code == 0
    assert "1 documents" in out


def test_command_skips_bad_lines_when_asked(tmp_path, source, capsys):
    with open(source, "ab") as file:
        file.write(b"broken\n")
    arguments = ("build", source, "--out", tmp_path / "c", "--vocab-size", "260")
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err == f"mt-data: {source}:5: not valid JSON: Expecting value at character 1\n"
    code, out, err = run(capsys, *arguments, "--skip-bad")
    assert code == 0
    assert "left out: 1 empty, 1 unreadable" in out
    assert err.startswith(f"skipped {source}:5: ")


def test_command_names_a_source_without_text(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.jsonl").write_text("broken\nbroken\n")
    (tmp_path / "empty.txt").write_text("")
    assert run(capsys, "build", "empty.jsonl", "--out", "c") == (
        2,
        "",
        "mt-data: empty.jsonl: has no document; give a source with text\n",
    )
    code, out, err = run(capsys, "build", "bad.jsonl", "--out", "c", "--skip-bad")
    assert (code, out) == (2, "")
    assert err.startswith("mt-data: bad.jsonl: has no readable document; the first of 2 skipped ")
    assert "skipped is bad.jsonl:1: not valid JSON" in err
    code, out, err = run(capsys, "build", "empty.txt", "--out", "c", "--vocab-size", "300")
    assert code == 2
    assert err.startswith("mt-data: there is no text for 'c': empty.txt has none; ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "nothing", "--out", "c"], "nothing: no such file or folder"),
        (["build", "source.jsonl", "--out", "c", "--vocab-size", "10"], "vocab_size is 10"),
        (["build", "source.jsonl", "--out", "c", "--key", "body"], "source.jsonl:1: no key 'body'"),
        (
            ["build", "source.jsonl", "--out", "c", "--tokenizer", "none"],
            "none: cannot read it: No such file or directory",
        ),
        (
            ["build", "source.jsonl", "--out", "c", "--tokenizer", "source.jsonl"],
            "is not a tokenizer.json",
        ),
        (
            ["build", ".", "--out", "c", "--glob", "**.jsonl"],
            "glob '**.jsonl' does not select files",
        ),
        (["peek", "nothing"], "nothing.idx: cannot read it: No such file"),
        (["stats", "nothing"], "nothing.idx: cannot read it: No such file or directory"),
        (["stats", "short"], "short.idx: has 3 bytes; the header"),
        (["stats", "nothing.bin"], "pass the prefix 'nothing'"),
    ],
)
def test_command_fails_with_one_message(tmp_path, source, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.idx").write_bytes(b"MMI")
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("mt-data: ")
    assert message in err
    assert err.count("\n") == 1


def test_peek_beyond_the_end_says_how_many_there_are(tmp_path, source, capsys):
    run(capsys, "build", source, "--out", tmp_path / "c", "--vocab-size", "260")
    code, _, err = run(capsys, "peek", tmp_path / "c", "--start", "3")
    assert (code, err) == (2, "mt-data: document 3 does not exist; there are 3\n")


def test_missing_tyro_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert run(capsys, "stats", "x") == (
        2,
        "",
        "mt-data: the mt-data command needs: pip install tyro\n",
    )


def test_import_is_light_and_brings_no_optional_library():
    code = (
        "import sys, numpy; before = set(sys.modules); import mt_data; "
        "new = set(sys.modules) - before; "
        "assert not new & {'tokenizers', 'tyro', 'torch'}, new; assert len(new) < 60, len(new); "
        "assert all(hasattr(mt_data, name) for name in mt_data.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
