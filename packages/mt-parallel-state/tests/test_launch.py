"""The launcher: variables, exit codes, signals, and no orphans. The ranks are plain Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from mt_parallel_state import launch

RANK_MODULE = """
import os, signal, sys, time
from pathlib import Path
rank, out, case = os.environ["RANK"], Path(sys.argv[1]), sys.argv[2]
if case == "variables":
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS".split()
    (out / rank).write_text(" ".join(os.environ[n] for n in names) + " " + " ".join(sys.argv[1:]))
    assert __name__ == "__main__" and sys.path[0] == os.getcwd(), sys.path
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
    signal.signal(signal.SIGTERM, save)
    (out / f"ready{rank}").write_text(str(os.getpid()))
    time.sleep(60)
elif case == "reduce":
    import torch, torch.distributed as dist
    from mt_parallel_state import detect_env, init_process_group
    device = init_process_group(detect_env())
    x = torch.ones(1, device=device)
    dist.all_reduce(x)
    assert x.item() == 2 and torch.get_num_threads() == 1
    dist.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rank_module.py").write_text(RANK_MODULE)
    monkeypatch.chdir(tmp_path)
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
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    start = time.monotonic()
    assert _run(folder, "stubborn", 2) == 5
    assert 3 < time.monotonic() - start < 30
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_ranks_and_a_clean_end_is_zero(
    folder: Path, number: signal.Signals
) -> None:
    if number == signal.SIGINT:
        module = folder / "rank_module.py"
        module.write_text(
            RANK_MODULE.replace(
                "signal.signal(signal.SIGTERM, save)", "signal.signal(signal.SIGINT, save)"
            )
        )
    process = _background(folder, "save")
    process.send_signal(number)
    assert process.wait(timeout=30) == 0
    assert all((folder / f"saved{rank}").exists() for rank in (0, 1))


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
    with pytest.raises(ValueError, match="nproc must be at least 1, got 0"):
        launch("x", [], 0)
