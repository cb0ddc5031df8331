"""Generation that retrieves: the neighbours of each finished chunk of a prompt and its answer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from mt_data import IndexedWriter
from mt_infer import Engine, Generator, Passages, Sampling, load_run
from mt_model import GPT, RetroConfig, gpt
from mt_parallel_state import ParallelLayout, ParallelState
from mt_retro import Retriever, build_database

CHUNK, COUNT, VOCAB, CONTEXT = 4, 2, 260, 24
RETRO = RetroConfig(chunk=CHUNK, neighbours=COUNT, encoder_layers=1, first=2, every=1)
CONFIG = gpt(
    vocab_size=VOCAB,
    hidden_size=16,
    num_layers=3,
    num_heads=4,
    max_sequence_length=CONTEXT,
    init_std=0.4,
    retro=RETRO,
)
GREEDY = Sampling(temperature=0, max_tokens=CONTEXT)
PROMPT = [int(token) for token in b"to be or"]


def opened(model: GPT) -> None:
    """Fill output projections to neighbours, which start at zero."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("cross.out.weight"):
                param.copy_(torch.sin(torch.arange(param.numel())).view_as(param))


@pytest.fixture(scope="module")
def databases(tmp_path_factory) -> list[Path]:
    """Return two databases of other documents."""
    path, draw = tmp_path_factory.mktemp("databases"), np.random.default_rng(2)
    for name in ("one", "two"):
        with IndexedWriter(path / name, np.uint16) as writer:
            for _ in range(60):
                writer.add_document(draw.integers(0, VOCAB, draw.integers(1, 14)))
        build_database([path / name], path / f"db-{name}", chunk=CHUNK)
    return [path / "db-one", path / "db-two"]


@pytest.fixture(scope="module")
def retro_run(module_run, tmp_path_factory) -> Path:
    return module_run(tmp_path_factory.mktemp("retro"), CONFIG, opened)


@pytest.fixture(scope="module")
def generator(retro_run: Path) -> Generator:
    return load_run(retro_run, ParallelState(ParallelLayout()), dtype="fp64")


def by_whole_passes(generator: Generator, retrieve, prompt: list[int]) -> list[int]:
    """Greedy tokens, each by a pass over the whole text with the neighbours of all its chunks."""
    text = list(prompt)
    while len(text) < CONTEXT:
        count = len(text) // CHUNK
        batch = {"tokens": torch.tensor([text])}
        if retrieve is not None and count:
            found = retrieve([text[i * CHUNK : (i + 1) * CHUNK] for i in range(count)], COUNT)
            tokens = torch.from_numpy(np.asarray(found.tokens))[None]
            batch |= {"neighbours": tokens.clamp(min=0), "neighbour_lengths": (tokens >= 0).sum(-1)}
        with torch.no_grad():
            scores = generator.model(None, batch)[0, -1, : generator.tokenizer.vocab_size]
        token = int(scores.argmax())
        if token == generator.tokenizer.eod_id:
            break
        text.append(token)
    return text[len(prompt) :]


@pytest.mark.parametrize("length", [1, 3, 4, 8])
def test_written_tokens_are_those_of_whole_passes(generator, databases, length) -> None:
    prompt, texts = PROMPT[:length], []
    for retrieve in (None, Retriever(databases[0]), Retriever(databases[1])):
        writing = replace(generator, retrieve=retrieve)
        written = list(writing.tokens(prompt, CONTEXT, GREEDY))
        assert written == by_whole_passes(generator, retrieve, prompt)
        texts.append(written)
    assert len(texts[0]) > CHUNK
    assert len({tuple(text) for text in texts}) == len(texts)


def test_given_passages_are_read_beside_each_chunk(generator) -> None:
    given = Passages([[5, 6, 7], [9] * 8])
    written = list(replace(generator, retrieve=given).tokens(PROMPT, CONTEXT, GREEDY))
    assert written == by_whole_passes(generator, given, PROMPT)
    assert written != by_whole_passes(generator, None, PROMPT)
    for passages in ([[1] * 9], [[1]] * 3):
        with pytest.raises(ValueError, match="the model reads 2 of up to 8 tokens"):
            next(replace(generator, retrieve=Passages(passages)).tokens(PROMPT, 1, GREEDY))


