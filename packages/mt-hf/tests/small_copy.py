"""A published configuration with small sizes and all its other fields, and a model of it."""

from pathlib import Path
from typing import Any

import torch

_HEAD = 16
_SIZES = {
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim"), 96),
    **{"intermediate_size_mlp": 80, "moe_intermediate_size": 24},
    **{"shared_expert_intermediate_size": 40, "vocab_size": 260, "pooler_fc_size": 32},
    **dict.fromkeys(("head_dim", "attention_head_dim", "d_kv", "mamba_head_dim"), _HEAD),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "kv_lora_rank"), 16),
    **{"qk_rope_head_dim": 8, "q_lora_rank": 24},
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"mamba_num_heads": 8, "ssm_state_size": 16, "state_size": 16, "chunk_size": 8},
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 16),
    # Windows are shorter than a test's sequence, so that they matter.
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size"), 7),
    **{"image_size": 12, "patch_size": 4, "projection_dim": 24, "image_token_index": 255},
}
_MOST = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer"), 7),
    **dict.fromkeys(("num_experts_per_tok", "experts_per_token"), 4),
}
_HEADS = ("num_attention_heads", "num_heads", "n_head")
_WIDTHS = ("hidden_size", "d_model", "n_embd")
_KINDS = {"kimi_k2": "deepseek_v3"}  # a name that only code beside the weights knows
# What the configuration of a part may leave to its class.
_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def small_config(given: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with small sizes; ratios of heads and turns of layers stay."""
    found = {key: value for key, value in given.items() if key != "quantization_config"}
    found["model_type"] = _KINDS.get(given["model_type"], given["model_type"])
    found |= {key: size for key, size in _SIZES.items() if isinstance(given.get(key), int)}
    found |= {key: min(given[key], most) for key, most in _MOST.items() if key in given}
    if "layer_types" in given:
        found["layer_types"] = given["layer_types"][: found["num_hidden_layers"]]
    if pattern := given.get("hybrid_override_pattern"):
        found["hybrid_override_pattern"] = pattern[: pattern.index("*") + 2]
        found["num_hidden_layers"] = len(found["hybrid_override_pattern"])
    heads = _small_heads(given, found)
    wide = 48 if {"head_dim", "attention_head_dim", "qk_nope_head_dim"} & given.keys() else 0
    if given["model_type"] == "mamba2":
        found["num_heads"], wide = 8, 8 * _HEAD // given["expand"]
    found |= {key: wide or heads * _HEAD for key in _WIDTHS if key in given}
    for part in ("text_config", "vision_config"):
        if part in given:
            found[part] = small_config({**dict.fromkeys(_NEEDED, 32), **given[part]})
    for key, value in given.items():
        if key.endswith("_token_id") and value is not None:
            found[key] = [1, 2] if isinstance(value, list) else min(value, 3)
    return found


def _small_heads(given: dict[str, Any], found: dict[str, Any]) -> int:
    """Set the heads, with up to 4 for each of up to 2 heads of keys; returns their number."""
    name = next((key for key in _HEADS if key in given), None)
    if name is None:
        return 4
    kv = given.get("num_key_value_heads") or given[name]
    small = min(kv, 2 if kv < given[name] else 4)
    found[name] = small * min(given[name] // kv, 4)
    if given.get("num_key_value_heads"):
        found["num_key_value_heads"] = small
    return found[name]


def write_small_model(config: dict[str, Any], folder: Path) -> int:
    """Save a model of transformers with drawn values; returns the number of its parameters."""
    import transformers

    made = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    model = getattr(transformers, config["architectures"][0])(made)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            drawn = torch.randn(param.shape, generator=generator)
            if param.dim() > 1:
                param.copy_(0.1 * drawn)
            else:  # weights of norms lie around 1 or 0, as they begin
                param.add_(0.1 * drawn)
    model.save_pretrained(folder)
    return model.num_parameters()
