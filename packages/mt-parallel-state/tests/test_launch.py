"""The launcher: variables, exit codes, signals, and no orphans. The ranks are plain Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import mt_parallel_state
import pytest
from mt_parallel_state import launch, leading

RANK_MODULE = """
import os, signal, sys, time
from pathlib import Path
rank, out, case = os.environ["RANK"], Path(sys.argv[1]), sys.argv[2]
if case == "variables":
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS".split()
    (out / rank).write_text(" ".join(os.environ[n] for n in names) + " " + " ".join(sys.argv[1:]))
    assert __name__ == "__main__"
elif case == "paths":
    assert not {os.getcwd(), "", "."} & set(sys.path), sys.path
    import tokenizers_of_nobody
elif case == "die":
    if rank == "1":
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
elif case == "exit":
    sys.exit(7 if rank == "0" else 0)
elif case == "stubborn":
    if rank == "1":
        time.sleep(0.5)
        sys.exit(5)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
elif case == "save":
    def save(*_):
        (out / f"saved{rank}").touch()
        sys.exit(0)
    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        signal.signal(getattr(signal, name), save)
    (out / f"ready{rank}").write_text(str(os.getpid()))
    time.sleep(60)
elif case == "stop":
    from signals import stop_signals
    with stop_signals() as stop, stop.deferred():
        (out / f"ready{rank}").write_text(str(os.getpid()))
        while not stop.requested:
            time.sleep(0.01)
        # Ranks do not leave at the same moment.
        time.sleep(1.0 if rank == "0" else 0.0)
    (out / f"saved{rank}").write_text(stop.reason)
    sys.exit(75)
elif case == "busy":
    from signals import stop_signals
    with stop_signals() as stop, stop.deferred():
        stop.note = f"rank {rank} did not save" if rank == "0" else ""
        (out / f"ready{rank}").write_text(str(os.getpid()))
        time.sleep(60)
elif case == "deaf":
    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    (out / f"ready{rank}").write_text(str(os.getpid()))
    time.sleep(60)
elif case == "reduce":
    import torch, torch.distributed as dist
    from mt_parallel_state import detect_env, joined
    with joined(detect_env()) as device:
        x = torch.ones(1, device=device)
        dist.all_reduce(x)
        assert x.item() == 2 and torch.get_num_threads() == 1
elif case == "listen":
    import torch, torch.distributed as dist
    from mt_parallel_state import detect_env, joined
    with joined(detect_env()) as device:
        dist.barrier()
        (out / f"listening{rank}").write_text("".join(
            Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")
        ))
        (out / f"port{rank}").write_text(os.environ["MASTER_PORT"])
        dist.barrier()
