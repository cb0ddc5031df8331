"""Qwen3: norms of queries and keys, with biases and without."""

from family_row import Row, decoder

SIZES = [
    {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 24, "head_dim": 10},
    {"attention_bias": True, "head_dim": 6, "tie_word_embeddings": True},
    {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "head_dim": 8},
]


def draw(index, random):
    return decoder(random, rope_theta=1e6, **SIZES[index])


ROW = Row(name="qwen3", model="Qwen3ForCausalLM", draw=draw, draws=len(SIZES))
