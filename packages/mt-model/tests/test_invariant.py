"""Bits of a token that depend on the tokens before it alone, in training and in generation."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from mt_model import (
    GPT,
    AttentionConfig,
    EncoderDecoder,
    GatedDeltaNetConfig,
    Kernels,
    LayerConfig,
    Mamba2Config,
    MLAConfig,
    MLPConfig,
    MoEConfig,
    RelativeConfig,
    RopeConfig,
    encoder_decoder_layers,
    gpt,
    invariance_obstacle,
)
from mt_model.attend.invariant import invariant_attention
from mt_model.attend.reference import reference_attention
from mt_model.attend.scores import Scores
from mt_testing import sample
from test_pages import Requests, pages_of, texts

SIZES = {"vocab_size": 48, "hidden_size": 64, "max_sequence_length": 40, "init_std": 0.3}
ROPE = RopeConfig()
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
GROUPED = AttentionConfig(**HEADS, rope=ROPE, qk_norm="head")
WINDOW = AttentionConfig(**HEADS, window=5, sinks="learned", softcap=2.0, rope=ROPE)
LATENT = MLAConfig(
    num_heads=4, kv_lora_rank=32, nope_head_dim=16, rope_head_dim=8, v_head_dim=16, rope=ROPE
)
MAMBA = Mamba2Config(num_heads=4, head_dim=16, state_size=16, chunk_size=4)
DELTA = GatedDeltaNetConfig(
    num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=16, chunk_size=4
)
MLP = MLPConfig(ffn_size=96)
MOE = MoEConfig(num_experts=4, top_k=2, ffn_size=32, shared_size=32, shared_gate=True)
NARROW = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6, rope=ROPE)
UNEVEN = GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=10)
MODELS = {
    "odd": [
        (NARROW, MLPConfig(ffn_size=44, activation="gelu_tanh")),
        (UNEVEN, MoEConfig(num_experts=5, top_k=2, ffn_size=14, score="sigmoid")),
    ],
    "dense": [(GROUPED, MLP), (WINDOW, MLP)],
    "experts": [(GROUPED, MOE), (GROUPED, MOE)],
    "latent": [(LATENT, MLP), (LATENT, MLP)],
    "recurrent": [(MAMBA, MLP), (GROUPED, MLP), (DELTA, MLP)],
}


def build(name, dtype=torch.float32, kernels="invariant"):
    layers = [LayerConfig(mixer=mixer, feed_forward=feed) for mixer, feed in MODELS[name]]
    kernels = Kernels(attention=kernels)
    return GPT(gpt(**SIZES, layers=layers), dtype=dtype, seed=3, kernels=kernels).eval()


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "dtype", "count"),
    sample(product(MODELS, [torch.float32, torch.bfloat16], [1, 2]), every=3),
)
def test_a_request_has_the_bits_of_the_trainers_forward(name, dtype, count, threads):
    threads(count)
    model = build(name, dtype)
    whole = model(texts()).detach()
    requests = Requests(texts())
    found = requests.scores(model, pages_of(model), ({0: 7, 1: 3}, {0: 1}, {2: 13, 1: 1, 0: 1}))
    for text, own in enumerate(found):
        assert torch.equal(own, whole[text, : len(own)])
    assert invariance_obstacle(model) is None


def test_the_probe_finds_products_that_depend_on_the_number_of_rows():
    model = build("dense")
    model.layers["1"].mixer.qkv.gemm = build("dense", kernels="auto").layers["1"].mixer.qkv.gemm
    assert "bits" in invariance_obstacle(model)
    assert "invariant" in invariance_obstacle(build("dense", kernels="auto"))
    short = GPT(
        gpt(
            **SIZES | {"max_sequence_length": 15},
            layers=[LayerConfig(mixer=GROUPED, feed_forward=MLP)],
        ),
        kernels=Kernels(attention="invariant"),
    )
    assert invariance_obstacle(short.eval()) is None


def test_the_probe_runs_a_stage_from_drawn_features():
    config, kernels = build("dense").config, Kernels(attention="invariant")
    for layers in (range(1), range(1, 2)):
        stage = GPT(config, layers=layers, kernels=kernels).eval()
        assert invariance_obstacle(stage) is None
    stage.layers["1"].mixer.qkv.gemm = build("dense", kernels="auto").layers["1"].mixer.qkv.gemm
    assert "bits" in invariance_obstacle(stage)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_has_the_same_bits_of_what_its_encoder_reads(dtype):
    attention = AttentionConfig(**HEADS, score_bias=RelativeConfig(), scale=1.0)
    layers = encoder_decoder_layers(attention, MLP, encoder=2, decoder=2)
    config = gpt(**SIZES, layers=layers, encoder_layers=2, positions="none")
    kernels = Kernels(attention="invariant")
    model = EncoderDecoder(config, dtype=dtype, seed=3, kernels=kernels).eval()
    assert invariance_obstacle(model) is None
    model.encode = lambda tokens, pages, places: None  # nothing in its pages
    assert "bits" in invariance_obstacle(model)


@pytest.mark.parametrize("how", [
    {"window": 5, "softcap": 2.0},
    {"documents": torch.arange(2 * 41).view(2, 41) // 15, "sinks": torch.randn(4).double()},
    {"bias": torch.randn(4, 81).double(), "causal": False},
])  # fmt: skip
def test_invariant_attention_has_the_numbers_and_gradients_of_the_reference(how):
    torch.manual_seed(0)
    shapes = (2, 41, 4, 8), (2, 41, 2, 8), (2, 41, 2, 6)
    given = [torch.randn(shape).double().requires_grad_() for shape in shapes]
    more = (how.get(name) for name in ("sinks", "bias"))
    given += [x.requires_grad_() for x in more if x is not None]
    kernels = invariant_attention, reference_attention
    outs = [kernel(*given[:3], Scores(scale=0.3, **how)) for kernel in kernels]
    torch.testing.assert_close(*outs, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(out.square().sum(), given) for out in outs]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)
