"""Forward and backward of several kinds of models against transformers, eager and compiled.

    python packages/mt-hf/benchmarks/families.py [--kinds llama gemma3 mamba2 t5] [--rounds 9]

One folder of random fp32 weights is read by both sides. All sides get the same tokens, and first
have to give the same loss and the same norm of all gradients. Then they take turns, a step each,
another one first in each round, and ratios are made within each round. Prints ratios of speed;
above 1 ours is faster.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from mt_hf import from_pretrained
from mt_model import keep_freed_memory
from mt_testing import environment, quartiles, shown, take_turns, write_report
from torch import Tensor, nn

Step = Callable[[], Tensor]
Seconds = tuple[float, float]  # of the clock, and of the processors
SHAPE = {"vocab_size": 16384, "hidden_size": 512}
SMOKE = {"vocab_size": 128, "hidden_size": 32}


def llama(*, smoke: bool) -> nn.Module:
    """Like Llama 3.2: groups of queries, SwiGLU, tied; 32M parameters."""
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM

    sizes = (
        {**SMOKE, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
        if smoke
        else {**SHAPE, "intermediate_size": 1408, "num_hidden_layers": 8, "head_dim": 64}
    )
    heads = {"num_attention_heads": 4 if smoke else 8, "num_key_value_heads": 2 if smoke else 4}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, **heads, tie_word_embeddings=True, use_cache=False)
    )


def gemma3(*, smoke: bool) -> nn.Module:
    """Like Gemma 3: five layers in six with a window, norms of heads, GeGLU, more tokens; 40M."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = (
        {**SMOKE, "intermediate_size": 64, "head_dim": 16, "sliding_window": 8}
        if smoke
        else {
            **{"vocab_size": 32768, "hidden_size": 512, "intermediate_size": 2048},
            **{"head_dim": 128, "sliding_window": 256},
        }
    )
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **sizes,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=1,
            query_pre_attn_scalar=sizes["head_dim"],
            use_cache=False,
        )
    )


def mamba2(*, smoke: bool) -> nn.Module:
    """Like Mamba-2's 130M: states of 128, one group, twice the width, tied; 29M parameters."""
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Config, Mamba2ForCausalLM

    sizes = (
        {**SMOKE, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 16}
        if smoke
        else {**SHAPE, "num_hidden_layers": 12, "num_heads": 16, "head_dim": 64, "state_size": 128}
    )
    return Mamba2ForCausalLM(
        Mamba2Config(**sizes, n_groups=1, tie_word_embeddings=True, use_cache=False)
    )


