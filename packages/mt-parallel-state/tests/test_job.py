"""Joining a job, waiting for late ranks, and leaving it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mt_parallel_state import (
    DistributedEnv,
    JoinError,
    PeerLostError,
    init_process_group,
    is_out_of_memory,
    joined,
    leave_process_group,
    must_launch,
    store,
)
from mt_parallel_state.job import is_peer_loss


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="states the CPU case")
def test_one_process_joins_no_process_group() -> None:
    assert init_process_group(DistributedEnv()) == torch.device("cpu")
    with joined(DistributedEnv()) as device:
        assert device == torch.device("cpu")
        assert not dist.is_initialized()


def test_leaving_ends_the_process_group_and_needs_none(tmp_path: Path) -> None:
    leave_process_group()
    found = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=found, rank=0, world_size=1)
    leave_process_group()
    assert not dist.is_initialized()


def test_a_job_of_the_caller_is_used_and_not_left(tmp_path: Path) -> None:
    found = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=found, rank=0, world_size=1)
    try:
        with joined(DistributedEnv(world_size=2)) as device:
            assert device == torch.device("cpu")
        assert dist.is_initialized()
    finally:
        leave_process_group()


def test_who_waits_says_for_whom_and_gives_up_in_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store, "_SILENT_SECONDS", 0.1)
    env = DistributedEnv(world_size=4, master_port=_free_port())
    with (
        caplog.at_level(logging.WARNING, logger="mt_parallel_state"),
        pytest.raises(JoinError, match=r"waited 1 s for ranks 1, 2, 3; start all ranks"),
    ):
        init_process_group(env, timeout=timedelta(seconds=1))
    assert caplog.messages == ["waiting for ranks 1, 2, 3 of 4"]
    assert not dist.is_initialized()


def test_a_rank_without_a_store_says_where_it_looks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store, "_SILENT_SECONDS", 0.1)
    port = _free_port()
    env = DistributedEnv(rank=1, world_size=2, master_port=port)
    where = f"the store of rank 0 at 127.0.0.1:{port}"
    with (
        caplog.at_level(logging.WARNING, logger="mt_parallel_state"),
        pytest.raises(JoinError, match=where),
    ):
        init_process_group(env, timeout=timedelta(seconds=1))
    assert [message for message in caplog.messages if where in message] == caplog.messages != []


def _meet(port: int, ranks: tuple[int, ...], seconds: float = 20.0) -> list[dist.Store]:
    """Let ranks of a world of two meet, the last one a moment after the others."""
    with ThreadPoolExecutor() as pool:
        found = []
        for rank in ranks:
            env = DistributedEnv(
                rank=rank,
                world_size=2,
                master_port=port,
                store_is_served=True,
                local_rank=rank,
                local_world_size=2,
            )
            found.append(pool.submit(store.meet, env, timedelta(seconds=seconds)))
            time.sleep(0.1)
        return [one.result() for one in found]


@pytest.mark.parametrize("lost", [(), (0,), (1,), (0, 1)])
def test_ranks_that_start_again_never_see_the_keys_of_those_before(lost: tuple[int, ...]) -> None:
    host = store.host_on_loopback()
    if len(lost) == 1:  # one that dies before the other has come
        with pytest.raises(JoinError):
            _meet(host.port, lost, seconds=0.2)
    elif lost:
        for one in _meet(host.port, lost):
            one.set("an address", "of a rank that is gone")
    first, second = _meet(host.port, (1, 0))
    assert not first.check(["an address"])
    first.set("an address", "of rank 1")
    assert second.get("an address") == b"of rank 1"


def test_a_taken_port_is_one_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        env = DistributedEnv(world_size=2, master_port=taken.getsockname()[1])
        with pytest.raises(JoinError, match="Address already in use"):
            init_process_group(env)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.campaign)]
)
def test_a_rank_that_waits_obeys_signals(number: signal.Signals) -> None:
    code = f"""
from mt_parallel_state import DistributedEnv, init_process_group, store
store._SILENT_SECONDS = 0.0
init_process_group(DistributedEnv(world_size=2, master_port={_free_port()}))
"""
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as rank:
        assert rank.stderr is not None
        assert rank.stderr.readline() == "waiting for rank 1 of 2\n"
        start = time.monotonic()
        rank.send_signal(number)
        assert rank.wait(timeout=20) == -number
        assert time.monotonic() - start < 5
        rank.stderr.read()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="makes a network namespace")
def test_without_a_network_there_is_one_message() -> None:
    code = """
