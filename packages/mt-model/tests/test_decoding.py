"""Passes of generation as one graph: the tokens of eager mode, and the rules of a graph held."""

import pytest
import torch
from mt_fusions import GraphError
from mt_model import (
    GPT,
    AlibiConfig,
    AttentionConfig,
    DynamicScaling,
    EncoderDecoder,
    GatedDeltaNetConfig,
    GraphedDecoding,
    LayerConfig,
    LongropeScaling,
    Mamba2Config,
    MLAConfig,
    MLPConfig,
    ModelConfig,
    RelativeConfig,
    RopeConfig,
    encoder_decoder_layers,
    gpt,
)

SIZES = {"vocab_size": 64, "hidden_size": 32, "max_sequence_length": 24, "init_std": 0.3}
HEADS = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
LONGROPE = LongropeScaling(
    short_factor=(1.0,) * 4, long_factor=(3.0,) * 4, original_length=12, factor=4.0
)


def mixed(mixer):
    layer = LayerConfig(mixer=mixer, feed_forward=MLPConfig(ffn_size=48))
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeConfig())
    other = LayerConfig(mixer=attention, feed_forward=MLPConfig(ffn_size=48))
    return {"layers": [layer, other]}


MLA = MLAConfig(
    num_heads=4, kv_lora_rank=16, nope_head_dim=8, rope_head_dim=4, v_head_dim=8, rope=RopeConfig()
)
MAMBA = Mamba2Config(num_heads=4, head_dim=8, state_size=8, chunk_size=8)
DELTA = GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8)
MODELS = {
    "window": {**HEADS, "window": 5},
    "capped": {**HEADS, "softcap": 3.0, "qk_norm": "head"},
    "learned": {**HEADS, "positions": "learned"},
    "relative": {
        **HEADS,
        "positions": "none",
        "score_bias": RelativeConfig(buckets=8, max_distance=20),
    },
    "mla": mixed(MLA),
    "mamba2": mixed(MAMBA),
    "delta": mixed(DELTA),
}


def build(name, kernels="auto"):
    return GPT(gpt(**SIZES, **MODELS[name]), seed=3, kernels=kernels).eval()


@torch.no_grad()
def generate(model, *, graphs, rows=2, count=18, mask=None, on_eager=None):
    """Greedy tokens and all scores; and how many passes were replayed."""
    device = next(model.parameters()).device
    tokens = torch.arange(rows * 4, device=device).reshape(rows, 4)
    cache = model.new_cache(batch_size=rows, max_length=4 + count)
    scores = model(None, {"tokens": tokens, "cache": cache, "mask": mask})
    run = GraphedDecoding(model, cache, on_eager=on_eager) if graphs else model
    found = [scores.clone()]
    for _ in range(count):
        batch = {"tokens": found[-1][:, -1].argmax(-1, keepdim=True), "cache": cache}
        found.append(run(None, batch).clone())
    assert cache.length == 4 + count
    return torch.cat(found, 1), getattr(run, "replays", 0)


# Each model once in CI, with the two choices of kernels in turn.
PAIRS = [
    pytest.param(name, kernels, marks=() if (i + j) % 2 == 0 else pytest.mark.campaign)
    for i, name in enumerate(MODELS)
    for j, kernels in enumerate(("auto", "fused"))
]


@pytest.mark.parametrize(("name", "kernels"), PAIRS)
def test_a_graph_scores_every_token_with_the_bits_of_eager(name, kernels):
    expected, _ = generate(build(name, kernels), graphs=False)
    found, replays = generate(build(name, kernels), graphs=True)
    assert torch.equal(found, expected)
    assert replays == 18 - 2  # the second pass is watched, those behind it are replayed
    assert len(set(expected.argmax(-1).flatten().tolist())) > 4


