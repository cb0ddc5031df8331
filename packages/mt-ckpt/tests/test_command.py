"""The command as typed: what it says of checkpoints, and how it ends."""

from __future__ import annotations

import fcntl
import json
import math
from pathlib import Path

import pytest
import torch
from mt_ckpt import TensorShard, hold_checkpoint, load_checkpoint, save_checkpoint
from mt_ckpt.command.cli import main
from mt_ckpt.run import RunFolder
from mt_files import FolderLock

WEIGHT = torch.arange(12, dtype=torch.float32).view(3, 4)
MODEL = {"model": {"layers": 1}, "tokenizer": None}


@pytest.fixture
def run(capsys):
    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            main([str(each) for each in arguments])
        return caught.value.code, *capsys.readouterr()

    return call


def save(root: Path, step: int, metadata: dict | None = None, **tensors: torch.Tensor) -> Path:
    shards = [TensorShard(name.replace("__", "/"), value) for name, value in tensors.items()]
    return save_checkpoint(root, step, shards, metadata or {})


def loaded(path: Path, name: str, like: torch.Tensor) -> torch.Tensor:
    values = torch.empty_like(like)
    load_checkpoint(path, [TensorShard(name, values)], ignore=("",))
    return values


def test_inspect_prints_the_tree_and_who_wrote_it(tmp_path, run):
    layout = {"layout": {"tp": 2, "pp": 1}, "consumed_samples": 640}
    path = save(
        tmp_path / "run/checkpoints", 20, layout, model__w=WEIGHT, model__b=WEIGHT[0].bfloat16()
    )
    code, out, err = run("inspect", tmp_path / "run")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[:2] == [str(path), "step 20: 2 arrays of 56 bytes"]
    assert lines[2].startswith("written by mt-ckpt 0.")
    assert lines[3:] == [
        *("layout tp 2, pp 1", "consumed_samples: 640"),
        "model/  2 arrays, 56 bytes",
        "  b  bfloat16 [4]  8 bytes",
        "  w  float32 [3, 4]  48 bytes",
    ]


def test_inspect_prints_json(tmp_path, run):
    save(tmp_path, 1, model__w=WEIGHT, count=torch.tensor(5))
    save(tmp_path, 2)
    found = json.loads(run("inspect", tmp_path, "--step", 1, "--json")[1])
    assert found["step"] == 1
    assert found["arrays"]["model/w"] == {"shape": [3, 4], "dtype": "float32", "bytes": 48}
    assert found["arrays"]["count"] == {"shape": [], "dtype": "int64", "bytes": 8}
    assert set(found["written_by"]) >= {"mt-ckpt", "torch"}


def test_verify_names_file_and_array(tmp_path, run):
    path = save(tmp_path, 1, model__w=WEIGHT)
    assert run("verify", tmp_path) == (0, f"{tmp_path}: sound\n", "")
    chunk = next(each for each in (path / "model/w").iterdir() if each.name != "zarr.json")
    content = bytearray(chunk.read_bytes())
    content[5] ^= 4
    chunk.write_bytes(content)
    code, out, err = run("verify", path)
    assert (code, err, out.count("\n")) == (1, "", 1)
    assert chunk.relative_to(path).as_posix() in out
    assert "'model/w'" in out
    assert run("verify", tmp_path / "none")[0] == 2


NAN = torch.tensor([math.nan, 1.0])


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        ({"w": WEIGHT}, {"w": WEIGHT.clone()}, None),
        ({"w": NAN}, {"w": NAN.clone()}, None),
        ({"w": WEIGHT}, {"w": WEIGHT + 0.5}, "12 of 12 values differ, by at most 0.5;"),
        ({"w": NAN}, {"w": NAN.nan_to_num()}, "1 of 2 values differ, by at most inf;"),
        (
            {"w": torch.tensor(0.0)},
            {"w": torch.tensor(-0.0)},
            "1 of 1 values differ, by at most 0;",
        ),
        ({"w": WEIGHT}, {"w": WEIGHT.bfloat16()}, "w: float32 and bfloat16\n"),
        ({"w": WEIGHT}, {"w": WEIGHT.T.contiguous()}, "w: shape [3, 4] and [4, 3]\n"),
        ({"w": WEIGHT}, {"v": WEIGHT}, "v: only in "),
        ({"w": torch.tensor(3)}, {"w": torch.tensor(5)}, "1 of 1 values differ, by at most 2;"),
    ],
)
def test_diff_lists_what_differs(tmp_path, run, a, b, says):
    save(tmp_path / "a", 1, **a)
    save(tmp_path / "b", 2, {"elapsed": 3.5}, **b)
    code, out, err = run("diff", tmp_path / "a", tmp_path / "b")
    assert (code, err) == (1 if says else 0, "")
    assert (says or "1 arrays are equal") in out


def test_diff_compares_in_blocks_and_in_a_group(tmp_path, run, monkeypatch):
    monkeypatch.setattr("mt_ckpt.command.difference._BLOCK", 32)
    other = WEIGHT.clone()
    other[2, 3] += 1
    save(tmp_path / "a", 1, model__w=WEIGHT, optimizer__m=WEIGHT)
    save(tmp_path / "b", 1, model__w=other, optimizer__m=WEIGHT)
    code, out, _ = run("diff", tmp_path / "a", tmp_path / "b")
    relative = 1 / float(WEIGHT.square().sum().sqrt())
    assert (code, out) == (
        1,
        f"model/w: 1 of 12 values differ, by at most 1; relative norm {relative:.3g}\n",
    )
    assert run("diff", tmp_path / "a", tmp_path / "b", "--prefix", "optimizer")[0] == 0
    code, _, err = run("diff", tmp_path / "a", tmp_path / "b", "--prefix", "modl")
    assert code == 2
    assert "its groups are model, optimizer" in err


