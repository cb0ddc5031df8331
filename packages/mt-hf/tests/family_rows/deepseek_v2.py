"""DeepSeek-V2: with and without a latent of queries, greedy and of groups, YaRN, biases."""

from family_row import Row, decoder

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 6.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 16,
}
SIZES = [
    {"num_attention_heads": 6, "q_lora_rank": 10, "rope_parameters": YARN},
    {
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 2,
        "topk_method": "group_limited_greedy",
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 16.0,
        "num_experts_per_tok": 1,
        "rope_parameters": {**YARN, "mscale": 0.5, "mscale_all_dim": 1.0},
    },
]


def draw(index, random):
    sizes = {
        "kv_lora_rank": 12,
        "q_lora_rank": 14,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": int(index == 0),
    }
    given = decoder(random, **{**sizes, **SIZES[index]})
    return {**given, "num_key_value_heads": given["num_attention_heads"]}


ROW = Row(
    name="deepseek_v2",
    model="DeepseekV2ForCausalLM",
    draw=draw,
    draws=len(SIZES),
    has_experts=True,
)
