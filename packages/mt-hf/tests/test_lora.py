"""Adapters of a GPT under the names of other models' layers, and of theirs on a GPT."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from family_row import ROWS
from llava_row import ROW as LLAVA_ROW
from mt_ckpt import TensorShard, save_checkpoint
from mt_hf import (
    ExchangeError,
    base_digest,
    export_lora,
    from_pretrained,
    open_pretrained,
    read_lora,
)
from mt_model import GPT, gpt
from mt_tensor_parallel import adapters, add_lora, lora_state
from safetensors.torch import load_file, save_file

SIZES = {"vocab_size": 32, "hidden_size": 8, "num_layers": 2, "num_heads": 4, "ffn_size": 6}


def adapted(**sizes) -> GPT:
    model = GPT(gpt(**SIZES, max_sequence_length=8, **sizes))
    add_lora(model, 2, alpha=6)
    for _, adapter in adapters(model):
        torch.nn.init.normal_(adapter.b)
    return model


def test_the_parts_of_fused_layers_add_what_they_add_together() -> None:
    model = adapted(num_kv_heads=2)
    state = lora_state(model, export=export_lora)
    attention, mlp = model.layers["1"].mixer, model.layers["1"].feed_forward
    qkv, up = attention.qkv.lora.delta(), mlp.up.lora.delta()  # [2, 4, 2, 8] and [2, 6, 8]
    expected = {
        "self_attn.q_proj": qkv[:, :2],
        "self_attn.k_proj": qkv[:, 2],
        "self_attn.v_proj": qkv[:, 3],
        "self_attn.o_proj": attention.out.lora.delta(),
        "mlp.gate_proj": up[0],
        "mlp.up_proj": up[1],
        "mlp.down_proj": mlp.down.lora.delta(),
    }
    assert len(state) == 2 * 2 * len(expected)
    for name, delta in expected.items():
        prefix = f"base_model.model.model.layers.1.{name}"
        b, a = (state[f"{prefix}.lora_{part}.weight"] for part in "BA")
        torch.testing.assert_close(3 * b @ a, delta.reshape(b.shape[0], a.shape[1]))


def test_what_llama_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"feed_forward\.up' is a plain feed-forward"):
        lora_state(adapted(gated=False, activation="gelu"), export=export_lora)
    with pytest.raises(ValueError, match="export the GPT itself"):
        lora_state(torch.nn.ModuleDict({"gpt": adapted()}), export=export_lora)


def test_exported_adapters_are_read_again() -> None:
    model = adapted(num_kv_heads=2)
    deltas = {name: adapter.delta() for name, adapter in adapters(model)}
    plain = GPT(gpt(**SIZES, max_sequence_length=8, num_kv_heads=2))
    for export in (export_lora, None):
        found = read_lora(lora_state(model, export=export), plain, alpha=6)
        assert found.keys() == deltas.keys()
        for name, (a, b) in found.items():
            assert a.shape[0] == 2  # the parts of a fused layer share A
            torch.testing.assert_close(b @ a, deltas[name].reshape(b.shape[0], a.shape[1]))


def dense(folder) -> list[str]:
    """Names of a folder's linear layers that take adapters."""
    links = open_pretrained(folder).links
    return [
        link.source.removesuffix(".weight")
        for target, each in links.items()
        for link in each
        if target.startswith("layers.") and target.endswith(".weight") and len(link.shape) == 2
        if not any(part in target for part in (".experts.", ".router.", "norm", "conv"))
    ]


DECODERS = [row for row in (*ROWS, LLAVA_ROW) if row.generates]


