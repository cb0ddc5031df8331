"""Frozen weights as codes beside adapters, against models whose weights are rounded."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from mt_model import (
    GPT,
    LoraConfig,
    MoEConfig,
    block_linears,
    gpt,
    grouped_layers,
    matrix_shape,
    weight_codes,
)
from mt_quant import QuantizationError, quantize_weight
from mt_tensor_parallel import adapters
from test_pages import MAMBA, MLA

SIZES = {"vocab_size": 48, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
EXPERTS = MoEConfig(num_experts=4, top_k=2, ffn_size=32, shared_size=32)
MODELS = {
    "dense": gpt(**SIZES, ffn_size=64, bias=True, max_sequence_length=16),
    "experts": gpt(**SIZES, moe=EXPERTS, max_sequence_length=16, tied=False),
}
PLAIN = gpt(**SIZES, ffn_size=64, max_sequence_length=16)
MIXERS = (replace(PLAIN.layers[0], mixer=MLA), replace(PLAIN.layers[1], mixer=MAMBA))
MODELS["mixers"] = replace(PLAIN, layers=MIXERS)
LAYERS = ("*.mixer.*", "*.experts.*", "*.down")


def build(name: str, base_format: str | None, **options) -> GPT:
    lora = LoraConfig(rank=2, layers=LAYERS, base_format=base_format)
    model = GPT(MODELS[name], lora=lora, seed=3, dtype=torch.float64, **options)
    for index, (_, adapter) in enumerate(adapters(model)):
        torch.manual_seed(index)
        torch.nn.init.normal_(adapter.b)
    return model


def matrices(model: GPT) -> dict[str, torch.Tensor]:
    """Weights of linear layers as lists of matrices, by layer."""
    found = {}
    for name, layer in {**block_linears(model), **grouped_layers(model)}.items():
        columns = matrix_shape(layer).columns
        experts = len(layer.weight) if layer.lead_dims else 1
        found[name] = layer.weight.detach().reshape(experts, -1, columns)
    return found


def gradients(model: GPT) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    tokens = torch.arange(32).view(2, 16) * 7 % 48
    loss = model(tokens, labels=tokens.roll(-1, 1))["lm"]
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(("name", "format"), [
    ("dense", "int8"), ("dense", "fp8-tensor"), ("dense", "nvfp4"),
    ("experts", "int4-g16-asym"), ("experts", "mxfp4"), ("mixers", "int4-g8"),
])  # fmt: skip
def test_losses_and_gradients_are_those_of_rounded_weights(name, format) -> None:
    model, plain = build(name, format), build(name, None)
    codes = weight_codes(model)
    assert codes.keys() == matrices(plain).keys()
    for layer, experts in matrices(plain).items():
        rounded = [quantize_weight(each, format) for each in experts]
        values = torch.stack([each.dequantize(torch.float64) for each in rounded])
        plain.get_submodule(layer).weight.data.copy_(values.view(codes[layer].full_shape))
        own = codes[layer]
        assert torch.equal(own.dequantized(torch.float64).view_as(values), values)
        kept = [model.get_submodule(layer).weight, *own.parameters()]
        assert sum(each.nbytes for each in kept) == sum(each.nbytes for each in rounded)
        assert not any(each.requires_grad for each in kept)
    loss, found = gradients(model)
    expected, wanted = gradients(plain)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    assert found.keys() == wanted.keys()
    assert all(".lora." in each for each in wanted)
    for each, grad in wanted.items():
        torch.testing.assert_close(found[each], grad, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        for each, param in model.named_parameters():
            assert (
                param.is_floating_point() or each.rpartition(".")[0] in codes or ".codes." in each
            )
    moved = copy.deepcopy(model).to(torch.float32)
    for layer, own in weight_codes(moved).items():
        assert torch.equal(own.dequantized(), codes[layer].dequantized()), layer


def test_a_base_of_codes_takes_no_sums_and_no_misfits() -> None:
    model = build("dense", "int8")
    with pytest.raises(ValueError, match="codes, which hold no sums"):
        next(adapters(model))[1].merge()
    with pytest.raises(QuantizationError, match=r"layers.0.mixer.*groups of 24"):
        build("dense", "int4-g24")
    with pytest.raises(QuantizationError, match="nf4"):
        build("dense", "nf4")


def test_a_model_on_meta_gets_its_codes_later() -> None:
    model, drawn = build("experts", "int8"), build("experts", "int8", device="meta")
    plain = build("experts", None)
    drawn.to_empty(device="cpu")
    for name, codes in weight_codes(drawn).items():
        codes.store(plain.get_submodule(name).weight.detach())
    state = model.state_dict()
    for name, codes in weight_codes(drawn).items():
        assert torch.equal(codes.dequantized(), weight_codes(model)[name].dequantized())
        assert torch.equal(drawn.get_submodule(name).weight, state[f"{name}.weight"])