def t5(*, smoke: bool) -> nn.Module:
    """Like T5 1.1: an encoder and a decoder, biases of distances, gated GELU, tied; 46M."""
    from transformers.models.t5.modeling_t5 import T5Config, T5ForConditionalGeneration

    sizes = (
        {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        if smoke
        else {
            **{"vocab_size": 16384, "d_model": 512, "d_kv": 64, "d_ff": 1024},
            **{"num_layers": 6, "num_heads": 8},
        }
    )
    form = {"feed_forward_proj": "gated-gelu", "dropout_rate": 0.0}
    return T5ForConditionalGeneration(
        T5Config(**sizes, **form, decoder_start_token_id=0, use_cache=False)
    )


KINDS: dict[str, Callable[..., nn.Module]] = {
    "llama": llama,
    "gemma3": gemma3,
    "mamba2": mamba2,
    "t5": t5,
}


def batches(model: Any, rows: int, length: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the same tokens as we take them and as transformers does."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(2, model.config.vocab_size, (rows, length), generator=draw)
    if model.config.is_encoder_decoder:
        tokens = F.pad(ids[:, :-1], (1, 0))  # the same length on both sides
        return {"encoder_tokens": ids.flip(1), "tokens": tokens, "labels": ids}, {
            "input_ids": ids.flip(1),
            "decoder_input_ids": tokens,
            "labels": ids,
        }
    return {"tokens": ids, "labels": F.pad(ids[:, 1:], (0, 1), value=-100)}, {
        "input_ids": ids,
        "labels": ids,
    }


def step_of(model: nn.Module, loss_of: Callable[[], Tensor]) -> Step:
    """Return a step: the loss, and all gradients anew."""
    params = list(model.parameters())

    def step() -> Tensor:
        for param in params:
            param.grad = None
        loss = loss_of()
        loss.backward()
        return loss.detach()

    return step


def sides_of(model: nn.Module, folder: Path, options: argparse.Namespace) -> dict[str, Step]:
    """Return each side's step; the compiled ones have the weights of the eager ones."""
    model.save_pretrained(folder)
    ours = from_pretrained(folder, dtype=torch.float32).train()
    own, other = batches(model.train(), options.rows, options.length)
    count = (own["labels"] != -100).sum()
    found: dict[str, Step] = {}
    for form in options.forms:
        mine, theirs = (torch.compile(m) if form == "compiled" else m for m in (ours, model))
        found[f"mt {form}"] = step_of(ours, lambda mine=mine: mine(None, own)["lm"] / count)
        found[f"transformers {form}"] = step_of(model, lambda m=theirs: m(**other).loss)
    check_equal(found, {"mt": ours, "transformers": model})
    return found


def check_equal(sides: dict[str, Step], models: dict[str, nn.Module]) -> None:
    """Refuse to compare sides that do not compute the same."""
    found = {}
    for name, step in sides.items():
        loss = step()
        norm = nn.utils.get_total_norm(
            [p.grad for p in models[name.split()[0]].parameters() if p.grad is not None]
        )
        found[name] = torch.stack((loss, norm))
    first = next(iter(found.values()))
    for name, values in found.items():
        if not torch.allclose(values, first, rtol=1e-4):
            raise SystemExit(
                f"{name}: loss and norm {values.tolist()} are not {first.tolist()}; there is "
                "nothing to compare"
            )


def compare(rounds: Sequence[dict[str, Seconds]]) -> dict[str, dict[str, list[float]]]:
    """Return quartiles of their seconds over ours for pairs of sides, and for the faster of each.

    The faster ones are those with the smaller median.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for which, clock in enumerate(("wall", "cpu")):
        times = {name: [each[name][which] for each in rounds] for name in rounds[0]}
        by_speed = sorted(times, key=lambda name, times=times: quartiles(times[name])[1])
        mine, others = (
            [name for name in by_speed if name.startswith(who)] for who in ("mt", "transformers")
        )
        pairs = {f"{a} / {b}": (a, b) for a in sorted(mine) for b in sorted(others)}
        pairs["faster / faster"] = mine[0], others[0]
        for name, (a, b) in pairs.items():
            ratios = [theirs / ours for ours, theirs in zip(times[a], times[b], strict=True)]
            found.setdefault(name, {})[clock] = quartiles(ratios)
    return found


def main() -> None:
    """Run the comparison, print it and write what it found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--forms", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"]
    )
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1, help="of each side in a round")
    parser.add_argument("--smoke", action="store_true", help="tiny models")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    keep_freed_memory()  # for both sides, as mt-train does
    sizes = {"rows": options.rows, "length": options.length, "threads": torch.get_num_threads()}
    print(f"torch {torch.__version__}, {sizes}, fp32, {options.rounds} rounds")
    results = {}
    for kind in options.kinds:
        torch.manual_seed(0)
        model = KINDS[kind](smoke=options.smoke)
        count = sum(param.numel() for param in model.parameters())
        with tempfile.TemporaryDirectory() as folder:
            sides = sides_of(model, Path(folder), options)
            found = compare(take_turns(sides, options.rounds, repeats=options.steps))
        results[kind] = {"parameters": count, "speed_ratios": found}
        print(f"{kind}, {count / 1e6:.1f}M parameters")
        for name, clocks in found.items():
            times = ", ".join(f"{clock} {shown(spread)}" for clock, spread in clocks.items())
            print(f"  {name:34} {times}", flush=True)
        if "compiled" in options.forms:
            torch.compiler.reset()
    machine = environment("torch", "transformers")
    write_report(options.out, {**machine, **sizes, "dtype": "fp32", "results": results})


if __name__ == "__main__":
    main()
