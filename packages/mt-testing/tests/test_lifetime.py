"""Processes start late, end with their parent, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import time

import torch.distributed as dist
from mt_testing import RankPool

SCRIPT = """
import time
import torch.distributed as dist
from mt_testing import RankPool

with RankPool() as ranks:
    ranks(2, dist.get_rank)
    print(*ranks.pids, flush=True)
    ranks(2, time.sleep, 300, timeout=300)
"""


def _gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_pool_survives_a_broken_package_and_leaves_no_process(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('half written')")
    monkeypatch.syspath_prepend(tmp_path)
    pool = RankPool(preload=["broken_module"])
    assert pool.pids == ()
    with pool as ranks:
        assert ranks(2, dist.get_rank) == [0, 1]
        assert "half written" in ranks.preload_errors["broken_module"]
        server = ranks._processes.server
        pids = [server._process.pid, *ranks.pids]
        directory = server.directory
        assert os.path.isdir(directory)
    assert all(_gone(pid) for pid in pids)
    assert not os.path.exists(directory)
    assert pool.pids == ()


def test_busy_ranks_end_when_their_parent_is_killed():
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True
    ) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.send_signal(signal.SIGKILL)
    assert all(_gone(pid) for pid in pids)