elif case == "loss":
    import torch, torch.distributed as dist
    from mt_parallel_state import PeerLostError, detect_env, joined
    with joined(detect_env()) as device:
        x = torch.ones(1, device=device)
        dist.all_reduce(x)
        if rank == "2":
            raise RuntimeError("the one failure")
        dist.all_reduce(x)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rank_module.py").write_text(RANK_MODULE)
    (tmp_path / "empty").mkdir()
    # A rank that only needs signals starts ten times faster without torch.
    source = Path(mt_parallel_state.__file__).parent / "signals.py"
    (tmp_path / "signals.py").symlink_to(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path


def _run(folder: Path, case: str, nproc: int) -> int:
    return launch("rank_module", [str(folder), case], nproc)


def _background(folder: Path, case: str) -> subprocess.Popen[bytes]:
    call = f"launch('rank_module', {[str(folder), case]}, 2)"
    code = f"import sys; from mt_parallel_state import launch; sys.exit({call})"
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not all((folder / f"ready{r}").exists() for r in (0, 1)):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(0.05)
    return process


def _gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_every_rank_gets_torchruns_variables_and_the_arguments(folder: Path) -> None:
    assert _run(folder, "variables", 3) == 0
    threads = max(1, len(os.sched_getaffinity(0)) // 3)
    for rank in range(3):
        text = (folder / str(rank)).read_text()
        assert text == f"{rank} 3 {rank} 3 127.0.0.1 {threads} {folder} variables"


def test_ranks_meet_at_the_store_of_the_launcher(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert _run(folder, "reduce", 2) == 0


def test_a_killed_rank_is_named_and_ends_the_others(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    start = time.monotonic()
    assert _run(folder, "die", 4) == 128 + signal.SIGKILL
    assert time.monotonic() - start < 20
    assert capfd.readouterr().err == "rank 1 was killed by SIGKILL; ending the other 3\n"


def test_a_rank_that_ignores_sigterm_is_killed_after_a_failure(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mt_parallel_state.launcher._FAILURE_GRACE_SECONDS", 1.0)
    start = time.monotonic()
    assert _run(folder, "stubborn", 2) == 5
    assert 1 < time.monotonic() - start < 30
    assert capfd.readouterr().err == "rank 1 exited with code 5; ending the other 1\n"


def test_the_exit_code_is_that_of_the_failing_rank(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _run(folder, "exit", 1) == 7
    assert capfd.readouterr().err == "rank 0 exited with code 7\n"


def test_launch_works_outside_the_main_thread(folder: Path) -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(_run(folder, "variables", 1)))
    thread.start()
    thread.join()
    assert codes == [0]


# SIGINT and SIGHUP are those of two signals below.
NUMBERS = [
    signal.SIGTERM,
    *(pytest.param(n, marks=pytest.mark.campaign) for n in (signal.SIGINT, signal.SIGHUP)),
]


@pytest.mark.parametrize("number", NUMBERS)
def test_signals_reach_the_ranks_and_a_clean_end_is_zero(
    folder: Path, number: signal.Signals
) -> None:
    process = _background(folder, "save")
    process.send_signal(number)
    assert process.wait(timeout=30) == 0
    assert all((folder / f"saved{rank}").exists() for rank in (0, 1))


@pytest.mark.parametrize("number", NUMBERS)
def test_ranks_that_stop_and_can_be_resumed_make_75(
    folder: Path, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    process = _background(folder, "stop")
    process.send_signal(number)
    assert process.wait(timeout=30) == 75
    assert [(folder / f"saved{rank}").read_text() for rank in (0, 1)] == [number.name] * 2
    assert capfd.readouterr().err == ""


def test_a_second_signal_ends_all_ranks_at_once(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    process = _background(folder, "busy")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 128 + signal.SIGINT
    assert time.monotonic() - start < 5
    assert capfd.readouterr().err == "SIGINT: rank 0 did not save\n"


def test_ranks_deaf_to_signals_are_killed_by_a_second_one(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    process = _background(folder, "deaf")
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    # Who insisted on a stop got one: that is no failure of a rank.
    assert process.wait(timeout=10) == 128 + signal.SIGTERM
    assert capfd.readouterr().err == ""


def test_a_hangup_that_shell_and_kernel_both_send_is_one(folder: Path) -> None:
    process = _background(folder, "stop")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.1)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=30) == 75


def test_nothing_in_the_working_directory_is_imported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    for name in ("tokenizers_of_nobody", "runpy", "torch"):
        (elsewhere / f"{name}.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(elsewhere)
    assert _run(folder, "paths", 1) == 1
    assert "No module named 'tokenizers_of_nobody'" in capfd.readouterr().err
    assert not (elsewhere / "ran").exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/net")
def test_nothing_listens_beyond_loopback(folder: Path) -> None:
    before = _listening("\n".join(Path(f"/proc/net/{n}").read_text() for n in ("tcp", "tcp6")))
    assert _run(folder, "listen", 2) == 0
    during = _listening((folder / "listening0").read_text())
    assert ("0100007F", int((folder / "port0").read_text())) in during
    assert {address for address, _ in during - before} == {"0100007F"}


def _listening(table: str) -> set[tuple[str, int]]:
    rows = [line.split() for line in table.splitlines()]
    ends = [row[1].split(":") for row in rows if len(row) > 3 and row[3] == "0A"]
    return {(address, int(port, 16)) for address, port in ends}


def test_a_dead_rank_is_heard_alone(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _run(folder, "loss", 3) == 1
    text = capfd.readouterr().err
    assert text.count("Traceback") == 1
    assert text.count("the one failure") == 2  # its line of source, and its message
    assert text.endswith("rank 2 exited with code 1; ending the other 2\n")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses PR_SET_PDEATHSIG")
def test_ranks_do_not_outlive_a_killed_launcher(folder: Path) -> None:
    process = _background(folder, "save")
    pids = [int((folder / f"ready{rank}").read_text()) for rank in (0, 1)]
    assert not any(_gone(pid) for pid in pids)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while not all(_gone(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_module_that_does_not_exist_fails(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch("no_such_module", [], 1) == 1
    assert "No module named no_such_module" in capfd.readouterr().err
    with pytest.raises(ValueError, match="nproc must be at least 1 and at most 1024, got 0"):
        launch("x", [], 0)


def test_the_ranks_that_one_leads_know_their_place_and_end_with_the_block(folder: Path) -> None:
    with leading("rank_module", [str(folder), "variables"], 3) as (env, others):
        assert (env.rank, env.world_size, env.store_is_served) == (0, 3, True)
        assert [each.wait(60) for each in others] == [0, 0]
    assert [(folder / rank).read_text().split()[:2] for rank in "12"] == [["1", "3"], ["2", "3"]]
    with leading("rank_module", [str(folder), "die"], 2) as (_, (other,)):
        pass
    assert other.returncode == -signal.SIGKILL
    with pytest.raises(ValueError, match="nproc"), leading("rank_module", [], 1):
        pass
