"""Scales of keys and values in folders: written, read on any layout, and by transformers."""

from __future__ import annotations

import json

import pytest
import torch
from family_rows.deepseek_v3 import ROW
from mt_hf import ExchangeError, from_pretrained, save_pretrained
from mt_model import GPT, calibrate_kv_cache, gpt
from mt_parallel_state import ParallelLayout, ParallelState
from mt_quant import KVFormat, QuantizationConfig, Rule, quantize
from safetensors.torch import load_file, save_file

SIZES = {"vocab_size": 96, "hidden_size": 64, "max_sequence_length": 32, "init_std": 0.2}
TOKENS = torch.arange(24).view(2, 12) * 5 % 48
FORMATS = ("fp8-head", "fp8-tensor", "int8-head")
ATTENTION = "model.layers.{}.self_attn"


def build():
    return GPT(gpt(**SIZES, num_layers=2, num_heads=4, num_kv_heads=2, tied=False), seed=1).eval()


def with_scales(model, name):
    model.kv_schemes = calibrate_kv_cache(model, [TOKENS], name)
    return model


def scales_of(model):
    return {i: (s.format, s.scales.key, s.scales.value) for i, s in model.kv_schemes.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for index, (format, *scales) in expected.items():
        assert found[index][0] == format
        for x, y in zip(found[index][1:], scales, strict=True):
            assert torch.equal(x, y)


@torch.no_grad()
def greedy(model, count=8):
    cache = model.new_cache(batch_size=2, max_length=12 + count)
    tokens = [TOKENS]
    for _ in range(count):
        scores = model(None, {"tokens": tokens[-1], "cache": cache})
        tokens.append(scores[:, -1].argmax(-1, keepdim=True))
    return torch.cat(tokens[1:], 1)


@pytest.mark.parametrize("weight", ["int8", None])
@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_keeps_the_scales_beside_the_weights_of_attention(name, weight, tmp_path):
    model = build()
    if weight is not None:
        quantize(model, QuantizationConfig(rules=(Rule(name="layers.*", weight=weight),)))
    with_scales(model, name)
    save_pretrained(model, tmp_path / "low")
    told = json.loads((tmp_path / "low" / "config.json").read_text())["quantization_config"]
    assert told["kv_cache_scheme"] == {
        "num_bits": 8,
        "type": {"fp8": "float", "int8": "int"}[name.partition("-")[0]],
        "symmetric": True,
        "strategy": {"head": "attn_head", "tensor": "tensor"}[name.partition("-")[2]],
        "group_size": None,
        "dynamic": False,
    }
    tensors = load_file(tmp_path / "low" / "model.safetensors")
    for index, (_, *scales) in scales_of(model).items():
        for leaf, scale in zip(("k_scale", "v_scale"), scales, strict=True):
            stored = tensors[f"{ATTENTION.format(index)}.{leaf}"]
            assert stored.shape == ((2, 1, 1) if name.endswith("head") else (1,))
            assert torch.equal(stored.flatten().expand(2), scale)
    again = from_pretrained(tmp_path / "low")
    assert_same(scales_of(again), scales_of(model))
    assert torch.equal(greedy(again), greedy(model))
    assert again.new_cache(batch_size=1, max_length=4).formats == {
        index: KVFormat.named(name) for index in (0, 1)
    }
    assert not from_pretrained(tmp_path / "low", dequantize=True).kv_schemes
    save_pretrained(again, tmp_path / "again")
    assert_same(scales_of(from_pretrained(tmp_path / "again")), scales_of(model))


@pytest.mark.parametrize(
    "name", ["fp8-head", pytest.param("fp8-tensor", marks=pytest.mark.campaign)]
)
def test_transformers_reads_the_scales_and_computes_the_same(name, tmp_path):
    """Its attention rounds keys and values of a prompt as our cache does (compressed-tensors)."""
    import transformers

    model = build()
    quantize(model, QuantizationConfig(rules=(Rule(name="layers.*", weight="int8"),)))
    save_pretrained(with_scales(model, name), tmp_path / "low")
    found, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "low", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for index, (_, *scales) in scales_of(model).items():
        attention = found.get_submodule(ATTENTION.format(index))
        for leaf, scale in zip(("k_scale", "v_scale"), scales, strict=True):
            torch.testing.assert_close(getattr(attention, leaf).flatten().expand(2), scale)
    cache = model.new_cache(batch_size=2, max_length=12)
    with torch.no_grad():
        theirs = found(TOKENS).logits
    ours, full = model.logits(TOKENS, cache=cache), model.logits(TOKENS)
    assert (theirs - ours).norm() < 1e-4 * ours.norm()
    assert (theirs - full).norm() > 1e-2 * full.norm()


def on_rank(folder, tp):
    model = from_pretrained(folder, state=ParallelState(ParallelLayout(tp=tp)))
    return greedy(model)


@pytest.mark.parametrize(
    "name", ["fp8-head", pytest.param("int8-head", marks=pytest.mark.campaign)]
)
def test_ranks_take_the_scales_of_their_heads(name, tmp_path, ranks):
    model = with_scales(build(), name)
    save_pretrained(model, tmp_path / "low")
    for found in ranks(2, on_rank, tmp_path / "low", 2):
        assert torch.equal(found, greedy(model))


def test_latents_have_the_scale_of_keys(saved, tmp_path):
    model = from_pretrained(saved(ROW, 0)[0])
    with_scales(model, "fp8-head")
    with pytest.raises(ExchangeError, match="layer 0 has one latent for all heads"):
        save_pretrained(model, tmp_path / "low")
    assert not (tmp_path / "low").exists()
    with_scales(model, "fp8-tensor")
    save_pretrained(model, tmp_path / "low")
    again = from_pretrained(tmp_path / "low")
    assert_same(scales_of(again), scales_of(model))
    assert torch.equal(greedy(again), greedy(model))


def test_scales_by_the_names_of_modelopt_are_read(tmp_path):
    model = with_scales(build(), "fp8-tensor")
    save_pretrained(model, tmp_path / "low")
    file, config = tmp_path / "low" / "model.safetensors", tmp_path / "low" / "config.json"
    tensors = load_file(file)
    for index in (0, 1):
        for leaf in ("k_scale", "v_scale"):
            scale = tensors.pop(f"{ATTENTION.format(index)}.{leaf}")
            tensors[f"{ATTENTION.format(index)}.{leaf[0]}_proj.{leaf}"] = scale.view(())
    save_file(tensors, file, {"format": "pt"})
    fields = json.loads(config.read_text())
    fields["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
    }
    config.write_text(json.dumps(fields))
    assert_same(scales_of(from_pretrained(tmp_path / "low")), scales_of(model))
    fields["quantization_config"]["kv_cache_quant_algo"] = "NVFP4"
    config.write_text(json.dumps(fields))
    assert not from_pretrained(tmp_path / "low").kv_schemes


def _without(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def _scheme(folder, **changes):
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    fields["quantization_config"]["kv_cache_scheme"] |= changes
    path.write_text(json.dumps(fields))


KEY = f"{ATTENTION.format(1)}.k_scale"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: _without(f, lambda t: t.pop(KEY)), "layers.1.self_attn: k_scale is missing"),
        (lambda f: _without(f, lambda t: t.update({KEY: torch.ones(3)})), "3 scales, and 2 heads"),
        (lambda f: _without(f, lambda t: t.update({KEY: torch.zeros(2)})), "scales are above 0"),
        (lambda f: _scheme(f, num_bits=4), "kv_cache_scheme .* is not supported"),
        (lambda f: _scheme(f, dynamic=True), "not dynamic"),
        (lambda f: _scheme(f, strategy="channel"), "strategy tensor or attn_head"),
    ],
)
def test_a_damaged_folder_is_one_error(damage, words, tmp_path):
    save_pretrained(with_scales(build(), "fp8-head"), tmp_path / "low")
    damage(tmp_path / "low")
    with pytest.raises(ExchangeError, match=words):
        from_pretrained(tmp_path / "low")


@pytest.mark.parametrize(
    ("formats", "words"),
    [
        ("fp8", "fp8-token has none"),
        ({0: KVFormat.named("fp8-head")}, "layer 1 keeps its keys and values in full"),
        (
            {0: KVFormat.named("fp8-head"), 1: KVFormat.named("int8-head")},
            "one format for keys and values, and there are fp8-head .* and int8-head",
        ),
    ],
)
def test_what_a_folder_has_no_place_for_is_refused(formats, words, tmp_path):
    made = with_scales(build(), formats)
    with pytest.raises(ExchangeError, match=words):
        save_pretrained(made, tmp_path / "low")
    assert not (tmp_path / "low").exists()
