"""Keys and values in passes that learn are those that a cache in low precision gives back."""

from functools import partial
from itertools import pairwise, product

import pytest
import torch
from mt_context_parallel import shard
from mt_model import GPT, calibrate_kv_cache, gpt
from mt_model.block.kv_rounding import rounded
from mt_parallel_state import ParallelLayout, ParallelState
from mt_quant import KVFormat, QuantizationError
from mt_testing import sample
from test_kv_cache import MODELS, SIZES, build, tokens_of

FORMATS = {name: KVFormat.named(name) for name in ("fp8", "int8")}


def with_rounding(model, name):
    keeping = calibrate_kv_cache(model, [], FORMATS[name])  # nothing is calibrated
    model.round_kv({index: scheme.format for index, scheme in keeping.items()})
    return model


@pytest.mark.parametrize(("model", "name"), sample(product(MODELS, FORMATS), every=3))
def test_a_pass_without_a_cache_is_one_with_a_cache_in_the_format(model, name):
    built = build(model, dtype=torch.float64)
    tokens = tokens_of(2, 16)
    plain = built.logits(tokens)
    cache = built.new_cache(batch_size=2, max_length=16, kv_cache_dtype=name)
    pieces = [built.logits(tokens[:, a:b], cache=cache) for a, b in pairwise((0, 5, 6, 16))]
    found = with_rounding(built, name).logits(tokens)
    torch.testing.assert_close(found, torch.cat(pieces, 1), rtol=1e-9, atol=1e-9)
    assert (found - plain).norm() > 1e-4 * plain.norm()
    built.round_kv({})
    assert torch.equal(built.logits(tokens), plain)


def test_a_pass_with_a_cache_rounds_as_the_cache_says():
    tokens, found = tokens_of(2, 8), []
    for built in (build("gqa"), with_rounding(build("gqa"), "int8")):
        cache = built.new_cache(batch_size=2, max_length=8)
        found.append(built.logits(tokens, cache=cache))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", FORMATS)
def test_gradients_pass_rounding_as_they_are(name):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 4, 8, requires_grad=True), torch.randn(2, 3, 4, 8)
    y = rounded(x, FORMATS[name])
    assert not torch.equal(y, x)
    (y * weight).sum().backward()
    assert torch.equal(x.grad, weight)
    assert rounded(x, None) is x


def learned(model, name, tp=1, cp=1, sequence_parallel=False):
    """Loss of all tokens."""
    state = ParallelState(ParallelLayout(tp=tp, cp=cp))
    how = {"sequence_parallel": sequence_parallel, "dtype": torch.float64}
    config = gpt(**SIZES, **MODELS[model])
    built = with_rounding(GPT(config, state, seed=3, **how), name).train()
    tokens = tokens_of(2, 16)
    batch = {"tokens": tokens, "labels": tokens.roll(-1, 1)}
    group = state.group("cp")
    total = built(None, {key: shard(x, group) for key, x in batch.items()})["lm"].detach()
    if group is not None:
        torch.distributed.all_reduce(total, group=group)
    return float(total)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ({"tp": 2, "sequence_parallel": True}, "gqa"),
        pytest.param({"tp": 2}, "mla", marks=pytest.mark.campaign),
        ({"cp": 2}, "gqa"),
        pytest.param({"tp": 2, "sequence_parallel": True}, "mla", marks=pytest.mark.campaign),
    ],
)
def test_every_layout_has_the_loss_of_one_process(ranks, layout, model):
    expected = learned(model, "fp8")
    for found in ranks(2, partial(learned, model, "fp8", **layout)):
        assert found == pytest.approx(expected, rel=1e-10)


def test_what_can_not_be_rounded_in_training_is_refused():
    with pytest.raises(QuantizationError, match="use fp8, which makes a scale for each head"):
        build("gqa").round_kv({0: KVFormat.named("fp8-head")})
    with pytest.raises(QuantizationError, match="layer 0 of this stage has no keys and values"):
        build("hybrid").round_kv({0: KVFormat.named("fp8")})
    with pytest.raises(QuantizationError, match="layer 9 of this stage has no keys and values"):
        build("gqa").round_kv({9: KVFormat.named("fp8")})
