"""Slopes and buckets as published, shared tables, and refusals."""

import json
from dataclasses import replace

import pytest
import torch
from mt_model import GPT, AlibiConfig, ModelConfig, RelativeConfig, gpt
from mt_model.attend.distance import (
    add_in_order,
    bias_by_distance,
    buckets_of,
    spread,
    spread_in_order,
)
from mt_parallel_state import sharding_of

SIZES = {"vocab_size": 48, "hidden_size": 16, "num_layers": 3, "num_heads": 4, "init_std": 0.3}
RELATIVE = {"type": "relative", "buckets": 6, "max_distance": 9}
CPU = torch.device("cpu")


@pytest.mark.parametrize("heads", [*range(1, 34), 48, 64, 112])
def test_slopes_are_those_of_transformers(heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(AlibiConfig().slopes(heads)), theirs)


def test_slopes_are_the_published_ones():
    assert AlibiConfig().slopes(8) == tuple(2.0**-i for i in range(1, 9))
    assert AlibiConfig().slopes(3) == (2**-4, 2**-8, 2**-2)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("buckets", "reach"), [(32, 128), (64, 256), (6, 9), (4, 20), (128, 1000)])
def test_buckets_are_those_of_transformers(buckets, reach, bidirectional):
    from transformers.models.t5.modeling_t5 import T5Attention

    bias = RelativeConfig(buckets=buckets, max_distance=reach, bidirectional=bidirectional)
    distance = torch.arange(-3000, 3000)
    theirs = T5Attention._relative_position_bucket(-distance, bidirectional, buckets, reach)
    assert torch.equal(buckets_of(distance, bias), theirs)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_bias_is_spread_as_in_transformers(bidirectional):
    from transformers.models.t5.configuration_t5 import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(d_model=8, num_heads=4, is_decoder=not bidirectional)
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    weight = theirs.relative_attention_bias.weight.detach()
    bias = RelativeConfig(bidirectional=bidirectional)
    options = {"num_heads": 4, "length": 50, "device": CPU}
    found = bias_by_distance(bias, weight, range(4), **options)
    places = torch.arange(50)
    assert torch.equal(spread(found, places, places), theirs.compute_bias(50, 50)[0])
    in_order = spread_in_order(found, range(50), range(50))
    assert torch.equal(in_order, spread(found, places, places))
    later = spread(found, places[40:45], places[:45])
    assert torch.equal(later, theirs.compute_bias(5, 45, past_seen_tokens=40)[0])


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        (range(11), range(11)),
        (range(4, 8), range(2, 9)),
        (range(8, 11), range(11)),
        (range(3, 4), range(5, 6)),
    ],
)
def test_blocks_of_pairs_take_and_add_what_an_index_does(queries, keys):
    draw = torch.Generator().manual_seed(0)
    bias = torch.randn(3, 21, generator=draw, dtype=torch.float64, requires_grad=True)
    expected = spread(bias, torch.tensor(queries), torch.tensor(keys))
    found = spread_in_order(bias, queries, keys)
    assert torch.equal(found, expected)
    by_pair = torch.randn(2, *expected.shape, generator=draw, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(expected, bias, by_pair.sum(0))
    (grad,) = torch.autograd.grad(found, bias, by_pair.sum(0))
    added = torch.ones_like(wanted)
    add_in_order(added, by_pair, queries, keys)
    assert torch.allclose(grad, wanted, rtol=1e-13, atol=1e-14)
    assert torch.allclose(added, 1 + wanted, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("bias", [{"type": "alibi"}, RELATIVE, {**RELATIVE, "table": None}])
def test_a_biased_model_counts_its_parameters_and_survives_json(bias):
    config = gpt(**SIZES, score_bias=bias)
    model = GPT(config)
    assert config.num_parameters == sum(p.numel() for p in model.parameters())
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert gpt(**json.loads(json.dumps(config.to_dict()))) == config
    names = [name for name, _ in model.named_parameters() if "score_table" in name]
    own = [f"layers.{i}.mixer.score_table.weight" for i in range(3)]
    expected = {None: own, "relative": ["score_tables.relative.weight"]}
    assert names == ([] if bias["type"] == "alibi" else expected[bias.get("table", "relative")])


def test_a_shared_table_is_on_every_stage_and_the_first_one_owns_it():
    config = gpt(**SIZES, score_bias=RELATIVE)
    stages = [GPT(config, layers=range(i, i + 1)) for i in range(3)]
    weights = [stage.score_tables["relative"].weight for stage in stages]
    assert [sharding_of(w).is_copy for w in weights] == [False, True, True]
    assert {sharding_of(w).partial_grad for w in weights} == {("pp",)}
    assert all(torch.equal(w, weights[0]) for w in weights)
    whole = GPT(config).score_tables["relative"].weight
    assert sharding_of(whole).partial_grad == ()
    assert torch.equal(whole, weights[0])


def test_a_stage_whose_layers_use_no_table_gives_it_a_gradient_of_zeros():
    config = gpt(**SIZES, score_bias=RELATIVE)
    last = config.layers[2]
    plain = replace(last, mixer=replace(last.mixer, score_bias=None))
    config = replace(config, layers=(*config.layers[:2], plain))
    stage = GPT(config, layers=range(2, 3))
    tokens = torch.arange(8).view(1, 8)
    x = torch.randn(1, 8, 16)
    stage(x, {"tokens": tokens, "labels": tokens})["lm"].backward()
    grad = stage.score_tables["relative"].weight.grad
    assert torch.equal(grad, torch.zeros(6, 4))


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({"type": "alibis"}, "score_bias.type: 'alibis' is not known here"),
        ({}, "score_bias.type: missing"),
        ({"type": "relative", "buckets": 1}, "score_bias.buckets: 1 is too small; use 2 or more"),
        (
            {"type": "relative", "buckets": 7, "bidirectional": True},
            "buckets: 7 is odd, and each direction has half",
        ),
        ({"type": "relative", "max_distance": 16}, "max_distance: 16 is not above the 16 dist"),
        ({"type": "relative", "table": "a.b"}, "table: 'a.b' is no name; use a word, or null"),
    ],
)
def test_a_bias_that_cannot_be_is_refused(bias, message):
    with pytest.raises(ValueError, match=message):
        gpt(**SIZES, score_bias=bias)


def test_layers_that_share_a_table_must_agree_on_its_size():
    config = gpt(**SIZES, score_bias=RELATIVE)
    first, *others = config.layers
    larger = replace(first, mixer=replace(first.mixer, score_bias=RelativeConfig()))
    with pytest.raises(ValueError, match="layer 1 has 6 buckets and 4 heads in the table 'relat"):
        replace(config, layers=(larger, *others))


def test_long_biased_sequences_are_computed_by_tiles_alike(monkeypatch):
    model = GPT(gpt(**SIZES, score_bias=RELATIVE), dtype=torch.float64, seed=3)
    tokens = torch.arange(40).view(2, 20)

    def results():
        model.zero_grad()
        loss = model(tokens, labels=tokens)["lm"]
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    whole = results()
    monkeypatch.setattr("mt_model.attend.kernels.BIAS_MAX_LENGTH", 8)
    for found, expected in zip(results(), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
