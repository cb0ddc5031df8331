"""The largest score of each key head, on every layout, and the factors that scale it back."""

from __future__ import annotations

import pytest
import torch
from mt_context_parallel import shard
from mt_model import GPT, gpt
from mt_parallel_state import ParallelLayout, ParallelState

SIZES = {"vocab_size": 48, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
SIZES |= {"ffn_size": 24, "max_sequence_length": 32, "init_std": 0.3}
VARIANTS = {
    "plain": {},
    "window": {"window": 5},
    "scale": {"attention_scale": 0.9, "bias": True},
    "gate": {"output_gate": True, "bias": True},
    "both ways": {"causal": False, "window": 4},
    "cap": {"softcap": 1.5, "sinks": "learned"},
    "chunk": {"chunk": 3},
}
LENGTH = 16


def batch(*, documents: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 48, (2, LENGTH + 1), generator=generator)
    data = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    if documents:
        data["documents"] = torch.tensor([[0] * 5 + [1] * 11, [0] * 2 + [1] * 7 + [2] * 7])
    return data


def run(name: str, *, documents: bool, tp: int = 1, cp: int = 1, recompute: str = "none"):
    """Return the maxima of both layers, and the values kept outside training."""
    with ParallelState(ParallelLayout(tp=tp, cp=cp)) as state:
        config = gpt(**SIZES, **VARIANTS[name])
        model = GPT(config, state, dtype=torch.float64, seed=11, recompute=recompute)
        model.watch_logits()
        data = batch(documents=documents)
        for key in ("tokens", "labels"):
            data[key] = shard(data[key], state.group("cp"), dim=1)
        losses = model(None, data)
        sum(loss for key, loss in losses.items() if key != "tokens").backward()
        found = model.max_logits()
        model.eval()
        with torch.no_grad():
            model(None, data)
        return found, model.max_logits()


def expected(name: str, *, documents: bool) -> dict[int, torch.Tensor]:
    """The definition: all pairs, a mask, the largest."""
    given, data = VARIANTS[name], batch(documents=documents)
    model = GPT(gpt(**SIZES, **given), dtype=torch.float64, seed=11)
    x, shared = model.begin(None, data)
    found = {}
    for layer in model.stage_layers():
        mixer = layer.mixer
        table = shared.tables[mixer.rotary]
        query, key, _ = mixer._heads(mixer.project(layer.mixer_norm(x))[0], table, shared)
        scores = torch.einsum("bsgqd,btgd->bgqst", query.unflatten(2, (2, -1)), key)
        scores = scores * given.get("attention_scale", 4**-0.5)
        place = torch.arange(LENGTH)
        distance = place[:, None] - place
        seen = (distance >= 0) | (not given.get("causal", True))
        if "window" in given:
            seen = seen & (distance.abs() < given["window"])
        own = place.expand(2, -1)
        if documents:
            same = data["documents"][:, :, None] == data["documents"][:, None]
            own = place - same.int().argmax(-1)
            seen = seen & same
        if "chunk" in given:
            own = own // given["chunk"]
            seen = seen & (own[:, :, None] == own[:, None])
        seen = seen if seen.dim() == 2 else seen[:, None, None]
        found[mixer.index] = scores.masked_fill(~seen, float("-inf")).amax((0, 2, 3, 4)).detach()
        x, _ = layer(x, shared)
    return found


def assert_same(found, wanted) -> None:
    assert found.keys() == wanted.keys()
    for layer, logits in wanted.items():
        torch.testing.assert_close(found[layer], logits, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_largest_score_is_that_of_all_pairs_that_are_seen(name, documents) -> None:
    found, kept = run(name, documents=documents)
    assert_same(found, expected(name, documents=documents))
    assert all(torch.isneginf(logits).all() for logits in kept.values())


def test_running_a_layer_again_changes_nothing() -> None:
    found, _ = run("plain", documents=False, recompute="full")
    assert_same(found, expected("plain", documents=False))


@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_the_largest_of_all_ranks_is_that_of_one(ranks, tp, cp) -> None:
    def body():
        return run("window", documents=True, tp=tp, cp=cp)[0]

    results = ranks(tp * cp, body)
    largest = {
        layer: torch.stack([result[layer] for result in results]).amax(0) for layer in results[0]
    }
    assert_same(largest, expected("window", documents=True))
    heads_seen = sum(torch.isfinite(result[0]).sum() for result in results)
    assert heads_seen == max(2, tp) * cp


def scaled(name: str, tp: int) -> dict[int, torch.Tensor]:
    with ParallelState(ParallelLayout(tp=tp)) as state:
        model = GPT(gpt(**SIZES, **VARIANTS[name]), state, dtype=torch.float64, seed=11)
        query = {0: torch.tensor([0.5, 1.0]).double(), 1: torch.tensor([1.0, 0.25]).double()}
        key = {0: torch.tensor([0.8, 1.0]).double(), 1: torch.tensor([1.0, 2.0]).double()}
        params = dict(model.named_parameters())
        factors = model.logit_factors(query, key)
        with torch.no_grad():
            for parameter, factor in factors.items():
                params[parameter].mul_(factor)
        model.watch_logits()
        # Inputs of the second layer have changed, so each layer is asked with those it had.
        data = batch(documents=False)
        x, shared = GPT(gpt(**SIZES, **VARIANTS[name]), state, dtype=torch.float64, seed=11).begin(
            None, data
        )
        layer = model.layers["0"]
        layer.mixer(layer.mixer_norm(x), shared)
        return {0: model.max_logits()[0]}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", ["plain", "scale", "gate"])
def test_factors_scale_the_scores_of_their_heads(ranks, name, tp) -> None:
    results = ranks(tp, scaled, name, tp)
    largest = torch.stack([result[0] for result in results]).amax(0)
    wanted = expected(name, documents=False)[0] * torch.tensor([0.4, 1.0]).double()
    torch.testing.assert_close(largest, wanted, rtol=1e-10, atol=1e-12)


def test_norms_of_queries_and_keys_leave_nothing_to_clip() -> None:
    model = GPT(gpt(**SIZES, qk_norm="head"))
    model.watch_logits()
    assert model.max_logits() == {}
    ones = {0: torch.ones(2), 1: torch.ones(2)}
    assert model.logit_factors(ones, ones) == {}
