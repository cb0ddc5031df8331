"""The command as typed: sources of every kind, what it says, and how it ends."""

import gzip
import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
from mt_data import IndexedDataset
from mt_data.cli import main
from mt_tokenizer import load_tokenizer, train_tokenizer

TEXTS = [f"document {number} says: the quick brown fox\n" * 5 for number in range(40)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "my_texts" / f"{number:02d}.txt").write_text(text)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "notes.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.json").write_text(lines)
    (tmp_path / "b.json").write_text(json.dumps([{"text": text} for text in TEXTS]))
    train_tokenizer(TEXTS, 300).save("tok.json")
    return tmp_path


def run(capsys, command):
    code = 0
    try:
        main(shlex.split(command))
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    "sources",
    [
        "my_texts",
        "notes.jsonl.gz",
        "a.json",
        "b.json",
        "'my_texts/*.txt'",
        "my_texts --glob '*.txt'",
    ],
)
def test_build_reads_what_people_have(folder, capsys, sources):
    code, out, err = run(capsys, f"build {sources} --out data/mine --vocab-size 300")
    assert (code, err) == (0, "")
    assert "data/mine.bin, .idx: 40 documents, " in out
    assert "documents end with <|eod|> (id 0)\n" in out
    assert "encoded by tokenizers\n" in out
    assert sorted(os.listdir("data")) == [
        f"mine.{ending}" for ending in ("bin", "idx", "json", "tokenizer.json")
    ]
    code, out, err = run(capsys, "peek data/mine --count 1")
    assert (code, err) == (0, "")
    assert f"{TEXTS[0]}<|eod|>" in out
    code, out, err = run(capsys, "stats data/mine")
    assert "documents end with <|eod|>" in out


def test_several_sources_are_one_dataset(folder, capsys):
    command = "build a.json my_texts --out c --tokenizer tok.json --workers 2"
    assert run(capsys, command)[0] == 0
    assert IndexedDataset("c").num_documents == 80


def test_standard_input_is_read(folder, tmp_path):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    code = "from mt_data.cli import main; main()"
    command = [sys.executable, "-c", code, "build", "-", "--out", "c", "--tokenizer", "tok.json"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert IndexedDataset("c").num_documents == 40


def test_standard_input_needs_a_tokenizer(folder, capsys):
    code, _, err = run(capsys, "build - --out c")
    assert code == 2
    assert "standard input can be read only once" in err


def test_end_of_document_is_asked_for_and_taken(folder, capsys):
    record = json.loads((folder / "tok.json").read_text())
    record["added_tokens"][0]["content"] = "<end>"
    record["model"]["vocab"]["<end>"] = record["model"]["vocab"].pop("<|eod|>")
    (folder / "tok.json").write_text(json.dumps(record))
    code, out, err = run(capsys, "build my_texts --out c --tokenizer tok.json")
    assert (code, out) == (2, "")
    assert "no special token is known to end documents; the tokenizer has '<end>'" in err
    assert "--eod NAME" in err
    code, out, err = run(capsys, "build my_texts --out c --tokenizer tok.json --eod '<end>'")
    assert (code, err) == (0, "")
    assert "documents end with <end> (id 0)" in out
    code, out, _ = run(capsys, "peek c --count 1")
    assert f"{TEXTS[0]}<end>" in out
    code, _, err = run(capsys, "build my_texts --out d --eod '<end>'")
    assert (code, "--eod names a token of --tokenizer" in err) == (2, True)


def test_dataset_is_not_replaced_unless_asked_and_not_in_use(folder, capsys):
    build = "build my_texts --out c --vocab-size 300"
    assert run(capsys, build)[0] == 0
    before = (folder / "c.bin").read_bytes()
    code, out, err = run(capsys, build)
    assert (code, out) == (2, "")
    assert err.startswith("mt-data: c.idx exists; choose another place, or replace")
    with IndexedDataset("c"):
        code, _, err = run(capsys, f"{build} --overwrite")
        assert code == 2
        assert "c.bin is in use" in err
    assert (folder / "c.bin").read_bytes() == before
    code, _, err = run(capsys, "build a.json --out c --vocab-size 280 --overwrite")
    assert (code, err) == (0, "")
    assert load_tokenizer("c.tokenizer.json").vocab_size <= 280
    assert run(capsys, "peek c")[0] == 0


def test_peek_refuses_another_tokenizer(folder, capsys):
    assert run(capsys, "build my_texts --out c --vocab-size 270")[0] == 0
    code, out, err = run(capsys, "peek c --tokenizer tok.json")
    assert (code, out) == (2, "")
    assert "tok.json: is not the tokenizer of c.bin" in err


def test_failed_build_leaves_nothing(folder, capsys):
    (folder / "bad.jsonl").write_text('{"text": "x"}\nbroken\n')
    before = sorted(os.listdir())
    code, _, err = run(capsys, "build my_texts bad.jsonl --out c --tokenizer tok.json")
    assert code == 2
    assert err == "mt-data: bad.jsonl:2: not valid JSON: Expecting value at character 1\n"
    assert sorted(os.listdir()) == before


def test_many_bad_lines_are_a_count(folder, capsys):
    (folder / "bad.jsonl").write_text('{"text": "x"}\n' + "broken\n" * 1000)
    code, out, err = run(capsys, "build bad.jsonl --out c --skip-bad --tokenizer tok.json")
    assert code == 0
    assert err.count("\n") == 21
    assert err.endswith("skipped 980 more\n")
    assert "1000 unreadable" in out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("bulid my_texts", "there is no command 'bulid'. Did you mean build?"),
        ("xyz", "there is no command 'xyz'. Known: build, "),
        ("build my_texts", "mt-data build SOURCE ... --out PREFIX"),
        ("build my_texts --out c --workers 0", "workers is 0; it must be at least 1"),
        ("build '*.nothing' --out c", "no file matches '*.nothing'"),
    ],
)
def test_slips_are_one_message(folder, capsys, command, message):
    code, out, err = run(capsys, command)
    assert (code, out) == (2, "")
    assert err.startswith("mt-data: ")
    assert message in err
    assert err.count("\n") == 1


