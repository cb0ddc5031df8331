"""A server's weights change as one value, and behind streams however long they run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from mt_infer import Engine, Sampling
from mt_infer.backends.backend import Job
from mt_infer.backends.local import LocalEngine
from mt_infer.completion import Delta
from mt_infer.engine.weights import Weights


def test_step_and_digest_change_together(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {step: Engine.from_folder(run, step=step).digest for step in (1, 2)}
    engine = LocalEngine(Engine.from_folder(run, step=1, blocks=32))
    seen: list[tuple[int | None, str]] = []
    pack = Weights._pack

    def packing(self: Weights) -> None:  # in the middle of a swap
        seen.append((engine.facts.step, engine.facts.digest))
        pack(self)

    monkeypatch.setattr(Weights, "_pack", packing)
    assert engine.facts.digests == {1: digests[1]}
    engine.engine.load_step(2)
    assert seen[-1] in digests.items()
    assert engine.facts.digests == digests
    weights = {name: x.clone() for name, x in engine.engine.model.named_parameters()}
    engine.engine.update_weights(weights, step=2)
    given = engine.facts.digest
    assert given != digests[2]
    engine.engine.update_weights({name: -x for name, x in weights.items()}, step=2)
    assert engine.facts.digest not in (given, digests[2])
    asyncio.run(engine.close())


def test_a_swap_waits_for_streams_however_long_they_run(run: Path) -> None:
    async def check() -> None:
        loop: Any = asyncio.get_running_loop()
        now = loop.time
        loop.time = lambda: 600 * now()  # a second is ten minutes
        engine = LocalEngine(Engine.from_folder(run, step=1, blocks=32))
        engine.engine.pause()
        how = Sampling(temperature=0, max_tokens=8, min_tokens=8)
        found: list[Delta] = []

        async def read() -> None:
            async for delta in engine.stream(Job(prompts=[[1, 2]], sampling=how)):
                found.append(delta)

        reading = asyncio.create_task(read())
        while not engine.engine.stats()["waiting"] and not reading.done():
            await asyncio.sleep(1)
        swap = asyncio.create_task(engine.load_step())
        await asyncio.sleep(300)
        assert not swap.done()
        assert not found
        engine.engine.resume()
        await reading
        assert [each.step for each in found] == [1] * 8
        assert await swap == 2
        await engine.close()

    asyncio.run(check())
