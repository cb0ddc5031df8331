"""OLMo-2: groups of keys, biases, scaled angles, tied and untied heads."""

from family_row import Row, decoder

SIZES = [
    {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 24},
    {"num_attention_heads": 4, "num_key_value_heads": 4, "attention_bias": True},
    {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "linear", "factor": 2.5},
    },
]


def draw(index, random):
    return decoder(random, rope_theta=5e5, **SIZES[index])


ROW = Row(name="olmo2", model="Olmo2ForCausalLM", draw=draw, draws=len(SIZES))
