"""Training steps of the quickstart model against transformers' LlamaForCausalLM, and plain torch's.

    python tests-integration/benchmarks/train_step.py [--pairs 7] [--steps 4] [--dtype fp32]
        [--onednn] [--no-compile]

Same shape, weights, batch, dtype and threads; both sides first have to give the same loss. Ours
trains as `mt-train` does (fp32 masters, gradient clipping, layers compiled one by one); theirs is
torch's fused AdamW on the weights themselves, which in bf16 is less work, and compiled whole. So
does a Llama in plain torch (plain_llama.py). Sides alternate; a ratio is made within each round.
With --onednn each side is there again with its fp32 products by oneDNN: ours by `Kernels.gemm`,
theirs with the whole step under torch's switch.
Prints ratios of speed; above 1 ours is faster. A further side does nothing but the step's matrix
products, those of attention for the pairs that count: no step can be faster than that, so its ratio
is the most that anyone reaches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from mt_data_parallel import GradBuffer
from mt_model import DTYPES, GPT, Kernels, ModelConfig, keep_freed_memory
from mt_model.kernels.onednn import onednn_products
from mt_optim import AdamW, clip_grad_norm
from mt_parallel_state import ParallelLayout, ParallelState
from mt_train.config.loading import build_model
from mt_train.quickstart import load_quickstart
from plain_llama import PlainLlama
from torch import Tensor

Step = Callable[[], float]


def ours(
    config: ModelConfig,
    batch: dict[str, Tensor],
    dtype: torch.dtype,
    *,
    compiled: bool,
    gemm: str = "auto",
) -> tuple[Step, GPT]:
    """The trainer's step: gradient buffer, clip, AdamW over fp32 masters."""
    state = ParallelState(ParallelLayout(), device="cpu")
    model = GPT(config, state, dtype=dtype, kernels=Kernels(gemm=gemm))
    named = list(model.named_parameters())
    buffer = GradBuffer(named, group=None)
    optimizer = AdamW(named, lr=1e-4, betas=(0.9, 0.95))
    model.sum_weight_gradients(buffer.sink)
    model.wrap_layers(torch.compile if compiled else None)
    count = batch["labels"].numel()

    def step() -> float:
        buffer.start(1)
        loss = model(None, batch)["lm"] / count
        loss.backward()
        buffer.finish()
        clip_grad_norm(named, state, 1.0)
        optimizer.step()
        return loss.item()

    return step, model