def steps_in(root: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.glob("step_*"))


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        ("--keep 2", [40, 50]),
        ("--keep 1 --every 20", [20, 40, 50]),
        ("--steps 10 30", [10, 30, 50]),
    ],
)
def test_prune_keeps_what_was_said_and_the_latest(tmp_path, run, arguments, left):
    root = tmp_path / "run/checkpoints"
    for step in range(10, 60, 10):
        save(root, step, w=WEIGHT)
    code, out, _ = run("prune", tmp_path / "run", *arguments.split(), "--dry-run")
    assert code == 0
    assert out.count("step_000000") == 5 - len(left)
    assert steps_in(root) == [10, 20, 30, 40, 50]
    code, out, _ = run("prune", tmp_path / "run", *arguments.split(), "--yes")
    assert (code, steps_in(root)) == (0, left)
    assert torch.equal(loaded(root, "w", WEIGHT), WEIGHT)
    assert not list(root.glob(".step*"))


def test_prune_asks_and_leaves_alone_what_is_in_use(tmp_path, run, monkeypatch):
    root = tmp_path / "run/checkpoints"
    for step in (1, 2, 3):
        save(root, step, w=WEIGHT)
    command = ("prune", tmp_path / "run", "--keep", 1)
    code, _, err = run(*command)
    assert (code, "pass --yes" in err) == (2, True)
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        patch.setattr("sys.stdin.readline", lambda: "\n", raising=False)
        assert run(*command)[0] == 1
    assert "say what to keep" in run("prune", root)[2]
    with FolderLock(tmp_path / "run", purpose="training"):
        code, _, err = run(*command, "--yes")
        assert (code, "(training, since" in err) == (2, True)
    with FolderLock(root, purpose="saving"):
        code, _, err = run("prune", root, "--keep", 1, "--yes")
        assert (code, "(saving, since" in err) == (2, True)
    assert steps_in(root) == [1, 2, 3]
    with hold_checkpoint(root, 1):
        code, _, err = run(*command, "--yes")
    assert (code, "step_00000001" in err) == (1, True)
    assert steps_in(root) == [1, 3]
    assert run(*command, "--yes")[0] == 0
    assert steps_in(root) == [3]


def test_merge_averages_weights_in_fp32(tmp_path, run):
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    values = [[torch.randn(5, 3).to(kind) for kind in kinds] for _ in range(3)]
    for number, each in enumerate(values):
        tensors = {f"model__{index}": value for index, value in enumerate(each)}
        extra = {"model__count": torch.tensor(7), "optimizer__m": torch.randn(2)}
        metadata = {**MODEL, "step": number, "config": {"lr": 1}}
        save(tmp_path / f"{number}/checkpoints", number, metadata, **tensors, **extra)
        (tmp_path / f"{number}/tokenizer.json").write_text("{}")
    sources = [tmp_path / str(number) for number in range(3)]
    assert run("merge", tmp_path / "out", *sources, "--weights", 1, 2, 1)[0] == 0
    out = RunFolder(tmp_path / "out")
    assert out.tokenizer.read_text() == "{}"
    found = json.loads(run("inspect", out.path, "--json")[1])
    assert set(found["arrays"]) == {"model/0", "model/1", "model/2", "model/3", "model/count"}
    assert found["metadata"]["model"] == MODEL["model"]
    assert "config" not in found["metadata"]
    assert [each["weight"] for each in found["metadata"]["merged"]] == [0.25, 0.5, 0.25]
    for index, kind in enumerate(kinds):
        exact = sum(
            weight * value[index].double()
            for weight, value in zip((0.25, 0.5, 0.25), values, strict=True)
        )
        got = loaded(out.checkpoints, f"model/{index}", values[0][index])
        torch.testing.assert_close(got, exact.to(kind))
    assert not [path for path in out.path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("other", "metadata", "arguments", "says"),
    [
        ({"model__w": WEIGHT.T.contiguous()}, MODEL, "", "has the shape [3, 4]"),
        ({"model__v": WEIGHT}, MODEL, "", "which another has"),
        ({"model__w": WEIGHT}, {"model": {}, "tokenizer": None}, "", "holds another model"),
        ({"model__w": WEIGHT}, MODEL, "--weights 1 -1", "sum above 0"),
        ({"model__w": WEIGHT}, MODEL, "--weights 1", "give one for each"),
        ({"model__w": WEIGHT, "n": torch.tensor(2)}, MODEL, "--prefix=", "so it has no average"),
    ],
)
def test_merge_refuses_what_has_no_average(tmp_path, run, other, metadata, arguments, says):
    save(tmp_path / "a", 1, MODEL, model__w=WEIGHT, n=torch.tensor(1))
    save(tmp_path / "b", 1, metadata, **other)
    code, _, err = run(
        "merge", tmp_path / "out", tmp_path / "a", tmp_path / "b", *arguments.split()
    )
    assert (code, says in err) == (2, True), err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_the_lock_of_a_reader_is_not_taken_by_inspect(tmp_path, run):
    path = save(tmp_path, 1, w=WEIGHT)
    with (path / "mt-manifest.json").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert run("inspect", path)[0] == 0
