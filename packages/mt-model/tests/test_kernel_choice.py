"""Whatever computes norms, activations, rope and loss, the numbers are the same."""

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist
from mt_kernels import KernelError
from mt_model import GPT, Kernels, MLAConfig, NormConfig, RopeConfig, gpt
from mt_parallel_state import ParallelLayout, ParallelState
from mt_tensor_parallel import add_lora
from mt_testing import sample
from test_parallel import (
    RECURRENT,
    TINY,
    assert_equal_to_one_rank,
    config_of,
    finish,
    gradients,
)
from torch.utils._python_dispatch import TorchDispatchMode

# What goes another way than `auto` in eager mode on a CPU.
ONE_BY_ONE = [
    *(Kernels(norm=name) for name in ("fused", "torch", "reference")),
    *(Kernels(activation=name) for name in ("fused", "reference")),
    *(Kernels(residual=name) for name in ("fused", "reference")),
    *(Kernels(rope=name) for name in ("fused", "torch", "reference")),
    *(Kernels(loss=name) for name in ("fused", "reference")),
]
VARIANTS = (
    *("gqa", "qk_norm", "ropes", "gemma2", "olmo2", "padded", "mtp", "bert", "neox", "losses"),
    *("mamba2", "shared_groups", "delta_net", "gpt2", "phi", "no_mixer"),
)


def on_layout(variant, kernels, *, tp=1, cp=1, stages=(range(3),), recompute="none"):
    """Losses, count, gradients and offsets on one rank of a layout; split over tp also tokens."""
    state = ParallelState(ParallelLayout(tp=tp, cp=cp))
    rest = {"context_inner_size": 2} if cp > 1 else {"recompute": recompute}
    losses, tokens, models = gradients(
        config_of(variant), state, stages, kernels=kernels, sequence_parallel=tp > 1, **rest
    )
    grads, offsets = finish(models, state)
    tokens = torch.tensor(tokens)
    if cp > 1:
        for part in (losses, tokens, *grads.values()):
            dist.all_reduce(part, group=state.group("cp"))
    return losses, int(tokens), grads, offsets


def assert_same(found, expected, tolerance=1e-12):
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=0)
    assert found[1] == expected[1]
    for name, grad in expected[2].items():
        assert (found[2][name] - grad).norm() <= tolerance * grad.norm(), name


@pytest.mark.parametrize(
    ("kernels", "variant"), sample(product(("fused", "reference"), VARIANTS), every=3)
)
def test_every_choice_gives_the_numbers_of_auto(variant, kernels):
    assert_same(on_layout(variant, kernels), on_layout(variant, "auto"))


@pytest.mark.parametrize("kernels", ONE_BY_ONE, ids=str)
def test_each_operation_is_chosen_alone(kernels):
    assert_same(on_layout("ropes", kernels), on_layout("ropes", "auto"))


@pytest.mark.parametrize("variant", ["t5", "untied_dropout", "mtp_untied"])
def test_fused_sums_give_the_numbers_of_plain_ones(variant):
    assert_same(on_layout(variant, Kernels(residual="fused")), on_layout(variant, "auto"))


class Joined(TorchDispatchMode):
    """Counts the operators that add something and do something else."""

    def __init__(self):
        super().__init__()
        self.norms = self.dropouts = self.gelus = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.gelus += func is torch.ops.mt_fusions.bias_gelu.default
        self.norms += func is torch.ops.mt_fusions.norm.default and args[1] is not None
        self.dropouts += func is torch.ops.mt_fusions.bias_dropout_add.default
        return func(*args, **(kwargs or {}))


def told(model, operation):
    choices = (c for c in model.chosen_kernels() if c.operation == operation)
    return [(c.operation, c.kernel, c.reason) for c in choices]


# Of three layers, what fused kernels add with a norm or with dropout, and why not others.
ADDED = {
    "pre": ({}, "none", (5, 0), None),
    "sandwich": ({"norms": "sandwich", "norm_zero_centered": True}, "none", (5, 0), None),
    "post": ({"norms": "post", "norm": "layer"}, "none", (6, 0), None),
    "dropout": ({"dropout": 0.1}, "none", (0, 6), None),
    "post_dropout": ({"norms": "post", "dropout": 0.1}, "selective", (0, 6), None),
    "layers_again": ({}, "full", (6, 0), None),  # three forward and three again
    "norms_again": ({}, "selective", (0, 0), "backward makes the norm again, alone"),
    "output": ({"norms": "output"}, "none", (0, 0), "no norm is next"),
    "parallel": ({"parallel": True}, "none", (2, 0), "both branches are added"),
    "scaled": ({"residual_scale": 0.5}, "none", (0, 0), "residual_scale 0.5 multiplies the branch"),
}


