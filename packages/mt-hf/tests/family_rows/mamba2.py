"""Mamba-2: one group, several and one for each head; biases, step sizes with limits, tied heads."""

from family_row import Row

SIZES = [
    {"n_groups": 1, "conv_kernel": 3, "chunk_size": 5},
    {"n_groups": 2, "use_bias": True, "time_step_limit": (0.5, 0.9)},
    {"n_groups": 4, "use_conv_bias": False, "tie_word_embeddings": True, "chunk_size": 4},
]


def draw(index, random):
    return {
        "vocab_size": 4 * random.randint(10, 16),
        "hidden_size": 16,
        "num_heads": 4,
        "head_dim": 8,
        "state_size": 2 * random.randint(2, 5),
        "num_hidden_layers": 2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **SIZES[index],
    }


ROW = Row(
    name="mamba2",
    model="Mamba2ForCausalLM",
    draw=draw,
    draws=len(SIZES),
    layouts=("tp2", "pp2", "tp2pp2"),
)
