"""Retro: attention to the neighbours of chunks, against plain loops, and who sees whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mt_context_parallel import shard
from mt_files import FieldError
from mt_fusions import GraphError
from mt_model import GPT, GraphedDecoding, ModelConfig, RetroConfig, expected_bytes, gpt
from mt_parallel_state import ParallelLayout, ParallelState, sharding_of

CHUNK, COUNT, ROWS, LENGTH, VOCAB = 4, 2, 2, 18, 40
RETRO = RetroConfig(chunk=CHUNK, neighbours=COUNT, encoder_layers=2, first=2, every=2)
CHUNKS, SIZE = LENGTH // CHUNK, 2 * CHUNK


def config_of(**given) -> ModelConfig:
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_layers": 4, "num_heads": 4}
    sizes |= {"num_kv_heads": 2, "max_sequence_length": 32, "init_std": 0.3}
    return gpt(**sizes, **{"retro": RETRO, **given})


def model_of(*, new: bool = False, **given) -> GPT:
    model = GPT(config_of(**given), dtype=torch.float64, seed=5).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("cross.out.weight") and not new:  # it starts at zero
                wave = torch.arange(param.numel(), dtype=torch.float64)
                param.copy_(torch.sin(wave).view_as(param) / 3)
    return model


def batch_of(seed: int = 0, length: int = LENGTH) -> dict[str, torch.Tensor]:
    generator, chunks = torch.Generator().manual_seed(seed), length // CHUNK

    def drawn(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    lengths = drawn(SIZE + 1, ROWS, chunks, COUNT)
    lengths[0, 1] = torch.tensor([0, 0])
    lengths[1, 0] = torch.tensor([SIZE, 0])
    tokens = drawn(VOCAB, ROWS, length)
    neighbours = drawn(VOCAB, ROWS, chunks, COUNT, SIZE)
    return {"tokens": tokens, "neighbours": neighbours, "neighbour_lengths": lengths}


def rms(x: torch.Tensor, norm: Any) -> torch.Tensor:
    return x / (x.pow(2).mean() + norm.eps).sqrt() * norm.weight


def turned(x: torch.Tensor, place: int) -> torch.Tensor:
    half = x.shape[0] // 2
    angle = place * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    first, second = x[:half], x[half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin))


def attended(queries, keys, values) -> torch.Tensor:
    """One token's heads [N, D], over lists of keys and values [G, D]."""
    heads = []
    for n, query in enumerate(queries):
        group = n * keys[0].shape[0] // len(queries)
        scores = torch.stack([query @ key[group] for key in keys]) / query.shape[0] ** 0.5
        weights = scores.softmax(0)
        heads.append(sum(w * value[group] for w, value in zip(weights, values, strict=True)))
    return torch.stack(heads)


def self_attention(layer, x, visible) -> list[torch.Tensor]:
    weight, made = layer.mixer.qkv.weight, []
    for place, token in enumerate(x):
        rows = torch.einsum("gqdh,h->gqd", weight, rms(token, layer.mixer_norm))
        queries = torch.stack([turned(q, place) for group in rows for q in group[:-2]])
        key = torch.stack([turned(group[-2], place) for group in rows])
        made.append((queries, key, rows[:, -1]))
    out = []
    for t, token in enumerate(x):
        seen = visible(t)
        heads = attended(made[t][0], [made[i][1] for i in seen], [made[i][2] for i in seen])
        out.append(token + torch.einsum("hnd,nd->h", layer.mixer.out.weight, heads))
    return out


def cross_attention(layer, token, memory) -> torch.Tensor:
    if not memory:
        return token
    made = [torch.einsum("gpdh,h->gpd", layer.cross.key_value.weight, each) for each in memory]
    queries = torch.einsum("ndh,h->nd", layer.cross.query.weight, rms(token, layer.cross_norm))
    heads = attended(queries, [each[:, 0] for each in made], [each[:, 1] for each in made])
    return token + torch.einsum("hnd,nd->h", layer.cross.out.weight, heads)


def fed(layer, token) -> torch.Tensor:
    return token + layer.feed_forward(rms(token, layer.feed_forward_norm)[None, None])[0, 0]


