"""A layer of experts against transformers' Mixtral block, and permutation against index_select.

    python packages/mt-moe/benchmarks/moe_layer.py [--device cuda] [--smoke] [--out FILE]

Both have equal weights and take turns. Prints theirs over ours within rounds, above 1 ours is
faster: the median and the middle half, of the clock and of the processors' time. On a GPU it has
the layer with 128 experts, 8 per token, of 32k tokens, and prints TFLOP/s of ours as well.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from mt_fusions import permute, unpermute
from mt_moe import MoELayer, MoEOptions, RouterOptions
from mt_testing import environment, ratios, shown, take_turns, write_report
from torch import Tensor, nn

Way = Callable[[], object]
Size = Mapping[str, int]  # experts, k, hidden, ffn, tokens
CPU: tuple[Size, ...] = (
    {"experts": 8, "k": 2, "hidden": 512, "ffn": 1024, "tokens": 4096},
    {"experts": 64, "k": 8, "hidden": 512, "ffn": 256, "tokens": 2048},
)
GPU: tuple[Size, ...] = ({"experts": 128, "k": 8, "hidden": 2048, "ffn": 768, "tokens": 32768},)
SMOKE: tuple[Size, ...] = ({"experts": 4, "k": 2, "hidden": 32, "ffn": 64, "tokens": 64},)


def ours_of(size: Size, device: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    options = MoEOptions(router=RouterOptions(top_k=size["k"]))
    sizes = (size["hidden"], size["ffn"], size["experts"])
    return MoELayer(*sizes, options=options, device=device, dtype=dtype)


def theirs_of(ours: nn.Module, size: Size, how: str) -> nn.Module:
    """Mixtral's block with our weights, by one of transformers' implementations."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=size["hidden"],
        intermediate_size=size["ffn"],
        num_local_experts=size["experts"],
        num_experts_per_tok=size["k"],
    )
    config._experts_implementation = how
    weights = dict(ours.named_parameters())
    up = weights["experts.up.weight"]
    block = MixtralSparseMoeBlock(config).to(up.device, up.dtype)
    with torch.no_grad():
        block.gate.weight.copy_(weights["router.weight"])
        block.experts.gate_up_proj.copy_(up.flatten(1, 2))
        block.experts.down_proj.copy_(weights["experts.down.weight"])
    return block


def output(found: object) -> Tensor:
    first = found if isinstance(found, Tensor) else found[0]  # type: ignore[index]
    assert isinstance(first, Tensor)
    return first


def ways(layer: nn.Module, x: Tensor) -> tuple[Way, Way]:
    """Forward alone, and with backward."""
    grad, leaf = torch.randn_like(x), x.clone().requires_grad_()

    @torch.no_grad()
    def forward() -> object:
        return layer(x)

    def step() -> object:
        return torch.autograd.grad(output(layer(leaf)), [leaf, *layer.parameters()], grad)

    return forward, step


def permutations(size: Size, device: str, dtype: torch.dtype) -> dict[str, dict[str, Way]]:
    """Tokens to experts and back with weights, ours and by torch's indexing."""
    tokens, k = size["tokens"], size["k"]
    x = torch.randn(tokens, size["hidden"], device=device, dtype=dtype)
    grad = torch.randn_like(x)
    experts = torch.rand(tokens, size["experts"], device=device).topk(k).indices
    weights = torch.rand(tokens, k, device=device)
    leaf = x.clone().requires_grad_()

    def ours(x: Tensor) -> Tensor:
        sent = permute(x, experts, size["experts"])
        return unpermute(sent.rows, sent.places, weights)

    def plain(x: Tensor) -> Tensor:
        order = experts.flatten().argsort(stable=True)
        token = order.div(k, rounding_mode="floor")
        rows = x.index_select(0, token)
        shares = weights.flatten().index_select(0, order).unsqueeze(1)
        return torch.zeros_like(x).index_add(0, token, (rows * shares).to(x.dtype))

    near = 3e-2 if dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(ours(x), plain(x), rtol=near, atol=near)
    both = {"ours": ours, "index_select": plain}
    return {
        "permute": {name: lambda f=f: f(x) for name, f in both.items()},
        "permute and back": {
            name: lambda f=f: torch.autograd.grad(f(leaf), leaf, grad) for name, f in both.items()
        },
    }


def layers(size: Size, device: str, dtype: torch.dtype) -> dict[str, dict[str, Way]]:
    ours = ours_of(size, device, dtype)
    x = torch.randn(1, size["tokens"], size["hidden"], device=device, dtype=dtype)
    made = {"ours": ours} | {how: theirs_of(ours, size, how) for how in ("eager", "grouped_mm")}
    near = 3e-2 if dtype is torch.bfloat16 else 1e-4
    with torch.no_grad():
        for other in made.values():
            torch.testing.assert_close(output(other(x)), output(ours(x)), rtol=near, atol=near)
    each = {name: ways(layer, x) for name, layer in made.items()}
    return {
        "forward": {name: forward for name, (forward, _) in each.items()},
        "forward and backward": {name: step for name, (_, step) in each.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each comparison, about")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    on_gpu = options.device != "cpu"
    sizes = SMOKE if options.smoke else GPU if on_gpu else CPU
    dtype = torch.bfloat16 if on_gpu else torch.float32
    wait = torch.cuda.synchronize if on_gpu else None
    found: list[dict[str, object]] = []
    for size in sizes:
        compared = layers(size, options.device, dtype) | permutations(size, options.device, dtype)
        flops = 6 * size["tokens"] * size["k"] * size["hidden"] * size["ffn"]
        for name, each in compared.items():
            rounds = 3 if options.smoke else options.rounds
            turns = take_turns(each, rounds, seconds=options.seconds, wait=wait)
            for other in [other for other in each if other != "ours"]:
                spread = ratios(turns, other, "ours")
                found.append({"size": dict(size), "what": name, "over": other, "ratio": spread})
                told = "  ".join(f"{clock} {shown(values)}" for clock, values in spread.items())
                shape = " ".join(f"{key}={value}" for key, value in size.items())
                print(f"{shape}  {name}: {other} / ours {told}")
            if on_gpu and name.startswith("forward"):
                times = 1 if name == "forward" else 3
                best = min(turn["ours"][0] for turn in turns)
                print(f"  ours: {times * flops / best / 1e12:.0f} TFLOP/s")
    report = environment("torch", "transformers") | {"threads": torch.get_num_threads()}
    write_report(options.out, report | {"theirs over ours": found})


if __name__ == "__main__":
    main()
