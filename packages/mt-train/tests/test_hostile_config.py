"""Absurd and mutilated configurations are refused at once, with short messages."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from mt_files import FieldProblem
from mt_train import ConfigError, load_config

MINIMAL = """\
model: {hidden_size: 64, num_layers: 2, num_heads: 4}
data: {corpus: standard-library}
training: {steps: 2, global_batch_size: 4, micro_batch_size: 2, sequence_length: 16}
"""
TINY = (Path(__file__).parents[1] / "examples" / "tiny.yaml").read_text()
SECONDS = 5  # of this process, for what takes milliseconds


def refused(path: Path, overrides: list[str] | None = None) -> str:
    """Load, also as one process would, and return the message."""
    started = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides).check_world(1)
    assert time.process_time() - started < SECONDS
    return str(caught.value)


ABSURD = {
    "training.global_batch_size=999999999999999999": "is too large; use 10000000 or less",
    "training.global_batch_size=1000000000000": "is too large; use 10000000 or less",
    "training.steps=999999999999999999": "is too large; use 1000000000 or less",
    "training.sequence_length=100000000000": "is too large",
    "training.micro_batch_size=1000000000000": "is too large",
    "optimizer.warmup=999999999999999999": "is too large",
    "pipeline.chunks=999999999": "is too large",
    "pipeline.chunks=3": "pipeline.chunks: 3 x 1 ranks are more stages than the 2 layers",
    "parallel.cp=999999999999999989": "is too large; use 1048576 or less",
    "parallel.tp=999999999999999989": "is too large",
    "parallel.check_timeout=1e300": "is too large",
    "parallel.hang_report=1e300": "is too large",
    "model.moe={num_experts: 4, top_k: 1, capacity_factor: 1e18}": "is too large; use 65536",
    "optimizer.lr=1e39": "is too large",
    "optimizer.weight_decay=1e39": "is too large",
    "parallel.bucket_size=999999999999999999": "is too large",
    "model.num_layers=1000000": "model.num_layers: 1000000 ",
    "model.num_layers=1000000000": "model.num_layers: 1000000000 ",
    "model.hidden_size=100000000000000000": "is too large",
    "model.ffn_size=100000000000000000": "is too large",
    "model.vocab_size=100000000000000000": "is too large; use 1073741824 or less",
    "model.head_dim=100000000000000000": "is too large",
    "evaluation.micro_batch_size=1000000000000": "is too large",
    "data.vocab_size=999999999999999999": "is too large; use 10000000 or less",
    "data.corpus=" + "a" * 5000: "File name too long",
    "data.corpus=a\0b": "does not exist",
    "data.weights=[1e999]": "expected a number",
    "parallel.order=" + "tp-" * 10_000: "parallel.order",
    "parallel.cp_algorithm=[" + ",".join(["ring"] * 9000) + "]": "9000 algorithms for 2 layers",
    "parallel.cp_algorithm=[" + ",".join(["star"] * 9000) + "]": "and 8980 more problems",
}


@pytest.mark.parametrize("override", ABSURD, ids=[name[:40] for name in ABSURD])
def test_an_absurd_size_is_refused_before_anything_is_built(override: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    message = refused(path, [override])
    assert ABSURD[override] in message
    assert len(message) < 10_000


def test_a_batch_of_too_many_pieces_is_refused_before_the_schedule_is_made(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    batch = ["training.global_batch_size=10000000", "training.micro_batch_size=1"]
    assert "more than 1048576 pieces; use 10 or more" in refused(path, batch)


def test_hierarchical_groups_of_an_absurd_size_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    overrides = ["parallel.cp=999999999999999989", "parallel.cp_algorithm=hierarchical"]
    assert "parallel.cp: 999999999999999989 is too large" in refused(path, overrides)


FILES = {
    "a long flow list": "model: [" + ",".join(["1"] * 500_000) + "]\n",
    "many unknown keys": "\n".join(f"key{i}: 1" for i in range(60_000)),
    "many unknown keys of a section": MINIMAL
    + "parallel:\n"
    + "\n".join(f"  key{i}: 1" for i in range(9000)),
    "a long word": MINIMAL + "parallel: " + "x" * 900_000,
    "a long key": MINIMAL + "x" * 900_000 + ": 1",
    "open brackets": "[" * 100_000,
    "an open quote": "'" + "a\n" * 300_000,
    "a long name of an anchor": "a: &" + "x" * 900_000 + " 1",
    "a long tag": "a: !" + "x" * 900_000 + " 1",
    "many documents": "---\na: 1\n" * 1000,
    "duplicate keys": "a: 1\n" * 9000,
    "a long path": "data: {corpus: " + "x/" * 5000 + "}",
    "a long glob": "data: {corpus: ., glob: " + "x/" * 5000 + "}",
}


@pytest.mark.parametrize("name", FILES)
def test_a_large_file_gives_a_short_message_at_once(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(FILES[name])
    message = refused(path)
    assert len(message) < 10_000
    assert len(message.splitlines()) <= 21


def test_a_file_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "fifo.yaml")
    assert "a FIFO" in refused(tmp_path / "fifo.yaml")
    assert "a device" in refused(Path("/dev/zero"))
    assert "a directory" in refused(tmp_path)


def test_at_most_twenty_problems_are_shown() -> None:
    problems = [FieldProblem("a", "wrong", "run.yaml:1")] * 50
    assert str(ConfigError(problems, hidden=7)).splitlines()[-1] == "and 37 more problems"


WORDS = ["1e999", "-1", "0", "[]", "{}", "null", "[[1]]", "{a: 1}", "nan", ".inf", "'", '"', "*x"]
WORDS += [
    "&x 1",
    "!!python/object 1",
    "999999999999999999",
    "x" * 300,
    "\t",
    "\n",
    "\0",
    "é",
    "---",
]


def mutilated(text: str, generator: random.Random) -> str:
    """Change a few places of a text: cut, repeat, swap characters, put in hostile words."""
    for _ in range(generator.randint(1, 4)):
        at = generator.randrange(len(text) + 1)
        to = min(len(text), at + generator.randint(0, 12))
        kind = generator.randrange(5)
        if kind == 0:
            text = text[:at] + text[to:]
        elif kind == 1:
            text = text[:at] + text[at:to] * 3 + text[to:]
        elif kind == 2:
            text = text[:at] + chr(generator.randrange(1, 0x250)) + text[to:]
        elif kind == 3:
            text = text[:at] + generator.choice(WORDS) + text[to:]
        else:
            lines = text.splitlines(keepends=True)
            generator.shuffle(lines)
            text = "".join(lines)
    return text


@pytest.mark.parametrize("seed", range(4))
def test_mutilated_files_and_overrides_are_taken_or_refused_in_words(
    seed: int, tmp_path: Path
) -> None:
    generator = random.Random(seed)
    path = tmp_path / "run.yaml"
    for trial in range(75):
        text = mutilated(TINY, generator)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        key = generator.choice(["training.steps", "parallel.cp", "data.glob", "pipeline", ""])
        overrides = [f"{key}={generator.choice(WORDS)}"] if generator.random() < 0.3 else []
        message, started = "right", time.process_time()
        try:
            load_config(path, overrides).check_world(1)
        except ConfigError as error:
            message = str(error)
        assert 0 < len(message) < 10_000, (seed, trial)
        assert time.process_time() - started < SECONDS, (seed, trial)