import sys
from mt_parallel_state import JoinError, launch
try:
    launch("no_matter", [], 2)
except JoinError as error:
    print(error)
"""
    command = ["unshare", "--user", "--map-root-user", "--net"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no network namespace")
    done = subprocess.run(
        [*command, sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert (
        done.stdout
        == "ranks of one machine meet at 127.0.0.1, which does not work here: [Errno 101] Network "
        "is unreachable\n"
    )
    assert done.stderr == ""


def test_the_loss_of_a_rank_is_told_from_other_errors(ranks) -> None:
    def body() -> tuple[bool, bool]:
        dist.all_reduce(torch.ones(1))  # connects them
        try:
            if dist.get_rank() == 1:
                dist.destroy_process_group()
                return True, True
            dist.recv(torch.empty(1), src=1)
        except RuntimeError as error:
            outer = ValueError("what came of it")
            outer.__cause__ = error
            return is_peer_loss(error), is_peer_loss(outer)
        return False, False

    assert ranks(2, body) == [(True, True)] * 2
    assert is_peer_loss(PeerLostError("gone"))
    assert not is_peer_loss(RuntimeError("shape mismatch"))
    assert not is_peer_loss(BrokenPipeError("Broken pipe"))  # a reader of our output
    assert not is_peer_loss(None)


def test_a_lost_rank_is_one_error_where_no_launcher_ends_us(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mt_parallel_state.job._YIELD_SECONDS", 0.0)
    monkeypatch.setattr("mt_parallel_state.job.init_process_group", lambda *_, **__: "cpu")
    long = "Connection closed by peer [1.2.3.4]\nframe #0: a stack"
    with (
        pytest.raises(PeerLostError) as caught,
        joined(DistributedEnv(rank=1, world_size=2)),
    ):
        raise RuntimeError(long)
    assert "\n" not in str(caught.value)
    assert "rank 1 lost another rank" in str(caught.value)
    with pytest.raises(RuntimeError, match="my own"), joined(DistributedEnv(world_size=2)):
        raise RuntimeError("my own")


def test_nproc_is_checked_against_launcher_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, launched = DistributedEnv(), DistributedEnv(world_size=4, launcher="slurm")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not must_launch(1, alone)
    assert must_launch(2, alone)
    assert not must_launch(1, launched)
    assert not must_launch(4, launched)
    with pytest.raises(ValueError, match="--nproc 0: use 1 or more"):
        must_launch(0, alone)
    with pytest.raises(ValueError, match="--nproc 2 under slurm, which started 4 processes"):
        must_launch(2, launched)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="--nproc 2 needs a GPU for each process"):
        must_launch(2, alone)
    assert not must_launch(1, alone)


def test_ranks_meet_at_a_store_that_rank_0_hosts_on_loopback() -> None:
    port = _free_port()
    code = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from mt_parallel_state import DistributedEnv, joined
rank, port = int(sys.argv[1]), int(sys.argv[2])
with joined(DistributedEnv(rank=rank, world_size=2, master_port=port)):
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x == 2
    print([e for n in ("tcp", "tcp6") for e in Path(f"/proc/net/{n}").read_text().split()
           if e.endswith(f":{port:04X}")][0])
    dist.barrier()
"""
    command = [sys.executable, "-c", code]
    both = [
        subprocess.Popen([*command, str(r), str(port)], stdout=subprocess.PIPE, text=True)
        for r in (1, 0)
    ]
    assert [p.communicate(timeout=60)[0].strip() for p in both] == [f"0100007F:{port:04X}"] * 2
    assert [p.returncode for p in both] == [0, 0]


def test_the_environment_is_left_alone() -> None:
    before = dict(os.environ)
    with joined(DistributedEnv()):
        pass
    assert dict(os.environ) == before


def test_running_out_of_memory_is_recognised_wherever_it_is_the_cause() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    outer = ValueError("a stage failed")
    outer.__cause__ = caught.value
    found = (caught.value, outer, MemoryError(), RuntimeError("CUDA error: out of memory"))
    assert all(map(is_out_of_memory, found))
    assert not any(map(is_out_of_memory, (None, RuntimeError("shapes"), ValueError())))
