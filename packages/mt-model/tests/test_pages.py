"""Requests in one row over pages, against each request alone without a cache."""

from __future__ import annotations

import pytest
import torch
from mt_model import (
    GPT,
    AttentionConfig,
    DynamicScaling,
    EncoderDecoder,
    GatedDeltaNetConfig,
    ImageInputConfig,
    LayerConfig,
    LongropeScaling,
    Mamba2Config,
    MLAConfig,
    MLPConfig,
    RopeConfig,
    Slots,
    encoder_decoder_layers,
    gpt,
    vit,
)
from mt_model.attend import paged
from mt_parallel_state import ParallelLayout, ParallelState

BLOCK, STATES = 4, 6
SIZES = {"vocab_size": 48, "hidden_size": 32, "max_sequence_length": 32, "init_std": 0.3}
HEADS = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
GROUPS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope": RopeConfig()}
MLA = MLAConfig(
    num_heads=4, kv_lora_rank=16, nope_head_dim=8, rope_head_dim=4, v_head_dim=8, rope=RopeConfig()
)
MAMBA = Mamba2Config(num_heads=4, head_dim=8, state_size=8, chunk_size=4)
DELTA = GatedDeltaNetConfig(
    num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8, chunk_size=4
)


def stack(*mixers):
    return {"layers": [LayerConfig(mixer=m, feed_forward=MLPConfig(ffn_size=48)) for m in mixers]}


MODELS = {
    "gqa": {**HEADS, "qk_norm": "head"},
    "window": {**HEADS, "window": 5},
    "chunk": stack(AttentionConfig(**GROUPS, chunk=6)),
    "sinks, cap": {**HEADS, "sinks": "learned", "softcap": 1.5, "attention_scale": 0.7},
    "alibi": {**HEADS, "score_bias": {"type": "alibi"}, "positions": "none", "window": 7},
    "relative": {**HEADS, "score_bias": {"type": "relative", "buckets": 6, "max_distance": 9}},
    "learned": {**HEADS, "positions": "learned", "temperature": {"strength": 0.7, "interval": 3}},
    "mla": stack(MLA, MLA),
    "hybrid": stack(MAMBA, AttentionConfig(**GROUPS), DELTA),
}
PASSES = (  # new tokens of each request in each pass
    {0: 7, 1: 3},
    {0: 1, 2: 13, 1: 1},
    {2: 1, 1: 1, 0: 1},
    {3: 5, 0: 4, 2: 4, 1: 1},
    {1: 9, 3: 2},
)


