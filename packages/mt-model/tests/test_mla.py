"""Latent attention: transformers' numbers, one on every layout, absorbed equal to expanded."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
import torch.distributed as dist
from mt_context_parallel import shard
from mt_model import (
    GPT,
    LayerConfig,
    MLAConfig,
    MLPConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
    validate_context,
)
from mt_parallel_state import ParallelLayout, ParallelState, offsets_of, sharding_of
from mt_quant import QuantizationConfig, quantize
from mt_tensor_parallel import add_lora
from mt_testing import sample

PLACES = [  # tp, cp, sequence parallel, algorithm
    (2, 1, False, "ring"),
    (2, 1, True, "ring"),
    (1, 2, False, "ring"),
    (1, 2, False, "ulysses"),
    (2, 2, True, "all_gather"),
]
SIZES = {"num_heads": 4, "kv_lora_rank": 6, "nope_head_dim": 5, "rope_head_dim": 4, "v_head_dim": 3}
VARIANTS = {
    "v2-lite": {},
    "v3": {"q_lora_rank": 7, "rope": RopeConfig(theta=50.0, interleaved=True)},
    "biases": {"q_lora_rank": 7, "down_bias": True, "out_bias": True, "window": 3, "scale": 0.7},
    "drops": {"dropout": 0.2, "rope": RopeConfig(theta=100.0), "norm_eps": 1e-3},
}
LENGTH = 8


def config_of(name: str) -> ModelConfig:
    mixer = MLAConfig(**SIZES, **VARIANTS[name])
    layers = (LayerConfig(mixer=mixer, feed_forward=MLPConfig(ffn_size=24), repeat=2),)
    return ModelConfig(
        vocab_size=48,
        hidden_size=16,
        max_sequence_length=16,
        positions="none" if mixer.rope is None else "rope",
        norm=NormConfig(eps=1e-6),
        layers=layers,
        init_std=0.3,
    )


def model_of(name: str, state: ParallelState | None = None, **rest) -> GPT:
    model = GPT(config_of(name), state, dtype=torch.float64, seed=11, **rest)
    with torch.no_grad():
        for key, param in model.named_parameters():
            if "norm" in key or key.endswith("bias"):  # whole on every rank
                param += 0.2 * torch.sin(torch.arange(param.numel())).view(param.shape)
    return model


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 48, (2, LENGTH + 1), generator=generator)
    ids = torch.tensor([3, 8])
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "sample_ids": ids}


@pytest.mark.parametrize("lora", [None, 7])
@pytest.mark.parametrize("interleaved", [True, False])
@torch.no_grad()
def test_latent_attention_is_that_of_deepseek_v3(lora, interleaved) -> None:
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    config = DeepseekV3Config(
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=lora,
        kv_lora_rank=6,
        qk_nope_head_dim=5,
        qk_rope_head_dim=4,
        v_head_dim=3,
        attention_bias=True,
        rope_interleave=interleaved,
    )
    config._attn_implementation = "sdpa"
    theirs = DeepseekV3Attention(config, 0).eval().double()
    rope = RopeConfig(theta=100.0, interleaved=interleaved)
    given = {"q_lora_rank": lora, "rope": rope, "down_bias": True, "out_bias": True}
    mixer = MLAConfig(**SIZES, **given)
    sizes = {"vocab_size": 8, "hidden_size": 16, "max_sequence_length": 8, "init_std": 0.3}
    layers, norm = (LayerConfig(mixer=mixer),), NormConfig(eps=1e-6)
    model = GPT(ModelConfig(**sizes, layers=layers, norm=norm), dtype=torch.float64, seed=3)
    ours = model.layers["0"].mixer
    pairs = {"kv_a_proj_with_mqa": ours.latent, "kv_a_layernorm": ours.latent_norm}
    pairs |= {"kv_b_proj": ours.key_value, "o_proj": ours.out}
    if lora is None:
        pairs["q_proj"] = ours.query
    else:
        pairs |= {"q_a_proj": ours.query_down, "q_a_layernorm": ours.query_norm}
        pairs["q_b_proj"] = ours.query
    for name, module in pairs.items():
        for part, param in module.named_parameters():
            if "norm" in name or part == "bias":
                param += 0.1 * torch.sin(torch.arange(param.numel()).double())
            wanted = getattr(getattr(theirs, name), part)
            wanted.copy_(param.reshape(wanted.shape))
    x = torch.randn(2, LENGTH, 16, dtype=torch.float64)
    angle = torch.arange(LENGTH)[:, None] * 100.0 ** -(torch.arange(0, 4, 2).double() / 4)
    angle = torch.cat((angle, angle), -1)[None]
    hidden = torch.full((LENGTH, LENGTH), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    expected = theirs(x, (angle.cos(), angle.sin()), hidden)[0]
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    found = ours(x, model.begin(None, {"tokens": tokens})[1])
    # Their norms are in fp32.
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


def run(name, tp, cp, cuts, sequence_parallel=True, recompute="none", algorithm="ring"):
    """Return the loss and each gradient of the whole model, from stages run in turn."""
    state = ParallelState(ParallelLayout(tp=tp, cp=cp))
    data, sent, received, stages = batch(), [], [None], []
    for key in ("tokens", "labels"):
        data[key] = shard(data[key], state.group("cp"))
    for start, stop in pairwise(cuts):
        options = {"sequence_parallel": sequence_parallel, "recompute": recompute}
        options |= {"layers": range(start, stop), "context_algorithm": algorithm}
        stages.append(model_of(name, state, **options))
        sent.append(stages[-1](received[-1], data))
        if stop < cuts[-1]:
            received.append(sent[-1].detach().requires_grad_())
    loss = sent[-1]["lm"]
    loss.backward()
    for x, after in zip(sent[-2::-1], received[:0:-1], strict=True):
        x.backward(after.grad)
    found, places = {"loss": loss.detach()}, {}
    for stage in stages:
        for key, param in stage.named_parameters():
            if key.startswith("layers"):
                found[key] = param.grad
                places[key] = offsets_of(param, state.layout, state.rank)
                if tp > 1 and "tp" in sharding_of(param).partial_grad:
                    dist.all_reduce(found[key], group=state.group("tp"))
    if cp > 1:
        for part in found.values():
            dist.all_reduce(part, group=state.group("cp"))
    return found, places


def assert_same(results, expected) -> None:
    for found, places in results:
        assert found.keys() == expected.keys()
        assert torch.allclose(found["loss"], expected["loss"], rtol=1e-10)
        for key, starts in places.items():
            sizes = found[key].shape
            box = tuple(slice(o, o + s) for o, s in zip(starts, sizes, strict=True))
            difference = (found[key] - expected[key][box]).norm()
            assert difference <= 1e-9 * expected[key][box].norm(), key


@pytest.mark.parametrize(
    ("name", "tp", "cp", "sequence_parallel", "algorithm"),
    sample(((name, *place) for name, place in product(VARIANTS, PLACES)), every=3),
)
def test_latent_attention_is_the_same_on_every_layout(
    ranks, name, tp, cp, sequence_parallel, algorithm
) -> None:
    expected, _ = run(name, 1, 1, (0, 2))
    options = (sequence_parallel, "none", algorithm)
    assert_same(ranks(tp * cp, run, name, tp, cp, (0, 1, 2), *options), expected)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_number(ranks, recompute) -> None:
    expected, _ = run("drops", 1, 1, (0, 2))
    assert_same(ranks(2, run, "drops", 2, 1, (0, 2), True, recompute), expected)


@pytest.mark.parametrize("way", ["plain", "adapted", "int8"])
@pytest.mark.parametrize("name", VARIANTS)
def test_decoding_from_the_latents_equals_the_expanded_form(name: str, way: str) -> None:
    model, tokens = model_of(name).eval(), batch()["tokens"]
    if way == "int8":
        rules = [{"name": "*.mixer.*", "weight": "int8"}]
        quantize(model, QuantizationConfig.from_dict({"rules": rules}))
    if way == "adapted":
        add_lora(model, 2, matches=lambda name: "mixer" in name)
        with torch.no_grad():
            for key, param in model.named_parameters():
                if key.endswith(".b"):
                    param += torch.cos(torch.arange(param.numel())).view(param.shape)
    cache = model.new_cache(batch_size=2, max_length=10)
    assert {key: x.shape for key, x in cache.layers[0].items()} == {
        "latent": (2, 1, 10, 6),
        "turned": (2, 1, 10, 4),
    }
    pieces = [model.logits(tokens[:, a:b], cache=cache) for a, b in pairwise((0, 4, 5, 8))]
    assert torch.allclose(torch.cat(pieces, 1), model.logits(tokens), rtol=1e-10, atol=1e-12)


def test_padded_rows_decode_from_the_latents_as_they_do_alone() -> None:
    model, tokens = model_of("v3").eval(), batch()["tokens"]
    mask = torch.tensor([[True] * 8, [False] * 3 + [True] * 5])
    cache = model.new_cache(batch_size=2, max_length=8)
    found = model.logits(tokens, cache=cache, mask=mask)
    expected = model.logits(tokens[1:, 3:])
    assert torch.allclose(found[1:, 3:], expected, rtol=1e-10, atol=1e-12)


def decoded(tp: int) -> torch.Tensor:
    model = model_of("v3", ParallelState(ParallelLayout(tp=tp))).eval()
    tokens, cache = batch()["tokens"], model.new_cache(batch_size=2, max_length=8)
    pieces = [model.logits(tokens[:, a:b], cache=cache) for a, b in pairwise((0, 4, 5, 8))]
    return torch.cat(pieces, 1)


def test_tensor_parallel_decoding_equals_one_rank(ranks) -> None:
    for found in ranks(2, decoded, 2):
        assert torch.allclose(found, decoded(1), rtol=1e-10, atol=1e-12)


def test_counts_are_those_of_the_parameters() -> None:
    bare = NormConfig(kind="layer", weight=False)  # of layers; those of latents have weights
    for config in (*map(config_of, VARIANTS), replace(config_of("v3"), norm=bare)):
        model = GPT(config)
        assert config.num_parameters == sum(p.numel() for p in model.parameters())
        assert ModelConfig.from_dict(config.to_dict()) == config
    mixer = config_of("v2-lite").layers[0].mixer
    weights = 16 * 4 * 9 + 16 * 10 + 4 * 6 * 8 + 16 * 4 * 3
    pairs = 4 * (9 + 3) * 100 // 2  # of each token with half of 100, scores and values
    assert mixer.flops_per_token(16, 100) == 6 * weights + 6 * pairs


def test_heads_that_ranks_cannot_swap_are_refused() -> None:
    with pytest.raises(ValueError, match="ulysses shares 4 heads and 4 key/value heads"):
        validate_context(config_of("v3"), ["ulysses"] * 2, cp=3)
    with pytest.raises(ValueError, match="rope_head_dim: 3 is odd"):
        MLAConfig(**{**SIZES, "rope_head_dim": 3}, rope=RopeConfig())
