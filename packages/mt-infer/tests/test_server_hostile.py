"""Hostile bodies end with an error of the client's kind or an answer, and leave nothing behind."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from hostile import Hostile, drawn
from mt_hf import save_pretrained
from mt_infer import Engine
from mt_infer.server import Limits, create_app
from mt_model import GPT, gpt
from mt_tokenizer import train_tokenizer

TOGETHER = 6  # one interpreter has clients, server and engine, so each waits for all others
SLOW_S = 2.0
LIMITS = Limits(max_body_bytes=64 << 10, max_prompt_bytes=4096, max_queue=64)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ effort }}"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("hostile") / "model"
    sizes: Any = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_sequence_length": 48}
    save_pretrained(GPT(gpt(vocab_size=384, **sizes), seed=3), path)
    train_tokenizer(["to be or not to be: system user"] * 9, 300).save(path / "tokenizer.json")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return Engine.from_folder(path, blocks=256, max_batch=32)


async def ask(app: FastAPI, request: Hostile) -> tuple[int, bytes]:
    """Return status and body of an answer, through the app alone."""
    sent: list[dict[str, Any]] = []
    parts = iter([{"type": "http.request", "body": request.body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        part = next(parts, None)
        if part is None:
            await asyncio.Event().wait()  # the client stays
        return part or {}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": b"",
        "headers": request.headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(each.get("body", b"") for each in sent)


@dataclass(kw_only=True)
class Found:
    """What an attack saw.

    Attributes:
        statuses: The number of answers of each status.
        seconds: The time of the slowest answer.
        slow: The numbers of the requests whose answers took longer than `SLOW_S`.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0
    slow: list[int] = field(default_factory=list)


async def attack(app: FastAPI, seed: int, wanted: range) -> Found:
    """Send the hostile requests of a seed, some together."""
    found = Found()
    numbers = iter(wanted)

    async def client() -> None:
        for n in numbers:
            request = drawn(seed, n)
            began = time.monotonic()
            status, body = await ask(app, request)
            seconds = time.monotonic() - began
            why = f"seed {seed}, number {n}: {request.path} {request.body[:300]!r}: {body[:300]!r}"
            assert status < 500, why
            assert seconds < (5 if status == 200 else SLOW_S), why
            assert b'"code":"internal_error"' not in body, why
            if status != 200:
                error = json.loads(body)["error"]
                assert set(error) == {"message", "type", "param", "code"}, why
                assert len(error["message"]) < 1000, why
            found.statuses[status] += 1
            found.seconds = max(found.seconds, seconds)
            if seconds > SLOW_S:
                found.slow.append(n)

    async with asyncio.TaskGroup() as group:
        for _ in range(TOGETHER):
            group.create_task(client())
    return found


async def assert_fast(app: FastAPI, seed: int, slow: list[int]) -> None:
    """Repeat slow requests with their neighbours: only a slow body, not the machine, stays slow."""
    for n in slow:
        around = range(max(n - 3 * TOGETHER, 0), n + 3 * TOGETHER)
        tries = [await attack(app, seed, around) for _ in range(3)]
        assert any(not each.slow for each in tries), f"seed {seed}, number {n}: {tries}"


def resident_bytes() -> int:
    """Return the memory in use, after malloc has given back freed pages."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("number", [20_000, pytest.param(1_000_000, marks=pytest.mark.campaign)])
def test_hostile_bodies_are_refused_and_leave_nothing_behind(
    engine: Engine, number: int, record_property: Callable[[str, object], None]
) -> None:
    app = create_app(engine, limits=LIMITS)

    async def run() -> None:
        async with app.router.lifespan_context(app):
            # Meanwhile oneDNN's cache of primitives, by shape, and malloc's arenas fill.
            first = await attack(app, 0, range(number // 2))
            before = resident_bytes()
            found = await attack(app, 1, range(number // 2))
            grown = resident_bytes() - before
            for name, value in (
                ("statuses", dict(sorted((first.statuses + found.statuses).items()))),
                ("MB grown", round(grown / 2**20, 1)),
                ("slowest s", round(max(first.seconds, found.seconds), 2)),
                ("asked again", len(first.slow + found.slow)),
            ):
                record_property(name, value)
            assert grown < 50 << 20
            await assert_fast(app, 0, first.slow)
            await assert_fast(app, 1, found.slow)
            assert found.statuses[200] > number // 100
            assert found.statuses[400] > number // 4
            assert set(found.statuses) <= {200, 400, 401, 403, 404, 413, 429}
            stats = await app.state.serving.backend.stats()
            assert stats["free_blocks"] == stats["blocks"]
            assert stats["running"] == stats["waiting"] == 0

    asyncio.run(run())
