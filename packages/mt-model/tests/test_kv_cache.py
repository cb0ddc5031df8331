"""Keys and values in low precision: how far from exact, how large, and the same on every layout."""

from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch
from mt_fusions import GraphError
from mt_model import (
    GPT,
    AttentionConfig,
    EncoderDecoder,
    GraphedDecoding,
    KVCache,
    LayerConfig,
    Mamba2Config,
    MLAConfig,
    MLPConfig,
    ModelConfig,
    RopeConfig,
    calibrate_kv_cache,
    encoder_decoder_layers,
    gpt,
    kv_formats,
)
from mt_model.attend.cached import CachedAttend
from mt_parallel_state import ParallelLayout, ParallelState
from mt_quant import (
    CalibrationError,
    KVFormat,
    KVScales,
    KVScheme,
    QuantizationConfig,
    QuantizationError,
    Rule,
)
from mt_testing import sample

FORMATS = ("fp8", "int8", "fp8-head", "int8-head", "fp8-tensor", "int8-tensor")
SIZES = {"vocab_size": 64, "hidden_size": 32, "max_sequence_length": 24, "init_std": 0.3}
HEADS = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeConfig())
MLA = MLAConfig(
    num_heads=4, kv_lora_rank=16, nope_head_dim=8, rope_head_dim=4, v_head_dim=8, rope=RopeConfig()
)
MAMBA = Mamba2Config(num_heads=4, head_dim=8, state_size=8, chunk_size=8)
NEAR = {"fp8": 1 / 8, "fp8-head": 1 / 8, "int8": 1 / 32, "int8-tensor": 1 / 16}
"""Norm of the error of logits over their norm, two layers deep."""


def stack(*mixers):
    return {"layers": [LayerConfig(mixer=m, feed_forward=MLPConfig(ffn_size=48)) for m in mixers]}


MODELS = {
    "gqa": HEADS,
    "one_kv_head": {**HEADS, "num_kv_heads": 1, "qk_norm": "head"},
    "window": {**HEADS, "window": 5},
    "chunk": stack(AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, chunk=6), ATTENTION),
    "mla": stack(MLA, MLA),
    "hybrid": stack(MAMBA, ATTENTION),
}


def build(name, state=None, **how):
    return GPT(gpt(**SIZES, **MODELS[name]), state, seed=3, **how).eval()


def tokens_of(rows=2, count=6):
    return torch.arange(rows * count).view(rows, count) * 7 % 64


def with_format(model, name):
    """Have a model keep keys and values in a format from here on."""
    model.kv_schemes = calibrate_kv_cache(model, [tokens_of(4, 12)], name)
    return model


def bits(x):
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def steps(x, scale, kind):
    """Half a unit of what each value is rounded to."""
    if kind == "int8":
        return scale / 2 * torch.ones_like(x)
    return torch.maximum(x.abs() * 2**-4, scale * 2**-10)


@pytest.mark.parametrize(("window", "name"), sample(product([None, 4], FORMATS), every=5))
def test_attention_is_as_near_to_exact_as_half_a_unit_of_each_value_allows(name, window):
    torch.manual_seed(0)
    query = torch.randn(2, 9, 4, 16).double()
    key, value = torch.randn(2, 2, 9, 2, 16).double() * torch.tensor([0.2, 3.0])[:, None]
    format = KVFormat.named(name)
    scales = {}
    for kind, x in (("key", key), ("value", value)):
        amax = x.abs().amax((0, 1, 3)) if format.group == "head" else x.abs().amax().expand(2)
        scales[kind] = (amax / format.limit).float()
    model = GPT(
        gpt(vocab_size=8, hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=2,
            max_sequence_length=12), dtype=torch.float64,
    )  # fmt: skip
    scheme = KVScheme(format=format, scales=KVScales(**scales) if format.is_static else None)
    model.kv_schemes = {0: scheme}
    own = next(each for each in model.modules() if hasattr(each, "attending"))
    layer = SimpleNamespace(
        index=0, window=window, chunk=None, scale=None, softcap=None,
        attending=own.attending, sink_logits=lambda query: None,
        bias_by_distance=lambda shared, length: None,
    )  # fmt: skip

    def attended(kind):
        cache, parts = model.new_cache(batch_size=2, max_length=12, kv_cache_dtype=kind), []
        for a, b in pairwise((0, 6, 7, 8, 9)):
            attend = CachedAttend(cache=cache, places=torch.arange(a, b))
            parts.append(attend(layer, query[:, a:b], key[:, a:b], value[:, a:b], None))
        return torch.cat(parts, 1)

    exact, found = attended("full"), attended("auto")
    keys, values = (x.repeat_interleave(2, 2) for x in (key, value))
    units = {}
    for kind, x in (("key", key), ("value", value)):
        dynamic = x.abs().amax(-1, keepdim=True) / format.limit
        scale = scales[kind].double()[:, None] if format.is_static else dynamic
        units[kind] = steps(x, scale, format.type).repeat_interleave(2, 2)
    scores = torch.einsum("bsnd,btnd->bnst", query, keys) / 4
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    seen = seen if window is None else seen.triu(1 - window)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    off = torch.einsum("bsnd,btnd->bnst", query.abs(), units["key"]) / 4
    spread = (2 * off.masked_fill(~seen, 0).amax(-1)).exp()[..., None].transpose(1, 2)
    bound = (spread - 1) * torch.einsum("bnst,btnd->bsnd", weights, values.abs())
    bound = bound + spread * torch.einsum("bnst,btnd->bsnd", weights, units["value"])
    assert ((found - exact).abs() <= bound * (1 + 1e-5)).all()
    assert (found != exact).any()


