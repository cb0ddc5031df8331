"""`mt-infer serve --nproc N --pp P`: the engine's process is a group of ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mt_infer import Engine, Sampling
from mt_infer.backends.backend import Setup
from mt_infer.backends.process import _environment
from mt_infer.cli import main
from mt_model import gpt
from serving import Process, children, wait_for

ASK = {"prompt": "to be", "max_tokens": 12, "seed": 7}
SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_sequence_length": 4096}


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        pytest.param(["--nproc=2"], "tp2-pp1", marks=pytest.mark.campaign),
        (["--pp=2"], "tp1-pp2"),
    ],
)
def test_a_killed_rank_is_seen_and_the_group_is_started_again(
    tmp_path: Path, write_run: Callable[..., Path], options: list[str], layout: str
) -> None:
    run = write_run(tmp_path / "run", gpt(vocab_size=264, init_std=0.4, **SIZES))
    (expected,) = Engine.from_folder(run).generate("to be", Sampling(seed=7, max_tokens=12))
    with Process(run, "--max-batch-tokens=64", *options) as server:
        (first,) = server.engines
        (second,) = children(first)
        found = server.complete(ASK).body
        assert found["choices"][0]["text"] == expected.text
        assert found["system_fingerprint"].endswith(f"float32-{layout}")
        with ThreadPoolExecutor(4) as pool:
            long = ASK | {"max_tokens": 4000, "min_tokens": 4000}
            held = [pool.submit(server.complete, long) for _ in range(4)]
            wait_for(lambda: server.metric("num_requests_running") > 0)
            os.kill(second, signal.SIGKILL)
            wait_for(lambda: server.site.get("/ready").status == 503)
        assert {each.result().status for each in held} == {503}
        wait_for(lambda: server.site.get("/ready").status == 200, 120)
        assert server.complete(ASK).body["choices"][0]["text"] == expected.text
        (again,) = server.engines
        ranks = [again, *children(again)]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    for each in (first, second, *ranks):
        wait_for(lambda pid=each: not Path(f"/proc/{pid}").exists())


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--pp=0"], "--pp 0"), (["--nproc=3", "--pp=2"], "--nproc 3"), (["--nproc=0"], "--nproc 0")],
)
def test_numbers_of_processes_that_make_no_layout_are_refused(
    saved_run: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", str(saved_run), *options])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("named", "expected"), [(None, "2,3"), ("4,5,6,7", "6,7"), ("GPU-a", ""), ("", "")]
)
def test_a_group_of_ranks_has_gpus_of_its_own_and_listens_on_loopback(
    monkeypatch: pytest.MonkeyPatch, named: str | None, expected: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("MT_INFER_API_KEY", "a-client's-key-of-this-test")
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    first, second = (
        _environment(Setup(folder="x", name="x", nproc=2, device=each)) for each in (0, 1)
    )
    assert first.get("CUDA_VISIBLE_DEVICES") == named
    assert second["CUDA_VISIBLE_DEVICES"] == expected
    assert second["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert "MT_INFER_API_KEY" not in second
