"""Llama: biases on either side, wide and narrow heads, tied and untied heads, every rope_type."""

from family_row import Row, decoder

SIZES = [
    {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 24, "head_dim": 6},
    {"num_attention_heads": 4, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    {"num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": True},
    {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.5,
            "high_freq_factor": 3.0,
            "original_max_position_embeddings": 24,
        }
    },
    {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 8,
            "original_max_position_embeddings": 32,
        }
    },
    {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
]


def draw(index, random):
    return decoder(random, rope_theta=random.choice([1e4, 5e5]), **SIZES[index])


ROW = Row(name="llama", model="LlamaForCausalLM", draw=draw, draws=len(SIZES))
