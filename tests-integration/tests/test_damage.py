"""Damaged files are named; they never give wrong data."""

from __future__ import annotations

import pickle
import pickletools
import random
import shutil
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory) -> Path:
    return tiny.train(tmp_path_factory.mktemp("run"), "training.steps=2")


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_truncated_token_file_is_named(ending, tiny, tmp_path, cli) -> None:
    data = tmp_path / "data"
    shutil.copytree(tiny.config.parent / "data", data)
    path = data / f"train{ending}"
    path.write_bytes(path.read_bytes()[:-3])
    config = tmp_path / "run.yaml"
    config.write_text(tiny.config.read_text().replace(str(tiny.config.parent / "data"), str(data)))
    result = cli(sys.executable, "-m", "mt_train", "run", config, "--out", tmp_path / "out")
    assert result.returncode == 1
    assert f"train{ending}" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in (1, 2))]
)
def test_one_flipped_byte_in_a_checkpoint_is_named_on_resume(
    seed, run, tiny, tmp_path, cli
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    rng = random.Random(seed)
    step = copy / "checkpoints" / "step_00000002"
    path = rng.choice(sorted(step.rglob("c.*")))
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    result = cli(*tiny.command(copy, "training.steps=4"))
    assert result.returncode == 1
    tensor = path.parent.relative_to(step).as_posix()
    assert tensor in result.stderr
    assert "Traceback" not in result.stderr


def test_stock_zarr_finds_parameters_and_both_moments(run, tiny, arrays) -> None:
    parameters = arrays(run, step=2)
    assert parameters["model/embedding.weight"].shape == (384, 32)
    assert parameters["model/layers.3.mixer.qkv.weight"].shape == (2, 4, 8, 32)
    for moment in ("exp_avg", "exp_avg_sq"):
        moments = arrays(run, step=2, prefix=f"optimizer/{moment}/")
        names = {name.removeprefix(f"optimizer/{moment}/") for name in moments}
        assert names == {name.removeprefix("model/") for name in parameters}
        for name, value in moments.items():
            twin = parameters["model/" + name.removeprefix(f"optimizer/{moment}/")]
            assert value.shape == twin.shape


def is_pickle(data: bytes) -> bool:
    """Whether the bytes parse as a pickle from protocol mark to STOP."""
    try:
        return data[:1] == b"\x80" and any(op.name == "STOP" for op, *_ in pickletools.genops(data))
    except ValueError:
        return False


def test_no_file_of_a_run_holds_a_pickle(run) -> None:
    assert is_pickle(pickle.dumps({"step": 1}))
    for path in run.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert not is_pickle(data), f"{path} is a pickle"
            assert data[:2] != b"PK", f"{path} is a zip, as torch.save writes"


def test_one_flipped_bit_of_the_tokens_is_named_on_resume(tiny, run, tmp_path, cli) -> None:
    data = tmp_path / "data"
    shutil.copytree(tiny.config.parent / "data", data)
    config = tmp_path / "run.yaml"
    config.write_text(tiny.config.read_text().replace(str(tiny.config.parent / "data"), str(data)))
    out = tmp_path / "out"
    shutil.copytree(run, out)
    tokens = bytearray((data / "train.bin").read_bytes())
    tokens[len(tokens) // 2] ^= 1
    (data / "train.bin").write_bytes(tokens)
    command = [sys.executable, "-m", "mt_train", "run", config, "training.steps=4", "--out", out]
    result = cli(*command)
    assert result.returncode == 1
    assert "train.bin" in result.stderr
    assert "content has changed" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_damaged_line_of_the_metrics_is_reported_and_the_run_goes_on(run, tiny, tmp_path, cli):
    out = tmp_path / "run"
    shutil.copytree(run, out)
    path = out / "metrics.jsonl"
    first, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([first.replace(b"loss", b"\x00\xff"), *rest]))
    result = cli(*tiny.command(out, "training.steps=4"))
    assert result.returncode == 0, result.stderr
    assert "metrics.jsonl was damaged in 1 lines (first 1)" in result.stdout
    assert (out / "metrics.damaged").exists()
    assert path.read_bytes().count(b'"loss"') == 3
