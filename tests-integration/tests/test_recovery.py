"""Killed at any moment, the same command ends in the same bits."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from mt_testing import KillAt, RankDied

OPTIONS = ("parallel.tp=2", "checkpoint.every=2", "training.micro_batch_size=2")
LONG = (*OPTIONS, "training.steps=20", "checkpoint.every=4")
POINTS = {
    "train.forward_backward": 8,
    "train.reduce": 8,
    "train.update": 8,
    "save.begin": 4,
    "save.arrays": 4,
    "save.data": 4,
    "save.manifest": 4,
    "save.before_rename": 4,
    "save.after_rename": 4,
    "save.after_latest": 4,
}
RANK_ZERO_ONLY = {
    "save.manifest",
    "save.before_rename",
    "save.after_rename",
    "save.after_latest",
    "save.arrays",
}


def seeded_kills(count: int, seed: int) -> list[tuple[str, int, int]]:
    """Every named point once, then at random: (point, how often it was reached, rank)."""
    rng = random.Random(seed)
    points = [*POINTS, *rng.choices(list(POINTS), k=max(0, count - len(POINTS)))][:count]
    return [
        (point, rng.randint(1, POINTS[point]), 0 if point in RANK_ZERO_ONLY else rng.randint(0, 1))
        for point in points
    ]


@pytest.fixture(scope="module")
def undisturbed(tiny, tmp_path_factory) -> Path:
    return tiny.train(tmp_path_factory.mktemp("undisturbed"), *OPTIONS, nproc=2)


def assert_equal_bits(run: Path, expected: Path, arrays, losses, step: int = 8) -> None:
    ours, theirs = arrays(run, step, prefix=""), arrays(expected, step, prefix="")
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)
    assert losses(run) == losses(expected)


# CI kills at some points; the campaign at each, twice.
KILLS = [
    pytest.param(*kill, marks=() if index == 0 else pytest.mark.campaign)
    for index, kill in enumerate(seeded_kills(20, seed=7))
]


@pytest.mark.parametrize(("point", "nth", "rank"), KILLS)
def test_a_killed_rank_continues_to_the_same_bits(
    point, nth, rank, tiny, undisturbed, tmp_path, arrays, losses
) -> None:
    with pytest.raises(RankDied, match=f"rank {rank}"):
        tiny.train(tmp_path, *OPTIONS, nproc=2, on_event=KillAt(point, rank=rank, nth=nth))
    tiny.train(tmp_path, *OPTIONS, nproc=2)
    assert_equal_bits(tmp_path, undisturbed, arrays, losses)


# CI kills a rank once while a thread writes.
BACKGROUND_KILLS = [
    pytest.param(*kill, marks=() if index == 0 else pytest.mark.campaign)
    for index, kill in enumerate(
        [("save.data", 3, 1), ("save.manifest", 2, 0), *seeded_kills(20, seed=8)]
    )
]


@pytest.mark.parametrize(("point", "nth", "rank"), BACKGROUND_KILLS)
def test_a_rank_killed_beside_saves_in_the_background_continues_to_the_same_bits(
    point, nth, rank, tiny, undisturbed, tmp_path, arrays, losses
) -> None:
    options = (*OPTIONS, "checkpoint.async=true")
    with pytest.raises(RankDied, match=f"rank {rank}"):
        tiny.train(tmp_path, *options, nproc=2, on_event=KillAt(point, rank=rank, nth=nth))
    tiny.train(tmp_path, *options, nproc=2)
    assert_equal_bits(tmp_path, undisturbed, arrays, losses)


@pytest.mark.parametrize(
    ("point", "nth", "steps", "nproc"),
    [
        ("train.update", 6, {4}, 2),
        pytest.param("train.update", 8, {6}, 1, marks=pytest.mark.campaign),
        pytest.param("copy.piece", 3, {4, 6}, 2, marks=pytest.mark.campaign),
        pytest.param("copy.whole", 3, {6}, 2, marks=pytest.mark.campaign),
    ],
)
def test_a_killed_rank_continues_from_the_copies_in_memory(
    point, nth, steps, nproc, tiny, undisturbed, tmp_path, arrays, losses
) -> None:
    (memory := tmp_path / "memory").mkdir()
    out, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    own = ("checkpoint.every=null", "checkpoint.copy_every=2", f"checkpoint.copy_dir={memory}")
    with pytest.raises(RankDied):
        tiny.train(out, *OPTIONS, *own, nproc=2, on_event=KillAt(point, rank=1, nth=nth))
    assert not list(checkpoints.glob("step_*"))
    tiny.train(out, *OPTIONS, *own, f"parallel.tp={nproc}", nproc=nproc)
    if nproc == 2:
        assert_equal_bits(out, undisturbed, arrays, losses)
    assert losses(out) == pytest.approx(losses(undisturbed), rel=1e-6)
    saved = {int(path.name[5:]) for path in checkpoints.glob("step_*")}
    assert len(saved) == 2
    assert saved <= steps | {8}
    assert not list(memory.rglob("rank_*"))


# What a kind of run keeps beside weights and moments has to come back too: the shards, the
# router's balance, scales of fp8, states in the host's memory, the loss scale, SOAP's bases.
KINDS = {
    "zero3": ("parallel.tp=1", "data_parallel.strategy=full"),
    "moe": (
        "parallel.tp=1",
        "parallel.ep=2",
        "model.moe={num_experts: 4, top_k: 2, ffn_size: 16, score: sigmoid, bias_rate: 0.01}",
    ),
    "fp8": ("precision.recipe=delayed", "training.dtype=bf16", "precision.history=4"),
    "offloaded": ("parallel.tp=1", "data_parallel.strategy=optimizer", "optimizer.offload=1"),
    "fp16": ("training.dtype=fp16", "optimizer.loss_scale=dynamic"),
    "soap": ("optimizer.name=soap", "optimizer.soap_frequency=3"),
}


@pytest.mark.campaign
@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_run_continues_to_the_same_bits(
    kind, in_background, tiny, tmp_path, arrays, losses
) -> None:
    options = (*OPTIONS, *KINDS[kind], f"checkpoint.async={str(in_background).lower()}")
    undisturbed = tiny.train(tmp_path / "undisturbed", *options, nproc=2)
    seed = list(KINDS).index(kind) + 10 * in_background
    drawn = seeded_kills(len(POINTS) + 5, seed=seed)[len(POINTS) :]
    for turn, (point, nth, rank) in enumerate(drawn):
        out = tmp_path / str(turn)
        with pytest.raises(RankDied, match=f"rank {rank}"):
            tiny.train(out, *options, nproc=2, on_event=KillAt(point, rank=rank, nth=nth))
        tiny.train(out, *options, nproc=2)
        assert_equal_bits(out, undisturbed, arrays, losses)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill_once(command: list[str], out: Path, rng: random.Random) -> bool:
    """Start the real command and SIGKILL one of its ranks at a random moment of training."""
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    deadline = time.monotonic() + 120
    while not (out / "metrics.jsonl").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.8))
    ranks = children(process.pid) if process.poll() is None else []
    if ranks:
        os.kill(rng.choice(ranks), signal.SIGKILL)
    message = process.communicate(timeout=60)[1]
    if process.returncode:
        assert "was killed by SIGKILL" in message
        assert "Traceback" not in message  # the survivors say nothing of their own
    return process.returncode != 0


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.campaign) for n in range(1, 20))]
)
def test_kill_9_of_the_real_command_continues_to_the_same_bits(
    seed, tiny, tmp_path_factory, tmp_path, arrays, losses, cli, record_property
) -> None:
    undisturbed = tiny.train(tmp_path_factory.mktemp("long"), *LONG, nproc=2)
    command = tiny.command(tmp_path, *LONG, nproc=2, real=True)
    rng = random.Random(seed)
    while not kill_once(command, tmp_path, rng):  # it was done before the kill came: once more
        shutil.rmtree(tmp_path)
    record_property("last step before the kill", max(losses(tmp_path), default=0))
    finished = cli(*tiny.command(tmp_path, *LONG, nproc=2))
    assert finished.returncode == 0, finished.stderr
    assert_equal_bits(tmp_path, undisturbed, arrays, losses, step=20)


def torchrun(command: list[str], rendezvous: str, nodes: int) -> list[list[str]]:
    """Return the commands that start the same run under torchrun, one for each node."""
    program = command[command.index("-m") + 1 : command.index("--nproc")]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "1"]
    if rendezvous == "static":
        where = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    start = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "3", *where]
    start += ["--nnodes", str(nodes), "--nproc-per-node", str(2 // nodes)]
    start += ["--monitor-interval", "0.1"]  # seconds between looks at the ranks
    ranked = [["--node-rank", str(node)] if rendezvous == "static" else [] for node in range(nodes)]
    return [[*start, *node, "-m", *program] for node in ranked]


# With two agents the one that failed counts alone.
TORCHRUN_KILLS = [
    pytest.param(*case, seed, marks=pytest.mark.campaign)
    for case, seeds in ((("c10d", 2), 6), (("static", 1), 7), (("c10d", 1), 7))
    for seed in range(seeds)
]


@pytest.mark.parametrize(("rendezvous", "nodes", "seed"), TORCHRUN_KILLS)
def test_torchrun_starts_killed_ranks_again_and_they_end_in_the_same_bits(
    rendezvous, nodes, seed, tiny, undisturbed, tmp_path, arrays, losses, record_property
) -> None:
    rng, log = random.Random(seed), tmp_path / "log"
    commands = torchrun(tiny.command(tmp_path / "run", *OPTIONS, nproc=2), rendezvous, nodes)
    with log.open("w") as output:
        agents = [subprocess.Popen(each, stdout=output, stderr=output) for each in commands]
    deadline = time.monotonic() + 120
    lines, metrics = rng.randint(1, 5), tmp_path / "run" / "metrics.jsonl"
    record_property("steps before the kill, at least", lines)
    while not metrics.exists() or metrics.read_text().count("\n") < lines:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.005)
    ranks = [rank for agent in agents for rank in children(agent.pid)]
    os.kill(rng.choice(ranks), signal.SIGKILL)
    assert [agent.wait(timeout=120) for agent in agents] == [0] * nodes, log.read_text()
    assert log.read_text().count(" parameters, ") == 2  # the first restart was enough
    assert_equal_bits(tmp_path / "run", undisturbed, arrays, losses)


def test_sigterm_saves_and_exits_with_75(tiny, tmp_path, losses, cli, arrays) -> None:
    steps = "training.steps=100000"
    command = tiny.command(tmp_path, steps, "parallel.tp=2", nproc=2)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (tmp_path / "metrics.jsonl").exists() or not losses(tmp_path):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert "stopped by SIGTERM" in output
    step = max(losses(tmp_path))
    assert arrays(tmp_path, step)
    assert (tmp_path / "loss.png").exists()


def test_a_finished_run_says_so_and_changes_nothing(tiny, undisturbed, cli) -> None:
    metrics = undisturbed / "metrics.jsonl"
    before = metrics.read_text()
    finished = cli(*tiny.command(undisturbed, *OPTIONS, nproc=2))
    assert finished.returncode == 0, finished.stderr
    assert "finished: " in finished.stdout
    assert metrics.read_text() == before


def test_another_sequence_length_is_refused_in_the_same_folder(tiny, undisturbed, cli) -> None:
    command = tiny.command(undisturbed, "training.sequence_length=64", "training.steps=40")
    finished = cli(*command)
    assert finished.returncode == 1
    assert "training.sequence_length: saved with 32, now 64" in finished.stderr
    assert "checkpoint.load_mode=weights" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_another_batch_size_and_layout_go_on_in_the_same_folder(
    tiny, undisturbed, tmp_path, losses
) -> None:
    out = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    changes = ("training.global_batch_size=16", "training.micro_batch_size=4", "training.steps=12")
    tiny.train(out, *changes, nproc=2)
    alone = Path(shutil.copytree(undisturbed, tmp_path / "alone"))
    tiny.train(alone, *changes)
    assert sorted(losses(out)) == list(range(1, 13))
    assert losses(out) == pytest.approx(losses(alone), rel=1e-5)


def test_another_seed_is_refused_before_anything_of_the_run_changes(tmp_path, cli) -> None:
    example = Path(__file__).parents[2] / "packages" / "mt-train" / "examples" / "tiny.yaml"
    command = [sys.executable, "-m", "mt_train", "run", example, "--out", tmp_path / "out"]
    assert cli(*command, "training.steps=2").returncode == 0
    tokenizer = (tmp_path / "out" / "tokenizer.json").read_bytes()
    refused = cli(*command, "training.steps=2", "data.vocab_size=400")
    assert refused.returncode == 2
    assert "belongs to a run with other data settings" in refused.stderr
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tokenizer
