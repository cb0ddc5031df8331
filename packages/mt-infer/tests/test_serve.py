"""`mt-infer serve` before and around its requests: options, keys, connections and its end."""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from mt_infer import Sampling
from mt_infer.backends.backend import EngineDownError, EngineFailedError, Job, Setup
from mt_infer.backends.process import EngineProcess, EngineStartError
from mt_infer.cli import main
from mt_infer.logs import JsonFormatter
from mt_infer.server import Key, Keys, Limits, create_app
from mt_infer.server.http import Server, bound, check_address
from mt_infer.server.keys import KeyFileError, keys_of_environment, read_keys
from mt_model import gpt
from serving import Process, wait_for

SECRET = "a-key-of-16-letters"


def serve(*options: str) -> object:
    with pytest.raises(SystemExit) as stop:
        main(["serve", *options])
    return stop.value.code


def test_another_address_without_a_key_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"):
        assert serve("nowhere", f"--host={host}") == 2
        assert "without a key" in capsys.readouterr().err
        check_address(host, Keys(clients=(Key(secret=SECRET),)))
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        check_address(host, Keys())


def test_without_the_extra_the_message_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert serve("nowhere") == 1
    assert "pip install 'mt-infer[server]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (SECRET, 0o644, "chmod 600"),
        (SECRET, 0o620, "chmod 600"),
        ("", 0o600, "has no key"),
        ("short", 0o600, ":1: "),
        (f"# one\n{SECRET} priority=high", 0o600, ":2: "),
        (f"{SECRET} 3", 0o600, "priority=N"),
        (f"{SECRET} priority=3 more", 0o600, ":1: "),
    ],
)
def test_a_file_of_keys_that_is_not_safe_or_not_one_is_refused(
    tmp_path: Path, text: str, mode: int, said: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(KeyFileError, match=said) as error:
        read_keys(path)
    assert SECRET not in str(error.value)


def test_keys_have_priorities_and_names_that_say_nothing_of_them(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{SECRET} priority=3\n\n{SECRET[::-1]}\n")
    path.chmod(0o600)
    keys = Keys(clients=read_keys(path))
    first, second = (keys.client(f"Bearer {each}") for each in (SECRET, SECRET[::-1]))
    assert first is not None
    assert second is not None
    assert (first.priority, second.priority) == (3, 0)
    assert first.name != second.name
    assert SECRET not in f"{keys}{first}"
    other = Keys(clients=read_keys(path)).client(f"Bearer {SECRET}")
    assert other is not None
    assert other.name != first.name  # salted, so that nobody finds the key by trying
    (found,) = keys_of_environment({"MT_INFER_API_KEY": SECRET})
    assert found.secret == SECRET
    with pytest.raises(KeyFileError, match="MT_INFER_API_KEY"):
        keys_of_environment({"MT_INFER_API_KEY": "short"})


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[str, str]] = []

    def compare(one: str, other: str) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("mt_infer.server.keys.hmac.compare_digest", compare)
    keys = Keys(clients=tuple(Key(secret=f"{number}-{SECRET}") for number in range(5)))
    assert keys.client(f"Bearer 0-{SECRET}") is not None
    assert keys.client("Bearer x") is None
    assert len(compared) == 10
    assert {len(text) for pair in compared for text in pair} == {64}


def test_a_line_of_the_log_is_ascii_and_has_no_text_of_an_error() -> None:
    text = "a\r\n\x1b[31m\u202eb"
    try:
        int(SECRET)  # the error's text has it
    except ValueError:
        error = sys.exc_info()
    record = logging.LogRecord("x", logging.ERROR, "f", 1, text, (), error)
    line = JsonFormatter().format(record)
    assert line.isascii()
    assert line.isprintable()
    assert SECRET not in line
    assert "ValueError" in line


def test_connections_beyond_the_limit_are_refused_and_slow_headers_end() -> None:
    limits = Limits(max_connections=3, header_s=0.3)
    server = Server(create_app(EngineProcess(Setup(folder="x", name="x"))), limits, lambda: None)
    with bound("127.0.0.1", 0) as listener, ThreadPoolExecutor(1) as pool:
        address = listener.getsockname()
        running = pool.submit(asyncio.run, server.serve([listener]))
        try:
            wait_for(lambda: server.started)
            check_connections(address)
        finally:
            server.should_exit = True
        running.result(20)


def check_connections(address: tuple[str, int]) -> None:
    """Check connections to a server that takes three of them, and gives a header 0.3 s."""
    with ExitStack() as stack:
        begun = time.monotonic()
        held = [stack.enter_context(socket.create_connection(address, 10)) for _ in range(3)]
        held[0].send(b"GET /health HTTP/1.1\r\nhost:")
        for asked in (b"", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"):
            with socket.create_connection(address, 10) as refused:
                refused.send(asked)
                assert refused.recv(4096).startswith(b"HTTP/1.1 503 Busy\r\n")
        for _ in range(2):  # a connection stays open for the next request
            held[1].send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = http.client.HTTPResponse(held[1])
            answer.begin()
            assert (answer.status, answer.read()) == (200, b'{"status":"ok"}')
        for each in (held[0], held[2]):
            assert each.recv(1) == b""
        assert time.monotonic() - begun < 5
        with socket.create_connection(address, 10) as taken:  # the place of one that has ended
            taken.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert taken.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    engine = EngineProcess(Setup(folder=str(tmp_path), name="x"))
    with pytest.raises(EngineStartError, match=r"tokenizer.json is missing"):
        asyncio.run(engine.start())
    assert engine.pid is None


def test_an_engine_is_started_again_after_a_start_that_the_machine_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = asyncio.create_subprocess_exec, list[str]()

    async def refuse_once(*command: str, **how: Any) -> asyncio.subprocess.Process:
        if not refused:
            refused.append(command[0])
            raise BlockingIOError("no more processes")
        return await start(*command, **how)

    async def check() -> None:
        engine = EngineProcess(Setup(folder=str(run), name="x"))
        await engine.start()
        first = engine.pid
        assert first is not None
        monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse_once)
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(120):
            while not refused or not engine.is_ready:
                await asyncio.sleep(0.05)
        assert engine.pid not in (None, first)
        await engine.close()

    asyncio.run(check())


def job(prompt: list[int], **sampling: int) -> Job:
    return Job(prompts=[prompt], sampling=Sampling(temperature=0, **sampling))


def test_a_stream_that_is_read_too_slowly_ends_and_no_other(run: Path) -> None:
    async def check() -> None:
        engine = EngineProcess(Setup(folder=str(run), name="x"), max_stream_bytes=300)
        await engine.start()
        pid = engine.pid
        assert pid is not None
        slow = engine.stream(job([1, 2], max_tokens=12, min_tokens=12))
        await anext(slow)
        quick = [each async for each in engine.stream(job([3], max_tokens=3))]
        assert quick[-1].completion is not None
        await asyncio.sleep(0.5)
        with pytest.raises(EngineFailedError, match="too slowly"):
            async for _ in slow:
                pass
        assert (await engine.stats())["running"] == 0
        await engine.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(EngineDownError):
            await engine.stats()

    asyncio.run(check())


def test_replicas_go_on_without_one_and_a_drain_has_an_end(
    tmp_path: Path, write_run: Callable[..., Path]
) -> None:
    config = gpt(
        vocab_size=264, hidden_size=16, num_layers=1, num_heads=2, max_sequence_length=65536
    )
    run = write_run(tmp_path / "run", config)
    long = {"prompt": "to be", "max_tokens": 60000, "min_tokens": 60000, "temperature": 0}
    with Process(run, "--replicas=2", "--drain-seconds=1") as server:
        first, second = server.engines
        os.kill(first, signal.SIGKILL)
        found = [server.complete(long | {"max_tokens": 4, "min_tokens": 0}) for _ in range(8)]
        assert {each.status for each in found} == {200}
        assert second in server.engines
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(server.complete, long)
            wait_for(lambda: server.metric("num_requests_running") == 1)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(30) == 0
            assert held.result().status == 503
        for each in (first, second):
            with pytest.raises(ProcessLookupError):
                os.kill(each, 0)