@pytest.mark.parametrize("name", FORMATS)
def test_a_cache_of_codes_has_half_the_bytes_of_bf16_and_its_scales(name):
    model = with_format(build("gqa", dtype=torch.bfloat16), name)
    full, small = (
        model.new_cache(batch_size=3, max_length=20, kv_cache_dtype=kind)
        for kind in ("full", "auto")
    )
    scales = 2 * 2 * 2 * 4  # fp32 of heads of keys and values of layers
    scales *= 1 if KVFormat.named(name).is_static else 3 * 20
    assert small.nbytes == full.nbytes / 2 + scales


def test_states_of_recurrent_layers_stay_as_they_are():
    model = build("hybrid", dtype=torch.bfloat16)
    full, small = (
        model.new_cache(batch_size=1, max_length=20, kv_cache_dtype=kind)
        for kind in ("full", "fp8")
    )
    assert {n: x.dtype for n, x in small.layers[0].items()} == {
        n: x.dtype for n, x in full.layers[0].items()
    }
    assert small.layers[1]["key"].dtype == torch.float8_e4m3fn
    model.logits(tokens_of(1), cache=small)
    model.logits(tokens_of(1), cache=full)
    assert torch.equal(small.layers[0]["state"], full.layers[0]["state"])


@pytest.mark.parametrize(("model", "name"), sample(product(MODELS, ["fp8", "int8-head"]), every=3))
def test_a_token_is_rounded_once_and_its_codes_stay(model, name):
    built = with_format(build(model), name)
    cache = built.new_cache(batch_size=2, max_length=20)
    built.logits(tokens_of(), cache=cache)
    before = {i: {n: x.clone() for n, x in held.items()} for i, held in cache.layers.items()}
    built.logits(tokens_of()[:, :3], cache=cache)
    for index in cache.formats:
        for name, x in cache.layers[index].items():
            was, now = (bits(y)[:, :, :6] for y in (before[index][name], x))
            assert torch.equal(was, now)


@pytest.mark.parametrize(("model", "name"), sample(product(MODELS, NEAR), every=3))
def test_logits_are_near_those_of_a_full_cache(model, name):
    built = with_format(build(model), name)
    tokens = tokens_of(2, 16)
    cache = built.new_cache(batch_size=2, max_length=20)
    pieces = [built.logits(tokens[:, a:b], cache=cache) for a, b in pairwise((0, 5, 6, 7, 16))]
    expected = built.logits(tokens)
    error = (torch.cat(pieces, 1) - expected).norm() / expected.norm()
    assert 0 < error < NEAR[name]


@pytest.mark.parametrize("model", ["window", "chunk"])
def test_a_window_is_all_that_is_made_of_the_codes(model, monkeypatch):
    read, sizes = KVCache.read, []

    def told(self, layer, name, dtype, places=None):
        found = read(self, layer, name, dtype, places)
        sizes.append((layer, found.shape[1]))
        return found

    monkeypatch.setattr(KVCache, "read", told)
    built = build(model)
    cache = built.new_cache(batch_size=2, max_length=20, kv_cache_dtype="fp8")
    tokens = tokens_of(2, 16)
    pieces = [built.logits(tokens[:, a:b], cache=cache) for a, b in pairwise((0, 3, 4, 16))]
    near = {"window": (5, 5), "chunk": (6, None)}[model]
    expected = [
        (layer, 20 if size is None or size + count > 20 else size + count - 1)
        for count in (3, 1, 12)
        for layer, size in enumerate(near)
        for _ in range(2)
    ]
    assert sizes == expected
    monkeypatch.undo()
    whole = built.new_cache(batch_size=2, max_length=20, kv_cache_dtype="fp8")
    monkeypatch.setattr(CachedAttend, "block", lambda self, window, chunk=None: None)
    again = [built.logits(tokens[:, a:b], cache=whole) for a, b in pairwise((0, 3, 4, 16))]
    torch.testing.assert_close(torch.cat(pieces, 1), torch.cat(again, 1), rtol=1e-5, atol=1e-5)


