"""Qwen3-MoE: experts in all layers, in every second layer, and in layers without a plain MLP."""

from family_row import Row, decoder

SIZES = [
    {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 24, "head_dim": 10},
    {"decoder_sparse_step": 2, "norm_topk_prob": True, "attention_bias": True},
    {"mlp_only_layers": [0], "use_sliding_window": True, "sliding_window": 4},
]


def draw(index, random):
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    return decoder(random, rope_theta=1e6, **experts, **SIZES[index])


ROW = Row(
    name="qwen3_moe", model="Qwen3MoeForCausalLM", draw=draw, draws=len(SIZES), has_experts=True
)
