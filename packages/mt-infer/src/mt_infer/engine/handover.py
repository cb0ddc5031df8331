"""Hand-over of a prompt's blocks from the engine that computed them to another engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mt_infer.engine.loop import Loop
from mt_infer.engine.message import pack, unpack
from mt_infer.engine.options import EngineOptions
from mt_infer.engine.prefix import PrefixCache, extend_keys
from mt_infer.engine.ranks import Ranks
from mt_infer.engine.request import Request
from mt_infer.engine.weights import Weights


class Handover:
    """Full blocks of prompts, read from the prefix cache or put into it.

    Blocks are sent with the heads of all tensor-parallel ranks and the layers of all stages, so
    that layouts may differ. States of recurrent layers are sent in the form of each rank.

    Args:
        loop: The loop that holds the blocks.
        options: Sizes of the engine.
        ranks: The ranks that serve the same requests.
        weights: The weights that made the blocks.
    """

    def __init__(self, loop: Loop, options: EngineOptions, ranks: Ranks, weights: Weights) -> None:
        self._loop, self._options, self._ranks, self._weights = loop, options, ranks, weights
        loop.add_deeds(self.read_blocks, self.write_blocks)

    def give(self, tokens: Sequence[int], *, adapter: str | None, caller: str) -> bytes:
        """Return the cached blocks of a prompt's beginning as bytes."""
        whose = {"tokens": list(tokens), "adapter": adapter, "caller": caller}
        found = self._ranks.do(self.read_blocks, **whose)
        return pack({"facts": self._facts(), **found})

    def take(self, content: bytes) -> int:
        """Put the blocks of `give` into the prefix cache, and return their number of tokens.

        Raises:
            ValueError: The bytes are not from `give`, or from an engine with other blocks.
        """
        self.check()
        try:
            given = unpack(content)
            theirs = given.pop("facts")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"the content is none of hand_over: {error}") from error
        own = self._facts()
        for name, value in own.items():
            if theirs.get(name) != value:
                raise ValueError(
                    f"the blocks are of an engine with {name}={theirs.get(name)}, and this one has "
                    f"{value}; make both engines alike"
                )
        return self._ranks.do(self.write_blocks, given=given)

    def check(self) -> None:
        """Raise ValueError if other requests can't use the engine's blocks."""
        if self._loop.scheduler.prefix is None or self._loop.runner.model.config.encoder_layers:
            raise ValueError(
                "a hand-over needs prefix_cache=True, a model without an encoder, and keys that "
                "don't depend on a request's length"
            )

    def read_blocks(self, tokens: list[int], adapter: str | None, caller: str) -> dict[str, Any]:
        """Return the cached blocks of a prompt's beginning, from all ranks."""
        request = self._request([*tokens, 0], adapter, caller)  # a last token is never cached
        blocks = self._prefix.match(request)
        request.held = len(blocks) * self._options.block_size
        row = self._prefix.states_of(request)
        own: dict[str, Any] = {"blocks": {}, "states": {}}
        for name, first, x in self._tensors():
            own["blocks"][name] = [first, _as_bytes(x)[blocks]]
        if row is not None:
            own["states"] = {name: _as_bytes(x).clone() for name, x in self._states(row)}
        whole: dict[str, dict[int, Tensor]] = {}
        states: dict[str, Tensor] = {}
        for each in map(unpack, self._ranks.gather(pack(own))):
            states |= each["states"]
            for name, (first, x) in each["blocks"].items():
                whole.setdefault(name, {})[first] = x
        joined = {
            name: torch.cat([parts[first] for first in sorted(parts)], dim=1)
            for name, parts in whole.items()
        }
        whose = {"tokens": tokens[: request.held], "adapter": adapter, "caller": caller}
        return {**whose, "blocks": joined, "states": states}

    def write_blocks(self, given: dict[str, Any]) -> int:
        """Put the blocks of all ranks into this rank's pages, as far as there is room."""
        tokens, size, pool = given["tokens"], self._options.block_size, self._loop.pool
        request = self._request(tokens, given["adapter"], given["caller"])
        count = min(len(tokens) // size, pool.free_blocks)
        if self._prefix.has_states and (count < len(tokens) // size or not given["states"]):
            return 0
        blocks = pool.take(count)
        for name, first, x in self._tensors():
            part = given["blocks"][name].narrow(1, first, x.shape[1])
            _as_bytes(x)[blocks] = part[:count].to(x.device)
        extend_keys(request, count, size)
        held = [pool.publish(block, key) for block, key in zip(blocks, request.keys, strict=False)]
        request.held = count * size
        row = self._prefix.keep_states(request)
        if row is not None:
            for name, x in self._states(row):
                _as_bytes(x).copy_(given["states"][name])
        pool.release(held)
        return request.held

    @property
    def _prefix(self) -> PrefixCache:
        prefix = self._loop.scheduler.prefix
        assert prefix is not None, "see check()"  # noqa: S101
        return prefix

    def _request(self, tokens: list[int], adapter: str | None, caller: str) -> Request:
        """Return a request to find the blocks of a prompt; it is never served."""
        number = self._loop.adapters.number(adapter)
        request = Request(number=-1, tokens=tokens, limit=0, caller=caller, adapter=number)
        request.salt = self._loop.salt(request)
        return request

    def _tensors(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yield this rank's tensors of blocks, by name, with the number of their first head."""
        for number, runner in enumerate(self._loop.runners):
            model = runner.model
            mixers, shard = model.config.mixers, model.shard
            for layer, name, x in runner.pages.named_tensors(states=False):
                first = shard.tp_index * mixers[layer].token_heads // shard.tp
                yield f"{number}.{layer}.{name}", first, x

    def _states(self, row: int) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's recurrent states that the prefix cache keeps in a row."""
        runner, rank = self._loop.runner, self._loop.runner.model.shard.tp_index
        for layer, name, x in runner.pages.named_tensors(states=True):
            yield f"{layer}.{name}.{rank}", x[runner.kept_row(row)]

    def _facts(self) -> dict[str, Any]:
        """Return the facts that two engines must have in common."""
        runner = self._loop.runner
        config = json.dumps(runner.model.config.to_dict(), sort_keys=True, default=str)
        return {
            "model": hashlib.sha256(config.encode()).hexdigest()[:16],
            "weights": self._weights.source,
            "step": self._loop.identity.step,
            "dtype": str(runner.model.shard.dtype),
            "kv_cache_dtype": str(self._options.kv_cache_dtype),
            "block_size": self._options.block_size,
            "models": len(self._loop.runners),
            "tp of recurrent layers": runner.model.shard.tp if self._prefix.has_states else None,
        }


def _as_bytes(x: Tensor) -> Tensor:
    """Return a tensor as bytes, since torch can't copy fp8 by index."""
    return x.view(torch.uint8)
