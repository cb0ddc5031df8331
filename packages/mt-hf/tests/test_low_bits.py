"""Models in low precision as folders that transformers reads, and such folders as models."""

from __future__ import annotations

import json
import shutil
from importlib import import_module

import pytest
import torch
from mt_hf import ExchangeError, from_pretrained, save_pretrained
from mt_parallel_state import ParallelLayout, ParallelState
from mt_quant import QuantizationConfig, QuantizedLinear, Rule, quantize
from safetensors.torch import load_file, save_file

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
FAMILIES = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 2}),
    "qwen3": (
        "Qwen3Config",
        {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True},
    ),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.5}),
}
# Weight and input.
FORMATS = {
    "int8": ("int8", None),
    "int8-dynamic": ("int8", "int8"),
    "int8-static": ("int8", "int8-static"),
    "int4-g32": ("int4-g32", None),
    "int4-g32-asym": ("int4-g32-asym", None),
    "fp8": ("fp8", "fp8"),
    "fp8-tensor-static": ("fp8-tensor", "fp8-static"),
    "mxfp4": ("mxfp4", None),
    "nvfp4": ("nvfp4", None),
}
TOKENS = torch.arange(24).view(2, 12) * 5 % 96


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


# transformers decompresses to bf16 there, in which nvfp4's values are not exact.
TOLERANCE = {"nvfp4": 1e-2}


def quantized(folder, formats: str):
    weight, input = FORMATS[formats]
    config = QuantizationConfig(rules=(Rule(weight=weight, input=input),))
    model = from_pretrained(folder, dtype=torch.float32)
    return quantize(model, config, [TOKENS] if input and "static" in input else None)


@torch.no_grad()
def logits_of_transformers(folder, *, wide: bool):
    """Return the logits of a folder; if `wide`, with its decompressed weights in fp32."""
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32 if wide else torch.bfloat16, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    logits = model(TOKENS).logits  # decompresses
    if wide:
        return logits
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.float() if tensor.is_floating_point() else tensor.data
    params = dict(model.named_parameters())
    for stored, tensor in load_file(folder / "model.safetensors").items():
        name = stored.replace("embed_out", "lm_head")  # as transformers calls it since version 5
        if name in params and tensor.dtype == torch.float32:
            params[name].data = tensor  # what is not in low precision
    return model(TOKENS).logits


@pytest.mark.parametrize(
    ("formats", "family"),
    [
        pytest.param(n, f, marks=() if (i + j) % 3 == 0 else pytest.mark.campaign)
        for i, n in enumerate(FORMATS)
        for j, f in enumerate(FAMILIES)
        if n not in ("int4-g32-asym", "int8-dynamic")
    ],
)
def test_transformers_reads_what_is_written_and_computes_the_same(
    family, formats, original, tmp_path
) -> None:
    model = quantized(original(family), formats)
    with torch.no_grad():
        expected = model(TOKENS)
    save_pretrained(model, tmp_path / "low", like=original(family))
    found = logits_of_transformers(tmp_path / "low", wide="fp4" not in formats)
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error <= TOLERANCE.get(formats, 1e-3)


@pytest.mark.parametrize("formats", FORMATS)
def test_a_folder_in_low_precision_is_read_with_the_same_codes(formats, original, tmp_path) -> None:
    model = quantized(original("llama"), formats)
    save_pretrained(model, tmp_path / "low", like=original("llama"))
    again = from_pretrained(tmp_path / "low", dtype=torch.float32)
    plain = from_pretrained(tmp_path / "low", dtype=torch.float32, dequantize=True)
    low = {name: m for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert len(low) == 8
    for name, layer in low.items():
        own, values = again.get_submodule(name), layer.quantized_weight.dequantize()
        assert torch.equal(own.quantized_weight.dequantize(), values)
        weight = plain.get_submodule(name).weight
        torch.testing.assert_close(weight.reshape(values.shape), values, rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS), model(TOKENS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("formats", "compressor"),
    [
        ("int4-g32-asym", "pack_quantized.PackedQuantizationCompressor"),
        ("int4-g32", "pack_quantized.PackedQuantizationCompressor"),
        ("int8-dynamic", "naive_quantized.IntQuantizationCompressor"),
    ],
)
def test_compressed_tensors_decompresses_codes_to_our_values(
    formats, compressor, original, tmp_path
) -> None:
    """For what logits can't show.

    transformers makes no room for packed zero points (with compressed-tensors 0.20), and there a
    dynamic scale of int8 is the largest value over 127.5, here over 127.
    """
    from compressed_tensors.quantization import QuantizationScheme

    module, name = compressor.split(".")
    kind = getattr(import_module(f"compressed_tensors.compressors.{module}"), name)
    model = quantized(original("gpt_neox"), formats)
    save_pretrained(model, tmp_path / "low", like=original("gpt_neox"))
    config = json.loads((tmp_path / "low" / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    scheme = QuantizationScheme(**group)
    tensors = load_file(tmp_path / "low" / "model.safetensors")
    prefix = "gpt_neox.layers.1.mlp.dense_h_to_4h."
    own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    found = kind.decompress(own, scheme)["weight"]
    layer = model.get_submodule("layers.1.feed_forward.up")
    torch.testing.assert_close(found, layer.quantized_weight.dequantize(), rtol=1e-6, atol=0)


def on_ranks(folder, expected) -> None:
    with ParallelState(ParallelLayout(tp=2), device="cpu") as state, torch.no_grad():
        model = from_pretrained(folder, dtype=torch.float32, state=state)
        assert any(isinstance(m, QuantizedLinear) for m in model.modules())
        torch.testing.assert_close(model(TOKENS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("formats", ["int8", "int4-g32-asym", "fp8"])
def test_ranks_read_their_parts(formats, original, ranks, tmp_path) -> None:
    model = quantized(original("llama"), formats)
    save_pretrained(model, tmp_path / "low", like=original("llama"))
    with torch.no_grad():
        expected = model(TOKENS)
    ranks(2, on_ranks, tmp_path / "low", expected)


def without_scale(folder) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.down_proj.weight_scale"]
    save_file(tensors, path, metadata={"format": "pt"})


def unknown_method(folder) -> None:
    change(folder, "quant_method", "squeeze")


def no_group(folder) -> None:
    change(folder, "config_groups", {})


def change(folder, field, value) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"][field] = value
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without_scale, r"layer model\.layers\.1\.mlp\.down_proj: weight_scale is missing"),
        (unknown_method, "quant_method 'squeeze'"),
        (no_group, "no group of quantization_config names it"),
    ],
)
def test_a_damaged_folder_is_one_error(damage, words, original, tmp_path) -> None:
    save_pretrained(quantized(original("llama"), "int8"), tmp_path / "low", like=original("llama"))
    shutil.copytree(tmp_path / "low", tmp_path / "bad")
    damage(tmp_path / "bad")
    with pytest.raises(ExchangeError, match=words):
        from_pretrained(tmp_path / "bad")


def test_what_the_layout_has_no_place_for_is_refused_and_nothing_is_written(
    original, tmp_path
) -> None:
    rule = Rule(name="*.mixer.*", weight="nvfp4", input="nvfp4")
    model = quantize(from_pretrained(original("llama")), QuantizationConfig(rules=(rule,)))
    with pytest.raises(ExchangeError, match="no layout of nvfp4 weights with nvfp4 inputs"):
        save_pretrained(model, tmp_path / "low", like=original("llama"))
    assert not (tmp_path / "low").exists()
