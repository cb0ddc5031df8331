"""Killed commands go on with their parts, and find the same neighbours as brute force."""

import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from mt_data import IndexedDataset
from mt_retro import Neighbours, build_database, find_neighbours

COMMANDS = {"build": "build c --out db", "query": "query db --data c --out n"}
NEVER = 10**9
LATE = 8  # moments at the end of a command, when one process joins the blocks


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """The file in which new processes look up the moment to kill their command."""
    path = tmp_path_factory.mktemp("plan") / "plan"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "kill_hook"))
        patch.setenv("KILL_PLAN", str(path))
        yield path


@pytest.fixture(scope="module")
def cluster(plan):
    """Start Ray on this machine, for short commands, and return its address."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture
def command(plan):
    """Return a function that runs a command in a folder, with a kill at a moment."""

    def run(line, folder, moment=NEVER, seconds=0):
        plan.unlink(missing_ok=True)
        plan.with_suffix(".count").write_bytes(b"")
        process = subprocess.Popen(
            [sys.executable, "-c", "from mt_retro.cli import main; main()", *line.split()],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        plan.write_text(f"{folder} {moment} {seconds} {process.pid}")
        said, _ = process.communicate(timeout=120)  # its other processes have ended then too
        until = time.monotonic() + 120
        while on_ray():
            assert time.monotonic() < until
            time.sleep(0.01)
        assert process.returncode in (0, *([] if moment == NEVER else [-signal.SIGKILL])), said
        return process.returncode == 0

    return run


def on_ray():
    """Tell whether Ray still runs a job."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::_run"):
                return True
        except (FileNotFoundError, ProcessLookupError):
            pass
    return False


def left_in(folder):
    """Name the kinds of files that a killed command left."""
    records = folder.glob("**/record.json")
    found = {
        "finished blocks": any(folder.glob("**/blocks/0*")),
        "an unfinished block": any(folder.glob("**/blocks/.*.tmp-*")),
        "an unfinished array": any(folder.glob("**/.*.npy.tmp-*")),
        "a record beside its plan": any((path.parent / "plan.json").exists() for path in records),
    }
    return Counter({what: int(is_left) for what, is_left in found.items()})


def content(folder):
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("parts", "on", "kills"),
    [
        (3, "processes", 2),
        *(pytest.param(n, "processes", 50, marks=pytest.mark.campaign) for n in (1, 3, 8)),
        pytest.param(3, "ray", 50, marks=pytest.mark.campaign),
    ],
)
def test_kills_change_no_neighbour(
    corpora, tmp_path, plan, command, record_property, monkeypatch, request, parts, on, kills
):
    """Each kill comes when some process creates, renames or removes a file, or somewhat later.

    A killed command is given again, and may be killed again. The complete folder has the same bytes
    as that of a single process without kills, and the neighbours of brute force.
    """
    if on == "ray":
        monkeypatch.setenv("RAY_ADDRESS", request.getfixturevalue("cluster"))
    draw = np.random.default_rng(parts)
    documents = corpora.drawn(draw, 500, 20)
    whole, run = tmp_path / "whole", tmp_path / "run"
    for folder in (whole, run):
        folder.mkdir()
        corpora.write(folder / "c", documents)
    chunks = corpora.chunks(documents)
    keys = corpora.vectors(chunks)
    expected = corpora.oracle(keys, keys, 2, lambda row, key: chunks[row][0] != chunks[key][0])
    given = {n: f"{c} --parts {parts} --workers 2 --on {on}" for n, c in COMMANDS.items()}
    moments, killed, left = {}, Counter(), Counter()
    database = build_database([whole / "c"], whole / "db")
    find_neighbours(database, IndexedDataset(whole / "c"), whole / "n")
    for name, line in given.items():
        assert command(line, run)
        moments[name] = plan.with_suffix(".count").stat().st_size
    assert content(run) == content(whole)
    while killed.total() < kills:
        for folder in ("db", "n"):
            shutil.rmtree(run / folder)
        for name, line in given.items():
            while True:
                late = draw.random() < 0.5
                moment = moments[name] - int(draw.integers(LATE if late else moments[name]))
                seconds = float(draw.choice([0, draw.uniform(0, 0.02)]))
                if command(line, run, moment if killed.total() < kills else NEVER, seconds):
                    break
                killed[name] += 1
                left.update(left_in(run))
        assert content(run) == content(whole)
        found = Neighbours(run / "n")
        ids = [found.ids(document) for document in range(found.chunks.num_documents)]
        assert np.concatenate(ids).tolist() == expected.tolist()
    for name in COMMANDS:
        record_property(f"killed, of {name}", killed[name])
    for what, count in left.items():
        record_property(f"left {what}", count)
    assert kills < 50 or min(*left.values(), *killed.values()) > 0, (left, killed)


@pytest.mark.campaign  # Ray takes long to start
@pytest.mark.usefixtures("cluster")
def test_ray_makes_the_parts(corpora, tmp_path, command):
    documents = corpora.drawn(np.random.default_rng(4), 500, 20)
    for folder in ("whole", "run"):
        (tmp_path / folder).mkdir()
        corpora.write(tmp_path / folder / "c", documents)
        for line in COMMANDS.values():
            given = line if folder == "whole" else f"{line} --parts 3 --on ray"
            assert command(given, tmp_path / folder)
    assert content(tmp_path / "run") == content(tmp_path / "whole")