@pytest.mark.parametrize("form", ADDED)
def test_fused_kernels_add_branches_where_a_norm_or_dropout_is_next(form):
    fields, recompute, expected, reason = ADDED[form]
    config = gpt(**{**SOME, **fields})
    model = GPT(config, kernels=Kernels(residual="fused"), recompute=recompute, dtype=torch.float64)
    tokens = torch.arange(12).view(1, 12)
    with Joined() as joined:
        loss = model(tokens, labels=tokens, sample_ids=torch.zeros(1, dtype=torch.int64))["lm"]
        loss.backward()
    assert (joined.norms, joined.dropouts) == expected
    plain = ("residual", "reference", reason)
    assert told(model, "residual") == [
        ("residual", "fused", "asked for") if reason is None else plain
    ]


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_fused_gelu_adds_the_bias_of_its_projection(activation):
    config = gpt(**{**SOME, "activation": activation, "gated": False, "bias": True})
    same = [whole(config, kernels, torch.float64) for kernels in ("auto", "fused")]
    torch.testing.assert_close(same[1], same[0], rtol=1e-12, atol=1e-14)
    model = GPT(config, kernels=Kernels(activation="fused"), dtype=torch.float64)
    tokens = torch.arange(12).view(1, 12)

    def gelus():
        with Joined() as joined:
            model(tokens, labels=tokens)["lm"].backward()
        return joined.gelus, told(model, "bias_gelu")

    assert gelus() == (3, [("bias_gelu", "fused", "asked for")])
    add_lora(model, 2, matches=lambda name: name.endswith("feed_forward.up"))
    reason = "an adapter is added to the projection first"
    assert gelus() == (0, [("bias_gelu", "torch", reason)])


PLACES = {
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "tp_cp": {"tp": 2, "cp": 2},
    "pp": {"stages": (range(2), range(2, 3))},
    "tp_pp": {"tp": 2, "stages": (range(1), range(1, 3))},
    "recompute": {"recompute": "full"},
    "selective": {"tp": 2, "recompute": "selective"},
}


@pytest.mark.parametrize(
    ("place", "variant"),
    sample(
        [
            (place, variant)
            for place in PLACES
            for variant in VARIANTS
            if "cp" not in place or variant not in RECURRENT
        ],
        every=11,
    ),
)
def test_fused_kernels_give_the_numbers_of_one_rank_on_every_layout(ranks, place, variant):
    layout = PLACES[place]
    count = layout.get("tp", 1) * layout.get("cp", 1)

    def each():
        return on_layout(variant, "fused", **layout)

    assert_equal_to_one_rank(ranks(count, each) if count > 1 else [each()], variant)


SOME = {
    **TINY,
    "num_kv_heads": 2,
    "window": 5,  # else products of matrices would turn queries and keys themselves
}
FORMS = {
    "llama": {"norm_rounds_first": True},
    "gemma": {"norm_zero_centered": True, "activation": "gelu_tanh", "qk_norm": "head"},
    "gpt_oss": {"activation": "gelu_quick", "clamp": 0.5, "up_offset": 1.0, "sinks": "learned"},
    "l2": {"qk_norm": "l2", "activation": "relu2", "gated": False},
}


def whole(config, kernels, dtype, *, autocast=False):
    """Return loss and gradients in one vector, from weights rounded to bf16."""
    model = GPT(config, kernels=kernels, dtype=dtype)
    drawn = GPT(config, dtype=torch.float64, seed=3)
    with torch.no_grad():
        for param, value in zip(model.parameters(), drawn.parameters(), strict=True):
            param.copy_(value.bfloat16())
    tokens = torch.randint(0, 48, (2, 13), generator=torch.Generator().manual_seed(4))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        losses = model(tokens[:, :-1], labels=tokens[:, 1:])
    loss = losses["lm"] / losses["tokens"]
    loss.backward()
    grads = [param.grad.double().flatten() for param in model.parameters()]
    return torch.cat([loss.detach().double()[None], *grads])


@pytest.mark.parametrize(
    ("form", "dtype"), sample(product(FORMS, (torch.float32, torch.bfloat16)), every=3)
)
def test_fused_kernels_are_as_exact_as_the_others(form, dtype):
    config = gpt(**{**SOME, **FORMS[form]})
    exact = whole(config, "reference", torch.float64)

    def error(kernels):
        return float((whole(config, kernels, dtype) - exact).norm() / exact.norm())

    assert error("fused") <= 2 * error("reference")


