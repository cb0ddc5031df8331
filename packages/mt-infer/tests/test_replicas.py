"""Several engines behind one server: who serves a request, and what happens when one ends."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from typing import Any

import pytest
from mt_infer import Completion, Engine, EngineOptions, Sampling
from mt_infer.backends.backend import Backend, EngineDownError, Job, Setup
from mt_infer.backends.local import LocalEngine
from mt_infer.backends.process import EngineProcess
from mt_infer.backends.replicas import Replicas
from mt_model import gpt
from test_engine import model_of

HOW = Sampling(seed=2, max_tokens=6)


def engines(blocks: int = 60) -> list[LocalEngine]:
    options = EngineOptions(blocks=blocks, block_size=4, max_batch=4)
    return [LocalEngine(Engine(model_of("llama"), options=options)) for _ in range(2)]


async def answer(backend: Backend, prompt: Sequence[int]) -> Completion:
    found = [each async for each in backend.stream(Job(prompts=[prompt], sampling=HOW))]
    completion = found[-1].completion
    assert completion is not None
    return completion


def prompts(rng: random.Random) -> list[list[int]]:
    """Prompts of which seven in ten begin with one of some long beginnings."""
    beginnings = [[rng.randrange(64) for _ in range(32)] for _ in range(10)]
    return [
        (rng.choice(beginnings) if rng.random() < 0.7 else [rng.randrange(64) for _ in range(32)])
        + [rng.randrange(64) for _ in range(4)]
        for _ in range(60)
    ]


async def hits(asked: list[list[int]], *, is_routed: bool) -> int:
    made = engines()
    router = Replicas(made)
    for number, prompt in enumerate(asked):
        await answer(router if is_routed else made[number % 2], prompt)
    stats = await router.stats()
    assert stats["free_blocks"] == stats["blocks"] == 120
    await router.close()
    return stats["prefix_tokens"]


def test_prompts_with_a_known_beginning_go_where_it_is_cached() -> None:
    asked = prompts(random.Random(1))
    routed, in_turns = (asyncio.run(hits(asked, is_routed=each)) for each in (True, False))
    assert routed >= 1.3 * in_turns > 0


def test_long_prompts_are_computed_by_engines_for_prompts() -> None:
    asked = [5, 6], list(range(1, 40))
    expected = Engine(model_of("llama")).generate(asked, HOW)

    async def run() -> list[dict[str, int]]:
        made, (helper, _) = engines(), engines()
        router = Replicas(made, prefill=[helper])
        for each, own in zip(asked, expected, strict=True):
            assert (await answer(router, each)).tokens == own.tokens
        stats = [await each.stats() for each in (*made, helper)]
        assert (await router.stats())["free_blocks"] == 180
        await router.close()
        return stats

    *decoding, prefilling = asyncio.run(run())
    assert sum(each["prefix_tokens"] for each in decoding) == prefilling["prefix_tokens"] == 36
    assert prefilling["tokens"] == 0


def test_requests_at_once_are_shared_and_have_their_own_tokens() -> None:
    asked = [[7] * 20, [7] * 20, [9] * 3, [9] * 3, [1, 2, 3]]
    expected = Engine(model_of("llama")).generate(asked, HOW)

    async def run() -> tuple[list[Completion], list[dict[str, int]]]:
        made = engines()
        router = Replicas(made)
        found = await asyncio.gather(*(answer(router, each) for each in asked))
        stats = [await each.stats() for each in made]
        await router.close()
        return found, stats

    found, stats = asyncio.run(run())
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert min(each["tokens"] for each in stats) > 0


def test_a_request_without_a_token_goes_to_another_engine(monkeypatch) -> None:
    async def run() -> Any:
        made = engines()
        router = Replicas(made)

        def fail() -> bool:
            raise MemoryError("no more memory")

        monkeypatch.setattr(made[0].engine, "advance", fail)
        found = await answer(router, [1, 2, 3])
        assert router.is_ready
        monkeypatch.setattr(made[1].engine, "advance", fail)
        with pytest.raises(EngineDownError, match="no more memory"):
            await answer(router, [1, 2, 3])
        assert not router.is_ready
        await router.close()
        return found

    (expected,) = Engine(model_of("llama")).generate([1, 2, 3], HOW)
    assert asyncio.run(run()).tokens == expected.tokens


def test_blocks_travel_to_an_engine_in_another_process(write_run, tmp_path) -> None:
    sizes = {"vocab_size": 264, "hidden_size": 16, "num_layers": 2, "num_heads": 4}
    run = write_run(tmp_path / "run", gpt(**sizes, max_sequence_length=64, init_std=0.4))
    own, prompt = Engine.from_folder(run), list(range(40))

    async def there_and_back() -> tuple[int, int, Completion]:
        other, here = EngineProcess(Setup(folder=str(run), name="run")), LocalEngine(own)
        await other.start()
        sent = await other.take_over(await here.hand_over(Job(prompts=[prompt], sampling=HOW)))
        found = await answer(other, prompt)
        back = await here.take_over(await other.hand_over(Job(prompts=[prompt[1:]], sampling=HOW)))
        with pytest.raises(ValueError, match="none of hand_over"):
            await other.take_over(b"no blocks")
        for each in (other, here):
            await each.close()
        return sent, back, found

    sent, back, found = asyncio.run(there_and_back())
    assert (sent, back) == (32, 32)
    assert found.tokens == own.generate([prompt], HOW)[0].tokens


def test_a_prompt_is_answered_when_its_engine_for_prompts_is_killed(write_run, tmp_path) -> None:
    sizes = {"vocab_size": 264, "hidden_size": 16, "num_layers": 2, "num_heads": 4}
    run = write_run(tmp_path / "run", gpt(**sizes, max_sequence_length=64, init_std=0.4))
    own, prompt = Engine.from_folder(run), list(range(40))

    async def killed() -> tuple[Completion, dict[str, int]]:
        peer, here = EngineProcess(Setup(folder=str(run), name="run")), LocalEngine(own)
        await peer.start()
        router, old = Replicas([here], prefill=[peer]), peer.pid
        assert old is not None
        os.kill(old, signal.SIGSTOP)  # it gets the prompt, and can't hand anything over
        asked = asyncio.create_task(answer(router, prompt))
        await asyncio.sleep(0.2)
        assert not asked.done()
        os.kill(old, signal.SIGKILL)
        async with asyncio.timeout(60):
            found, stats = await asked, await here.stats()
            while not peer.is_ready:
                await asyncio.sleep(0.05)
        assert peer.pid != old
        await router.close()
        return found, stats

    found, stats = asyncio.run(killed())
    assert stats["free_blocks"] == stats["blocks"]
    assert found.tokens == own.generate([prompt], HOW)[0].tokens