def theirs(config: ModelConfig, batch: dict[str, Tensor], source: GPT, *, compiled: bool) -> Step:
    """The step of transformers' Llama with our weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layer = config.layers[0]
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=layer.feed_forward.ffn_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=layer.mixer.num_heads,
            num_key_value_heads=layer.mixer.num_kv_heads,
            head_dim=layer.mixer.head_dim,
            max_position_embeddings=config.max_sequence_length,
            rope_theta=layer.mixer.rope.theta,
            rms_norm_eps=config.norm.eps,
            tie_word_embeddings=config.tied,
            use_cache=False,
            attn_implementation="sdpa",
        )
    ).to(source.shard.dtype)
    copy_weights(source, llama)
    model = torch.compile(llama) if compiled else llama
    return torch_step(lambda tokens: model(tokens).logits, llama, batch)


def by_hand(config: ModelConfig, batch: dict[str, Tensor], source: GPT, *, compiled: bool) -> Step:
    """The step of a Llama in plain torch with our weights."""
    llama = PlainLlama(config, source)
    return torch_step(torch.compile(llama) if compiled else llama, llama, batch)


def torch_step(
    logits_of: Callable[[Tensor], Tensor], llama: torch.nn.Module, batch: dict[str, Tensor]
) -> Step:
    """Train with torch's fused AdamW."""
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    tokens, labels = batch["tokens"], batch["labels"]

    def step() -> float:
        logits = logits_of(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(llama.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


@torch.no_grad()
def copy_weights(source: GPT, llama: torch.nn.Module) -> None:
    """Give a Llama our weights: fused qkv and gate/up are split by their explicit dims."""
    ours, named = dict(source.named_parameters()), dict(llama.named_parameters())

    def put(name: str, value: Tensor) -> None:
        named[name].copy_(value.reshape(named[name].shape))

    put("model.embed_tokens.weight", ours["embedding.weight"])
    put("model.norm.weight", ours["final_norm.weight"])
    if "head.weight" in ours:
        put("lm_head.weight", ours["head.weight"])
    for i in range(source.config.num_layers):
        mine, prefix = f"layers.{i}.", f"model.layers.{i}."
        qkv = ours[mine + "mixer.qkv.weight"]
        put(prefix + "self_attn.q_proj.weight", qkv[:, :-2])
        put(prefix + "self_attn.k_proj.weight", qkv[:, -2])
        put(prefix + "self_attn.v_proj.weight", qkv[:, -1])
        put(prefix + "self_attn.o_proj.weight", ours[mine + "mixer.out.weight"])
        gate_up = ours[mine + "feed_forward.up.weight"]
        put(prefix + "mlp.gate_proj.weight", gate_up[0])
        put(prefix + "mlp.up_proj.weight", gate_up[1])
        put(prefix + "mlp.down_proj.weight", ours[mine + "feed_forward.down.weight"])
        put(prefix + "input_layernorm.weight", ours[mine + "mixer_norm.weight"])
        put(prefix + "post_attention_layernorm.weight", ours[mine + "feed_forward_norm.weight"])


def products(config: ModelConfig, batch: dict[str, Tensor], source: GPT) -> Step:
    """Do only the matrix products of a step, with existing matrices."""
    rows, length = batch["tokens"].shape
    layer, dtype = config.layers[0], source.shard.dtype
    matrices = [p.detach() for p in source.parameters() if p.dim() > 1]
    pairs = []
    for matrix in (m.flatten(1) if m.shape[0] == config.hidden_size else m for m in matrices):
        weight = matrix.flatten(0, -2)
        out_features, in_features = weight.shape
        x, grad = (torch.randn(rows * length, n, dtype=dtype) for n in (in_features, out_features))
        pairs += [(x, weight.t()), (grad, weight), (grad.t(), x)]
    heads, width = layer.mixer.num_heads, layer.mixer.head_dim
    # Half of all pairs of tokens count; the six products of forward and backward are of one size.
    query, scores = (
        torch.randn(rows * heads, length // 2, n, dtype=dtype) for n in (width, length)
    )
    key = torch.randn(rows * heads, length, width, dtype=dtype)
    inner = 3 * config.num_layers

    def step() -> float:
        for a, b in pairs:
            torch.mm(a, b)
        for _ in range(inner):
            torch.bmm(query, key.mT)
            torch.bmm(scores, key)
        return 0.0

    return step


def by_onednn(step: Step) -> Step:
    """Take the step under torch's switch for oneDNN."""

    def run() -> float:
        with onednn_products():
            return step()

    return run


def seconds(step: Step, steps: int) -> tuple[float, float]:
    """Wall and CPU seconds of some steps."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled sides out")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--onednn", action="store_true", help="each side also with oneDNN")
    options = parser.parse_args()
    dtype = DTYPES[options.dtype]
    keep_freed_memory()  # for both sides, as mt-train does
    loaded = load_quickstart(None)
    training = loaded.config.training
    config = build_model(
        loaded.config.model,
        loaded.config.data.vocab_size,
        loaded.config.training.sequence_length,
    )
    shape = (training.micro_batch_size, training.sequence_length + 1)
    rows = torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(1))
    batch = {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}
    forms = ["eager"] if options.no_compile else ["eager", "compiled"]
    _, weights = ours(config, batch, dtype, compiled=False)
    sides = {
        f"transformers {form}": theirs(config, batch, weights, compiled=form == "compiled")
        for form in forms
    }
    for form in forms:
        how = {"compiled": form == "compiled"}
        sides[f"plain torch {form}"] = by_hand(config, batch, weights, **how)
        sides[f"mt {form}"] = ours(config, batch, dtype, compiled=form == "compiled")[0]
    for form in forms if options.onednn else ():
        how = {"compiled": form == "compiled"}
        sides[f"transformers {form} onednn"] = by_onednn(theirs(config, batch, weights, **how))
        sides[f"plain torch {form} onednn"] = by_onednn(by_hand(config, batch, weights, **how))
        sides[f"mt {form} onednn"] = ours(config, batch, dtype, **how, gemm="onednn")[0]
    check_equal(
        {name: side() for name, side in sides.items()}, 1e-5 if dtype.itemsize > 2 else 2e-2
    )
    sides["products"] = products(config, batch, weights)
    for side in sides.values():
        seconds(side, 2)  # warm up
    rounds = [
        {name: seconds(side, options.steps) for name, side in sides.items()}
        for _ in range(options.pairs)
    ]
    tokens = batch["tokens"].numel() * options.steps
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, batch {list(shape)}, "
        f"{options.dtype}, {options.pairs} rounds of {options.steps} steps"
    )
    for name in sides:
        print(f"{name}: {tokens / min(times[name][0] for times in rounds):,.0f} tokens/s at best")
    report = {}
    peers = "transformers", "plain torch"
    for mine in (name for name in sides if not name.startswith(peers)):
        for other in (name for name in sides if name.startswith(peers)):
            for kind, index in (("wall", 0), ("cpu", 1)):
                ratios = sorted(times[other][index] / times[mine][index] for times in rounds)
                low, middle, high = ratios[0], statistics.median(ratios), ratios[-1]
                report[f"{mine} / {other}, {kind}"] = [low, middle, high]
                print(f"{mine} / {other} {kind} {middle:.2f}x ({low:.2f} to {high:.2f})")
    print(json.dumps(report))


def check_equal(losses: dict[str, float], tolerance: float) -> None:
    """Refuse to compare sides that do not compute the same loss."""
    first = next(iter(losses.values()))
    for name, loss in losses.items():
        if abs(loss - first) > tolerance * first:
            raise SystemExit(f"{name}: loss {loss} is not {first}; nothing to compare")


if __name__ == "__main__":
    main()
