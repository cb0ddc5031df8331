"""The time of a Retro's step beside a GPT's, as a multiple of what their operations say.

    OMP_NUM_THREADS=1 python retro_step.py --out retro_step.json

A step is forward and backward of one micro-batch; seconds are the processor's. The goal is 1.1.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from environment import environment
from mt_model import GPT, RetroConfig, gpt

ROWS, LENGTH, VOCABULARY = 2, 512, 4096
RETRO = RetroConfig(chunk=64, neighbours=2, encoder_layers=2, first=2, every=2)


def main() -> None:
    """Time steps of both models in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"hidden_size": 256, "num_layers": 4, "num_heads": 8, "max_sequence_length": LENGTH}
    retro = gpt(vocab_size=VOCABULARY, **sizes, retro=RETRO)
    configs = {"gpt": replace(retro, retro=None), "retro": retro}
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=draw)
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    shape = (ROWS, LENGTH // RETRO.chunk, RETRO.neighbours, RETRO.length)
    read = {"neighbours": torch.randint(0, VOCABULARY, shape, generator=draw)}
    read["neighbour_lengths"] = torch.full(shape[:3], RETRO.length)
    batches = {"gpt": batch, "retro": batch | read}
    models = {name: GPT(config) for name, config in configs.items()}
    flops = {name: config.flops_per_token(LENGTH) for name, config in configs.items()}
    said, rounds = flops["retro"] / flops["gpt"], []
    for _ in range(options.rounds + 1):  # the first one warms up
        seconds = {}
        for name, model in models.items():
            begin = time.process_time()
            model(None, batches[name])["lm"].backward()
            seconds[name] = time.process_time() - begin
        rounds.append(seconds)
    shares = [each["retro"] / each["gpt"] / said for each in rounds[1:]]
    low, high = min(shares), max(shares)
    text = f"operations {said:.2f}x of the GPT's, time {median(shares):.2f}x of what they say"
    print(f"{text} ({low:.2f} to {high:.2f})")
    found = {"operations": said, "rounds": rounds[1:], "median": median(shares)}
    if options.out is not None:
        text = json.dumps(environment() | found | {"low": low, "high": high}, indent=1)
        options.out.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