@pytest.mark.parametrize("form", FORMS)
def test_generation_with_fused_kernels_gives_the_logits_of_auto(form):
    config = gpt(**{**SOME, **FORMS[form]})
    tokens = torch.randint(0, 48, (2, 9), generator=torch.Generator().manual_seed(6))
    found = []
    for kernels in ("auto", "fused", "reference"):
        model = GPT(config, kernels=kernels, dtype=torch.float64, seed=3).eval()
        cache = model.new_cache(batch_size=2, max_length=9)
        with torch.no_grad():
            parts = [model.logits(part, cache=cache) for part in tokens.split((6, 1, 1, 1), 1)]
        found.append(torch.cat(parts, 1))
    for logits in found[1:]:
        torch.testing.assert_close(logits, found[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("fields", [{}, {"qk_norm": "head"}], ids=str)
@pytest.mark.parametrize(
    "kernels",
    [Kernels(attention="matmul"), Kernels(attention="sdpa"), Kernels.of("fused")],
    ids=["matmul", "sdpa", "fused"],
)
def test_autocast_is_as_exact_as_bf16(kernels, fields):
    config = gpt(**{**TINY, "num_kv_heads": 2, **fields})
    exact = whole(config, "reference", torch.float64)
    found = whole(config, kernels, torch.float32, autocast=True)
    bf16 = whole(config, kernels, torch.bfloat16)
    assert (found - exact).norm() <= 1.25 * (bf16 - exact).norm()


def latent(**fields):
    sizes = {"num_heads": 4, "kv_lora_rank": 6, "nope_head_dim": 4, "rope_head_dim": 4}
    mixer = MLAConfig(**sizes, v_head_dim=5, q_lora_rank=6, rope=RopeConfig(**fields))
    config = gpt(**TINY)
    return replace(config, layers=tuple(replace(x, mixer=mixer) for x in config.layers))


@pytest.mark.parametrize("fields", [{}, {"interleaved": True}])
def test_latent_attention_takes_fused_kernels(fields):
    auto = whole(latent(**fields), "auto", torch.float64)
    fused = whole(latent(**fields), "fused", torch.float64)
    torch.testing.assert_close(fused, auto, rtol=1e-11, atol=1e-13)


# Dynamo itself looks at .grad where a graph breaks.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("form", ["llama", pytest.param("gpt_oss", marks=pytest.mark.campaign)])
def test_fused_kernels_stay_in_a_compiled_graph(form):
    config = gpt(**{**SOME, **FORMS[form], "num_layers": 1})
    model = GPT(config, kernels="fused", dtype=torch.float64, seed=3)
    names = []

    def noting(graph, inputs):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.compiler.reset()  # a function that other tests compiled often is compiled no more
    tokens = torch.arange(12).view(1, 12)
    losses = []
    for module in (model, torch.compile(model, backend=noting)):
        model.zero_grad()
        loss = module(tokens, labels=tokens)["lm"]
        loss.backward()
        losses.append(
            torch.cat([loss.detach()[None], *(p.grad.flatten() for p in model.parameters())])
        )
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=1e-13)
    assert {"mt_fusions.norm.default", "mt_fusions.gated.default"} <= set(names)
    assert "mt_fusions.rope.default" in names


def test_the_choices_are_told_with_their_reasons():
    config = gpt(**SOME)
    chosen = {choice.operation: choice for choice in GPT(config).chosen_kernels()}
    assert list(chosen) == ["gemm", "residual", "rms_norm", "attention", "rope", "gated", "loss"]
    kernels = [chosen[name].kernel for name in chosen if name != "gemm"]
    assert kernels == ["reference", "cpu", "auto", "torch", "torch", "torch"]
    assert "not fused: slower on a CPU than the next" in str(chosen["rms_norm"])
    asked = GPT(config, kernels=Kernels(norm="fused"))
    assert told(asked, "rms_norm") == [("rms_norm", "fused", "asked for")]
    assert told(asked, "rope") == [("rope", "torch", chosen["rope"].reason)]


def test_a_group_that_ranks_share_is_normed_without_a_kernel(ranks):
    def each():
        model = GPT(
            config_of("shared_groups"), ParallelState(ParallelLayout(tp=2)), kernels="fused"
        )
        return told(model, "rms_norm")

    reason = "ranks that share a group of channels sum its mean square between"
    for found in ranks(2, each):
        assert ("rms_norm", "reference", reason) in found


def test_what_does_not_serve_is_refused_at_once_with_what_would():
    relu = gpt(**{**SOME, "activation": "relu"})
    message = (
        r"'fused' of gated does not serve: activation relu with a gate: it is for silu, gelu, "
        r"gelu_tanh, gelu_quick; use auto, reference"
    )
    with pytest.raises(KernelError, match=message):
        GPT(relu, kernels="fused")
    weightless = replace(gpt(**SOME), norm=NormConfig(kind="rms", weight=False))
    with pytest.raises(KernelError, match=r"'cpu' of rms_norm .*: no weight; use auto, fused"):
        GPT(weightless, kernels=Kernels(norm="cpu"))
    with pytest.raises(ValueError, match=r"one of auto, fused, reference, got 'fuse'.*'?fused"):
        GPT(gpt(**SOME), kernels="fuse")
    with pytest.raises(ValueError, match=r"norm: 'triton' is not one of auto, fused, cpu"):
        Kernels(norm="triton")
    short = gpt(**{**SOME, "window": None})
    with pytest.raises(KernelError, match=r"'matmul' .*: kernels.rope is fused, and it turns by"):
        GPT(short, kernels=Kernels(attention="matmul", rope="fused"))(torch.arange(8)[None])