def encoded(model, tokens, chunk) -> list[torch.Tensor]:
    x = [model.embedding.weight[token] for token in tokens]
    encoder = model.neighbours.encoder
    for layer in encoder.layers:
        x = self_attention(layer, x, lambda _: range(len(tokens)))
        x = [fed(layer, cross_attention(layer, token, chunk)) for token in x]
    return [rms(token, encoder.norm) for token in x]


def plain_row(model, tokens, neighbours, lengths, documents) -> torch.Tensor:
    x, found = [model.embedding.weight[token] for token in tokens], []
    for index, layer in enumerate(model.stage_layers()):
        if index == RETRO.first - 1:
            for u in range(CHUNKS):
                last = u * CHUNK + CHUNK - 1
                places = range(u * CHUNK, last + 1)
                own = [x[i] for i in places if documents[i] == documents[last]]
                memory = []
                for each, length in zip(neighbours[u], lengths[u], strict=True):
                    memory += encoded(model, each[:length], own) if length else []
                found.append(memory)
        start = lambda t: [i for i in range(t + 1) if documents[i] == documents[t]]  # noqa: E731
        x = self_attention(layer, x, start)
        if layer.cross is not None:
            for t in range(CHUNK - 1, len(x)):
                u = (t - CHUNK + 1) // CHUNK
                if documents[u * CHUNK + CHUNK - 1] == documents[t]:
                    x[t] = cross_attention(layer, x[t], found[u])
        x = [fed(layer, token) for token in x]
    return torch.stack([model.embedding.weight @ rms(token, model.final_norm) for token in x])