def stages_write(run: Path, database: Path) -> list[int]:
    with ParallelState(ParallelLayout(pp=2)) as state:
        generator = load_run(run, state, dtype="fp64")
        return list(replace(generator, retrieve=Retriever(database)).tokens(PROMPT, 99, GREEDY))


def test_stages_hand_neighbours_on(generator, retro_run, databases, ranks) -> None:
    alone = replace(generator, retrieve=Retriever(databases[0]))
    expected = list(alone.tokens(PROMPT, 99, GREEDY))
    assert ranks(2, stages_write, retro_run, databases[0]) == [expected] * 2


def test_the_command_retrieves_from_the_named_database(
    generate, generator, retro_run, databases, tmp_path
) -> None:
    options = ["--dtype", "fp64", "--greedy"]
    texts = []
    for database in databases:
        expected = replace(generator, retrieve=Retriever(database)).complete("to be or", GREEDY)
        code, out, _ = generate(retro_run, *options, "--database", database, prompt="to be or")
        assert (code, out) == (0, f"{expected.text}\n")
        texts.append(expected.text)
    code, out, told = generate(retro_run, *options, prompt="to be or")
    assert code == 0
    assert out != f"{texts[0]}\n" != f"{texts[1]}\n"
    assert "--database" in told
    asked, answers = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    asked.write_text('{"prompt": "to be or"}\n{"prompt": "to"}\n')
    several = ["--prompts", asked, "--out", answers, *options, "--database", databases[0]]
    assert generate(retro_run, *several, prompt=None)[0] == 0
    whole = answers.read_text()
    first = json.loads(whole.splitlines()[0])["text"]
    assert first == texts[0]
    answers.write_text(whole[: len(whole) // 2])
    assert generate(retro_run, *several, prompt=None)[0] == 0
    assert answers.read_text() == whole
    several[-1] = databases[1]
    code, _, told = generate(retro_run, *several, prompt=None)
    assert code == 2
    assert "name another file" in told


def test_what_does_not_retrieve_is_refused(
    generate, generator, retro_run, saved_run, databases, tmp_path
) -> None:
    def refused(*options: object, run: Path = retro_run) -> str:
        code, _, told = generate(run, *options)
        assert code == 2
        return told

    assert "leave them out" in refused("--database", databases[0], run=saved_run)
    assert "--speculate" in refused("--speculate", "ngram")
    assert "contradict" in refused("--database", databases[0], "--passage", "be")
    with IndexedWriter(tmp_path / "long", np.uint16) as writer:
        writer.add_document(range(20))
    build_database([tmp_path / "long"], tmp_path / "db", chunk=CHUNK * 2)
    assert "chunks of 8 tokens" in refused("--database", tmp_path / "db")
    with IndexedWriter(tmp_path / "wide", np.uint16) as writer:
        writer.add_document([999] * CHUNK)
    build_database([tmp_path / "wide"], tmp_path / "db-wide", chunk=CHUNK)
    assert "token 999" in refused("--database", tmp_path / "db-wide")
    writer = IndexedWriter(tmp_path / "other", np.uint16)
    writer.add_document([9] * CHUNK)
    writer.finalize(metadata={"tokenizer_sha256": "0" * 64})
    build_database([tmp_path / "other"], tmp_path / "db-other", chunk=CHUNK)
    assert "another tokenizer" in refused("--database", tmp_path / "db-other")
    with pytest.raises(ValueError, match="mt-infer generate --database"):
        Engine(generator.model, tokenizer=generator.tokenizer)
    with pytest.raises(ValueError, match="cuda_graphs=False"):
        next(replace(generator, cuda_graphs=True).tokens(PROMPT, 1, GREEDY))
