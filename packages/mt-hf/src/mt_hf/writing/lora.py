"""Adapters on a GPT as adapters on the same model in Hugging Face transformers."""

from __future__ import annotations

import re

from torch import Tensor

_NAME = re.compile(r"layers\.(\d+)\.(mixer\.qkv|mixer\.out|feed_forward\.up|feed_forward\.down)")


def export_lora(name: str, a: Tensor, b: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Adapters of Llama's layers that do what one adapter of a `GPT` does.

    For `mt_tensor_parallel.save_lora(model, ..., export=export_lora)`. A fused projection becomes
    the layers it holds: each has its rows of B, and all have the same A. Fits every family with
    Llama's layer names and half-split rotation (Llama, Mistral, Qwen2, Qwen3).

    Args:
        name: of the adapted layer in the GPT.
        a: the whole A.
        b: the whole B.

    Returns:
        A and B by the layer's name in transformers.

    Shape:
        a: [rank, hidden], of `mixer.out` [rank, num_heads, head_dim]. b: [hidden, rank], of
        `mixer.qkv` [kv_heads, q_per_kv + 2, head_dim, rank], of `feed_forward.up` [2, ffn, rank].
        Returns the same with one dim for each side.

    Raises:
        ValueError: the name is none of a GPT's linear layers, or its feed-forward is not gated.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(
            f"{name!r} is not a linear layer of a GPT, such as 'layers.0.mixer.qkv'; export "
            "the GPT itself, not a module around it"
        )
    layer, kind = f"model.layers.{match[1]}", match[2]
    if kind == "mixer.qkv":
        parts = {"q": b[:, :-2], "k": b[:, -2], "v": b[:, -1]}
        return {
            f"{layer}.self_attn.{part}_proj": (a, rows.flatten(0, -2))
            for part, rows in parts.items()
        }
    if kind == "mixer.out":
        return {f"{layer}.self_attn.o_proj": (a.flatten(1), b)}
    if kind == "feed_forward.down":
        return {f"{layer}.mlp.down_proj": (a, b)}
    if b.dim() == 2:
        raise ValueError(f"{name!r} is a plain feed-forward, and those of Llama are gated")
    return {f"{layer}.mlp.gate_proj": (a, b[0]), f"{layer}.mlp.up_proj": (a, b[1])}
