"""What requests keep in host memory comes back in every bit."""

from __future__ import annotations

import pytest
import torch
from mt_infer.engine.host import HostRoom
from mt_infer.engine.host_pages import HostPages
from mt_infer.engine.request import Request
from mt_model import GPT, AttentionConfig, LayerConfig, Mamba2Config, MLAConfig, RopeConfig, gpt

MIXERS = {
    "attention": AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeConfig()),
    "mla": MLAConfig(
        num_heads=4, kv_lora_rank=16, nope_head_dim=8, rope_head_dim=4, v_head_dim=8,
        rope=RopeConfig(),
    ),
    "mamba2": Mamba2Config(num_heads=4, head_dim=16, state_size=8),
}  # fmt: skip
CASES = [*((name, "auto") for name in MIXERS), ("attention", "int8"), ("attention", "fp8")]


@pytest.mark.parametrize(("mixer", "kept"), CASES)
def test_blocks_and_states_come_back_in_every_bit_to_other_places(mixer, kept) -> None:
    layers = [LayerConfig(mixer=MIXERS[mixer])] * 2
    sizes = {"vocab_size": 16, "hidden_size": 32, "max_sequence_length": 64}
    config = gpt(**sizes, layers=layers, positions="none" if mixer == "mamba2" else "rope")
    pages = GPT(config, seed=1).new_pages(blocks=6, block_size=4, states=3, kv_cache_dtype=kept)
    blocks, states = list(pages.tensors(states=False)), list(pages.tensors(states=True))
    assert bool(states) == (mixer == "mamba2")
    generator = torch.Generator().manual_seed(1)
    for x in blocks + states:
        x.view(torch.uint8).random_(0, 120, generator=generator)
    before = [x.view(torch.uint8).clone() for x in blocks + states]
    room, host = HostRoom(4, 4), HostPages(pages, 4)
    first = Request(number=0, tokens=[1] * 10, limit=12, held=10, table=[5, 1, 3], state=2)
    second = Request(number=1, tokens=[1] * 9, limit=12, held=9, table=[0, 2, 4], state=0)
    room.keep(first)
    room.keep(second)  # finds no room
    assert (first.saved, second.saved, room.pool.free_blocks) == ((10, 0), (0, 0), 1)
    first.table, first.held, first.state = [5, 4, 0], 4, 1  # the prefix cache had block 5
    room.restore(first)
    out, back = room.take_moves()
    host.make(out, pages, row=2)
    for x in blocks:
        x.view(torch.uint8)[:5] = 0
    for x in states:
        x.view(torch.uint8)[:] = 0
    host.make(back, pages, row=1)
    for x, old in zip(blocks + states, before, strict=True):
        places, sources = ([5, 4, 0], [5, 1, 3]) if len(x) == 6 else ([1], [2])
        assert torch.equal(x.view(torch.uint8)[places], old[sources])
    assert (first.held, room.restored, room.pool.free_blocks) == (10, 6, 4)
