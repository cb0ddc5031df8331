"""Requests of a pass with adapters of their own, against models that the adapters are merged in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mt_model import GPT, AdapterBank, LayerConfig, MLPConfig, MoEConfig, gpt
from mt_quant import LinearShape, QuantizationConfig, quantize
from test_pages import DELTA, GROUPS, MAMBA, MLA, SIZES, AttentionConfig, Requests, pages_of, texts

EXPERTS = MoEConfig(num_experts=4, top_k=2, ffn_size=16, shared_size=16)
KINDS = [
    (AttentionConfig(**GROUPS), MLPConfig(ffn_size=48)),
    (MLA, MLPConfig(ffn_size=48, gated=False, activation="gelu", bias=True)),
    (replace(MLA, q_lora_rank=12), EXPERTS),
    (MAMBA, None),
    (DELTA, None),
]
LAYERS = [LayerConfig(mixer=mixer, feed_forward=feed) for mixer, feed in KINDS]
REFUSED = ("experts", "key_value", "router")
PASSES = ({0: 7, 1: 3, 3: 2}, {0: 1, 2: 9, 1: 1}, {2: 1, 1: 4, 0: 1, 3: 1})
OWN = (1, 2, 0, 1)  # the adapter of each request


def build():
    return GPT(gpt(**SIZES, layers=LAYERS), dtype=torch.float64, seed=3).eval()


def matrices(model, rank, seed):
    """Random A and B of every dense linear layer."""
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for name, module in model.named_modules():
        shape = LinearShape.of(module) if name.startswith("layers.") else None
        if shape is None or any(part in name for part in REFUSED):
            continue
        a = torch.randn(rank, shape.columns, generator=draw, dtype=torch.float64)
        b = torch.randn(shape.rows, rank, generator=draw, dtype=torch.float64)
        found[name] = a / 8, b / 8
    return found


def merged(given):
    model = build()
    with torch.no_grad():
        for name, (a, b) in given.items():
            weight = model.get_submodule(name).weight
            weight += (b @ a).view_as(weight)
    return model


class WithAdapters(Requests):
    def slots(self, counts):
        tokens, slots = super().slots(counts)
        return tokens, replace(slots, adapters=torch.tensor([OWN[text] for text in counts]))


def test_each_request_has_the_scores_of_its_adapters_model():
    model = build()
    given = {number: matrices(model, 3 * number, number) for number in (1, 2)}
    assert len(given[1]) == 22
    bank = AdapterBank(model)
    for number, own in given.items():
        bank.add(number, own)
    requests = WithAdapters(texts())
    found = requests.scores(model, pages_of(model), PASSES)
    models = {0: build()} | {number: merged(own) for number, own in given.items()}
    for text, own in enumerate(found):
        alone = models[OWN[text]].logits(requests.texts[None, text, : len(own)])[0]
        torch.testing.assert_close(own, alone, rtol=1e-10, atol=1e-10)
    plain = model.logits(texts())
    assert torch.equal(plain, models[0].logits(texts()))
    bank.remove(1)
    bank.remove(2)
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(ValueError, match="no adapter has it"):
        requests.scores(model, pages_of(model), ({0: 1},))


def test_adapters_go_on_layers_with_codes():
    def logits(model):
        requests = WithAdapters(texts())
        return requests.scores(model, pages_of(model), ({0: 9, 1: 6, 2: 5},))

    model = build()
    given = matrices(model, 4, 1)
    config = QuantizationConfig.from_dict({"rules": [{"name": "layers.0.*", "weight": "int8"}]})
    quantize(model, config)
    codes = {n: m for n, m in model.named_modules() if type(m).__name__ == "QuantizedLinear"}
    assert len(codes) == 4
    for name, module in codes.items():
        given[name] = given[name][0], given[name][1] * 0 + 0.1
        assert module.weight.shape
    bank = AdapterBank(model)
    bank.add(1, given)
    bank.add(2, {})
    found = logits(model)
    plain = build()
    with torch.no_grad():
        for name, (a, b) in given.items():
            weight = plain.get_submodule(name).weight
            base = codes[name].weight if name in codes else weight
            weight.copy_(base + (b @ a).view_as(weight))
    torch.testing.assert_close(found[0], plain.logits(texts()[:1, :9])[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "word"), [
    ("layers.0.mixer.qqq", "no linear layer"),
    ("layers.9.mixer.qkv", "no linear layer"),
    ("layers.1.mixer.key_value", "multiplies"),
    ("layers.2.feed_forward.experts.up", "experts"),
    ("embedding", "layers.N"),
    ("layers.0.mixer.qkv", "needs"),
])  # fmt: skip
def test_what_takes_no_adapter_is_refused_by_name(name, word):
    bank = AdapterBank(build())
    with pytest.raises(ValueError, match=word) as caught:
        bank.add(1, {name: (torch.ones(2, 31), torch.ones(64, 2))})
    assert name in str(caught.value)
