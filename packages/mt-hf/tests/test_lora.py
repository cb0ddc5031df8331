"""Adapters of a GPT under the names of Llama's layers: every part adds what the fused one adds."""

from __future__ import annotations

import pytest
import torch
from mt_hf import export_lora
from mt_model import GPT, gpt
from mt_tensor_parallel import LoraLinear, add_lora, lora_state

SIZES = {"vocab_size": 32, "hidden_size": 8, "num_layers": 2, "num_heads": 4, "ffn_size": 6}


def adapted(**sizes) -> GPT:
    model = GPT(gpt(**SIZES, max_sequence_length=8, **sizes))
    add_lora(model, 2, alpha=6)
    for layer in model.modules():
        if isinstance(layer, LoraLinear):
            torch.nn.init.normal_(layer.b)
    return model


def test_the_parts_of_fused_layers_add_what_they_add_together() -> None:
    model = adapted(num_kv_heads=2)
    state = lora_state(model, export=export_lora)
    attention, mlp = model.layers["1"].mixer, model.layers["1"].feed_forward
    qkv, up = attention.qkv.delta(), mlp.up.delta()  # [2, 4, 2, 8] and [2, 6, 8]
    expected = {
        "self_attn.q_proj": qkv[:, :2],
        "self_attn.k_proj": qkv[:, 2],
        "self_attn.v_proj": qkv[:, 3],
        "self_attn.o_proj": attention.out.delta(),
        "mlp.gate_proj": up[0],
        "mlp.up_proj": up[1],
        "mlp.down_proj": mlp.down.delta(),
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
