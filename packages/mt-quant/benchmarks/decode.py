"""Decoding of a 125M model on a CPU by formats of the weights, as ratios of one run.

    python packages/mt-quant/benchmarks/decode.py [--tokens 24] [--batch 1]

Every way decodes the same tokens in alternating rounds, on one thread, in bf16. torchao's ways are
there where it is installed. The head stays in bf16 with every way.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from mt_quant import QuantizationConfig, Rule, quantize
from torch import Tensor, nn

HIDDEN, HEADS, LAYERS, VOCABULARY, CONTEXT, ROUNDS = 768, 12, 12, 50304, 256, 5
RULES = {
    "int8": Rule(weight="int8"),
    "int8 x int8": Rule(weight="int8", input="int8"),
    "int4-g128": Rule(weight="int4-g128"),
    "int4-g32-asym": Rule(weight="int4-g32-asym"),
}


class Block(nn.Module):
    """Attention over a cache and a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, cache: Tensor, at: int) -> Tensor:
        """Add a token to the stream, and to the cache."""
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1))
        query, *new = qkv.unbind(-3)
        cache[:, :, :, at] = torch.stack(new)
        keys, values = cache[:, :, :, : at + 1]
        mixed = F.scaled_dot_product_attention(query[:, :, None], keys, values)
        x = x + self.out(mixed.flatten(1))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """GPT-2 small without positions, whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, tokens: Tensor, caches: list[Tensor], at: int) -> Tensor:
        """Return the scores of the next token."""
        x = self.embedding(tokens)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache, at)
        return F.linear(self.norm(x), self.embedding.weight)


@torch.no_grad()
def seconds(model: nn.Module, batch: int, tokens: int) -> float:
    """Processor seconds for a token."""
    shape = (2, batch, HEADS, CONTEXT, HIDDEN // HEADS)
    caches = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)]
    chosen, start = torch.zeros(batch, dtype=torch.int64), 0.0
    for at in range(tokens + 2):
        if at == 2:  # the first ones warm up
            start = time.process_time()
        chosen = model(chosen, caches, at).argmax(-1)
    return (time.process_time() - start) / tokens


def with_torchao(model: nn.Module) -> dict[str, Callable[[], nn.Module]]:
    """The weight-only ways of torchao that run here."""
    if importlib.util.find_spec("torchao") is None:
        print("torchao is not installed: pip install torchao")
        return {}
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def int8() -> nn.Module:
        made = copy.deepcopy(model)
        quantize_(made, Int8WeightOnlyConfig())
        return made

    return {"torchao int8": int8}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = Model().bfloat16().eval()
    made = {"bf16": plain}
    for name, rule in RULES.items():
        made[name] = quantize(copy.deepcopy(plain), QuantizationConfig(rules=(rule,)))
    made |= {name: make() for name, make in with_torchao(plain).items()}
    found: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(ROUNDS):
        for name, model in made.items():
            found[name].append(seconds(model, options.batch, options.tokens))
    print(f"batch {options.batch}, {options.tokens} tokens, torch {torch.__version__}, one thread")
    for name, times in found.items():
        ratio = statistics.median(a / b for a, b in zip(found["bf16"], times, strict=True))
        per_token = statistics.median(times) * 1e3
        print(f"{name:14s} {per_token:7.1f} ms a token, {ratio:5.2f} times as fast as bf16")


if __name__ == "__main__":
    main()
