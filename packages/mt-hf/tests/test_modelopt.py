"""Models in low precision as folders in the layout of ModelOpt."""

from __future__ import annotations

import json

import pytest
import torch
from mt_hf import ExchangeError, from_pretrained, save_pretrained
from mt_parallel_state import ParallelLayout, ParallelState
from mt_quant import KVFormat, KVScales, KVScheme, QuantizationConfig, QuantizedLinear, Rule
from mt_quant import quantize as quantize_layers
from safetensors.torch import load_file, save_file

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 32, **MIXTURE}),
}
FORMATS = {
    "FP8": ("fp8-tensor", "fp8-static"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8", "fp8"),
    "MXFP8": ("mxfp8", "mxfp8"),
    "W4A16_NVFP4": ("nvfp4", None),
}
TOKENS = torch.arange(24).view(2, 12) * 5 % 96
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Folders of random models, by family."""
    import transformers

    made = {}

    def get(family: str):
        if family not in made:
            name, fields = FAMILIES[family]
            torch.manual_seed(0)
            config = getattr(transformers, name)(**SIZES, **fields, initializer_range=0.2)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            made[family] = tmp_path_factory.mktemp(family) / "model"
            model.save_pretrained(made[family])
        return made[family]

    return get


def quantized(folder, *rules: Rule):
    model = from_pretrained(folder, dtype=torch.float32)
    model.unfuse_experts()
    kept = Rule(name="re:(.*\\.)?(head|router).*", optional=True)
    # Of one batch for each expert, so that all have seen an input.
    batches = [TOKENS, TOKENS.flip(1), (TOKENS * 7 + 3) % 96]
    return quantize_layers(model, QuantizationConfig(rules=(kept, *rules)), batches)


def decoded(tensors, algorithm: str) -> torch.Tensor:
    """The values of a layer, of what the layout says of its tensors."""
    weight, scale = tensors["weight"], tensors["weight_scale"]
    if algorithm == "W4A16_NVFP4":
        codes = torch.stack((weight & 15, weight >> 4), -1).flatten(1).long()
        values = E2M1[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
        steps = scale.float() * tensors["weight_scale_2"]
        return (values.unflatten(1, (-1, 16)) * steps.unsqueeze(-1)).flatten(1)
    values = weight.float()
    if algorithm == "MXFP8":
        steps = torch.exp2(scale.double() - 127).float()
        return (values.unflatten(1, (-1, 32)) * steps.unsqueeze(-1)).flatten(1)
    return values * (scale if algorithm == "FP8" else scale.unsqueeze(1))


@pytest.mark.parametrize("algorithm", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_has_the_codes_of_the_model_and_is_read_with_them(
    algorithm, family, original, tmp_path
) -> None:
    weight, input = FORMATS[algorithm]
    model = quantized(original(family), Rule(weight=weight, input=input))
    save_pretrained(model, tmp_path / "low", like=original(family), layout="modelopt")
    save_pretrained(model, tmp_path / "other", like=original(family))
    config = json.loads((tmp_path / "low" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["quant_algo"]) == ("modelopt", algorithm)
    told = json.loads((tmp_path / "low" / "hf_quant_config.json").read_text())
    assert told["quantization"]["quant_algo"] == algorithm
    assert told["quantization"]["exclude_modules"] == config["ignore"]
    tensors = load_file(tmp_path / "low" / "model.safetensors")
    layers = config["config_groups"]["group_0"]["targets"]
    assert len(layers) == (2 * (4 + 3 * 4) if family == "qwen3_moe" else 14)
    matrices = {n.removesuffix(".weight") for n, t in tensors.items() if n.endswith(".weight")}
    matrices = {n for n in matrices if tensors[f"{n}.weight"].dim() == 2}
    assert set(config["ignore"]) == matrices - set(layers)
    plain = from_pretrained(tmp_path / "other", dtype=torch.float32, dequantize=True)
    save_pretrained(plain, tmp_path / "plain")
    values = load_file(tmp_path / "plain" / "model.safetensors")
    for name in layers:
        own = {n.rpartition(".")[2]: t for n, t in tensors.items() if n.startswith(f"{name}.")}
        assert torch.equal(decoded(own, algorithm), values[f"{name}.weight"])
        assert ("input_scale" in own) == (algorithm == "FP8")
    again, other = (from_pretrained(tmp_path / n, dtype=torch.float32) for n in ("low", "other"))
    low = [name for name, m in again.named_modules() if isinstance(m, QuantizedLinear)]
    assert low == [name for name, m in other.named_modules() if isinstance(m, QuantizedLinear)]
    for name in low:
        own, same = again.get_submodule(name), other.get_submodule(name)
        assert torch.equal(own.quantized_weight.data, same.quantized_weight.data)
        assert own.input == same.input
    with torch.no_grad():
        assert torch.equal(again(TOKENS), other(TOKENS))


def on_ranks(folder, expected) -> None:
    with ParallelState(ParallelLayout(tp=2), device="cpu") as state, torch.no_grad():
        model = from_pretrained(folder, dtype=torch.float32, state=state)
        assert any(isinstance(m, QuantizedLinear) for m in model.modules())
        torch.testing.assert_close(model(TOKENS), expected, rtol=1e-4, atol=1e-4)


def test_layers_of_several_formats_are_named_and_ranks_read_their_parts(
    original, ranks, tmp_path
) -> None:
    rules = Rule(name="*.mixer.*", weight="fp8", input="fp8"), Rule(weight="nvfp4")
    model = quantized(original("llama"), *rules)
    with torch.no_grad():
        expected = model(TOKENS)
    save_pretrained(model, tmp_path / "low", like=original("llama"), layout="modelopt")
    config = json.loads((tmp_path / "low" / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "MIXED_PRECISION"
    assert config["quantized_layers"]["model.layers.1.mlp.up_proj"] == {
        "quant_algo": "W4A16_NVFP4",
        "group_size": 16,
    }
    assert len(config["quantized_layers"]) == 14
    ranks(2, on_ranks, tmp_path / "low", expected)


def with_scales(model, name: str):
    form, heads = KVFormat.named(name), 2
    for index in model.generating():
        scales = KVScales(key=torch.full((heads,), 0.5 + index), value=torch.full((heads,), 0.25))
        model.kv_schemes[index] = KVScheme(format=form, scales=scales)
    return model


def test_scales_of_keys_and_values_are_beside_their_projections(original, tmp_path) -> None:
    model = with_scales(
        quantized(original("llama"), Rule(weight="mxfp8", input="mxfp8")), "fp8-tensor"
    )
    save_pretrained(model, tmp_path / "low", like=original("llama"), layout="modelopt")
    tensors = load_file(tmp_path / "low" / "model.safetensors")
    assert tensors["model.layers.1.self_attn.k_proj.k_scale"].item() == 1.5
    assert tensors["model.layers.1.self_attn.v_proj.v_scale"].item() == 0.25
    told = json.loads((tmp_path / "low" / "hf_quant_config.json").read_text())["quantization"]
    assert told["kv_cache_quant_algo"] == "FP8"
    again = from_pretrained(tmp_path / "low", dtype=torch.float32)
    assert {i: s.scales.key.tolist() for i, s in again.kv_schemes.items()} == {
        0: [0.5, 0.5],
        1: [1.5, 1.5],
    }


@pytest.mark.parametrize(
    ("weight", "input", "words"),
    [
        ("int8", None, "has no int8-channel with inputs as they are; it has fp8-tensor with"),
        ("int4-g32", None, "use one of these, or the layout compressed-tensors"),
        ("fp8", None, "has no fp8-channel with inputs as they are"),
        ("fp8-tensor", "fp8", "has no fp8-tensor with inputs fp8-token"),
        ("nvfp4", "nvfp4", "has no nvfp4 with inputs nvfp4"),
    ],
)
def test_what_the_layout_has_no_place_for_is_one_message(
    weight, input, words, original, tmp_path
) -> None:
    model = quantized(original("llama"), Rule(weight=weight, input=input))
    with pytest.raises(ExchangeError, match=words):
        save_pretrained(model, tmp_path / "low", like=original("llama"), layout="modelopt")
    assert not (tmp_path / "low").exists()


def test_other_formats_of_keys_and_values_and_other_layouts_are_refused(original, tmp_path) -> None:
    model = quantized(original("llama"), Rule(weight="nvfp4"))
    with pytest.raises(ExchangeError, match=r"Did you mean modelopt"):
        save_pretrained(model, tmp_path / "low", like=original("llama"), layout="modelop")
    with_scales(model, "int8-head")
    with pytest.raises(ExchangeError, match="has fp8-tensor of keys and values, and they are int8"):
        save_pretrained(model, tmp_path / "low", like=original("llama"), layout="modelopt")
    assert not (tmp_path / "low").exists()


def changed(folder, change, algorithm=None):
    """Change the tensors of a folder, and the name of its algorithm."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    given = json.loads((folder / "config.json").read_text())
    if algorithm is not None:
        given["quantization_config"]["quant_algo"] = algorithm
        (folder / "config.json").write_text(json.dumps(given))


def compare_with_plain(folder, tmp_path, values, tolerance):
    """Compare a folder in low precision with a folder that has these values of the same layers."""
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    plain |= {f"{name}.weight": value for name, value in values.items()}
    (tmp_path / "expected").mkdir()
    save_file(plain, tmp_path / "expected" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "expected" / "config.json").write_text(json.dumps(config))
    expected = from_pretrained(tmp_path / "expected", dtype=torch.float32)
    whole = from_pretrained(folder, dtype=torch.float32, dequantize=True)
    codes = from_pretrained(folder, dtype=torch.float32)
    assert any(isinstance(module, QuantizedLinear) for module in codes.modules())
    with torch.no_grad():
        assert (whole(TOKENS) - expected(TOKENS)).abs().max() < 1e-5
        assert (codes(TOKENS) - expected(TOKENS)).abs().max() < tolerance


def low_and_plain(original, tmp_path, *rules):
    model = quantized(original("llama"), *rules)
    save_pretrained(model, tmp_path / "low", like=original("llama"), layout="modelopt")
    whole = from_pretrained(tmp_path / "low", dtype=torch.float32, dequantize=True)
    save_pretrained(whole, tmp_path / "plain")


def layers_of(tensors):
    return [name.removesuffix("_scale") for name in tensors if name.endswith(".weight_scale")]


def test_factors_of_the_inputs_of_awq_are_read(original, tmp_path) -> None:
    low_and_plain(original, tmp_path, Rule(weight="nvfp4"))
    values, factors = {}, torch.linspace(0.5, 2, 128)

    def scale(tensors):
        for weight in layers_of(tensors):
            name = weight.removesuffix(".weight")
            own = {n.rpartition(".")[2]: t for n, t in tensors.items() if n.startswith(f"{name}.")}
            value = decoded(own, "W4A16_NVFP4")
            tensors[f"{name}.pre_quant_scale"] = factors[: value.shape[1]].bfloat16().clone()
            values[name] = value * tensors[f"{name}.pre_quant_scale"].float()

    changed(tmp_path / "low", scale, "NVFP4_AWQ")
    compare_with_plain(tmp_path / "low", tmp_path, values, 1e-4)
    short = {f"{next(iter(values))}.pre_quant_scale": torch.ones(3)}
    changed(tmp_path / "low", lambda tensors: tensors.update(short))
    with pytest.raises(ExchangeError, match=r"pre_quant_scale has the shape \[3\]"):
        from_pretrained(tmp_path / "low")


def test_int8_codes_of_smoothquant_are_read(original, tmp_path) -> None:
    low_and_plain(original, tmp_path, Rule(weight="fp8", input="fp8"))
    values = {}

    def smooth(tensors):
        for weight in layers_of(tensors):
            name = weight.removesuffix(".weight")
            codes = (
                (torch.randn(tensors[weight].shape) * 30).round().clamp(-127, 127).to(torch.int8)
            )
            scale = torch.rand(len(codes)) * 1e-3 + 1e-3
            factors = torch.rand(codes.shape[1]) + 0.5
            if name.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
                factors = torch.linspace(0.5, 2, codes.shape[1])
            parts = {"weight": codes, "weight_scale": scale, "pre_quant_scale": factors}
            tensors.update({f"{name}.{leaf}": tensor for leaf, tensor in parts.items()})
            values[name] = codes.float() * scale[:, None] * factors

    changed(tmp_path / "low", smooth, "W8A8_SQ_PER_CHANNEL")
    compare_with_plain(tmp_path / "low", tmp_path, values, 1e-4)


def test_a_scale_of_one_box_may_have_no_dims(original, tmp_path) -> None:
    low_and_plain(original, tmp_path, Rule(weight="fp8-tensor", input="fp8-static"))
    values = {}

    def one_box(tensors):
        for weight in layers_of(tensors):
            tensors.pop(f"{weight.removesuffix('.weight')}.input_scale")
            assert tensors[f"{weight}_scale"].shape == ()
            value = tensors[weight].float() * tensors[f"{weight}_scale"]
            values[weight.removesuffix(".weight")] = value

    changed(tmp_path / "low", one_box, "FP8_PB_WO")
    compare_with_plain(tmp_path / "low", tmp_path, values, 1e-4)


@pytest.mark.parametrize("spoiled", ["weight_scale", "weight"])
def test_codes_that_are_not_finite_are_named(original, tmp_path, spoiled) -> None:
    low_and_plain(original, tmp_path, Rule(weight="fp8-tensor", input="fp8-static"))
    name = "model.layers.1.mlp.up_proj"

    def spoil(tensors):
        if spoiled == "weight":
            tensors[f"{name}.weight"].view(torch.uint8)[0, 0] = 0x7F
        else:
            tensors[f"{name}.weight_scale"].fill_(3e38)

    changed(tmp_path / "low", spoil)
    for dequantize in (False, True):
        with pytest.raises(ExchangeError, match=f"tensor {name}.weight has .* not finite"):
            from_pretrained(tmp_path / "low", dequantize=dequantize)
