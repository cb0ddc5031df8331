"""Vectors of chunks by a model: the mean of its last features, the same bits for any ranks."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mt_data import IndexedDataset, IndexedWriter
from mt_hf import from_pretrained, save_pretrained
from mt_infer.cli import main
from mt_infer.embedding import load_embedder
from mt_model import GPT, gpt, preset
from mt_retro import Chunks, Retriever, Vectors, build_database
from mt_testing import RankDied
from mt_tokenizer import train_tokenizer

CHUNK = 8


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(4)
    with IndexedWriter(folder / "tokens", np.uint16) as writer:
        for _ in range(150):
            writer.add_document(draw.integers(97, 123, draw.integers(0, 30)))
    return folder / "tokens"


@pytest.fixture(
    scope="module", params=["bert", pytest.param("decoder", marks=pytest.mark.campaign)]
)
def model_folder(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    sizes = {"vocab_size": 264, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    sizes |= {"max_sequence_length": 32, "init_std": 0.3}
    is_bert = request.param == "bert"
    config = preset("bert-base", ffn_size=64, **sizes) if is_bert else gpt(**sizes)
    save_pretrained(GPT(config, seed=3), folder)
    train_tokenizer(["to be or not to be"], 260).save(folder / "tokenizer.json")
    return folder


def embed(*options: object) -> object:
    with pytest.raises(SystemExit) as stop:
        main(["embed", *map(str, options)])
    return stop.value.code


def test_a_vector_is_the_mean_of_the_last_features(model_folder, data, tmp_path) -> None:
    assert embed(model_folder, "--data", data, "--out", tmp_path / "e", "--chunk", CHUNK) == 0
    vectors, chunks = Vectors(tmp_path / "e"), Chunks(IndexedDataset(data), CHUNK)
    assert len(vectors) == len(chunks)
    model = from_pretrained(model_folder).eval()
    for number in range(0, len(chunks), 7):
        text = chunks.tokens(np.array([number]))[0]
        text = torch.tensor(text[text >= 0].tolist())[None]
        expected = model.final_features({"tokens": text})[0].mean(0)
        found = torch.from_numpy(vectors.array.rows(number, number + 1)[0].copy())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_any_number_of_ranks_leaves_the_same_bits(model_folder, data, tmp_path) -> None:
    how = ["--data", data, "--chunk", CHUNK]
    assert embed(model_folder, *how, "--out", tmp_path / "one") == 0
    assert embed(model_folder, *how, "--out", tmp_path / "three", "--nproc", 3) == 0
    whole = (tmp_path / "one/vectors.npy").read_bytes()
    assert (tmp_path / "three/vectors.npy").read_bytes() == whole


def embed_on_ranks(ranks, nproc: int, arguments: list, kill: tuple[int, int] | None) -> list[int]:
    """Run `embed` as a launcher's ranks; kill a rank when it changes the folder for the n-th time.

    Returns how often each rank changed the folder `--out`: created, renamed or removed something.
    """

    def body() -> int:
        own, count = torch.distributed.get_rank(), 0
        changes = ("os.mkdir", "os.remove", "os.rename", "shutil.rmtree")

        def look(event: str, given: tuple) -> None:
            nonlocal count
            is_change = event in changes or (event == "open" and given[2] & os.O_CREAT)
            if is_change and str(given[0]).startswith(str(arguments[-1])):
                count += 1
                if (own, count) == kill:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(look)
        for name in ("", "LOCAL_"):
            os.environ |= {f"{name}RANK": str(own), f"{name}WORLD_SIZE": str(nproc)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # joined already
        assert embed(*arguments) == 0
        return count

    return ranks(nproc, body)


@pytest.mark.parametrize(
    ("first", "then", "kills"),
    [
        (2, 1, 2),
        *(pytest.param(*n, 25, marks=pytest.mark.campaign) for n in ((1, 2), (2, 1), (2, 3))),
    ],
)
def test_kills_and_other_numbers_of_ranks_change_no_bit(
    ranks, model_folder, data, tmp_path, record_property, first, then, kills
) -> None:
    """A kill comes when a rank creates, renames or removes a file, at any of these moments."""
    how = [model_folder, "--data", data, "--chunk", CHUNK, "--out"]
    assert embed(*how, tmp_path / "one") == 0
    moments = embed_on_ranks(ranks, first, [*how, tmp_path / "all"], None)
    draw, killed, begun = np.random.default_rng(first * 10 + then), 0, 0
    while killed < kills:
        rank, out = int(draw.integers(first)), tmp_path / f"{len([*tmp_path.iterdir()])}"
        try:
            kill = rank, int(draw.integers(moments[rank])) + 1
            embed_on_ranks(ranks, first, [*how, out], kill)
        except RankDied:
            killed += 1
            begun += any(out.glob("blocks/0*"))
            embed_on_ranks(ranks, then, [*how, out], None)
    for name in ("vectors.npy", "record.json"):
        assert len({(out / name).read_bytes() for out in tmp_path.iterdir()}) == 1
    assert all(len([*out.iterdir()]) == 2 for out in tmp_path.iterdir())
    record_property("kills", killed)
    record_property("left finished blocks", begun)


def test_a_database_of_a_model_answers_its_embedder(model_folder, data, tmp_path) -> None:
    assert embed(model_folder, "--data", data, "--out", tmp_path / "e", "--chunk", CHUNK) == 0
    vectors = [Vectors(tmp_path / "e")]
    database = build_database([data], tmp_path / "db", chunk=CHUNK, embedding=vectors)
    found = Retriever(database, load_embedder(model_folder))
    chunks = database.tokens(np.array([[5], [77]]))[:, 0, :CHUNK]
    assert found([chunk[chunk >= 0] for chunk in chunks], k=1).distances.max() < 1e-6
    save_pretrained(GPT(from_pretrained(model_folder).config, seed=4), tmp_path / "other")
    other = tmp_path / "other"
    with pytest.raises(ValueError, match="use one embedding for both"):
        Retriever(database, load_embedder(other))


def test_another_tokenizer_reads_the_text(model_folder, data, tmp_path) -> None:
    words = train_tokenizer(["abc bcd cde"] * 9, 262)
    words.save(tmp_path / "words.json")
    how = ["--data", data, "--chunk", CHUNK, "--tokenizer", tmp_path / "words.json"]
    assert embed(model_folder, *how, "--out", tmp_path / "e") == 0
    embedder = load_embedder(model_folder, source=words)
    assert Vectors(tmp_path / "e").record.embedding == embedder.name
    text = words.encode("abc cde!")
    own = train_tokenizer(["to be or not to be"], 260).encode_prompt("abc cde!")
    alike = load_embedder(model_folder)(np.array([own]))
    np.testing.assert_allclose(embedder(np.array([text])), alike, rtol=1e-5, atol=1e-6)


def test_what_can_not_be_embedded_is_refused(model_folder, data, tmp_path, capsys) -> None:
    with IndexedWriter(tmp_path / "wide", np.uint16) as writer:
        writer.add_document([999] * CHUNK)
    assert embed(model_folder, "--data", tmp_path / "wide", "--out", tmp_path / "e") == 2
    assert "--tokenizer FILE" in capsys.readouterr().err
    writer = IndexedWriter(tmp_path / "other", np.uint16)
    writer.add_document([99] * CHUNK)
    writer.finalize(metadata={"tokenizer_sha256": "0" * 64})
    assert embed(model_folder, "--data", tmp_path / "other", "--out", tmp_path / "e") == 2
    assert "other.tokenizer.json" in capsys.readouterr().err
    how = ["--data", data, "--out", tmp_path / "f", "--chunk", 64]
    assert embed(model_folder, *how) == 0
    assert embed(model_folder, "--data", data, "--out", tmp_path / "f", "--chunk", 8) == 1
