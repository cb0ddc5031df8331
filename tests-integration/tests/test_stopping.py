"""A run that is asked to stop, wherever it is, saves and can be continued."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

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
    assert max(losses(out)) == 20


@pytest.mark.parametrize("nproc", [1, 2])
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
    from mt_data import train_tokenizer

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
    assert "was not written by mt-train: its metadata lacks" in result.stderr
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
