"""Tokens per second of the engine beside one prompt at a time and transformers, in turns.

    python packages/mt-infer/benchmarks/engine.py [--dtype bf16] [--rounds 5] [--out REPORT.json]

A Llama of 110M parameters with drawn weights decodes greedily on two threads: 1 and 16 requests of
32 tokens by the engine and by transformers' `generate` (whose prompts are a batch of equal
length), one by `Generator`, and with the engine also 64 requests of drawn lengths, at once and
one after the other. Prints tokens per second and ratios with their quartiles.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from mt_hf import save_pretrained
from mt_infer import Engine, EngineOptions, Generator, Sampling
from mt_model import DTYPES, GPT, gpt
from mt_testing.benchmark import environment, ratios, shown, take_turns, write_report

LENGTH = 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--small", action="store_true", help="25M parameters")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(2)
    sizes: dict[str, Any] = {"hidden_size": 768, "num_layers": 12, "num_heads": 12}
    if given.small:
        sizes = {"hidden_size": 384, "num_layers": 6, "num_heads": 6}
    config = gpt(**sizes, vocab_size=32000, max_sequence_length=1024, tied=True)
    model = GPT(config, dtype=DTYPES[given.dtype], seed=1).eval()
    ways, counts = ways_of(model, given.new)
    rounds = take_turns(ways, rounds=given.rounds)
    speeds = {name: sorted(counts[name] / each[name].wall for each in rounds) for name in ways}
    for name, found in speeds.items():
        print(
            f"{name:20} {found[len(found) // 2]:8.1f} tokens/s  {found[0]:.1f} to {found[-1]:.1f}"
        )
    pairs = [("generator 1", "engine 1"), ("transformers 1", "engine 1")]
    pairs.append(("transformers 16", "engine 16"))
    for one, other in pairs:
        print(f"{other} / {one}", shown(ratios(rounds, one, other)["wall"]))
    write_report(given.out, environment("transformers") | {"dtype": given.dtype, "speeds": speeds})


def ways_of(model: GPT, new: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the ways to decode, and the number of tokens that each makes."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, Path(folder) / "model")
        peer = AutoModelForCausalLM.from_pretrained(
            Path(folder) / "model", dtype=next(model.parameters()).dtype
        ).eval()
    rng = random.Random(0)  # noqa: S311 - the lengths of prompts are no secret
    prompts = [[rng.randrange(32000) for _ in range(LENGTH)] for _ in range(16)]
    mixed = [[rng.randrange(32000) for _ in range(rng.randint(16, 512))] for _ in range(64)]
    lengths = [rng.randint(16, 256) for _ in mixed]
    engine = Engine(model, options=EngineOptions(blocks=3072, prefix_cache=False))
    tokenizer = cast("Any", SimpleNamespace(vocab_size=32000, eod_id=-1))
    generator = Generator(model=model, config=model.config, tokenizer=tokenizer)
    greedy = Sampling(temperature=0, max_tokens=new)
    many = [Sampling(temperature=0, max_tokens=each) for each in lengths]

    def transformers(count: int) -> None:
        given = torch.tensor(prompts[:count])
        how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        peer.generate(given, attention_mask=torch.ones_like(given), pad_token_id=0, **how)

    ways = {
        "generator 1": lambda: list(generator.tokens(prompts[0], new, greedy)),
        "engine 1": lambda: engine.generate(prompts[0], greedy),
        "transformers 1": lambda: transformers(1),
        "engine 16": lambda: engine.generate(prompts, greedy),
        "transformers 16": lambda: transformers(16),
        "engine 64": lambda: engine.generate(mixed, many),
        "engine 64 in turn": lambda: [
            engine.generate(*each) for each in zip(mixed[:8], many[:8], strict=True)
        ],
    }
    counts = {name: new * (16 if "16" in name else 1) for name in ways}
    return ways, counts | {"engine 64": sum(lengths), "engine 64 in turn": sum(lengths[:8])}


if __name__ == "__main__":
    main()
