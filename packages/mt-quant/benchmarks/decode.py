"""Decoding of a 125M model on a CPU by formats of the weights, and against torchao's of the same.

    python packages/mt-quant/benchmarks/decode.py [--batch 1 8] [--no-compiled] [--smoke] [--out F]

All ways decode the same tokens in turns, on one thread, in bf16: eager, and with each block
compiled. Prints bf16's time over a way's, and torchao's over ours, within rounds: above 1 the way,
or ours, is faster. torchao's are there where it is installed; its int4 for a CPU is a prototype of
its. The head stays in bf16 with every way.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from mt_quant import QuantizationConfig, Rule, quantize
from mt_testing import environment, ratios, shown, take_turns, write_report
from torch import Tensor, nn

HIDDEN, HEADS, LAYERS, VOCABULARY, CONTEXT = 768, 12, 12, 50304, 256
RULES = {
    "int8": Rule(weight="int8"),
    "int8 x int8": Rule(weight="int8", input="int8"),
    "int4-g128": Rule(weight="int4-g128"),
    "int4-g32-asym": Rule(weight="int4-g32-asym"),
}
PAIRS = {"torchao int8": "int8", "torchao int4-g128": "int4-g128"}


class Block(nn.Module):
    """Attention over a cache and a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, cache: Tensor, at: Tensor) -> Tensor:
        """Add a token to the stream, and to the cache at a place."""
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1))
        query, *new = qkv.unbind(-3)
        cache.index_copy_(3, at, torch.stack(new).unsqueeze(3))
        seen = torch.arange(CONTEXT)[None] <= at[:, None]
        mixed = F.scaled_dot_product_attention(query[:, :, None], *cache, attn_mask=seen)
        x = x + self.out(mixed.flatten(1))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """GPT-2 small without positions, whose head is its embedding."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, tokens: Tensor, caches: list[Tensor], at: Tensor) -> Tensor:
        """Return the scores of the next token."""
        x = self.embedding(tokens)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache, at)
        return F.linear(self.norm(x), self.embedding.weight)


def decoding(model: Model, batch: int, tokens: int) -> Callable[[], Tensor]:
    """Decode some tokens greedily; returns the last scores."""
    shape = (2, batch, HEADS, CONTEXT, HIDDEN // HEADS)

    @torch.no_grad()
    def decode() -> Tensor:
        caches = [torch.zeros(shape, dtype=torch.bfloat16) for _ in model.blocks]
        chosen, scores = torch.zeros(batch, dtype=torch.int64), torch.empty(0)
        for at in range(tokens):
            scores = model(chosen, caches, torch.tensor([at]))
            chosen = scores.argmax(-1)
        return scores

    return decode


def with_torchao(model: Model) -> dict[str, Model]:
    """The weight-only ways of torchao that run on a CPU."""
    if importlib.util.find_spec("torchao") is None:
        print("torchao is not installed: pip install torchao")
        return {}
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    configs = {"torchao int8": Int8WeightOnlyConfig()}
    try:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    except ImportError as error:
        print(f"this torchao has no int4 for a CPU: {error}")
    else:
        configs["torchao int4-g128"] = PrototypeInt4WeightOnlyConfig(group_size=128)
    made = {name: copy.deepcopy(model) for name in configs}
    for name, config in configs.items():
        quantize_(made[name], config)
    return made


def models_of(layers: int) -> dict[str, Model]:
    """The same model by every way."""
    torch.manual_seed(0)
    plain = Model(layers).bfloat16().eval()
    made = {"bf16": plain}
    for name, rule in RULES.items():
        low = quantize(copy.deepcopy(plain), QuantizationConfig(rules=(rule,)))
        assert isinstance(low, Model)
        made[name] = low
    return made | with_torchao(plain)


def ways_of(
    models: dict[str, Model], batch: int, tokens: int, *, compiled: bool
) -> dict[str, Callable[[], Tensor]]:
    """Decoding by every way, after a look at whether it computes what the model does."""
    expected = decoding(models["bf16"], batch, 1)()
    ways = {}
    for name, model in models.items():
        for block in model.blocks if compiled else ():
            block.compile()  # one graph serves all blocks of a way
        found = decoding(model, batch, 1)()
        error = float((found - expected).norm() / expected.norm())
        assert error < 0.3, (name, error)
        ways[name] = decoding(model, batch, tokens)
    return ways


def compared(
    batch: int, layers: int, tokens: int, rounds: int, *, compiled: bool
) -> list[dict[str, object]]:
    """Ratios of all ways at a batch, which are printed too."""
    mode = "compiled" if compiled else "eager"
    ways = ways_of(models_of(layers), batch, tokens, compiled=compiled)
    turns = take_turns(ways, rounds)
    pairs = [("bf16", name) for name in ways if name != "bf16"]
    pairs += [pair for pair in PAIRS.items() if pair[0] in ways]
    found: list[dict[str, object]] = []
    for one, other in pairs:
        spread = ratios(turns, one, other)
        found.append({"batch": batch, "mode": mode, "time of": one, "over": other, "ratio": spread})
        told = "  ".join(f"{clock} {shown(values)}" for clock, values in spread.items())
        print(f"batch {batch}, {mode}: {one} / {other} {told}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=24, help="in a round, by each way")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--smoke", action="store_true", help="two layers, short")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # a graph for each way
    sizes = (2, 2, 3) if options.smoke else (LAYERS, options.tokens, options.rounds)
    found = [
        ratio
        for batch in options.batch
        for compiled in (False, True)[: 1 + options.compiled]
        for ratio in compared(batch, *sizes, compiled=compiled)
    ]
    packages = ["torch", *(["torchao"] if importlib.util.find_spec("torchao") else [])]
    report = environment(*packages) | {"threads": 1, "layers": sizes[0], "tokens": sizes[1]}
    write_report(options.out, report | {"ratios": found})


if __name__ == "__main__":
    main()
