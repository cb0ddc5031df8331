"""A run that gets a stop request, at any point, saves and can be continued."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest


def test_a_stop_during_evaluation_is_obeyed_before_the_next_step(tiny, losses, tmp_path) -> None:
    out = tmp_path / "run"

    def at_evaluation(name: str) -> None:
        if name == "evaluate.chunk":
            os.kill(os.getpid(), signal.SIGTERM)

    tiny.train(out, "evaluation.every=4", nproc=1, on_event=at_evaluation)
    assert max(losses(out)) == 4
    assert (out / "checkpoints" / "step_00000004").is_dir()
    tiny.train(out, nproc=1)
    assert max(losses(out)) == 8


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.campaign), 2])
def test_sigterm_at_the_first_step_saves_and_exits_with_75(tiny, tmp_path, nproc) -> None:
    out = tmp_path / "run"
    command = tiny.command(out, "training.steps=100000", "training.micro_batch_size=4", nproc=nproc)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # "model ...": the run is about to take its first step
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=100)
    assert process.returncode == 75, errors.decode()
    assert b"stopped by SIGTERM" in output
    assert (out / "checkpoints" / "latest").is_file()


def test_tokens_of_another_tokenizer_are_refused(tiny, cli, tmp_path) -> None:
    from mt_tokenizer import train_tokenizer

    other = tmp_path / "other.json"
    train_tokenizer(["some words", "and other words"], 300).save(other)
    result = cli(*tiny.command(tmp_path / "run", f"data.tokenizer={other}"))
    assert result.returncode == 2
    assert "data.tokenizer: " in result.stderr
    assert "was made with another tokenizer" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_checkpoint_of_another_program_is_refused(tiny, cli, tmp_path) -> None:
    import torch
    from mt_ckpt import TensorShard, save_checkpoint

    shard = TensorShard("w", torch.ones(2), global_shape=(2,), offsets=(0,))
    save_checkpoint(tmp_path / "foreign", 1, [shard], {"name": "not ours"})
    step = tmp_path / "foreign" / "step_00000001"
    result = cli(*tiny.command(tmp_path / "run", f"checkpoint.load={step}"))
    assert result.returncode == 1
    assert "is not that of an mt-train run: it lacks" in result.stderr
    assert "Traceback" not in result.stderr


def test_master_weights_of_another_width_are_refused(tiny, cli, tmp_path) -> None:
    out = tiny.train(tmp_path / "run", "training.steps=2", "training.dtype=fp32")
    result = cli(*tiny.command(out, "training.dtype=fp64"))
    assert result.returncode == 1
    assert "training.dtype: saved with fp32, now fp64" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.campaign
def test_compiled_training_gives_the_losses_of_eager(tiny, losses, cli, tmp_path) -> None:
    eager = tiny.train(tmp_path / "eager", "training.steps=3")
    command = tiny.command(tmp_path / "compiled", "training.steps=3", "training.compile=true")
    result = cli(*command, timeout=300)
    assert result.returncode == 0, result.stderr
    assert losses(tmp_path / "compiled") == pytest.approx(losses(eager), rel=1e-5)


def test_the_config_left_behind_runs_again_from_anywhere(tiny, cli, losses, tmp_path) -> None:
    first = tiny.train(tmp_path / "first", "training.steps=2")
    again = [sys.executable, "-m", "mt_train", "run", first / "config.yaml"]
    assert cli(*again, "--out", tmp_path / "again").returncode == 0
    assert losses(tmp_path / "again") == losses(first)


def begun(process: subprocess.Popen, path) -> None:
    """Wait until a file of the run is there and not empty."""
    deadline = time.monotonic() + 120
    while not path.exists() or (path.name != ".lock" and not path.stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


ENDLESS = ("training.steps=1000000", "checkpoint.every=null")


@pytest.mark.parametrize("how", ["SIGHUP", "SIGINT", "a pipe nobody reads", "a full disk"])
def test_whatever_ends_a_run_it_saves_first(how, tiny, tmp_path, losses, arrays) -> None:
    command = tiny.command(tmp_path, *ENDLESS, "logging.every=1")
    with open("/dev/full", "w") as full:
        stdout = full if how == "a full disk" else subprocess.PIPE
        with subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE) as process:
            begun(process, tmp_path / "metrics.jsonl")
            if how == "a pipe nobody reads":
                process.stdout.close()
                process.stdout = None
            elif how.startswith("SIG"):
                process.send_signal(getattr(signal, how))
            output, errors = process.communicate(timeout=100)
    assert process.returncode == 75, errors.decode()
    assert (b"once more ends it at once" in errors) == how.startswith("SIG")
    said = (output or b"") + errors
    assert b"the same command continues" in said
    assert b"Traceback" not in said
    assert arrays(tmp_path, max(losses(tmp_path)))


def test_a_second_signal_ends_at_once_and_says_what_is_saved(tiny, tmp_path) -> None:
    command = tiny.command(tmp_path, *ENDLESS)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        begun(process, tmp_path / "metrics.jsonl")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 75
    assert b"ended at once; nothing is saved" in errors


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_signal_while_the_data_is_built_ends_at_once(tiny, tmp_path, nproc) -> None:
    out = tmp_path / "run"
    corpus = ("data.train=[]", "data.validation=null", "data.tokenizer=null")
    command = tiny.command(
        out, *corpus, "data.corpus=standard-library", "training.micro_batch_size=4", nproc=nproc
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        begun(process, out / ".lock")
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=100)
    assert time.monotonic() - started < 10
    assert process.returncode == 75
    assert b"no step was trained" in errors
    assert b"saved" not in output
    assert not (out / "checkpoints").exists()


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.campaign), 2])
def test_all_ranks_save_when_the_time_has_passed(tiny, tmp_path, nproc) -> None:
    options = ("checkpoint.every=0.001s", "checkpoint.keep=null", "training.micro_batch_size=4")
    out = tiny.train(tmp_path / "run", *options, "training.steps=6", nproc=nproc)
    kept = sorted(path.name for path in out.glob("checkpoints/step_*"))
    # A step asks the clock when it begins: each second one saves, or each where the first
    # millisecond has passed by then. The newest two of those stay.
    assert kept in [["step_00000004", "step_00000006"], ["step_00000005", "step_00000006"]]


def test_the_second_start_of_a_run_changes_nothing_and_names_the_first(
    tiny, tmp_path, losses, cli
) -> None:
    often = ("checkpoint.every=1", "checkpoint.keep=2")
    command = tiny.command(tmp_path, *ENDLESS, *often, real=True)  # its process is named
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        begun(process, tmp_path / "metrics.jsonl")
        config = (tmp_path / "config.yaml").read_text()
        other = ("optimizer.lr=1e-4", "training.micro_batch_size=4")
        second = cli(*tiny.command(tmp_path, *other, nproc=2))
        assert second.returncode == 1
        assert f"process {process.pid} on " in second.stderr
        assert "Traceback" not in second.stderr
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 75, errors.decode()
    assert (tmp_path / "config.yaml").read_text() == config
    steps = losses(tmp_path)
    assert sorted(steps) == list(range(1, max(steps) + 1))
