"""The command line of `mt-retro`, and retrieval for chunks outside any dataset."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mt_data import PADDING, DataError, IndexedDataset, IndexedWriter
from mt_data import cli as data_cli
from mt_retro import Database, NGramEmbedding, Retriever, exact_neighbours
from mt_retro.cli import main

LINES = [f"{'the quick brown fox ' * 9}jumps over {number} lazy dogs\n" * 3 for number in range(30)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, lines in (("a", LINES[:20]), ("b", LINES[20:])):
        text = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)
    build = "build a.jsonl b.jsonl --out all --vocab-size 300"
    for command in (build, *(
        f"build {name}.jsonl --out {name} --tokenizer all.tokenizer.json" for name in "ab"
    )):  # fmt: skip
        with pytest.raises(SystemExit):
            data_cli.main(shlex.split(command))
    return tmp_path


@pytest.fixture
def run(folder, capsys):
    capsys.readouterr()

    def call(command):
        with pytest.raises(SystemExit) as stop:
            main(shlex.split(command))
        return stop.value.code, *capsys.readouterr()

    return call


def test_build_query_peek_verify(run):
    code, out, err = run("build a b --out db")
    assert (code, err) == (0, "")
    assert out.startswith("db: ")
    assert " chunks of 64 tokens, 2 datasets\nembedded by ngrams: " in out
    assert out.endswith("searched by comparing all\n")
    code, out, err = run("query db --data b --neighbours 2 --out n")
    assert (code, err) == (0, "")
    assert out.startswith("n: 2 neighbours of ")
    code, out, err = run("peek n --document 3 --count 1")
    assert (code, err) == (0, "")
    assert "--- document 3, chunk 0 of " in out
    assert "quick brown fox" in out
    assert out.count(": overlap ") == 2
    vectors = min(Path("db").glob("vectors-*"))
    code, out, err = run(f"verify n db {vectors}")
    assert (code, err) == (0, "")
    assert out.count(" are as they were written\n") == 3


def test_parts_are_for_a_scheduler(run):
    code, out, _ = run("build a b --out db --part 1/2")
    assert (code, out) == (0, "db: part 1/2 is there, and others are missing\n")
    code, _, err = run("query db --data b --out n")
    assert code == 2
    assert "db has no record.json, so it is no database; mt-retro build makes one" in err
    assert run("build a b --out db --part 2/2")[0] == 0
    assert run("query db --data b --out n --part 1/2")[0] == 0
    code, out, _ = run("query db --data b --out n --part 2/2")
    assert out.startswith("n: 2 neighbours of ")
    assert run("query db --data b --out whole")[0] == 0
    assert Path("n/ids.npy").read_bytes() == Path("whole/ids.npy").read_bytes()


def test_tokens_of_another_tokenizer_are_refused(run):
    """Their ids would be compared as if they meant the same texts."""
    Path("other.jsonl").write_text('{"text": "a quick red fox"}\n' * 9)
    with pytest.raises(SystemExit):
        data_cli.main(["build", "other.jsonl", "--out", "other", "--vocab-size", "270"])
    for command in ("build a other --out db", "query known --data other --out n"):
        run("build a --out known")
        code, _, err = run(command)
        assert code == 2
        assert "different tokenizers" in err
        assert not Path(command.split()[-1]).exists()


def test_dataset_without_a_tokenizer_is_shown_as_numbers(run):
    with IndexedWriter("bare", np.uint16) as writer:
        for number in range(3):
            writer.add_document([number, 500, 501])
    for command in ("build bare --out db --chunk 2", "query db --data bare --out n"):
        assert run(command)[0] == 0
    code, out, _ = run("peek n --document 1")
    assert code == 0
    assert "1 500\n" in out
    assert "  - " in out
    assert "document 0, chunk 0: overlap 67%\n    0 500 501\n" in out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("biuld a", "there is no command 'biuld'. Did you mean build?"),
        ("build a", "datasets and --out are required: mt-retro build PREFIX ... --out DB"),
        ("build a --out db --part 3", "a part is written like 3/16"),
        ("build a --out db --part 1/3 --parts 3", "--parts all of them; give one"),
        ("build a --out db --parts 0", "parts are 1/N to N/N"),
        ("query db --data a --out n --parts 2 --workers 0", "--workers is 0; it must be at"),
        ("query db --data a --out n --on ray", "--on says where --parts are made; give their"),
        ("build nothing --out db", "nothing.idx"),
        ("build a --out db --index IVF64,Flat", "use --index"),
        ("query db --data a", "mt-retro query DB --data PREFIX --out N"),
        ("query a --data a --out n", "a has no record.json, so it is no database"),
        ("verify", "mt-retro verify FOLDER ..."),
        ("verify nothing", "nothing has no record.json"),
        ("peek nothing", "it is no folder of neighbours; mt-retro query makes one"),
    ],
)
def test_slips_are_one_message(run, command, message):
    code, out, err = run(command)
    assert (code, out) == (2, "")
    assert err.startswith("mt-retro: ")
    assert message in err
    assert err.count("\n") == 1


def test_retriever_finds_passages_for_any_tokens(run):
    run("build a b --out db")
    database = Database("db")
    dataset = IndexedDataset("b")
    prompt = [dataset.document(2)[:64], dataset.document(5)[10:30], [1, 2]]
    found = Retriever("db")(prompt, 3)
    assert found.ids.shape == found.distances.shape == (3, 3)
    assert found.tokens.shape == (3, 3, 128)
    assert found.tokens[0, 0][:64].tolist() == dataset.document(2)[:64].tolist()
    assert found.distances[0, 0] == 0
    padded = np.full((3, 64), PADDING)
    for row, chunk in zip(padded, prompt, strict=True):
        row[: len(chunk)] = chunk
    keys = np.concatenate([block for _, block in database.vectors.blocks()])
    ids, distances = exact_neighbours(NGramEmbedding()(padded), keys, 3)
    assert (found.ids.tolist(), found.distances.tolist()) == (ids.tolist(), distances.tolist())
    many = Retriever(database, lambda chunks: NGramEmbedding()(chunks))(prompt[:1], 10**4)
    assert (many.ids[0, len(database) :] == -1).all()
    assert (many.tokens[0, len(database) :] == PADDING).all()
    for wrong, message in (([[]], "1 to 64 tokens"), ([[1] * 65], "1 to 64 tokens")):
        with pytest.raises(DataError, match=message):
            Retriever(database)(wrong, 1)
    with pytest.raises(DataError, match="use one embedding for both"):
        Retriever(database, NGramEmbedding(128))
    with pytest.raises(DataError, match=r"must be \[n, 256\]"):
        Retriever(database, lambda chunks: np.zeros((len(chunks), 3)))(prompt, 1)


def test_nothing_imports_torch():
    code = "import sys, mt_retro; [getattr(mt_retro, n) for n in mt_retro.__all__]; "
    code += "from mt_retro import cli; assert not {'torch', 'faiss', 'tyro'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
