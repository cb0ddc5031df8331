"""The losses of 20 steps in fp64 equal recorded ones, after any refactoring.

`python test_held_losses.py` writes the record anew. A change of it changes every run's numbers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mt_model import GPT, gpt
from mt_parallel_state import ParallelLayout, hash_key, initialize_, random_uniform

RECORD = Path(__file__).parent / "goldens" / "losses.json"
STEPS = 20
LONG = {"quickstart": pytest.mark.campaign}  # seconds
# name: (model, rows, tokens per row). The first two are the models of mt-train's tiny.yaml and
# quickstart.yaml; the others have what those lack.
RUNS = {
    "tiny": (
        {"vocab_size": 512, "hidden_size": 64, "num_layers": 4, "num_heads": 4}
        | {"num_kv_heads": 2, "ffn_size": 128, "max_sequence_length": 64},
        (8, 64),
    ),
    "quickstart": (
        {"vocab_size": 4096, "hidden_size": 256, "num_layers": 4, "num_heads": 4}
        | {"ffn_size": 768, "max_sequence_length": 256},
        (1, 256),
    ),
    "dropout": (
        {"vocab_size": 48, "hidden_size": 16, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2}
        | {"ffn_size": 24, "max_sequence_length": 32, "qk_norm": "head", "tied": False}
        | {"dropout": 0.1, "attention_dropout": 0.2, "bias": True},
        (3, 20),
    ),
    "gpt2": (
        {"vocab_size": 48, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "ffn_size": 24}
        | {"max_sequence_length": 32, "positions": "learned", "norm": "layer", "dropout": 0.1}
        | {"activation": "gelu_tanh", "gated": False, "bias": True},
        (3, 20),
    ),
    "long": (
        {"vocab_size": 48, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 1}
        | {"ffn_size": 24, "max_sequence_length": 600, "qk_norm": "head", "activation": "relu2"},
        (1, 600),
    ),
}


# What names were when the losses were recorded: the weights are copied by them.
RECORDED = {
    ".mixer_norm.": ".attention_norm.",
    ".mixer.": ".attention.",
    ".feed_forward_norm.": ".mlp_norm.",
    ".feed_forward.": ".mlp.",
    "embedding.positions.": "position_embedding.",
}


def draw_weights(model: GPT, std: float = 0.05) -> None:
    """Give every weight a value of its recorded name and its index."""
    layout = ParallelLayout()
    for name, param in model.named_parameters():
        for now, then in RECORDED.items():
            name = name.replace(now, then)
        if param.dim() > 1:
            initialize_(param, seed=5, name=name, layout=layout, rank=0, std=std)


def losses(sizes: dict, shape: tuple[int, int]) -> list[float]:
    model = GPT(gpt(**sizes), dtype=torch.float64, seed=5)
    draw_weights(model)
    moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()}
    rows, length = shape
    found = []
    for step in range(1, STEPS + 1):
        index = torch.arange(rows * (length + 1)).view(rows, -1)
        uniform = random_uniform(hash_key("text", step), index)
        tokens = (uniform**3 * sizes["vocab_size"]).long()
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
        batch["sample_ids"] = torch.arange(rows) + step * rows
        output = model(None, batch)
        loss = output["lm"] / output["tokens"]
        loss.backward()
        found.append(loss.item())
        with torch.no_grad():
            for param, (first, second) in moments.items():
                first.lerp_(param.grad, 0.1)
                second.lerp_(param.grad.square(), 0.05)
                size = (second / (1 - 0.95**step)).sqrt_().add_(1e-8)
                param.addcdiv_(first, size, value=-3e-3 / (1 - 0.9**step))
                param.grad = None
    return found


@pytest.mark.parametrize("name", [pytest.param(n, marks=LONG.get(n, ())) for n in RUNS])
def test_losses_of_twenty_steps_are_held(name: str) -> None:
    expected = json.loads(RECORD.read_text())[name]
    assert losses(*RUNS[name]) == pytest.approx(expected, rel=1e-12, abs=0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    record = {name: losses(*run) for name, run in RUNS.items()}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
