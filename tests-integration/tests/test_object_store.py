"""From an object store that fails one request in ten: the bits of local files, or one message."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from mt_files import ObjectStore
from mt_testing import KillAt, RankDied, unsteady_store

if TYPE_CHECKING:
    from mt_testing import UnsteadyStore

OPTIONS = ("training.steps=12", "checkpoint.every=2")
TEMPLATE = """\
{% for m in messages %}{% if m.role == 'user' %}Q {{ m.content }}
{% else %}A{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}A{% endif %}"""
# Kinds with the share of requests that fail: files that are read once take few.
KINDS = {"chat": 0.4, "tokens": 0.1, "corpus": 0.4}


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory) -> Path:
    """Return a folder with tokens, texts and conversations."""
    path: Path = tmp_path_factory.mktemp("local")
    for name in ("train", "validation"):
        for ending in (".bin", ".idx", ".json"):
            shutil.copy(tiny.config.parent / f"data/{name}{ending}", path)
    (path / "raw").mkdir()
    words = ["one two three", "four five six seven", "eight nine ten"]
    for name in "abc":
        lines = [{"text": f"{name} {number} {words[number % 3]}" * 5} for number in range(80)]
        (path / f"raw/{name}.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    talks = [
        {"prompt": f"say {number % 5} {words[number % 3]}", "completion": words[number % 2]}
        for number in range(90)
    ]
    with (path / "talks.jsonl").open("w") as file:
        for talk in talks:
            turns = [("user", talk["prompt"]), ("assistant", talk["completion"])]
            said = [{"role": role, "content": text} for role, text in turns]
            file.write(f"{json.dumps({'messages': said})}\n")
    (path / "template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def server(folder) -> Iterator[UnsteadyStore]:
    """Run a server whose bucket has the folder's files."""
    with unsteady_store() as proxy, pytest.MonkeyPatch.context() as patch:
        for name, value in proxy.variables.items():
            patch.setenv(name, value)
        bucket = ObjectStore("s3://bucket")
        for file in folder.rglob("*.*"):
            bucket.put(str(file.relative_to(folder)), file.read_bytes())
        yield proxy


@pytest.fixture
def store(server) -> Iterator[UnsteadyStore]:
    """Return the server, of which a test lets requests fail."""
    server.faults = 0
    yield server
    server.fault = None


@pytest.fixture
def surroundings(store, tmp_path) -> dict[str, str]:
    """Return the variables by which a run finds the proxy, with a new home for copies."""
    return {**store.variables, "HOME": str(tmp_path / "home")}


def options(kind: str, root: object, tiny, folder: Path) -> list[str]:
    tokenizer = f"tokenizer: {tiny.config.parent}/data/tokenizer.json"
    sequence = "training.sequence_length=32"
    if kind == "tokens":
        data = f"train: [{root}/train], validation: {root}/validation, {tokenizer}"
    elif kind == "corpus":
        data = f"corpus: {root}/raw, glob: '*.jsonl', vocab_size: 300"
    else:
        data = f"kind: chat, train: [{root}/talks.jsonl], validation: {root}/talks.jsonl"
        data += f", {tokenizer}, template: {folder}/template.jinja, too_long: cut"
    return [f"data={{{data}}}", sequence, *OPTIONS]


def train(tiny, out: Path, overrides: list[str], surroundings=None, on_event=None) -> None:
    """Train on a rank with these environment variables."""
    config = tiny.config

    def body() -> None:
        from mt_parallel_state import DistributedEnv
        from mt_train import load_config, run

        env = DistributedEnv(rank=0, world_size=1, local_rank=0, local_world_size=1)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (surroundings or {}).items():
                patch.setenv(name, value)
            run(load_config(config, overrides), env, out, on_event=on_event)

    tiny.ranks(1, body, timeout=120)


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=() if kind == "chat" else pytest.mark.campaign) for kind in KINDS
])  # fmt: skip
def test_a_run_that_is_killed_ends_in_the_bits_of_local_files(
    kind, tiny, folder, store, surroundings, tmp_path, losses, arrays
) -> None:
    out, local = tmp_path / "run", tmp_path / "local"
    train(tiny, local, options(kind, folder, tiny, folder))
    stored = options(kind, "s3://bucket", tiny, folder)
    store.fail_some(KINDS[kind], seed=0)
    with pytest.raises(RankDied):
        train(tiny, out, stored, surroundings, KillAt("train.update", rank=0, nth=6))
    train(tiny, out, stored, surroundings)
    assert store.faults
    assert losses(out) == losses(local)
    ours, theirs = (arrays(run, 12, prefix="") for run in (out, local))
    assert {name: each.tobytes() for name, each in ours.items()} == {
        name: each.tobytes() for name, each in theirs.items()
    }


@pytest.mark.campaign  # eight tries take a while
@pytest.mark.parametrize(("kind", "name"), [("tokens", "train.bin"), ("chat", "talks.jsonl")])
@pytest.mark.parametrize("fault", ["error", "cut"])
def test_one_message_names_object_and_cause(
    kind, name, fault, tiny, folder, store, surroundings, tmp_path
) -> None:
    store.fault = lambda method, path: (
        fault if method == "GET" and path.partition("?")[0].endswith(name) else None
    )
    command = tiny.command(tmp_path / "run", *options(kind, "s3://bucket", tiny, folder))
    failed = said(command, surroundings)
    assert failed.returncode in (1, 2)
    assert f"s3://bucket/{name}: the store fails, after 8 tries: " in failed.stderr
    assert "Traceback" not in failed.stderr
    assert len(failed.stderr) < 1000


def said(command: list, surroundings: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command with these variables."""
    return subprocess.run(
        [str(each) for each in command],
        **{"capture_output": True, "text": True, "timeout": 300, "check": False},
        env={**os.environ, **surroundings},
    )


@pytest.mark.campaign
def test_a_build_has_the_bytes_of_one_from_local_files(
    tiny, folder, store, surroundings, tmp_path
) -> None:
    command = [sys.executable, "-c", "from mt_data.cli import main; main()", "build"]
    options = ["--tokenizer", tiny.config.parent / "data/tokenizer.json", "--parts", "3"]
    store.fail_some(0.3, seed=0)
    for root, name in ((folder, "local"), ("s3://bucket", "stored")):
        source = f"{root}/raw/*.jsonl"
        built = said([*command, source, *options, "--out", tmp_path / name], surroundings)
        assert built.returncode == 0, built.stderr
    assert store.faults
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"stored{ending}").read_bytes() == (
            tmp_path / f"local{ending}"
        ).read_bytes()