class Requests:
    """Texts that take pages in an order that mixes them up."""

    def __init__(self, texts, step=7):
        self.texts, self.held = texts, [0] * len(texts)
        self.blocks = [[] for _ in texts]
        self.free = [(step * i) % 37 for i in range(37)]
        self.memories = []

    def slots(self, counts):
        """Take the next tokens of some texts: their row and its slots."""
        row, starts, positions, places = [], [0], [], []
        for text, count in counts.items():
            first = self.held[text]
            self.held[text] += count
            while len(self.blocks[text]) * BLOCK < self.held[text]:
                self.blocks[text].append(self.free.pop())
            own = range(first, self.held[text])
            row += self.texts[text][first : self.held[text]].tolist()
            positions += own
            places += [self.blocks[text][i // BLOCK] * BLOCK + i % BLOCK for i in own]
            starts.append(len(row))
        most = max(len(self.blocks[text]) for text in counts)
        tables = [self.blocks[text] + [0] * (most - len(self.blocks[text])) for text in counts]
        memories = [self.memories[text] for text in counts] if self.memories else []
        return torch.tensor([row]), Slots(
            starts=torch.tensor(starts),
            positions=torch.tensor(positions),
            places=torch.tensor(places),
            tables=torch.tensor(tables),
            lengths=torch.tensor([self.held[text] for text in counts]),
            states=torch.tensor([STATES - 1 - text for text in counts]),
            scored=torch.arange(len(row)),
            memory_tables=torch.tensor([blocks for blocks, _ in memories]) if memories else None,
            memory_lengths=torch.tensor([count for _, count in memories]) if memories else None,
        )

    def scores(self, model, pages, passes=PASSES):
        """Run passes, and return the scores after each token of each text."""
        found = [[] for _ in self.texts]
        for counts in passes:
            tokens, slots = self.slots(counts)
            with torch.no_grad():
                rows = model(None, {"tokens": tokens, "cache": pages, "slots": slots})[0]
            for text, part in zip(counts, rows.split(list(counts.values())), strict=True):
                found[text].append(part)
        return [torch.cat(parts) for parts in found if parts]


def texts():
    return torch.arange(4 * 24).view(4, 24).mul(7).remainder(47)


def pages_of(model, kind="auto"):
    return model.new_pages(blocks=37, block_size=BLOCK, states=STATES, kv_cache_dtype=kind)


@pytest.mark.parametrize("name", MODELS)
def test_each_request_of_a_row_has_the_scores_that_it_has_alone(name):
    model = GPT(gpt(**SIZES, **MODELS[name]), dtype=torch.float64, seed=3).eval()
    requests = Requests(texts())
    found = requests.scores(model, pages_of(model))
    for text, own, held in zip(requests.texts, found, requests.held, strict=True):
        alone = model.logits(text[None, :held])[0]
        torch.testing.assert_close(own, alone, rtol=1e-12, atol=1e-12)


def test_requests_have_their_scores_where_their_keys_are_copied_for_few_at_a_time(monkeypatch):
    monkeypatch.setattr(paged, "_MOST", 4 * BLOCK)
    model = GPT(gpt(**SIZES, **MODELS["gqa"]), dtype=torch.float64, seed=3).eval()
    requests = Requests(texts())
    equal = dict.fromkeys(range(4), 6)
    assert len(Requests(texts()).slots(equal)[1].groups(BLOCK, 4 * BLOCK)) == 2
    found = requests.scores(model, pages_of(model), (equal, dict.fromkeys(equal, 1)))
    for text, own in zip(requests.texts, found, strict=True):
        torch.testing.assert_close(own, model.logits(text[None, :7])[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["gqa", "window", "sinks, cap", "alibi", "mla"])
def test_a_request_whose_blocks_are_in_a_row_has_the_scores_that_it_has_alone(name):
    model = GPT(gpt(**SIZES, **MODELS[name]), dtype=torch.float64, seed=3).eval()
    requests = Requests(texts()[:1], step=36)
    [found] = requests.scores(model, pages_of(model), ({0: 6}, {0: 1}, {0: 5}, {0: 1}))
    assert requests.blocks[0] == [1, 2, 3, 4]
    alone = model.logits(requests.texts[:, :13])[0]
    torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "kind"), [("gqa", "int8"), ("window", "fp8"), ("mla", "int8")])
def test_pages_of_codes_give_the_scores_of_a_cache_of_codes(name, kind):
    model = GPT(gpt(**SIZES, **MODELS[name]), dtype=torch.float64, seed=3).eval()
    requests = Requests(texts())
    found = requests.scores(model, pages_of(model, kind))
    for text, own, held in zip(requests.texts, found, requests.held, strict=True):
        cache = model.new_cache(batch_size=1, max_length=held, kv_cache_dtype=kind)
        alone = model.logits(text[None, :held], cache=cache)[0]
        torch.testing.assert_close(own, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scaling", [
    DynamicScaling(factor=4.0, original_length=8),
    LongropeScaling(short_factor=(1.0,) * 4, long_factor=(1.0, 2.0, 3.0, 4.0), original_length=8),
])  # fmt: skip
def test_each_request_turns_by_its_own_length(scaling):
    rope = RopeConfig(scaling=scaling)
    model = GPT(gpt(**SIZES, **stack(AttentionConfig(**{**GROUPS, "rope": rope}))), seed=3).eval()
    requests, passes = Requests(texts()), ({0: 3, 1: 12}, {2: 8, 1: 1, 0: 2}, {1: 3, 3: 11})
    pages = pages_of(model)
    found = requests.scores(model, pages, passes)
    for text, own in enumerate(found):
        cache, start, alone = model.new_cache(batch_size=1, max_length=16), 0, []
        for count in (counts[text] for counts in passes if text in counts):
            part = requests.texts[None, text, start : start + count]
            alone.append(model.logits(part, cache=cache)[0])
            start += count
        torch.testing.assert_close(own, torch.cat(alone), rtol=1e-4, atol=1e-5)
    if isinstance(scaling, LongropeScaling):
        tokens, slots = requests.slots({0: 1, 2: 1})
        with pytest.raises(ValueError, match="longrope"):
            model(None, {"tokens": tokens, "cache": pages, "slots": slots})


def test_a_pass_of_one_token_of_each_request_reads_no_number_on_an_accelerator():
    model = GPT(gpt(**SIZES, **MODELS["hybrid"]), device="meta")
    pages = pages_of(GPT(gpt(**SIZES, **MODELS["hybrid"])))
    for index, tensors in pages.layers.items():
        pages.layers[index] = {name: x.to("meta") for name, x in tensors.items()}
    tokens, slots = Requests(texts()).slots({0: 1, 1: 1, 2: 1})
    fields = {name: x.to("meta") for name, x in vars(slots).items() if x is not None}
    batch = {"tokens": tokens.to("meta"), "cache": pages, "slots": Slots(**fields)}
    assert model(None, batch).shape == (1, 3, 48)


