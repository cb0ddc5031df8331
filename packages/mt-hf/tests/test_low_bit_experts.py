"""Mixtures of experts in low precision: written by expert, read on any layout."""

from __future__ import annotations

import json
from importlib import import_module

import pytest
import torch
import transformers
from mt_hf import ExchangeError, from_pretrained, save_pretrained
from mt_parallel_state import ParallelLayout, ParallelState
from mt_quant import QuantizationConfig, QuantizationError, QuantizedLinear, Rule, quantize
from safetensors.torch import load_file, save_file

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SPARSE |= {"head_dim": 32, "decoder_sparse_step": 2, "mlp_only_layers": []}
FAMILIES = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", SPARSE),
    "gpt_oss": (
        "GptOssConfig",
        {"num_local_experts": 4, "head_dim": 16, "layer_types": ["full_attention"] * 2},
    ),
}
FORMATS = {
    "int8": ("int8", None),
    "int8-dynamic": ("int8", "int8"),
    "int8-static": ("int8", "int8-static"),
    "int4-g32": ("int4-g32", None),
    "fp8": ("fp8", "fp8"),
    "nvfp4": ("nvfp4", None),
}
TOKENS = torch.arange(64).view(4, 16) * 5 % 96
STAYS = tuple(Rule(name=name, optional=True) for name in ("*router*", "*head*"))


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Folders of random models, by family."""
    made = {}

    def get(family):
        if family not in made:
            name, fields = FAMILIES[family]
            torch.manual_seed(0)
            config = getattr(transformers, name)(**SIZES, **fields)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            made[family] = tmp_path_factory.mktemp(family) / "model"
            model.save_pretrained(made[family])
        return made[family]

    return get


def quantized(folder, formats, *, method="rtn"):
    weight, input = FORMATS[formats]
    rules = (*STAYS, Rule(weight=weight, input=input, method=method))
    model = from_pretrained(folder, dtype=torch.float32)
    model.unfuse_experts()
    sees = method != "rtn" or (input is not None and "static" in input)
    return quantize(model, QuantizationConfig(rules=rules), [TOKENS] if sees else None)


def experts_of(model):
    found = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    return {name: module for name, module in found.items() if ".experts." in name}


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_folder_is_read_with_the_codes_of_each_expert(family, formats, original, tmp_path):
    model = quantized(original(family), formats)
    save_pretrained(model, tmp_path / "low", like=original(family))
    again = from_pretrained(tmp_path / "low", dtype=torch.float32)
    ours, theirs = experts_of(model), experts_of(again)
    assert ours.keys() == theirs.keys()
    assert len(ours) == (16 if family == "mixtral" else 8)
    for name, layer in ours.items():
        for leaf, tensor in layer.tensors().items():
            other = theirs[name].tensors()[leaf]
            assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)), (name, leaf)
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS), model(TOKENS), rtol=1e-5, atol=1e-5)


def test_a_method_that_sees_data_sees_the_rows_of_each_expert(original):
    plain, seen = (quantized(original("mixtral"), "int4-g32", method=m) for m in ("rtn", "gptq"))
    exact = from_pretrained(original("mixtral"), dtype=torch.float32)(TOKENS)
    with torch.no_grad():
        errors = [float((model(TOKENS) - exact).square().mean()) for model in (plain, seen)]
    assert errors[1] < errors[0]


@pytest.mark.parametrize("formats", ["int8", "int4-g32"])
def test_compressed_tensors_decompresses_an_expert_to_our_values(formats, original, tmp_path):
    """In place of logits: transformers makes no linear layers of a mixture's experts."""
    from compressed_tensors.quantization import QuantizationScheme

    model = quantized(original("mixtral"), formats)
    save_pretrained(model, tmp_path / "low", like=original("mixtral"))
    config = json.loads((tmp_path / "low" / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    module = import_module("compressed_tensors.compressors.pack_quantized")
    tensors = load_file(tmp_path / "low" / "model.safetensors")
    for name, part in (("w1", 0), ("w3", 1)):
        prefix = f"model.layers.1.block_sparse_moe.experts.3.{name}."
        own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        scheme = QuantizationScheme(**group)
        found = module.PackedQuantizationCompressor.decompress(own, scheme)["weight"]
        layer = model.get_submodule("layers.1.feed_forward.experts.up.3")
        torch.testing.assert_close(found, layer.weight[part], rtol=1e-6, atol=0)


LAYOUTS = {
    "ep2": ParallelLayout(dp=2, ep=2),
    "tp2": ParallelLayout(tp=2),
    "tp2-ep2": ParallelLayout(tp=2, ep=2),
    "tp2-etp2": ParallelLayout(tp=2, etp=2),
}


def on_ranks(folder, expected, layout):
    with ParallelState(layout, device="cpu") as state, torch.no_grad():
        model = from_pretrained(folder, dtype=torch.float32, state=state)
        assert len(experts_of(model)) == 16 // state.size("ep")
        torch.testing.assert_close(model(TOKENS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("formats", ["int8-dynamic", "int4-g32"])
def test_ranks_read_their_experts_or_their_parts(formats, layout, original, ranks, tmp_path):
    model = quantized(original("mixtral"), formats)
    save_pretrained(model, tmp_path / "low", like=original("mixtral"))
    with torch.no_grad():
        expected = model(TOKENS)
    ranks(2, on_ranks, tmp_path / "low", expected, LAYOUTS[layout])


def test_a_missing_scale_of_an_expert_is_named(original, tmp_path):
    model = quantized(original("mixtral"), "int8")
    save_pretrained(model, tmp_path / "low", like=original("mixtral"))
    path = tmp_path / "low" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.block_sparse_moe.experts.2.w2.weight_scale"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ExchangeError, match=r"experts\.2\.w2"):
        from_pretrained(tmp_path / "low")


def test_tensors_of_several_experts_are_not_written_one_by_one(original, tmp_path):
    model = quantized(original("gpt_oss"), "int8")
    with pytest.raises(ExchangeError, match="holds several experts"):
        save_pretrained(model, tmp_path / "low", like=original("gpt_oss"))
    assert not (tmp_path / "low").exists()


def test_rules_name_single_experts_and_explain_says_so(original):
    model = from_pretrained(original("mixtral"), dtype=torch.float32)
    with pytest.raises(QuantizationError, match="experts"):
        QuantizationConfig(rules=(Rule(name="*.experts.up.3", weight="int8"),)).decide(model)
    model.unfuse_experts()
    rules = (Rule(name="*.experts.up.3", weight="int8"), Rule(name="*.mixer.*", weight="int4-g32"))
    lines = str(QuantizationConfig(rules=rules).explain(model)).splitlines()
    assert sum("experts.up.3" in line and "int8" in line for line in lines) == 2
