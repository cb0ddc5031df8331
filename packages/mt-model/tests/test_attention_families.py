"""Kinds of attention against modules of transformers, with copied weights."""

from __future__ import annotations

import pytest
import torch
from mt_model import GPT, gpt
from torch import Tensor, nn

LENGTH, HIDDEN, THETA = 7, 24, 100.0


def attention_of(dtype: torch.dtype = torch.float32, **options) -> nn.Module:
    sizes = {"vocab_size": 8, "hidden_size": HIDDEN, "num_layers": 1, "max_sequence_length": 16}
    sizes |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "norm_eps": 1e-6}
    config = gpt(**{**sizes, "rope_theta": THETA, "init_std": 0.3, **options})
    model = GPT(config, dtype=dtype, seed=5)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "_norm" in name or name.endswith("bias"):
                param += 0.2 * torch.sin(torch.arange(param.numel())).view(param.shape)
    return model


def ours(model: GPT, x: Tensor) -> Tensor:
    tokens = torch.zeros(x.shape[:2], dtype=torch.int64)
    return model.layers["0"].mixer(x, model.begin(None, {"tokens": tokens})[1])


def turning(width: int = 8) -> tuple[Tensor, Tensor]:
    """Cosines and sines as transformers hands them to its layers. [1, S, width] each."""
    frequency = THETA ** -(torch.arange(0, width, 2) / width)
    angle = torch.arange(LENGTH)[:, None] * frequency
    angle = torch.cat((angle, angle), -1)[None]
    return angle.cos(), angle.sin()


def causal() -> Tensor:
    return torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]


def rows(weight: Tensor) -> Tensor:
    """[G, parts, D, ...] as rows of a matrix, or of a bias."""
    return weight.flatten(0, 2).detach()


def x_of(seed: int = 1) -> Tensor:
    return torch.randn(2, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(seed))


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_an_output_gate_is_that_of_qwen3_next() -> None:
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

    config = Qwen3NextConfig(
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attention_bias=True,
        rms_norm_eps=1e-6,
    )
    config._attn_implementation = "eager"
    theirs = Qwen3NextAttention(config, 0).eval()
    form = {"norm_zero_centered": True}
    model = attention_of(output_gate=True, qk_norm="head", bias=True, **form)
    mixer = model.layers["0"].mixer
    for part in ("weight", "bias"):
        given = getattr(mixer.qkv, part)  # [G, gates and queries, keys, values]
        pairs = torch.stack((given[:, 2:4], given[:, :2]), 2)  # the query of a head, then its gate
        getattr(theirs.q_proj, part).copy_(pairs.flatten(0, 3))
        getattr(theirs.k_proj, part).copy_(rows(given[:, 4:5]))
        getattr(theirs.v_proj, part).copy_(rows(given[:, 5:6]))
    theirs.o_proj.weight.copy_(mixer.out.weight.flatten(1))
    theirs.o_proj.bias.copy_(mixer.out.bias)
    theirs.q_norm.weight.copy_(mixer.q_norm.weight)
    theirs.k_norm.weight.copy_(mixer.k_norm.weight)
    assert_near(ours(model, x_of()), theirs(x_of(), turning(), causal())[0])


@torch.no_grad()
def test_norms_of_whole_projections_are_those_of_olmo2() -> None:
    from transformers.models.olmo2.configuration_olmo2 import Olmo2Config
    from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention

    config = Olmo2Config(
        hidden_size=HIDDEN, num_attention_heads=3, num_key_value_heads=3, rms_norm_eps=1e-6
    )
    config._attn_implementation = "eager"
    theirs = Olmo2Attention(config, 0).eval()
    model = attention_of(num_heads=3, num_kv_heads=3, qk_norm="whole")
    mixer = model.layers["0"].mixer
    for place, name in enumerate(("q_proj", "k_proj", "v_proj")):
        getattr(theirs, name).weight.copy_(rows(mixer.qkv.weight[:, place : place + 1]))
    theirs.o_proj.weight.copy_(mixer.out.weight.flatten(1))
    theirs.q_norm.weight.copy_(mixer.q_norm.weight)
    theirs.k_norm.weight.copy_(mixer.k_norm.weight)
    assert_near(ours(model, x_of()), theirs(x_of(), turning(), causal())[0])


@torch.no_grad()
def test_norms_after_the_rotation_are_those_of_llama4() -> None:
    from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm

    model = attention_of(qk_norm="l2")
    mixer, norm = model.layers["0"].mixer, Llama4TextL2Norm(1e-6)
    query, key, value = mixer.project(x_of())[0].split((2, 1, 1), dim=3)
    cos, sin = (t[0, :, None, None] for t in turning())

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    query, key = norm(turned(query)), norm(turned(key))
    scores = torch.einsum("bsgqd,btgd->bgqst", query, key[:, :, :, 0]) * 8**-0.5
    weights = (scores + causal()[0]).softmax(-1)
    mixed = torch.einsum("bgqst,btgd->bsgqd", weights, value[:, :, :, 0])
    assert_near(ours(model, x_of()), mixer.out(mixed.flatten(2, 3)))


@pytest.mark.parametrize("window", [None, 3])
@torch.no_grad()
def test_attention_both_ways_is_that_of_modernbert(window: int | None) -> None:
    from transformers.models.modernbert.configuration_modernbert import ModernBertConfig
    from transformers.models.modernbert.modeling_modernbert import ModernBertAttention

    kind = "full_attention" if window is None else "sliding_attention"
    config = ModernBertConfig(
        hidden_size=HIDDEN,
        num_attention_heads=3,
        num_hidden_layers=1,
        layer_types=[kind],
        local_attention=4,  # two tokens on each side
    )
    config._attn_implementation = "eager"
    theirs = ModernBertAttention(config, 0).eval()
    model = attention_of(num_heads=3, num_kv_heads=3, causal=False, window=window)
    mixer = model.layers["0"].mixer
    theirs.Wqkv.weight.copy_(mixer.qkv.weight.transpose(0, 1).flatten(0, 2))
    theirs.Wo.weight.copy_(mixer.out.weight.flatten(1))
    place = torch.arange(LENGTH)
    far = (place[:, None] - place).abs() > config.sliding_window
    mask = torch.zeros(LENGTH, LENGTH).masked_fill(far & (window is not None), -torch.inf)
    assert config.sliding_window == 2
    assert_near(ours(model, x_of()), theirs(x_of(), turning(), mask[None, None])[0])