def test_a_copy_of_its_rows_goes_on_as_the_request_does():
    model = GPT(gpt(**SIZES, **MODELS["hybrid"]), seed=3).eval()
    requests, pages = Requests(texts()[:1].expand(2, -1)), pages_of(model, "int8")
    requests.scores(model, pages, ({0: 7}, {0: 1}))
    requests.held[1], requests.blocks[1] = 8, [30, 31]
    requests.free = [block for block in requests.free if block not in (30, 31)]
    for x in pages.tensors(states=False):
        x[[30, 31]] = x[requests.blocks[0]]
    for x in pages.tensors(states=True):
        x[STATES - 2] = x[STATES - 1]
    first, second = requests.scores(model, pages, ({0: 3}, {1: 3}))  # rows of one pass may differ
    assert torch.equal(first, second)


@pytest.mark.parametrize("kind", ["full", "int8"])
def test_each_request_attends_to_its_own_memory(kind):
    mlp, layer = MLPConfig(ffn_size=48), AttentionConfig(**GROUPS)
    layers = encoder_decoder_layers(layer, mlp, encoder=1, decoder=2)
    fields = {**SIZES, "layers": layers, "encoder_layers": 1, "decoder_start": 0}
    model = EncoderDecoder(gpt(**fields), dtype=torch.float64, seed=3).eval()
    requests, pages = Requests(texts()), pages_of(model, kind)
    given = [texts()[text, : 5 + 3 * text] + 1 for text in range(4)]
    for text in given:
        blocks = [requests.free.pop() for _ in range(4)]
        places = [blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(len(text))]
        model.encode(text[None], pages, torch.tensor(places))
        requests.memories.append((blocks, len(text)))
    found = requests.scores(model, pages, ({0: 1, 1: 1}, {1: 3, 0: 1, 2: 2}, {3: 1, 1: 1}))
    for text, own, asked in zip(requests.texts, found, given, strict=True):
        cache = model.new_cache(batch_size=1, max_length=8, kv_cache_dtype=kind)
        alone = model.logits(text[None, : len(own)], encoder_tokens=asked[None], cache=cache)[0]
        torch.testing.assert_close(own, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cut", [1, 2, 3, 5])
def test_stages_fill_the_memories_of_the_whole_model(cut):
    mlp, layer = MLPConfig(ffn_size=48), AttentionConfig(**GROUPS)
    layers = encoder_decoder_layers(layer, mlp, encoder=2, decoder=2)
    config = gpt(**SIZES, layers=layers, encoder_layers=2)
    text, places = texts()[:1, :9], torch.arange(9) + 2 * BLOCK
    whole = EncoderDecoder(config, dtype=torch.float64, seed=3).eval()
    expected, x = pages_of(whole), None
    whole.encode(text, expected, places)
    for own in (range(cut), range(cut, 6)):
        stage = EncoderDecoder(config, layers=own, dtype=torch.float64, seed=3).eval()
        found = pages_of(stage)
        x = stage.encode(text, found, places, x)
        for index, tensors in found.layers.items():
            torch.testing.assert_close(tensors, expected.layers[index], rtol=1e-12, atol=1e-12)
    assert any(x.any() for x in expected.layers[3].values())


def on_rank(tp):
    """Return the scores that a rank of a tensor-parallel group has of a model of several kinds."""
    state = ParallelState(ParallelLayout(tp=tp))
    model = GPT(gpt(**SIZES, **MODELS["hybrid"]), state, dtype=torch.float64, seed=3).eval()
    return Requests(texts()).scores(model, pages_of(model))


def test_ranks_that_share_the_heads_have_the_scores_of_one_process(ranks):
    expected = on_rank(1)
    for found in ranks(2, on_rank, 2):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_row_has_the_images_of_its_requests():
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "ffn_size": 16}
    tower = vit(**sizes, image_size=8, patch_size=4, pooling=None)
    images = ImageInputConfig(tower=tower, token_id=47)
    model = GPT(gpt(**SIZES, **MODELS["gqa"], images=images), dtype=torch.float64, seed=3).eval()
    given = texts()
    given[0, 2 : 2 + images.num_tokens] = given[2, 1 : 1 + images.num_tokens] = 47
    pixels = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    requests, counts = Requests(given), {2: 9, 1: 3, 0: 8}
    tokens, slots = requests.slots(counts)
    batch = {"tokens": tokens, "cache": pages_of(model), "slots": slots, "pixel_values": pixels}
    with torch.no_grad():
        row = model(None, batch)[0].split(list(counts.values()))
    for (text, count), own in zip(counts.items(), row, strict=True):
        seen = {2: pixels[:1], 0: pixels[1:]}.get(text)
        alone = model.logits(given[None, text, :count], pixel_values=seen)[0]
        torch.testing.assert_close(own, alone, rtol=1e-12, atol=1e-12)
    batch["tokens"][0, 1] = 0  # a part of the first image is missing
    with pytest.raises(ValueError, match="image"):
        model(None, batch)
