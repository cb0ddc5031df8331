"""Receipts make the same answers again, and say what differs."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from mt_infer import Engine, Sampling
from mt_infer.cli import main
from mt_infer.receipts import read_receipt
from mt_infer.server import create_app
from mt_model import gpt
from serving import Site, served

CHOICES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.8},
    {"top_k": 20, "presence_penalty": 1.0, "n": 2},
    {"min_p": 0.02, "logit_bias": {"5": 3.0}, "stop": ["zz"]},
    {"typical_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": -0.5},
]

REPLAYS = """
import sys
from mt_infer.cli import main

folder, *files = sys.argv[1:]
for file in files:
    try:
        main(["replay", file, "--model", folder])
    except SystemExit as stop:
        if stop.code:
            raise
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from conftest import _write_run

    sizes: Any = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "init_std": 0.2}
    config = gpt(vocab_size=264, max_sequence_length=64, **sizes)
    return _write_run(tmp_path_factory.mktemp("receipts"), config)


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[Site]:
    with served(create_app(Engine.from_folder(folder, blocks=256, max_batch=16))) as found:
        yield found


def request(number: int) -> dict[str, Any]:
    rng = random.Random(number)
    prompt = [rng.randrange(256) for _ in range(rng.randint(1, 30))]
    return {"prompt": prompt, "max_tokens": rng.randint(1, 20), "seed": number} | rng.choice(
        CHOICES
    )


def receipts(site: Site, number: int, path: Path) -> list[Path]:
    """Files with answers to some clients at once."""

    def one(index: int) -> Path:
        found = site.post("/v1/completions", request(index) | {"receipt": True})
        assert found.status == 200, found.text
        file = path / f"answer-{index}.json"
        file.write_text(found.text)
        return file

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, range(number)))


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[object, str]]:
    """Exit code and output of `mt-infer replay` in this process."""

    def call(file: Path, folder: Path) -> tuple[object, str]:
        with pytest.raises(SystemExit) as stop:
            main(["replay", str(file), "--model", str(folder)])
        return stop.value.code, "".join(capsys.readouterr())

    return call


@pytest.mark.parametrize(
    ("number", "counts"), [(6, [1]), pytest.param(100, [1, 2], marks=pytest.mark.campaign)]
)
def test_receipts_replay_on_any_number_of_threads(
    site: Site, folder: Path, tmp_path: Path, replay: Any, number: int, counts: list[int]
) -> None:
    threads = torch.get_num_threads()
    try:
        for file in receipts(site, number, tmp_path):
            for count in counts:
                torch.set_num_threads(count)
                code, said = replay(file, folder)
                assert code == 0, said
                assert "bit for bit" in said
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("number", "counts"), [(1, "2"), pytest.param(100, "12", marks=pytest.mark.campaign)]
)
def test_receipts_replay_in_a_fresh_process(
    site: Site, folder: Path, tmp_path: Path, number: int, counts: str
) -> None:
    command = [sys.executable, "-c", REPLAYS, str(folder), *receipts(site, number, tmp_path)]
    for count in counts:
        own = os.environ | {"OMP_NUM_THREADS": count, "OMP_WAIT_POLICY": "PASSIVE"}
        done = subprocess.run(command, capture_output=True, text=True, env=own, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("bit for bit") == number


def test_what_differs_is_named(site: Site, folder: Path, tmp_path: Path, replay: Any) -> None:
    (file,) = receipts(site, 1, tmp_path)
    body = json.loads(file.read_text())
    body["receipt"]["answers"][0]["tokens"][0] ^= 1
    file.write_text(json.dumps(body))
    code, said = replay(file, folder)
    assert code == 1
    assert "answer 0: other tokens from number 0 on" in said
    body["receipt"]["weights"] = "0" * 64
    file.write_text(json.dumps(body["receipt"]))
    code, said = replay(file, folder)
    assert code == 1
    assert f"weights: {'0' * 64} then" in said
    file.write_text("{}")
    code, said = replay(file, folder)
    assert code != 0
    assert "weights" in said


def test_a_changed_bit_of_the_weights_is_named(
    site: Site, folder: Path, tmp_path: Path, replay: Any
) -> None:
    (file,) = receipts(site, 1, tmp_path)
    spoiled = Path(shutil.copytree(folder, tmp_path / "spoiled"))
    step = read_receipt(file).step
    chunks = (spoiled / "checkpoints" / f"step_{step:08}").rglob("c.*")
    chunk = next(each for each in sorted(chunks) if "qkv" in str(each))
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 1
    chunk.write_bytes(content)
    code, said = replay(file, spoiled)
    assert code == 1
    assert "qkv" in said


def test_32_clients_get_the_tokens_of_the_engine_alone(site: Site, folder: Path) -> None:
    lone = Engine.from_folder(folder, blocks=256, max_batch=1, prefix_cache=False)

    def one(number: int) -> tuple[list[list[int]], list[list[float]]]:
        streams = number % 2 == 0
        body = request(number) | {"receipt": True, "stream": streams}
        text = site.post("/v1/completions", body).text
        if streams:
            lines = [each.removeprefix("data: ") for each in text.split("\n\n")]
            text = next(each for each in lines if '"receipt"' in each)
        answers = json.loads(text)["receipt"]["answers"]
        return [each["tokens"] for each in answers], [each["logprobs"] for each in answers]

    with ThreadPoolExecutor(32) as pool:
        found = list(pool.map(one, range(32)))
    for number, (tokens, logprobs) in enumerate(found):
        how = request(number)
        expected = lone.generate(how.pop("prompt"), Sampling(logprobs=0, **how))
        assert tokens == [each.tokens for each in expected]
        assert logprobs == [each.logprobs for each in expected]
