"""Qwen2-MoE: a shared expert, experts in some layers, windows in every other one or as listed."""

from family_row import Row, decoder

SIZES = [
    {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 24},
    {"decoder_sparse_step": 2, "norm_topk_prob": True, "qkv_bias": False},
    {"norm_topk_prob": True, "num_experts_per_tok": 1},
    {
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": 4,
        "num_hidden_layers": 3,
    },
]


def draw(index, random):
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    shared = {"shared_expert_intermediate_size": 12}
    return decoder(random, rope_theta=1e6, **{**experts, **shared, **SIZES[index]})


ROW = Row(
    name="qwen2_moe", model="Qwen2MoeForCausalLM", draw=draw, draws=len(SIZES), has_experts=True
)
