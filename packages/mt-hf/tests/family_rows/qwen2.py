"""Qwen2: windows in no layer, in the upper layers, and in listed layers."""

from family_row import Row, decoder

LISTED = ["sliding_attention", "full_attention", "sliding_attention"]
SIZES = [
    {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 24},
    {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    {
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": LISTED,
        "num_hidden_layers": 3,
        "tie_word_embeddings": True,
    },
]


def draw(index, random):
    return decoder(random, rope_theta=1e6, **SIZES[index])


ROW = Row(name="qwen2", model="Qwen2ForCausalLM", draw=draw, draws=len(SIZES))
