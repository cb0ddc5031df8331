"""Ranks that raise, die or hang, and the calls that follow."""

import contextlib
import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from mt_testing import KillAt, RankDied, RankFailure, RankTimeout, expect_kill
from mt_testing.report import Outcome


def _world() -> int:
    value = torch.ones(1)
    dist.all_reduce(value)
    return int(value.item())


@pytest.fixture(autouse=True)
def _pool_works_afterwards(ranks):
    yield
    assert ranks(2, _world) == [2, 2]


def test_failed_rank_is_named_with_its_traceback(ranks):
    def body():
        if dist.get_rank() == 1:
            raise ValueError("bad shard")
        dist.barrier()

    ranks(2, _world)
    ranks(2, _world)
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"^rank 1 of 2 raised ValueError: bad shard") as caught:
        ranks(2, body)
    assert time.monotonic() - start < 5.0
    failure = caught.value
    assert (failure.rank, failure.error_type) == (1, "ValueError")
    assert "in body" in failure.tracebacks[1]
    assert 'raise ValueError("bad shard")' in str(failure)
    assert "mt_testing" not in failure.tracebacks[1].replace("mt-testing", "")
    assert "rank 0: still running when the pool was ended" in str(failure)


def test_error_on_every_rank_keeps_the_processes(ranks):
    def body():
        raise KeyError(f"missing on {dist.get_rank() // 2}")

    pids = ranks(4, os.getpid)
    with pytest.raises(RankFailure, match="KeyError") as caught:
        ranks(4, body)
    assert sorted(caught.value.tracebacks) == [0, 1, 2, 3]
    assert ranks(4, os.getpid) == pids


def test_failed_assertion_shows_its_values(ranks):
    def body():
        assert dist.get_rank() + 1 == 1

    with pytest.raises(RankFailure, match=r"rank 1 of 2 raised AssertionError: assert \(1 \+ 1\)"):
        ranks(2, body)


def test_sys_exit_in_a_rank_is_a_failure(ranks):
    with pytest.raises(RankFailure, match="raised SystemExit: 3"):
        ranks(1, lambda: sys.exit(3))


def test_result_that_cannot_be_sent_is_named(ranks):
    with pytest.raises(RankFailure, match="a result of type generator cannot be sent back"):
        ranks(1, lambda: (i for i in range(3)))


def test_dead_rank_is_named_with_its_signal(ranks):
    def body():
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankDied, match=r"^rank 0 of 4 was ended by SIGKILL") as caught:
        ranks(4, body)
    assert caught.value.signal_name == "SIGKILL"
    assert caught.value.point is None


def test_exit_of_a_rank_is_named_with_its_code(ranks):
    with pytest.raises(RankDied, match="rank 0 of 1 exited with code 7 before it returned") as e:
        ranks(1, lambda: os._exit(7))
    assert (e.value.exit_code, e.value.signal_name) == (7, None)


def test_segmentation_fault_shows_where(ranks):
    def crash():
        os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(RankDied, match="was ended by SIGSEGV") as caught:
        ranks(1, crash)
    assert "in crash" in str(caught.value)


def test_rank_that_died_between_calls_is_replaced(ranks):
    pids = ranks(2, os.getpid)
    os.kill(pids[1], signal.SIGKILL)
    time.sleep(0.2)
    assert ranks(2, _world) == [2, 2]


def test_hang_names_the_running_ranks_and_their_stacks(ranks):
    def wait_for_nobody():
        dist.recv(torch.empty(1), src=0)

    def body():
        if dist.get_rank() > 0:
            wait_for_nobody()

    with pytest.raises(
        RankTimeout, match=r"^ranks 1, 2 of 3 still running after 0.5 s; returned: rank 0"
    ) as caught:
        ranks(3, body, timeout=0.5)
    assert caught.value.running == (1, 2)
    for stack in caught.value.stacks.values():
        assert "in wait_for_nobody" in stack
    assert "in wait_for_nobody" in str(caught.value)


