"""Nemotron-H: MLPs behind mixers or not, with biases and without."""

from family_row import Row

M, A, F = "linear_attention", "full_attention", "mlp"
SIZES = [
    {"layers_block_type": [M, F, A, F], "n_groups": 1},
    {"layers_block_type": [M, M, F, A], "n_groups": 2, "use_bias": True, "mlp_bias": True},
    {"layers_block_type": [A, M], "n_groups": 4, "use_conv_bias": False, "mlp_hidden_act": "silu"},
]


def draw(index, random):
    return {
        "vocab_size": 4 * random.randint(10, 16),
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "intermediate_size": 4 * random.randint(5, 12),
        "mamba_num_heads": 4,
        "mamba_head_dim": random.choice([4, 8]),
        "ssm_state_size": 2 * random.randint(2, 5),
        "chunk_size": 5,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **SIZES[index],
    }


ROW = Row(
    name="nemotron_h",
    model="NemotronHForCausalLM",
    draw=draw,
    draws=len(SIZES),
    layouts=("tp2", "pp2", "tp2pp2"),
    prefixes=("backbone.", "model."),
)
