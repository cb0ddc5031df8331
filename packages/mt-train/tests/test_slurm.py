"""The sbatch file: ranks by SLURM's variables, a save before the limit, back to the queue."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

# Starts the tasks of a step as srun does. With FAKE_LIMIT, the time limit comes near when the run
# has so many lines of metrics: every task gets SIGTERM.
SRUN = """\
#!{python}
import os, signal, subprocess, sys, time
from pathlib import Path

command = [word for word in sys.argv[1:] if not word.startswith("--kill")]
tasks = int(os.environ["SLURM_NTASKS"])
ranks = [
    subprocess.Popen(
        command, env={{**os.environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}}
    )
    for rank in range(tasks)
]
limit, metrics = int(os.environ.get("FAKE_LIMIT", "0")), Path(os.environ["FAKE_METRICS"])
while any(rank.poll() is None for rank in ranks):
    if limit and metrics.exists() and len(metrics.read_text().splitlines()) >= limit:
        limit = 0
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
    time.sleep(0.02)
sys.exit(max(rank.returncode if rank.returncode >= 0 else 128 for rank in ranks))
"""

SCONTROL = """\
#!/bin/sh
echo "$@" >> "$FAKE_QUEUE"
"""


def job(folder: Path, limit: int, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the batch script once, as SLURM does on the job's first node, with more programs."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    found = {"srun": SRUN.format(python=sys.executable), "scontrol": SCONTROL, **more}
    for name, text in found.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    out = folder / "out"
    environment = {
        **os.environ,
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": str(random.Random(folder.name).randrange(10**6)),
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURM_JOB_NODELIST": "localhost",
        "FAKE_LIMIT": str(limit),
        "FAKE_METRICS": str(out / "metrics.jsonl"),
        "FAKE_QUEUE": str(folder / "queue"),
    }
    sizes = ["model.hidden_size=32", "model.ffn_size=64", "parallel.tp=2", "training.steps=30"]
    arguments = [str(EXAMPLES / "tiny.yaml"), *sizes, "--out", str(out)]
    return subprocess.run(
        ["bash", str(EXAMPLES / "slurm.sbatch"), *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def steps(folder: Path) -> list[int]:
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return [record["step"] for record in map(json.loads, lines) if "loss" in record]


@pytest.mark.parametrize(("code", "queued"), [(0, False), (1, False), (75, True)])
def test_what_was_stopped_and_saved_alone_goes_back_to_the_queue(
    tmp_path: Path, code: int, queued: bool
) -> None:
    run = f'#!/bin/sh\necho "$@" > run\nexit {code}\n'
    assert job(tmp_path, 0, **{"mt-train": run}).returncode == code
    assert (tmp_path / "run").read_text().startswith(f"run {EXAMPLES / 'tiny.yaml'} model.")
    assert (tmp_path / "queue").exists() == queued


@pytest.mark.campaign
def test_a_job_at_its_limit_saves_goes_back_to_the_queue_and_continues(tmp_path: Path) -> None:
    stopped = job(tmp_path, limit=5)
    assert stopped.returncode == 75, stopped.stderr
    assert (tmp_path / "queue").read_text().split()[0] == "requeue"
    before = steps(tmp_path)
    assert 5 <= len(before) < 30
    again = job(tmp_path, limit=0)
    assert again.returncode == 0, again.stderr
    assert len((tmp_path / "queue").read_text().splitlines()) == 1
    assert steps(tmp_path) == list(range(1, 31))


def test_a_job_that_is_wrong_does_not_go_back_to_the_queue(tmp_path: Path) -> None:
    script = str(EXAMPLES / "slurm.sbatch")
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    assert (done.returncode, "usage" in done.stderr) == (2, True)