@pytest.mark.parametrize("row", DECODERS, ids=lambda row: row.name)
def test_an_adapter_does_to_our_layers_what_it_does_to_the_folders(saved, tmp_path, row) -> None:
    folder, _ = saved(row, 0)
    stored, tensors = load_file(folder / "model.safetensors"), {}
    transposed = row.name == "gpt2"
    for number, name in enumerate(dict.fromkeys(dense(folder))):
        out, into = stored[f"{name}.weight"].shape[:: -1 if transposed else 1]
        a, b = torch.randn(1 + number % 3, into), torch.randn(out, 1 + number % 3)
        known = row.in_memory(f"{name}.weight").removesuffix(".weight")
        tensors |= {f"base_model.model.{known}.lora_{s}.weight": x for s, x in (("A", a), ("B", b))}
        stored[f"{name}.weight"] += (b @ a).T if transposed else b @ a
    shutil.copytree(folder, tmp_path / "merged")
    save_file(stored, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"})
    model = from_pretrained(folder)
    found = read_lora(tensors, model)
    merged = dict(from_pretrained(tmp_path / "merged").named_parameters())
    changed = set()
    for name, param in model.named_parameters():
        layer = name.removesuffix(".weight")
        delta = torch.zeros_like(param)
        if layer in found:
            a, b = found[layer]
            delta, changed = (b @ a).view_as(param), changed | {layer}
        torch.testing.assert_close(param + delta, merged[name], rtol=1e-4, atol=1e-4)
    assert changed == set(found)


def peft(folder, model, **fields) -> None:
    """Write an adapter of PEFT with given fields of its config."""
    state = lora_state(model, export=export_lora)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], **fields}
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))


def test_a_folder_says_the_scale_of_each_layer(tmp_path) -> None:
    model = adapted()
    scales = {"use_rslora": True, "alpha_pattern": {"layers.1.mlp.down_proj": 5, "o_proj": 4}}
    peft(tmp_path, model, **scales)
    found = read_lora(tmp_path, GPT(model.config))
    for name, alpha in {"0.mixer.qkv": 6, "1.mixer.out": 4, "1.feed_forward.down": 5}.items():
        layer = model.get_submodule(f"layers.{name}.lora")
        a, b = found[f"layers.{name}"]
        delta = (layer.delta() / layer.scale).reshape(b.shape[0], a.shape[1])
        torch.testing.assert_close(b @ a, delta * alpha / 2**0.5)


@pytest.mark.parametrize(("fields", "word"), [
    ({"use_dora": True}, "use_dora"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"bias": "all"}, "bias"),
    ({"peft_type": "IA3"}, "peft_type"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    ({"target_parameters": ["experts.up"]}, "target_parameters"),
    ({"r": 3}, "rank"),
    ({"alpha_pattern": {".*q_proj": 3}}, "alpha_pattern"),
])  # fmt: skip
def test_fields_that_change_other_numbers_are_refused_by_name(tmp_path, fields, word) -> None:
    model = adapted()
    peft(tmp_path, model, **fields)
    with pytest.raises(ExchangeError, match=word):
        read_lora(tmp_path, GPT(model.config))


@pytest.mark.parametrize("name", [
    "model.embed_tokens.lora_embedding_A",
    "lm_head.lora_A.weight",
    "model.layers.0.self_attn.q_proj.lora_magnitude_vector",
    "model.layers.0.self_attn.k_proj.lora_A.weight",
])  # fmt: skip
def test_tensors_without_a_place_are_refused_by_name(name) -> None:
    model = adapted()
    state = lora_state(model, export=export_lora)
    for more in (f"base_model.model.{name}", f"base_model.model.{name}".replace("_A", "_B")):
        state[more] = torch.ones(2, 3) if "_A" in more else torch.ones(32, 2)
    with pytest.raises(ExchangeError, match=name.split(".lora")[0]):
        read_lora(state, GPT(model.config))


def test_a_base_is_known_by_its_weights_and_not_by_the_layout_that_saved_them(tmp_path):
    weight, bias = torch.randn(8, 6).bfloat16(), torch.randn(())
    halves = [
        TensorShard("model/w", part, global_shape=(8, 6), offsets=(start, 0))
        for start, part in ((0, weight[:4]), (4, weight[4:]))
    ]
    saves = {
        "whole": [TensorShard("model/w", weight), TensorShard("model/b", bias)],
        "halves": [*halves, TensorShard("model/b", bias), TensorShard("optimizer/w", bias)],
        "other": [TensorShard("model/w", weight * 2), TensorShard("model/b", bias)],
    }
    whole, cut, other = (
        base_digest(save_checkpoint(tmp_path / name, 3, shards, {}))
        for name, shards in saves.items()
    )
    assert whole == cut != other