def test_rows_with_padding_have_the_logits_that_they_have_alone():
    built = build("window")
    mask = torch.tensor([[True] * 8, [False] * 3 + [True] * 5])
    tokens = tokens_of(2, 8)
    caches = [
        built.new_cache(batch_size=rows, max_length=12, kv_cache_dtype="fp8") for rows in (2, 1)
    ]
    found = built.logits(tokens, cache=caches[0], mask=mask)
    alone = built.logits(tokens[1:, 3:], cache=caches[1])
    torch.testing.assert_close(found[1:, 3:], alone, rtol=1e-5, atol=1e-5)
    found, alone = (
        built.logits(tokens[-rows:, :1], cache=cache)
        for rows, cache in zip((2, 1), caches, strict=True)
    )
    torch.testing.assert_close(found[1:], alone, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def generate(model, kind, *, graphs=False, count=16):
    """Greedy tokens and all scores."""
    cache = model.new_cache(batch_size=2, max_length=6 + count, kv_cache_dtype=kind)
    tokens = tokens_of().to(model.shard.device)
    scores = [model(None, {"tokens": tokens, "cache": cache})]
    run = GraphedDecoding(model, cache) if graphs else model
    for _ in range(count):
        batch = {"tokens": scores[-1][:, -1].argmax(-1, keepdim=True), "cache": cache}
        scores.append(run(None, batch).clone())
    return torch.cat(scores, 1), getattr(run, "replays", 0)


@pytest.mark.parametrize(("model", "name"), sample(product(MODELS, NEAR), every=5))
def test_a_graph_scores_every_token_with_the_bits_of_eager(model, name):
    built = with_format(build(model), name)
    expected, _ = generate(built, "auto")
    found, replays = generate(built, "auto", graphs=True)
    assert torch.equal(found, expected)
    assert replays == 16 - 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", NEAR)
@pytest.mark.parametrize("model", MODELS)
def test_a_captured_pass_scores_every_token_as_eager(model, name):
    built = with_format(build(model).cuda(), name)
    expected, _ = generate(built, "auto")
    found, replays = generate(built, "auto", graphs=True)
    assert replays == 16 - 2
    torch.testing.assert_close(found, expected)


def test_a_graph_refuses_scales_that_moved():
    built = with_format(build("gqa"), "fp8-head")
    cache = built.new_cache(batch_size=2, max_length=12)
    with torch.no_grad():
        built(None, {"tokens": tokens_of(), "cache": cache})
        run, batch = GraphedDecoding(built, cache), {"tokens": tokens_of()[:, :1], "cache": cache}
        for _ in range(3):
            run(None, batch)
        cache.layers[0]["key_scale"] = cache.layers[0]["key_scale"].clone()
        with pytest.raises(GraphError, match="key_scale of layer 0 in the cache"):
            run(None, batch)


def on_rank(model, name, tp):
    built = with_format(build(model, ParallelState(ParallelLayout(tp=tp))), name)
    scores, _ = generate(built, "auto")
    return scores.argmax(-1), {
        i: (s.scales.key, s.scales.value) for i, s in built.kv_schemes.items() if s.scales
    }


@pytest.mark.parametrize(
    ("model", "name"),
    sample(
        product(["gqa", "one_kv_head", "mla", "hybrid"], ["fp8", "int8-head", "fp8-tensor"]),
        every=2,
    ),
)
def test_tensor_parallel_ranks_choose_the_tokens_of_one_process(ranks, model, name):
    tokens, scales = on_rank(model, name, 1)
    assert len(set(tokens.flatten().tolist())) > 4
    for found, theirs in ranks(2, on_rank, model, name, 2):
        assert torch.equal(found, tokens)
        assert theirs.keys() == scales.keys()
        for index, pair in scales.items():
            for x, y in zip(pair, theirs[index], strict=True):
                torch.testing.assert_close(x, y)


@pytest.mark.parametrize("name", ["fp8", "int8-head"])
@pytest.mark.parametrize("model", ["gqa", "hybrid"])
def test_stages_choose_the_tokens_of_one_process(model, name):
    whole = with_format(build(model), name)
    expected, _ = generate(whole, "auto")
    stages = [build(model, layers=layers) for layers in (range(1), range(1, 2))]
    for stage in stages:
        stage.kv_schemes = {
            i: whole.kv_schemes[i] for i in whole.kv_schemes if i in stage.layer_range
        }
    caches = [stage.new_cache(batch_size=2, max_length=22) for stage in stages]
    tokens, found = tokens_of(), []
    with torch.no_grad():
        for _ in range(17):
            x = None
            for stage, cache in zip(stages, caches, strict=True):
                x = stage(x, {"tokens": tokens, "cache": cache})
            found.append(x)
            tokens = x[:, -1].argmax(-1, keepdim=True)
    assert torch.equal(torch.cat(found, 1), expected)


def test_a_decoder_keeps_what_it_makes_of_the_encoder_in_low_precision():
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
    layers = encoder_decoder_layers(attention, MLPConfig(ffn_size=48), encoder=1, decoder=1)
    config = ModelConfig(**SIZES, positions="none", layers=layers, encoder_layers=1)
    model = EncoderDecoder(config, seed=3).eval()
    given, scores = tokens_of(2, 6), {}
    batches = [{"tokens": tokens_of(2, 8), "encoder_tokens": given}]
    model.kv_schemes = calibrate_kv_cache(model, batches, "fp8-head")
    assert len(model.kv_schemes) == 2
    for kind in ("full", "auto", "fp8", "int8"):
        cache = model.new_cache(batch_size=2, max_length=8, kv_cache_dtype=kind)
        tokens = tokens_of(2, 8)
        parts = [model.logits(tokens[:, :1], cache=cache, encoder_tokens=given)]
        parts += [model.logits(tokens[:, i : i + 1], cache=cache) for i in range(1, 8)]
        scores[kind] = torch.cat(parts, 1)
        for index in cache.formats:
            assert cache.layers[index]["key"].dtype.itemsize == 1
        assert len(cache.formats) == (0 if kind == "full" else 2)
        error = (scores[kind] - scores["full"]).norm() / scores["full"].norm()
        assert (0 < error < 1 / 8) or kind == "full"


def test_rules_name_the_layers_that_keep_codes():
    model = build("gqa")
    rules = (Rule(name="layers.1.mixer", kv_cache="int8-head"), Rule(weight="int8"))
    found = kv_formats(model, QuantizationConfig(rules=rules).decide(model))
    assert found == {1: KVFormat(type="int8", group="head")}
    model.kv_schemes = calibrate_kv_cache(model, [tokens_of()], found)
    cache = model.new_cache(batch_size=1, max_length=8)
    assert [cache.layers[i]["key"].dtype for i in (0, 1)] == [torch.float32, torch.int8]


def recurrent():
    return GPT(gpt(**SIZES, positions="none", **stack(MAMBA)), seed=3).eval()


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda: build("gqa").new_cache(batch_size=1, max_length=4, kv_cache_dtype="mxfp4"),
         QuantizationError, "unknown format of keys and values 'mxfp4'"),
        (lambda: build("gqa").new_cache(batch_size=1, max_length=4, kv_cache_dtype="fp8-head"),
         CalibrationError, "fp8-head has scales from calibration, and there are none"),
        (lambda: recurrent().new_cache(batch_size=1, max_length=4, kv_cache_dtype="fp8"),
         QuantizationError, "no layer of this model keeps keys and values"),
        (lambda: calibrate_kv_cache(recurrent(), [tokens_of()], "fp8-head"),
         QuantizationError, "no layer of this model keeps keys and values"),
        (lambda: calibrate_kv_cache(build("gqa"), [], "fp8-head"),
         CalibrationError, "no keys and values were seen"),
        (lambda: kv_formats(build("gqa"), QuantizationConfig(
            rules=(Rule(name="layers.0.feed_forward", kv_cache="fp8"),)).decide(build("gqa"))),
         QuantizationError, "layers.0.feed_forward, which keeps no keys and values"),
    ],
)  # fmt: skip
def test_what_can_not_be_kept_so_is_refused(ask, error, message):
    with pytest.raises(error, match=message):
        ask()


def test_scales_are_one_for_each_head():
    model = build("gqa")
    scales = KVScales(key=torch.ones(3), value=torch.ones(3))
    model.kv_schemes = {0: KVScheme(format=KVFormat(type="fp8", group="head"), scales=scales)}
    with pytest.raises(QuantizationError, match=r"layer 0 has 2 heads .* the shape \[3\]"):
        model.new_cache(batch_size=1, max_length=4)
