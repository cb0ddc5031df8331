"""Qwen3-Next: delta nets and gated attention in turns, with and without experts, and YaRN."""

from family_row import Row, decoder

L, A = "linear_attention", "full_attention"
SIZES = [
    {"layer_types": [L, A], "num_experts": 0, "linear_num_value_heads": 2},
    {"layer_types": [A, L], "mlp_only_layers": [0, 1], "attention_bias": True, "head_dim": 16},
    {"layer_types": [A, L], "num_experts": 0, "tie_word_embeddings": True},
    {
        "layer_types": [L, A],
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 8,
            "original_max_position_embeddings": 32,
        },
        "partial_rotary_factor": 0.5,
    },
    {"layer_types": [A, L, A], "num_hidden_layers": 3, "decoder_sparse_step": 2},
]


def draw(index, random):
    sizes = {
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": random.choice([4, 6]),
        "linear_value_head_dim": random.choice([3, 5]),
        "linear_conv_kernel_dim": random.choice([2, 4]),
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 12,
    }
    return decoder(random, **{**sizes, **SIZES[index]})


ROW = Row(
    name="qwen3_next",
    model="Qwen3NextForCausalLM",
    draw=draw,
    draws=len(SIZES),
    layouts=("tp2", "pp2", "tp2pp2"),
    norm_center=0.0,
    has_experts=True,
)
