"""An engine follows a training run: its answers come from the step that they name."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from mt_ckpt import RunFolder, hold_checkpoint, latest_checkpoint
from mt_files import build
from mt_infer import Completion, Engine, Sampling
from mt_infer.receipts import Receipt, answered

OPTIONS = ("training.steps=100000", "checkpoint.every=2", "checkpoint.keep=2")
OPTIONS += ("optimizer.schedule=constant", "model.qk_norm=none")
# A mixture whose router has a bias that no optimizer updates; the head is tied.
MOE = "model.moe={num_experts: 4, top_k: 2, ffn_size: 16, score: sigmoid, bias_rate: 0.01}"
PROMPTS = [[5, 9, 3, 70, 81], [200, 17], [5, 9, 3, 70, 81, 90, 14]]
# Without cached blocks the same prompts make the same passes, and so the same bits.
SIZES = {"blocks": 64, "block_size": 4, "prefix_cache": False, "batch_invariant": False}
GREEDY = Sampling(temperature=0, max_tokens=12, seed=0, logprobs=0)


@contextmanager
def training(command: list[str]) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        yield
        assert process.poll() is None, process.communicate()[1].decode()
    finally:
        process.terminate()
        process.communicate(timeout=60)


def newer_step(folder: Path, than: int) -> int:
    """Wait for the checkpoint after a step, and return its step."""
    deadline = time.monotonic() + 60
    while (found := latest_checkpoint(folder)) is None or step_of(found) <= than:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return step_of(found)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def memory() -> tuple[int, int]:
    """Bytes of all tensors that Python holds, and the process's resident memory."""
    gc.collect()
    held = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return sum(x.nbytes for x in held), pages * os.sysconf("SC_PAGESIZE")


def swap(
    engine: Engine, run: RunFolder, before: list[Completion], *, finish: bool
) -> list[Completion]:
    """Load a newer step while requests run, and return what a fresh engine of it answers."""
    stream = engine.stream(PROMPTS, GREEDY)
    begun = [next(stream) for _ in range(4 * len(PROMPTS))]  # four tokens of each
    newer_step(run.checkpoints, than=engine.step)
    with hold_checkpoint(run.checkpoints) as path:  # saves go on, and remove steps beside it
        assert engine.load_step(step_of(path), finish=finish) == engine.step == step_of(path)
        fresh = Engine.from_folder(run.path, step=engine.step, **SIZES)
    expected = fresh.generate(PROMPTS, GREEDY)
    ends = {each.index: each.completion for each in [*begun, *stream] if each.completion}
    assert engine.generate(PROMPTS, GREEDY) == expected
    for index, (old, prompt) in enumerate(zip(before, PROMPTS, strict=True)):
        ended = ends[index]
        if finish:
            assert ended == old
            continue
        assert (ended.step, ended.tokens[:4]) == (engine.step, old.tokens[:4])
        (rest,) = fresh.generate(prompt + ended.tokens[:4], GREEDY)
        assert ended.tokens[4:] == rest.tokens[: len(ended.tokens) - 4]
        # The chunks are others, hence to the rounding.
        assert ended.logprobs[4:] == pytest.approx(rest.logprobs[: len(ended.tokens) - 4], abs=1e-4)
    return expected


@pytest.mark.parametrize(
    ("swaps", "model"),
    [
        (4, MOE),
        pytest.param(20, MOE, marks=pytest.mark.campaign),
        pytest.param(20, "model.hidden_size=128", marks=pytest.mark.campaign),
    ],
)
def test_an_engine_follows_a_run_that_trains_and_removes_its_old_steps(
    swaps, model, tiny, tmp_path
) -> None:
    run, taken = RunFolder(tmp_path / "run"), []
    with training(tiny.command(run.path, *OPTIONS, model)):
        first = newer_step(run.checkpoints, than=0)
        engine = Engine.from_folder(run.path, **SIZES)
        answers = engine.generate(PROMPTS, GREEDY)
        steps = [answers[0].step]
        for index in range(swaps):
            answers = swap(engine, run, answers, finish=index % 2 == 0)
            steps.append(answers[0].step)
            taken.append(memory())
        assert steps == sorted(set(steps))
        newer_step(run.checkpoints, than=steps[-1] + 2)
        assert first not in map(step_of, run.checkpoints.glob("step_*"))
    tensors, resident = zip(*taken, strict=True)
    assert len(set(tensors)) == 1
    assert resident[-1] - resident[swaps // 4] < 16 << 20, [x >> 20 for x in resident]
    biases = [x for name, x in engine.model.named_buffers() if name.endswith("expert_bias.value")]
    assert bool(biases) == (model == MOE)
    assert all(each.any() for each in biases)


@contextmanager
def following(run: Path, log: Path) -> Iterator[str]:
    """Serve a run with `--follow`, and yield the address."""
    command = [sys.executable, "-m", "mt_infer", "serve", str(run), "--port=0", "--follow"]
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        assert line.startswith("listening on http://"), log.read_text()
        yield line.split()[-1]
        server.terminate()
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.communicate()


def completion(url: str, **fields: Any) -> dict[str, Any]:
    """Return a server's answer; an error of it is an HTTPError."""
    headers = {"Content-Type": "application/json"}
    body = json.dumps({"receipt": True, "max_tokens": 12} | fields).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=120) as found:
        return json.load(found)


@pytest.mark.campaign
def test_answers_of_a_server_beside_a_run_that_trains_replay_at_the_step_they_name(
    tiny, tmp_path
) -> None:
    run, is_over = RunFolder(tmp_path / "run"), threading.Event()
    found: dict[int, list[dict[str, Any]]] = {}

    def ask(client: int, url: str) -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            seed = 1000 * number + client
            each = completion(url, prompt=PROMPTS[number % len(PROMPTS)], seed=seed)
            found.setdefault(each["receipt"]["step"], []).append(each)

    often = "checkpoint.every=10", "checkpoint.keep=1000"
    with training(tiny.command(run.path, *OPTIONS, *often)):
        newer_step(run.checkpoints, than=0)
        with following(run.path, tmp_path / "log") as url, ThreadPoolExecutor(16) as pool:
            clients = [pool.submit(ask, client, url) for client in range(16)]
            while len(found) < 20 and not any(each.done() for each in clients):
                time.sleep(0.1)
            is_over.set()
            for each in clients:
                each.result()
    assert len(found) >= 20
    for step, answers in found.items():
        engine = Engine.from_folder(run.path, step=step, blocks=256)
        name = f"mt-{engine.digest[:16]}-step{step}-"
        assert all(each["system_fingerprint"].startswith(name) for each in answers)
        receipts = [build(Receipt, each["receipt"]) for each in answers]
        assert {each.weights for each in receipts} == {engine.digest}
        prompts = [list(each.prompts[0]) for each in receipts]
        again = engine.generate(prompts, [each.sampling for each in receipts])
        assert [answered([each]) for each in again] == [each.answers for each in receipts]
