"""Phi-3: windows, a share of channels that turns, and both divisors of longrope."""

from family_row import Row, decoder

SIZES = [
    {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "hidden_size": 48,
        "partial_rotary_factor": 0.75,
        "sliding_window": 7,
    },
    {
        "hidden_size": 32,
        "original_max_position_embeddings": 4,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.3, 1.7],
            "long_factor": [1.0, 2.5, 4.0, 9.0],
        },
    },
    {
        "hidden_size": 32,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "original_max_position_embeddings": 24,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.2],
            "long_factor": [3.0, 5.0],
        },
    },
]


def draw(index, random):
    return decoder(random, rope_theta=random.choice([1e4, 5e5]), **SIZES[index])


ROW = Row(name="phi3", model="Phi3ForCausalLM", draw=draw, draws=len(SIZES))
