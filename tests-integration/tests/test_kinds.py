"""Kinds of rows: a new one is a file, and no kind is named outside its own."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SUMS = Path(__file__).with_name("sums.py")
ROOT = Path(__file__).parents[2] / "packages"
ROWS = {
    "tp2": (2, ["parallel.tp=2"]),
    "cp2": (2, ["parallel.cp=2"]),
    "pp2": (2, ["parallel.pp=2", "training.micro_batch_size=4"]),
    "dp2": (2, ["training.micro_batch_size=2"]),
    "tp2-cp2": (4, ["parallel.tp=2", "parallel.cp=2", "parallel.sequence_parallel=true"]),
    "pp3": (3, ["parallel.pp=3", "training.micro_batch_size=2"]),
}
IN_CI = ("tp2", "cp2", "pp2")


@pytest.fixture(scope="module")
def sums():
    """Load the file as a module of its own name, as no package has it."""
    spec = importlib.util.spec_from_file_location("sums", SUMS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sums"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["sums"]


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Return the overrides that make the small run one of sums."""
    folder, random = tmp_path_factory.mktemp("sums"), np.random.default_rng(5)
    for name, count in (("train", 50), ("held", 11)):  # several epochs, and no whole batches
        lines = (f"{a} {b}\n" for a, b in random.integers(0, 1000, (count, 2)))
        (folder / name).write_text("".join(lines))
    data = f"{{kind: sums, train: [{folder}/train], validation: {folder}/held, reverse: true}}"
    sizes = ("model.vocab_size=14", "training.sequence_length=16", "training.dtype=fp64")
    # Without a decay, as the first part of a run plans fewer steps.
    course = ("training.steps=8", "optimizer.schedule=constant", "evaluation.max_windows=null")
    return (f"data={data}", *sizes, *course)


@pytest.fixture(scope="module")
def one_process(tiny, sums, options, tmp_path_factory):
    return tiny.train(tmp_path_factory.mktemp("one"), *options, kinds=(sums.SumsData,))


@pytest.fixture(scope="module")
def begun(tiny, sums, options, tmp_path_factory):
    """Return a run that ended after five steps."""
    out = tmp_path_factory.mktemp("begun")
    return tiny.train(out, *options, "training.steps=5", kinds=(sums.SumsData,))


@pytest.mark.parametrize(
    "layout",
    [pytest.param(n, marks=() if n in IN_CI else pytest.mark.campaign) for n in ROWS],
)
def test_a_new_kind_trains_resumes_and_evaluates_alike_on_every_layout(
    tiny, sums, options, one_process, begun, tmp_path, losses, metrics_of, held_out, layout
) -> None:
    nproc, own = ROWS[layout]
    run = shutil.copytree(begun, tmp_path / "run")
    tiny.train(run, *options, *own, nproc=nproc, kinds=(sums.SumsData,))
    ours, theirs = losses(run), losses(one_process)
    assert ours.keys() == theirs.keys()
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-9)
    assert theirs[8] < theirs[1]
    found = [row["val_loss"] for row in metrics_of(run) if "val_loss" in row]
    assert found[-1] == pytest.approx(held_out(one_process), rel=1e-9)


def test_a_new_kind_is_named_in_a_yaml_file(tiny, options, monkeypatch, tmp_path) -> None:
    from mt_files import to_plain
    from mt_train import ConfigError, load_config

    monkeypatch.setenv("HOME", str(tmp_path))  # where a known plugin is noted
    given = [*options, f"plugins=[{SUMS}]"]
    config = load_config(tiny.config, given).config
    assert to_plain(config)["data"]["kind"] == "sums"
    assert to_plain(config)["data"]["reverse"] is True
    with pytest.raises(
        ConfigError, match=r"data.packing: is a key of data.kind text and spans and chat"
    ):
        load_config(tiny.config, [*given, "data.packing=documents"])
    with pytest.raises(ConfigError, match=r"evaluation.stride: 4: rows of data.kind sums do not"):
        load_config(tiny.config, [*given, "evaluation.stride=4"])


def test_an_installed_distribution_adds_a_kind(
    tiny, options, one_process, tmp_path, losses
) -> None:
    """Its entry point is all that names it: to the command, and to each process that it starts."""
    site = tmp_path / "site"
    (site / "sums_of_others").mkdir(parents=True)
    (site / "sums_of_others" / "__init__.py").touch()
    shutil.copy(SUMS, site / "sums_of_others" / "rows.py")
    info = site / "sums_of_others-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sums-of-others\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mt.datasets]\nsums = sums_of_others.rows\n")
    command = tiny.command(tmp_path / "run", *options, "parallel.tp=2", nproc=2, real=True)

    def run(path: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(command, capture_output=True, text=True, env=env, check=False)

    without = run("")
    assert without.returncode == 2
    assert "data.kind: 'sums'" in without.stderr
    done = run(str(site))
    assert done.returncode == 0, done.stderr
    ours, theirs = losses(tmp_path / "run"), losses(one_process)
    assert ours.keys() == theirs.keys()
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-9)


def test_no_kind_is_named_outside_its_file() -> None:
    from mt_train.config.kinds.registry import KINDS

    classes = "|".join(kind.__name__ for kind in KINDS)
    named = re.compile(
        rf"\b({classes}|MaskedDataset|PairDataset|SpanDataset|masked_fields|span_fields)\b"
    )
    found = {
        path.relative_to(ROOT).as_posix()
        for package in ("mt-train", "mt-data", "mt-model")
        for path in (ROOT / package / "src").rglob("*.py")
        if named.search(path.read_text())
    }
    kinds = "mt-train/src/mt_train/config/kinds/"
    own = {f"{kinds}{kind.type_name.replace('-', '_')}.py" for kind in KINDS}
    datasets = {f"mt-data/src/mt_data/datasets/{name}.py" for name in ("masked", "pairs", "spans")}
    assert found <= own | datasets | {f"{kinds}registry.py", "mt-data/src/mt_data/__init__.py"}