def test_equal_stacks_are_printed_once():
    outcome = Outcome(world_size=4, results={2: b""})
    message = str(outcome.timed_out(3.0, {0: "in send", 1: "in recv", 3: "in recv"}))
    assert message == (
        "ranks 0, 1, 3 of 4 still running after 3 s; returned: rank 2\n\n"
        "rank 0 in:\nin send\n\nranks 1, 3 in:\nin recv"
    )


def test_children_of_a_failed_rank_are_ended(ranks, tmp_path):
    path = tmp_path / "pid"

    def body():
        import subprocess

        child = subprocess.Popen(["sleep", "300"])
        path.write_text(str(child.pid))
        os._exit(1)

    with pytest.raises(RankDied):
        ranks(1, body)
    pid = int(path.read_text())
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and _is_alive(pid):
        time.sleep(0.02)
    assert not _is_alive(pid)


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    return False


def test_nccl_without_enough_gpus_is_refused(ranks):
    # 32 ranks would need 32 GPUs; two, where there is none
    if torch.cuda.device_count() >= 2:
        pytest.skip("this machine has two GPUs")
    with pytest.raises(RankFailure, match="backend 'nccl' needs one GPU per rank: 2 ranks"):
        ranks(2, _world, backend="nccl")


def _three_steps(path, *, on_event):
    for step in range(3):
        on_event("step_started")
        dist.barrier()
        on_event("step_done")
        if dist.get_rank() == 1:
            path.write_text(str(step))


def test_kill_at_ends_the_rank_at_the_nth_visit(ranks, tmp_path):
    path = tmp_path / "steps"
    kill = KillAt("step_done", rank=1, nth=2)
    death = expect_kill(ranks, 2, _three_steps, path, kill=kill)
    assert (death.rank, death.point, death.signal_name) == (1, "step_done", "SIGKILL")
    assert str(death).startswith("rank 1 of 2 was ended by SIGKILL at point 'step_done' (KillAt)")
    assert path.read_text() == "0"


def test_kill_at_a_point_never_visited_says_what_was(ranks, tmp_path):
    with pytest.raises(AssertionError, match=r"after visiting \{'step_started': 3, 'step_done': 3"):
        expect_kill(ranks, 2, _three_steps, tmp_path / "s", kill=KillAt("commit", rank=1))


def test_other_failure_is_not_taken_for_the_kill(ranks):
    def body(*, on_event):
        raise OSError("disk full")

    with pytest.raises(AssertionError, match=r"did not end the rank; instead: .*disk full"):
        expect_kill(ranks, 2, body, kill=KillAt("commit"))


def test_kill_at_validates_its_arguments(ranks):
    with pytest.raises(ValueError, match="point is empty"):
        KillAt("")
    with pytest.raises(ValueError, match="rank is -1 and nth is 0"):
        KillAt("a", rank=-1, nth=0)
    with pytest.raises(ValueError, match="outside the world of 2"):
        expect_kill(ranks, 2, _three_steps, kill=KillAt("a", rank=2))


class _Clinging:
    """Does something when the rank's cleaning up collects it."""

    def __init__(self, act):
        self.act, self.cycle = act, self

    def __del__(self):
        self.act()


@pytest.mark.parametrize("act", ["ends", "hangs"])
def test_what_breaks_while_a_rank_cleans_up_is_not_the_next_calls_failure(
    ranks, act, monkeypatch, caplog
):
    from mt_testing import pool

    def leaves_behind():
        if dist.get_rank() == 1:
            _Clinging((lambda: os._exit(3)) if act == "ends" else lambda: time.sleep(100))
        return dist.get_rank()

    monkeypatch.setattr(pool, "CLEANING", 1.0)
    assert ranks(2, leaves_behind) == [0, 1]
    assert ranks(2, lambda data: len(data), b"0" * 2**23, timeout=20) == [2**23] * 2
    assert "ended or hung while they cleaned up" in caplog.text