def test_version_is_said(capsys):
    code, out, err = run(capsys, "--version")
    assert (code, err) == (0, "")
    assert out.startswith("mt-data 0.")


def test_progress_is_shown_when_asked(folder, capsys, monkeypatch):
    monkeypatch.setattr("mt_files.progress._EVERY", 0.0)
    monkeypatch.setattr("mt_data.corpus.BATCH_DOCUMENTS", 5)
    code, _, err = run(capsys, "build my_texts --out c --tokenizer tok.json --progress")
    assert code == 0
    assert "\rencoding: " in err
    assert " tokens a second, " not in err
    assert "100% of" in err
    assert " a second, 0:00 left" in err


def start(*arguments, **options):
    code = "from mt_data.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, text=True, **options
    )


@pytest.mark.parametrize("workers", ["1", "2"])
def test_ctrl_c_ends_cleanly(folder, workers):
    os.mkfifo("slow")  # its writer decides how long the build takes
    reading = os.open("slow", os.O_RDWR)
    arguments = ("build", "-", "--out", "c", "--tokenizer", "tok.json", "--workers", workers)
    process = start(*arguments, stdin=reading, start_new_session=True)
    try:
        while not any(".tmp-" in name for name in os.listdir()):
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
        os.close(reading)
    assert process.returncode == 130
    assert err == "mt-data: interrupted; nothing was written\n"
    assert not [name for name in os.listdir() if name.startswith((".c", "c."))]


def test_reader_that_goes_away_ends_it_quietly(folder, capsys):
    run(capsys, "build my_texts --out c --vocab-size 300")
    read, write = os.pipe()
    os.close(read)
    process = start("peek", "c", "--count", "40", stdout=write)
    os.close(write)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (141, "")


def test_console_without_unicode_shows_escapes(folder, capsys):
    (folder / "my_texts" / "x.txt").write_text("日本")
    run(capsys, "build my_texts --out c --tokenizer tok.json")
    process = start(
        "peek",
        "c",
        "--start",
        "40",
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")
    assert "\\u65e5\\u672c<|eod|>" in out
