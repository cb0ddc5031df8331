"""What `kernels="auto"` takes for each operation against mt-fusions' `fused`, on a CPU.

    python packages/mt-model/benchmarks/kernels.py [--rounds 15] [--smoke] [--out report.json]

Each ratio is processor time of auto over fused in alternating rounds on one thread, forward
alone and with backward: below 1 auto is faster. Both sides give the same numbers, or it ends.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from mt_fusions import BIAS_GELU, GATED, LAYER_NORM, RESIDUAL, RMS_NORM, ROPE, LossOptions
from mt_model.block.dropout import DropoutSite
from mt_model.block.norm import RMSNorm
from mt_model.block.residual import added, normed
from mt_model.rope.config import RopeConfig, Rotary
from mt_model.rope.rotary import rotary_table
from mt_tensor_parallel import linear_cross_entropy
from mt_testing import environment, quartiles, shown, take_turns, write_report
from torch import Tensor, nn

SHAPES = ((256, 256), (4096, 1024))  # tokens and width
HEAD_DIM = 64
Way = Callable[..., tuple[Tensor, ...]]


def norm(x: Tensor, weight: Tensor, *, kernel: str) -> tuple[Tensor, ...]:
    return (RMS_NORM.find(kernel, x, weight).function(x, weight, 1e-5),)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, kernel: str) -> tuple[Tensor, ...]:
    return (LAYER_NORM.find(kernel, x).function(x, weight, bias, 1e-5),)


def gate(x: Tensor, *, kind: str, kernel: str) -> tuple[Tensor, ...]:
    chosen = GATED.find(kernel, x, kind, None, 0.0)
    return (chosen.function(x, kind, clamp=None, up_offset=0.0),)


def gelu(x: Tensor, bias: Tensor, *, kernel: str) -> tuple[Tensor, ...]:
    return (BIAS_GELU.find(kernel, x).function(x, bias, "gelu"),)


def summed(x: Tensor, y: Tensor, weight: nn.Parameter, *, kernel: str) -> tuple[Tensor, ...]:
    norm = RMSNorm(len(weight), eps=1e-5, dtype=weight.dtype)
    norm.weight = weight
    whole = DropoutSite(0.0, seed=0, layer=0, name="mixer")
    chosen = RESIDUAL.find(kernel, x)
    return normed(norm, chosen.function(x, y, whole, None, opens=True))


def dropped(x: Tensor, y: Tensor, *, kernel: str) -> tuple[Tensor, ...]:
    site = DropoutSite(0.1, seed=0, layer=0, name="mixer")
    index = torch.arange(x.numel()).view(x.shape)
    return (added(RESIDUAL.find(kernel, x).function(x, y, site, index, opens=False)),)


def turned(qkv: Tensor, *, interleaved: bool, kernel: str) -> tuple[Tensor, ...]:
    rotary = Rotary(RopeConfig(theta=1e4, interleaved=interleaved), HEAD_DIM)
    table = rotary_table(torch.arange(qkv.shape[1]), rotary, length=1, dtype=qkv.dtype)
    query, key, _ = qkv.split((qkv.shape[3] - 2, 1, 1), dim=3)
    return ROPE.find(kernel, query, key, *table).function(query, key, *table)


def loss(hidden: Tensor, head: Tensor, *, kernel: str) -> tuple[Tensor, ...]:
    labels = torch.arange(len(hidden)) % len(head)
    options = LossOptions(kernel=kernel)
    return (linear_cross_entropy(hidden, head, labels, options=options),)


def works(tokens: int, width: int, vocabulary: int, dtype: torch.dtype) -> dict[str, tuple]:
    """The operations with what they take."""

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype).requires_grad_()

    both = rand(tokens, width), rand(tokens, width)
    groups = max(1, width // HEAD_DIM // 2)
    qkv = rand(1, tokens, groups, 4, HEAD_DIM)
    kinds = ("silu", "gelu", "gelu_quick")
    return {
        "norm": (norm, (rand(tokens, width), rand(width))),
        "layer norm": (layer_norm, (rand(tokens, width), rand(width), rand(width))),
        "sum and norm": (summed, (*both, nn.Parameter(rand(width).detach()))),
        "sum and dropout": (dropped, both),
        "bias and gelu": (gelu, (rand(tokens, width), rand(width))),
        **{kind: (partial(gate, kind=kind), (rand(tokens, 2, width),)) for kind in kinds},
        "rope": (partial(turned, interleaved=False), (qkv,)),
        "rope interleaved": (partial(turned, interleaved=True), (qkv,)),
        "loss": (loss, (rand(min(tokens, 512), 64), rand(vocabulary, 64))),
    }


def run(way: Way, inputs: tuple[Tensor, ...], *, backward: bool) -> list[Tensor]:
    if not backward:
        with torch.no_grad():
            return list(way(*inputs))
    outputs = way(*inputs)
    grads = torch.autograd.grad(outputs, inputs, [torch.ones_like(y) for y in outputs])
    return [*outputs, *grads]


def ratios(way: Way, inputs: tuple[Tensor, ...], *, rounds: int, backward: bool) -> list[float]:
    """Quartiles of auto over fused."""
    sides = {kernel: partial(way, kernel=kernel) for kernel in ("auto", "fused")}
    tolerance = 4e-2 if inputs[0].dtype == torch.bfloat16 else 2e-5
    for a, b in zip(
        *(run(side, inputs, backward=backward) for side in sides.values()), strict=True
    ):
        error = (a.double() - b.double()).norm() / a.double().norm()
        assert error < tolerance, f"the two sides differ by {error}"
    repeats = max(1, (1 << 18) // inputs[0].numel()) if rounds > 2 else 1
    ways = {name: partial(run, side, inputs, backward=backward) for name, side in sides.items()}
    turns = take_turns(ways, rounds, repeats=repeats)
    return quartiles(turn["auto"][1] / turn["fused"][1] for turn in turns)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--smoke", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, width in ((16, 64),) if args.smoke else SHAPES:
            vocabulary = 128 if args.smoke else 32000
            for name, (way, inputs) in works(tokens, width, vocabulary, dtype).items():
                title = f"{name}, {str(dtype)[6:]}, {tokens} x {width}"
                how = {"rounds": 2 if args.smoke else args.rounds}
                results[title] = {
                    "forward": ratios(way, inputs, **how, backward=False),
                    "with backward": ratios(way, inputs, **how, backward=True),
                }
                told = "   ".join(f"{k} {shown(v)}" for k, v in results[title].items())
                print(f"{title:44s} auto / fused: {told}", flush=True)
    packages = ("torch", "mt-model", "mt-fusions")
    write_report(args.out, {"environment": environment(*packages), "results": results})


if __name__ == "__main__":
    main()