def test_rows_with_padding_have_the_bits_of_eager():
    mask = torch.tensor([[False, True, True, True], [True] * 4])
    expected, _ = generate(build("window"), graphs=False, mask=mask)
    assert torch.equal(generate(build("window"), graphs=True, mask=mask)[0], expected)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"positions": "none", "score_bias": AlibiConfig()}, "makes a tensor of Python's values"),
        (
            {"rope": RopeConfig(scaling=DynamicScaling(factor=2.0, original_length=8))},
            r"the rope of layer 0 turns by other angles as the text grows \(DynamicScaling\)",
        ),
    ],
)
def test_what_changes_in_python_runs_eagerly_with_a_reason(options, reason):
    model, said = GPT(gpt(**SIZES, **HEADS, **options), seed=3).eval(), []
    expected, _ = generate(model, graphs=False)
    found, replays = generate(model, graphs=True, on_eager=said.append)
    assert torch.equal(found, expected)
    assert replays == 0
    assert len(said) == 1
    with pytest.raises(GraphError, match=reason):
        generate(model, graphs=True)


def test_longrope_is_replayed_up_to_the_length_where_its_factors_change():
    config = gpt(**SIZES, **HEADS, rope=RopeConfig(scaling=LONGROPE))
    model = GPT(config, seed=3).eval()
    expected, _ = generate(model, graphs=False, count=8)
    found, replays = generate(model, graphs=True, count=8)
    assert replays
    assert torch.equal(found, expected)


def test_a_decoder_behind_an_encoder_has_the_bits_of_eager():
    bias = RelativeConfig(buckets=8, max_distance=20)
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, score_bias=bias)
    layers = encoder_decoder_layers(attention, MLPConfig(ffn_size=48), encoder=1, decoder=2)
    config = ModelConfig(**SIZES, positions="none", layers=layers, encoder_layers=1)
    model = EncoderDecoder(config, seed=3).eval()
    found = []
    for graphs in (False, True):
        cache, run = model.new_cache(batch_size=2, max_length=16), model
        batch = {"tokens": torch.ones(2, 1).long(), "cache": cache}
        with torch.no_grad():
            given = torch.arange(12).reshape(2, 6)
            scores = [model(None, {**batch, "encoder_tokens": given})]
            run = GraphedDecoding(model, cache) if graphs else model
            for _ in range(15):
                batch = {"tokens": scores[-1][:, -1].argmax(-1, keepdim=True), "cache": cache}
                scores.append(run(None, batch).clone())
        found.append(torch.cat(scores, 1))
    assert torch.equal(*found)
    assert run.replays == 15 - 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", MODELS)
def test_a_captured_pass_scores_every_token_as_eager(name):
    model = build(name).cuda()
    expected, _ = generate(model, graphs=False)
    found, replays = generate(model, graphs=True)
    assert replays == 18 - 2
    torch.testing.assert_close(found, expected)


def test_memory_that_moved_is_found():
    model = build("window")
    with torch.no_grad():
        tokens = torch.ones(1, 4).long()
        cache = model.new_cache(batch_size=1, max_length=24)
        model(None, {"tokens": tokens, "cache": cache})
        decoding = GraphedDecoding(model, cache)
        batch = {"tokens": tokens[:, :1], "cache": cache}
        for _ in range(4):
            decoding(None, batch)
        cache.layers[0]["key"] = cache.layers[0]["key"].clone()
        with pytest.raises(GraphError, match=r"memory at 0x.*and was key of layer 0 in the cache"):
            decoding(None, batch)


def test_a_wrong_pass_is_refused():
    model = build("window")
    cache, other = (model.new_cache(batch_size=1, max_length=6) for _ in range(2))
    with pytest.raises(ValueError, match="the cache holds no token"):
        GraphedDecoding(model, cache)
    tokens = torch.ones(1, 4).long()
    with torch.no_grad():
        model(None, {"tokens": tokens, "cache": cache})
        decoding = GraphedDecoding(model, cache)
        with pytest.raises(ValueError, match="4 tokens for a cache that holds 4 of 6"):
            decoding(None, {"tokens": tokens, "cache": cache})
        one = tokens[:, :1]
        with pytest.raises(ValueError, match="takes tokens and its own cache, got cache, tokens;"):
            decoding(None, {"tokens": one, "cache": other})
        with pytest.raises(ValueError, match="got cache, mask, tokens"):
            decoding(None, {"tokens": one, "cache": cache, "mask": one.bool()})
        for _ in range(2):
            decoding(None, {"tokens": one, "cache": cache})
        with pytest.raises(ValueError, match="1 tokens for a cache that holds 6 of 6"):
            decoding(None, {"tokens": one, "cache": cache})
