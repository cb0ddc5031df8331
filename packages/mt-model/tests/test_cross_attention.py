"""Cross-attention against a plain formula and transformers, on every layout and with a cache."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
import torch.distributed as dist
from mt_context_parallel import shard
from mt_model import (
    GPT,
    AttentionConfig,
    CrossAttentionConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
)
from mt_parallel_state import ParallelLayout, ParallelState, sharding_of
from mt_testing import sample

LENGTH, MEMORY = 8, 5
VARIANTS = {
    "plain": {},
    "t5": {"scale": 1.0, "memory_size": 12, "softcap": 3.0},
    "bart": {"qkv_bias": True, "out_bias": True, "num_kv_heads": 4},
    "drops": {"dropout": 0.2, "num_kv_heads": 1},
}


def config_of(name: str) -> ModelConfig:
    cross = CrossAttentionConfig(
        **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "memory_size": 10, **VARIANTS[name]}
    )
    own = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=4)
    decoder = (
        LayerConfig(mixer=own),
        LayerConfig(mixer=cross, feed_forward=MLPConfig(ffn_size=24)),
    )
    return ModelConfig(
        vocab_size=48,
        hidden_size=16,
        max_sequence_length=16,
        positions="none",
        layers=decoder * 2,
        init_std=0.3,
    )


def model_of(name: str, state: ParallelState | None = None, **rest) -> GPT:
    model = GPT(config_of(name), state, dtype=torch.float64, seed=11, **rest)
    with torch.no_grad():
        for key, param in model.named_parameters():
            if key.endswith("out.bias"):  # whole on every rank
                param += torch.sin(torch.arange(param.numel())).view(param.shape)
    return model


def batch(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 48, (2, LENGTH + 1), generator=generator)
    width = VARIANTS[name].get("memory_size", 10)
    memory = torch.randn(2, MEMORY, width, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[True] * 5, [True, True, False, True, False]])
    data = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "sample_ids": torch.tensor([3, 8])}
    return {**data, "memory": memory.requires_grad_(), "memory_mask": mask}


def plain(mixer, x, data, name):
    """The definition, of plain tensors."""
    given = {"scale": 0.5, "softcap": None, **VARIANTS[name]}
    query, made = mixer.query(x), mixer.key_value(data["memory"])
    key, value = (made[:, :, :, i].repeat_interleave(4 // made.shape[2], 2) for i in (0, 1))
    scores = torch.einsum("bsnd,bmnd->bnsm", query, key) * given["scale"]
    if given["softcap"]:
        scores = given["softcap"] * (scores / given["softcap"]).tanh()
    weights = scores.exp() * data["memory_mask"][:, None, None]
    weights = weights / weights.sum(-1, keepdim=True)
    return mixer.out(torch.einsum("bnsm,bmnd->bsnd", weights, value))


@pytest.mark.parametrize("name", ["plain", "t5", "bart"])
def test_cross_attention_is_its_formula(name: str) -> None:
    model, data = model_of(name), batch(name)
    x, shared = model.begin(None, data)
    mixer = model.layers["1"].mixer
    found = mixer(x, shared)
    expected = plain(mixer, x, data, name)
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)
    inputs = [data["memory"], *mixer.parameters()]
    ours = torch.autograd.grad(found.square().sum(), inputs)
    theirs = torch.autograd.grad(expected.square().sum(), inputs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)


@torch.no_grad()
def test_cross_attention_is_that_of_t5() -> None:
    from transformers.models.t5.configuration_t5 import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(d_model=16, d_kv=4, num_heads=4, is_decoder=True, dropout_rate=0.0)
    config._attn_implementation = "eager"
    theirs = T5Attention(config, has_relative_attention_bias=False, layer_idx=0).eval().double()
    given = replace(config_of("t5").layers[1].mixer, softcap=None, num_kv_heads=4, memory_size=None)
    layers = (replace(config_of("t5").layers[1], mixer=given),)
    model = GPT(replace(config_of("t5"), layers=layers), dtype=torch.float64, seed=2)
    mixer = model.layers["0"].mixer
    theirs.q.weight.copy_(mixer.query.weight.flatten(0, 1))
    theirs.k.weight.copy_(mixer.key_value.weight[:, 0].flatten(0, 1))
    theirs.v.weight.copy_(mixer.key_value.weight[:, 1].flatten(0, 1))
    theirs.o.weight.copy_(mixer.out.weight.flatten(1))
    data = batch("t5")
    data["memory"] = torch.randn(2, MEMORY, 16, dtype=torch.float64)
    x, shared = model.begin(None, data)
    hidden = torch.zeros(2, 1, 1, MEMORY, dtype=torch.float64)
    hidden.masked_fill_(~data["memory_mask"][:, None, None], -torch.inf)
    expected = theirs(x, mask=hidden, key_value_states=data["memory"])[0]
    assert torch.allclose(mixer(x, shared), expected, rtol=1e-10, atol=1e-12)


def run(name, tp, cp, cuts, recompute="none", sequence_parallel=True):
    """Loss, gradient of the memory and of one weight, through stages run in turn."""
    state = ParallelState(ParallelLayout(tp=tp, cp=cp))
    data, sent, received, stages = batch(name), [], [None], []
    for key in ("tokens", "labels"):
        data[key] = shard(data[key], state.group("cp"))
    for start, stop in pairwise(cuts):
        rest = {"layers": range(start, stop), "sequence_parallel": sequence_parallel}
        stages.append(model_of(name, state, recompute=recompute, **rest))
        sent.append(stages[-1](received[-1], data))
        if stop < cuts[-1]:
            received.append(sent[-1].detach().requires_grad_())
    loss = sent[-1]["lm"]
    loss.backward()
    for x, after in zip(sent[-2::-1], received[:0:-1], strict=True):
        x.backward(after.grad)
    weights = [stages[0].layers[i].mixer.out.weight for i in stages[0].layers]
    grads = [data["memory"].grad, loss.detach()]
    for part in grads:
        if cp > 1:
            dist.all_reduce(part, group=state.group("cp"))
    assert all(sharding_of(w).partial_grad == () for w in weights)
    return grads


@pytest.mark.parametrize(
    ("name", "tp", "cp"),
    sample(((n, *p) for n, p in product(VARIANTS, ((2, 1), (4, 1), (1, 2), (2, 2)))), every=3),
)
def test_cross_attention_is_the_same_on_every_layout(ranks, name, tp, cp) -> None:
    expected = run(name, 1, 1, (0, 4))
    assert expected[0].norm() > 0
    for found in ranks(tp * cp, run, name, tp, cp, (0, 2, 4)):
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("cuts", [(0, 4), (0, 1, 4)])
def test_stages_and_recomputation_change_no_gradient_of_the_memory(recompute, cuts) -> None:
    expected = run("drops", 1, 1, (0, 4))
    for a, b in zip(run("drops", 1, 1, cuts, recompute), expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("cuts", [(0, 4), (0, 1, 4)])
@pytest.mark.parametrize("name", VARIANTS)
def test_keys_of_the_memory_are_made_once_in_decoding(name: str, cuts) -> None:
    whole, data = model_of(name).eval(), batch(name)
    memory = {key: data[key].detach() for key in ("memory", "memory_mask")}
    stages = [model_of(name, layers=range(a, b)).eval() for a, b in pairwise(cuts)]
    caches = [stage.new_cache(batch_size=2, max_length=10) for stage in stages]
    with torch.no_grad():
        for a, b in pairwise((0, 4, 5, LENGTH)):
            x, given = None, memory if a == 0 else {}
            for stage, cache in zip(stages, caches, strict=True):
                x = stage(x, {"tokens": data["tokens"][:, a:b], "cache": cache, **given})
            expected = whole(None, {"tokens": data["tokens"][:, :b], **memory})[:, -1:]
            assert torch.allclose(x, expected, rtol=1e-10, atol=1e-12)


def test_a_cache_that_begins_anew_takes_the_memory_it_is_given() -> None:
    model, data = model_of("plain").eval(), batch("plain")
    cache, tokens = model.new_cache(batch_size=2, max_length=4), data["tokens"][:, :4]
    with torch.no_grad():
        for memory in (data["memory"], data["memory"].flip(1) * 2):
            cache.length = 0
            found = model(None, {"tokens": tokens, "cache": cache, "memory": memory})
            expected = model(None, {"tokens": tokens, "memory": memory})[:, -1:]
            assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_counts_are_those_of_the_parameters() -> None:
    for name in VARIANTS:
        config = config_of(name)
        model = GPT(config)
        assert config.num_parameters == sum(p.numel() for p in model.parameters())
        assert ModelConfig.from_dict(config.to_dict()) == config
    cross = config_of("plain").layers[1].mixer
    weights = 16 * 16 + 2 * 8 * 10 + 16 * 16
    pairs = 2 * 16 * 100  # scores and values: q elements of each of 100 tokens
    assert cross.flops_per_token(16, 100) == 6 * weights + 6 * pairs


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"memory": None}, ValueError, "layer 1 attends to a memory, and the batch has none"),
        ({"memory": torch.ones(2, 5)}, TypeError, r"memory must be a floating-point tensor \[B, M"),
        ({"memory_mask": torch.ones(2, 4).bool()}, ValueError, r"memory_mask must be \(2, 5\)"),
        ({"memory_mask": torch.ones(2, 5)}, TypeError, "memory_mask must be a tensor of bool"),
    ],
)
def test_a_memory_that_does_not_fit_is_refused(change, error, message) -> None:
    with pytest.raises(error, match=message):
        model_of("plain")(None, {**batch("plain"), **change})
