"""Processes start late, end with their parent, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import time

import pytest
from mt_testing import RankPool
from mt_testing.errors import PoolError

pytest_plugins = ["pytester"]

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


def test_unused_pool_starts_and_closes_nothing():
    pool = RankPool()
    assert pool.pids == ()
    assert pool.preload_errors == {}
    pool.close()
    pool.close()


def test_slow_start_is_refused_at_once():
    start = time.monotonic()
    with pytest.raises(PoolError, match=r"did not import torch within 0 s"):
        RankPool(start_timeout=0.01)(2, abs, 1)
    assert time.monotonic() - start < 2.0


def test_session_survives_a_broken_package_and_leaves_no_process(pytester):
    pytester.makeini("[pytest]\nmt_testing_preload = broken_module\n")
    pytester.makepyfile(
        broken_module="raise RuntimeError('half written')",
        helper="def twice(x):\n    return 2 * x\n",
        test_user="""
            import sys
            from pathlib import Path

            import helper
            import torch.distributed as dist

            def body():
                return helper.twice(dist.get_rank())

            def test_body(ranks):
                assert ranks(2, body) == [0, 2]
                server = ranks._processes.server
                pids = [server._process.pid, *ranks.pids]
                Path("left").write_text(" ".join([server.directory, *map(str, pids)]))
        """,
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["*could not preload broken_module into the rank pool*", "*RuntimeError: half written"]
    )
    directory, *pids = (pytester.path / "left").read_text().split()
    assert len(pids) == 3
    assert all(_gone(int(pid)) for pid in pids)
    assert not os.path.exists(directory)


def test_busy_ranks_end_when_their_parent_is_killed():
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True
    ) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.send_signal(signal.SIGKILL)
    assert all(_gone(pid) for pid in pids)