@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_scores_equal_plain_loops(packed: bool) -> None:
    model, batch = model_of(), batch_of()
    documents = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    if packed:
        documents[0, 8:], documents[1, 4:12], documents[1, 12:] = 1, 1, 2
        batch["documents"] = documents
        batch["positions"] = torch.arange(LENGTH).expand(ROWS, -1)
    scores = model(None, batch)
    for row in range(ROWS):
        own = batch["tokens"][row], batch["neighbours"][row], batch["neighbour_lengths"][row]
        expected = plain_row(model, *own, documents[row])
        torch.testing.assert_close(scores[row], expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize(("layers", "places"), [(12, [6, 9, 12]), (24, [9, 12, 15, 18, 21, 24])])
def test_deeper_models_begin_to_attend_later(layers: int, places: list[int]) -> None:
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_layers": layers, "num_heads": 4}
    model = GPT(gpt(**sizes, retro=RetroConfig()), device="meta")
    found = [index for index, layer in model.layers.items() if layer.cross is not None]
    assert [1 + int(index) for index in found] == places


def test_a_new_model_is_the_gpt_that_it_starts_from() -> None:
    model, batch = model_of(new=True), batch_of()
    plain = GPT(config_of(retro=None), dtype=torch.float64, seed=5).eval()
    missing, more = model.load_state_dict(plain.state_dict(), strict=False)
    assert set(missing) == {name for name in model.state_dict() if RETRO.owns(name)}
    assert not more
    assert torch.equal(model(None, batch), plain(None, batch))  # which reads no neighbours


@torch.no_grad()
def test_no_score_sees_a_later_token() -> None:
    model, batch = model_of(), batch_of()
    before = model(None, batch)
    for place in range(LENGTH):
        tokens = batch["tokens"].clone()
        tokens[:, place] = (tokens[:, place] + 1) % VOCAB
        after = model(None, {**batch, "tokens": tokens})
        assert torch.equal(before[:, :place], after[:, :place])
        assert not torch.equal(before[:, place], after[:, place])


@torch.no_grad()
def test_neighbours_move_scores_from_the_last_token_of_their_chunk() -> None:
    model, batch = model_of(), batch_of()
    batch["neighbour_lengths"] = batch["neighbour_lengths"].clamp(min=1)
    before = model(None, batch)
    for u in range(CHUNKS):
        neighbours, last = batch["neighbours"].clone(), u * CHUNK + CHUNK - 1
        neighbours[:, u] = (neighbours[:, u] + 1) % VOCAB
        after = model(None, {**batch, "neighbours": neighbours})
        assert torch.equal(before[:, :last], after[:, :last])
        assert (before[:, last] != after[:, last]).any(-1).all()


@torch.no_grad()
def test_padding_and_missing_neighbours_are_not_seen() -> None:
    model, batch = model_of(), batch_of()
    padding = torch.arange(SIZE) >= batch["neighbour_lengths"][..., None]
    neighbours = batch["neighbours"].masked_fill(padding, 0)
    assert not torch.equal(neighbours, batch["neighbours"])
    assert torch.equal(model(None, {**batch, "neighbours": neighbours}), model(None, batch))
    none = {**batch, "neighbour_lengths": torch.zeros_like(batch["neighbour_lengths"])}
    alone = model(None, none)
    torch.testing.assert_close(alone, model(batch["tokens"]), rtol=1e-12, atol=1e-12)


def test_recomputed_layers_have_the_same_gradients() -> None:
    batch = {**batch_of(), "labels": batch_of(1)["tokens"]}
    found = []
    for recompute in ("none", "selective", "full"):
        model = GPT(config_of(), dtype=torch.float64, seed=5, recompute=recompute)
        model.load_state_dict(model_of().state_dict())
        model(None, batch)["lm"].backward()
        found.append({name: param.grad for name, param in model.named_parameters()})
    for name, grad in found[0].items():
        assert grad.abs().sum() > 0, name
        for other in found[1:]:
            torch.testing.assert_close(other[name], grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("layers", [range(4), range(1, 3), range(2, 4), range(3, 4)])
def test_what_the_encoder_keeps_is_expected(layers: range) -> None:
    stage = GPT(config_of(), layers=layers, dtype=torch.float64)
    batch = {**batch_of(), "labels": batch_of(1)["tokens"]}
    expected = expected_bytes(stage, batch)
    x = None
    if layers.start:
        x = torch.zeros(ROWS, LENGTH + batch["neighbours"][0].numel(), 16, dtype=torch.float64)
    with stage.watch_activations() as kept:
        for _ in range(2):  # the second pass counts for itself
            stage(x if x is None else x.requires_grad_(), batch)
    bytes_of = lambda found: {i: each.device for i, each in found.items()}  # noqa: E731
    # The encoder's tables are the same for any number of rows.
    assert bytes_of(kept) == pytest.approx(bytes_of(expected), rel=0.01)
    encoder = CHUNKS * COUNT * SIZE * 16 * 8 * ROWS  # bytes of the neighbours' hidden states
    for index, bytes in kept.items():
        has_encoder = index == RETRO.first - 1 and index in layers
        assert (bytes.device > 30 * encoder) == has_encoder


def test_parameters_are_counted() -> None:
    config = config_of()
    assert config.num_parameters == sum(p.numel() for p in GPT(config).parameters())
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert "neighbours [from layer 1, every 2]" in str(config)
    assert config.flops_per_token(16) > replace(config, retro=None).flops_per_token(16)


def test_what_does_not_fit_is_refused() -> None:
    model, batch = model_of(), batch_of()
    with pytest.raises(ValueError, match="neighbours must be"):
        model(None, {**batch, "neighbours": batch["neighbours"][:, 1:]})
    with pytest.raises(ValueError, match="lengths of 0"):
        model.train()(batch["tokens"], labels=batch["tokens"])
    model.eval()
    kept = {"cache": model.new_cache(batch_size=ROWS, max_length=LENGTH)}
    with pytest.raises(ValueError, match="cache and a mask"):
        model(None, {**batch, **kept, "mask": torch.ones(ROWS, LENGTH, dtype=torch.bool)})
    kept = {"cache": model.new_cache(batch_size=ROWS, max_length=LENGTH)}
    model(None, {**pass_of(batch, 0, CHUNK), **kept})
    with pytest.raises(ValueError, match="finishes 1 chunks"):
        model(None, {"tokens": batch["tokens"][:, :CHUNK], **kept})
    pages = model.new_pages(blocks=4, block_size=8, states=1)
    with pytest.raises(ValueError, match="pages keep no neighbours"):
        model.neighbours.lengths({**batch, "cache": pages}, training=False)
    with pytest.raises(GraphError, match="retro"):
        GraphedDecoding(model, kept["cache"])
    with pytest.raises(FieldError, match="first=9"):
        config_of(retro=replace(RETRO, first=9))


def pass_of(batch: dict[str, torch.Tensor], start: int, stop: int) -> dict[str, torch.Tensor]:
    """The tokens of one pass, with the neighbours of the chunks that it finishes."""
    chunks = slice(start // CHUNK, stop // CHUNK)
    return {
        "tokens": batch["tokens"][:, start:stop],
        "neighbours": batch["neighbours"][:, chunks],
        "neighbour_lengths": batch["neighbour_lengths"][:, chunks],
    }


@pytest.mark.parametrize("places", [range(1, LENGTH + 1), (3, 4, 12, 15, 18), (13, 14, 18), (18,)])
@pytest.mark.parametrize("cuts", [(0, 4), (0, 1, 4), (0, 3, 4)])
@torch.no_grad()
def test_decoding_equals_the_whole_pass(places: Sequence[int], cuts: tuple[int, ...]) -> None:
    """By one or several tokens a pass, with a cut of the model on either side of its encoder."""
    whole, batch = model_of(), batch_of()
    expected, stages, held = whole(None, batch), [], 0
    for start, stop in pairwise(cuts):
        stage = GPT(config_of(), layers=range(start, stop), dtype=torch.float64).eval()
        weights = whole.state_dict()
        stage.load_state_dict({name: weights[name] for name in stage.state_dict()})
        stages.append((stage, stage.new_cache(batch_size=ROWS, max_length=LENGTH)))
    for place in places:
        x: Any = None
        for stage, cache in stages:
            x = stage(x, {**pass_of(batch, held, place), "cache": cache})
        torch.testing.assert_close(x[:, -1], expected[:, place - 1], rtol=1e-10, atol=1e-10)
        held = place


@torch.no_grad()
def test_neighbours_can_begin_and_end_within_a_text() -> None:
    model, batch = model_of(), batch_of()
    batch["neighbour_lengths"][:, 0] = batch["neighbour_lengths"][:, 2] = 0
    expected = model(None, batch)
    cache = model.new_cache(batch_size=ROWS, max_length=LENGTH)
    for place in range(1, LENGTH + 1):
        given = pass_of(batch, place - 1, place)
        if place <= CHUNK or place % CHUNK:
            given = {"tokens": given["tokens"]}
        x = model(None, {**given, "cache": cache})
        torch.testing.assert_close(x[:, -1], expected[:, place - 1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("cuts", [(0, 1, 4), (0, 2, 4), (0, 1, 3, 4), (0, 3, 4)])
@torch.no_grad()
def test_stages_in_turn_equal_the_whole_model(cuts: tuple[int, ...]) -> None:
    whole, batch = model_of(), batch_of()
    x: Any = None
    for start, stop in pairwise(cuts):
        stage = GPT(config_of(), layers=range(start, stop), dtype=torch.float64).eval()
        weights = whole.state_dict()
        stage.load_state_dict({name: weights[name] for name in stage.state_dict()})
        x = stage(x, batch)
    assert torch.equal(x, whole(None, batch))


def run(
    layout: ParallelLayout,
    cuts: tuple[int, ...],
    documents: torch.Tensor | None,
    dropout: float = 0.0,
    sequence_parallel: bool = False,
) -> dict[str, torch.Tensor]:
    """Loss and whole gradients of some parameters, through stages run in turn."""
    state = ParallelState(layout)
    length = LENGTH if documents is None else documents.shape[1]
    batch = {**batch_of(0, length), "labels": batch_of(1, length)["tokens"]}
    group = state.group("cp")
    batch = {name: shard(x, group) for name, x in batch.items()}  # cut at chunks
    batch["sample_ids"] = torch.tensor([3, 8])
    if documents is not None:
        batch["documents"] = documents
    stages: list[GPT] = []
    sent: list[Any] = []
    received: list[Any] = [None]
    how = {"dtype": torch.float64, "seed": 5, "sequence_parallel": sequence_parallel}
    for start, stop in pairwise(cuts):
        stage = GPT(config_of(dropout=dropout), state, layers=range(start, stop), **how)
        open_gates(stage, state)
        stages.append(stage)
        sent.append(stage(received[-1], batch))
        if stop < cuts[-1]:
            received.append(sent[-1].detach().requires_grad_())
    sent[-1]["lm"].backward()
    for x, after in zip(sent[-2::-1], received[:0:-1], strict=True):
        x.backward(after.grad)
    found = {"lm": sent[-1]["lm"].detach()}
    for stage in stages:
        for name, param in stage.named_parameters():
            if param.grad is not None:
                found[name] = found.get(name, 0) + whole_gradient(param, state)
    if group is not None:
        for x in found.values():
            dist.all_reduce(x, group=group)
    return found


def whole_gradient(param: torch.nn.Parameter, state: ParallelState) -> torch.Tensor:
    grad, tp = param.grad, state.size("tp")
    assert grad is not None
    grad = grad.contiguous()
    dims = [dim for dim, axes in enumerate(sharding_of(param).spec.dims) if axes == ("tp",)]
    if tp > 1 and "tp" in sharding_of(param).partial_grad:
        dist.all_reduce(grad, group=state.group("tp"))
    if tp > 1 and dims:
        parts = [torch.empty_like(grad) for _ in range(tp)]
        dist.all_gather(parts, grad, group=state.group("tp"))
        grad = torch.cat(parts, dims[0])
    return grad


def open_gates(stage: GPT, state: ParallelState) -> None:
    """Fill output projections of cross-attention, which start at zero, as on one rank."""
    whole = model_of().state_dict()
    with torch.no_grad():
        for name, param in stage.named_parameters():
            if name.endswith("cross.out.weight"):
                size = param.shape[1]
                param.copy_(whole[name].narrow(1, state.index("tp") * size, size))


def test_parts_of_a_pass_and_experts_have_the_same_losses() -> None:
    moe = {"num_experts": 4, "top_k": 2}
    batch = {**batch_of(), "labels": batch_of(1)["tokens"]}
    model = model_of(moe=moe, positions="learned").train()
    x: Any = None
    for part in model.parts(batch):
        x = part(x)
    whole = model.to(torch.float64)(None, batch)
    assert x.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(x[name], value, rtol=1e-12, atol=1e-12)
    assert model.config.num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("cuts", [(0, 1, 4), (0, 2, 4), (0, 1, 3, 4)])
def test_stages_have_the_gradients_of_the_whole_model(cuts: tuple[int, ...]) -> None:
    one = ParallelLayout()
    expected, found = run(one, (0, 4), None, 0.1), run(one, cuts, None, 0.1)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("layout", "sequence_parallel", "cuts"),
    [
        (ParallelLayout(tp=2), False, (0, 2, 4)),
        (ParallelLayout(tp=2), True, (0, 1, 4)),
        (ParallelLayout(tp=2), True, (0, 2, 4)),
        (ParallelLayout(cp=2), False, (0, 1, 4)),
        (ParallelLayout(cp=2), False, (0, 2, 4)),
        pytest.param(ParallelLayout(tp=2, cp=2), True, (0, 2, 4), marks=pytest.mark.campaign),
        pytest.param(ParallelLayout(cp=4), False, (0, 4), marks=pytest.mark.campaign),
    ],
)
def test_ranks_have_the_gradients_of_one(ranks, layout, sequence_parallel, cuts, packed) -> None:
    documents = torch.zeros(ROWS, 32, dtype=torch.int64)
    if packed:
        documents[0, 8:], documents[0, 20:], documents[1, 12:] = 1, 2, 1
    expected = run(ParallelLayout(), (0, 4), documents)
    size = layout.tp * layout.cp
    for found in ranks(size, run, layout, cuts, documents, 0.0, sequence_parallel):
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            torch.testing.assert_close(found[name], x, rtol=1e-9, atol=1e-11)
