"""Windows, sinks, caps, scales and packed documents against a plain mask, on every layout."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from mt_context_parallel import shard
from mt_model import GPT, AlibiConfig, gpt
from mt_parallel_state import ParallelLayout, ParallelState
from mt_testing import sample

SIZES = {"vocab_size": 48, "hidden_size": 16, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2}
SIZES |= {"ffn_size": 24, "max_sequence_length": 32, "init_std": 0.3}
VARIANTS = {
    "window": {"window": 5},
    "documents": {},
    "window documents": {"window": 3, "qk_norm": "head"},
    "sinks": {"sinks": "learned", "window": 4},
    "cap": {"softcap": 1.5, "attention_scale": 0.7},
    "scale": {"attention_scale": 0.9, "window": 6},
    "alibi": {"score_bias": {"type": "alibi"}, "positions": "none", "window": 7},
    "relative": {"score_bias": {"type": "relative", "buckets": 6, "max_distance": 9}},
    "biased": {
        "score_bias": {"type": "relative", "table": None},
        "softcap": 2.0,
        "sinks": "learned",
    },
    "off by one": {"sinks": "zero", "qk_norm": "l2"},
    "whole norm, gate": {"qk_norm": "whole", "output_gate": True, "qkv_bias": True},
    "chunk": {"chunk": 5, "sinks": "learned"},
    "chunk, both ways": {"chunk": 3, "causal": False, "output_gate": True},
    "temperature": {"temperature": {"strength": 0.7, "interval": 3}, "qk_norm": "l2"},
    "both ways": {"causal": False},
    "both ways, relative": {
        "score_bias": {"type": "relative", "buckets": 12, "max_distance": 9, "bidirectional": True},
        "causal": False,
    },
    "both ways, window": {"causal": False, "window": 3, "sinks": "zero", "output_gate": True},
    "all": {"window": 5, "sinks": "learned", "softcap": 2.0, "attention_dropout": 0.1},
}
LENGTH = 16


def batch(documents: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 48, (2, LENGTH + 1), generator=generator)
    data = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "sample_ids": torch.tensor([3, 8])}
    if documents:
        data["documents"] = torch.tensor([[0] * 5 + [1] * 11, [0] * 2 + [1] * 7 + [2] * 7])
        data["positions"] = torch.cat([torch.arange(5), torch.arange(11)])[None].repeat(2, 1)
        data["positions"][1] = torch.cat([torch.arange(n) for n in (2, 7, 7)])
    return data


def model_of(name: str, state: ParallelState | None = None, **rest) -> GPT:
    model = GPT(gpt(**SIZES, **VARIANTS[name]), state, dtype=torch.float64, seed=11, **rest)
    with torch.no_grad():
        for layer in model.layers.values():
            if layer.mixer.sinks is not None:
                heads = torch.arange(len(layer.mixer.sinks)) + layer.mixer.first_head
                layer.mixer.sinks.copy_(heads * 0.3 - 0.5)
    return model


def plain_bias(layer, shared, length):
    """[groups, queries of a group, length, length], pair by pair."""
    bias = layer.score_bias
    if bias is None:
        return 0.0
    if isinstance(bias, AlibiConfig):
        rows = [[[-slope * abs(i - j) for j in range(length)] for i in range(length)]
                for slope in (2**-2, 2**-4, 2**-6, 2**-8)]  # fmt: skip
        return torch.tensor(rows, dtype=torch.float64).unflatten(0, (2, 2))
    own = layer.score_table is not None
    weight = layer.score_table.weight if own else shared.score_tables["relative"]

    def bucket(distance):
        count = bias.buckets // 2 if bias.bidirectional else bias.buckets
        first, half = (count if bias.bidirectional and distance < 0 else 0), count // 2
        distance = abs(distance) if bias.bidirectional else max(distance, 0)
        if distance < half:
            return first + distance
        grown = math.log(distance / half) / math.log(bias.max_distance / half) * (count - half)
        return first + min(half + int(grown), count - 1)

    places = range(length)
    rows = torch.stack([torch.stack([weight[bucket(i - j)] for j in places]) for i in places])
    return rows.permute(2, 0, 1).unflatten(0, (2, 2))


def plain_attention(layer, x, data, name, shared):
    """The definition: a mask of all pairs, a softmax with one more logit, and no kernel."""
    given = VARIANTS[name]
    qkv, gate = layer.project(x)
    even = replace(shared, temperatures={k: torch.ones(()) for k in shared.temperatures})
    query, key, value = layer._heads(qkv, shared.tables.get(layer.rotary), even)
    if "temperature" in given:
        steps = (data.get("positions", torch.arange(x.shape[1])) + 1) // 3
        query = query * (1 + 0.7 * (steps + 1).double().log())[..., None, None]
    scores = torch.einsum("bsgqd,btgd->bgqst", query.unflatten(2, (2, -1)), key)
    scores = scores * given.get("attention_scale", 4**-0.5)
    if "softcap" in given:
        scores = given["softcap"] * (scores / given["softcap"]).tanh()
    place = torch.arange(x.shape[1])
    distance = place[:, None] - place
    seen = (distance >= 0) | (not given.get("causal", True))
    if "window" in given:
        seen = seen & (distance.abs() < given["window"])
    if "chunk" in given:
        own = data.get("positions", place.expand(2, -1)) // given["chunk"]
        seen = seen & (own[:, :, None] == own[:, None])
        seen = seen if "documents" in data else seen[:, None, None]
    if "documents" in data:
        same = data["documents"][:, :, None] == data["documents"][:, None]
        seen = (seen & same)[:, None, None]
    scores = scores + plain_bias(layer, shared, x.shape[1])
    weights = scores.masked_fill(~seen, float("-inf")).exp()
    total = weights.sum(-1, keepdim=True)
    if given.get("sinks") == "learned":
        total = total + layer.sinks.exp().view(1, 2, 2, 1, 1)
    elif "sinks" in given:
        total = total + 1
    mixed = torch.einsum("bgqst,btgd->bsgqd", weights / total, value).flatten(2, 3)
    return layer.out(mixed if gate is None else mixed / (1 + (-gate.flatten(2, 3)).exp()))


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "all"])
def test_attention_is_that_of_a_plain_mask(name: str, documents: bool) -> None:
    model, data = model_of(name), batch(documents)
    x, shared = model.begin(None, data)
    layer = model.layers["0"].mixer
    ours, theirs = x.detach().requires_grad_(), x.detach().requires_grad_()
    found, expected = layer(ours, shared), plain_attention(layer, theirs, data, name, shared)
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)
    found.square().sum().backward()
    params = {**dict(layer.named_parameters()), **dict(model.score_tables.named_parameters())}
    grads = {n: p.grad.clone() for n, p in params.items()}
    model.zero_grad()
    expected.square().sum().backward()
    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-9, atol=1e-11)
    for key, param in params.items():
        assert torch.allclose(grads[key], param.grad, rtol=1e-9, atol=1e-11), key


def loss_of(name: str, tp: int, cp: int, cuts: tuple[int, ...]) -> torch.Tensor:
    """The loss over the ranks of a context group, through stages run in turn."""
    state = ParallelState(ParallelLayout(tp=tp, cp=cp))
    data, x = batch(documents=True), None
    for key in ("tokens", "labels", "positions"):
        data[key] = shard(data[key], state.group("cp"))
    for start, stop in pairwise(cuts):
        rest = {"layers": range(start, stop), "sequence_parallel": tp > 1}
        x = model_of(name, state, **rest)(x, data)
    total = x["lm"].detach()
    if cp > 1:
        torch.distributed.all_reduce(total, group=state.group("cp"))
    return total


@pytest.mark.parametrize(
    ("name", "tp", "cp"),
    sample(((n, *p) for n, p in product(VARIANTS, ((2, 1), (1, 2), (2, 2)))), every=4),
)
def test_packed_documents_are_the_same_on_every_layout(ranks, name, tp, cp) -> None:
    expected = loss_of(name, 1, 1, (0, 3))
    assert torch.allclose(loss_of(name, 1, 1, (0, 1, 3)), expected, rtol=1e-12, atol=0)
    for found in ranks(tp * cp, loss_of, name, tp, cp, (0, 2, 3)):
        assert torch.allclose(found, expected, rtol=1e-10, atol=0)


def test_documents_are_of_whole_sequences_and_said_so_if_not() -> None:
    model, data = model_of("window"), batch(documents=True)
    for documents, message in (
        (
            data["documents"][:, :8],
            r"documents must be \[B, 16\], of whole sequences, got \(2, 8\)",
        ),
        (data["documents"][:1], r"documents must be \(2, 16\) here, got \(1, 16\)"),
        (data["documents"][0], r"documents must be \(2,\) here, got \(16,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            model(None, {**data, "documents": documents})


def test_packed_documents_are_what_they_are_alone() -> None:
    model, data = model_of("window documents"), batch(documents=True)
    logits = model(None, {key: data[key] for key in ("tokens", "documents", "positions")})
    assert torch.allclose(logits[1, 2:9], model(data["tokens"][1:, 2:9])[0], rtol=1e-9, atol=1e-11)


CAUSAL = [name for name, given in VARIANTS.items() if given.get("causal", True)]


@pytest.mark.parametrize("name", CAUSAL)
def test_decoding_from_a_cache_equals_the_whole_prefix(name: str) -> None:
    model, tokens = model_of(name).eval(), batch(False)["tokens"]
    cache = model.new_cache(batch_size=2, max_length=20)
    pieces = [model.logits(tokens[:, a:b], cache=cache) for a, b in pairwise((0, 6, 7, 8, 16))]
    assert torch.allclose(torch.cat(pieces, 1), model.logits(tokens), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("cuts", [(0, 3), (0, 1, 3), (0, 1, 2, 3)])
def test_stages_generate_with_caches_of_their_own(cuts: tuple[int, ...]) -> None:
    whole, tokens = model_of("window").eval(), batch(False)["tokens"]
    stages = [model_of("window", layers=range(a, b)).eval() for a, b in pairwise(cuts)]
    caches = [stage.new_cache(batch_size=2, max_length=16) for stage in stages]
    with torch.no_grad():
        for a, b in pairwise((0, 5, 6, 16)):
            x = None
            for stage, cache in zip(stages, caches, strict=True):
                x = stage(x, {"tokens": tokens[:, a:b], "cache": cache})
            assert torch.allclose(x, whole.logits(tokens[:, :b])[:, -1:], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("cuts", [(0, 3), (0, 1, 3)])
def test_embeddings_may_replace_tokens(cuts: tuple[int, ...]) -> None:
    data, table = batch(False), model_of("window").embedding.weight.detach()
    given = {"embeddings": table[data["tokens"]], "labels": data["labels"]}
    expected = x = None
    for start, stop in pairwise(cuts):
        stage = model_of("window", layers=range(start, stop))
        expected, x = stage(expected, data), stage(x, given)
    assert torch.equal(x["lm"], expected["lm"])
