"""Llama: biases on either side, wide and narrow heads, tied and untied heads."""

from family_row import Row, decoder

SIZES = [
    {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 24, "head_dim": 6},
    {"num_attention_heads": 4, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    {"num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": True},
]


def draw(index, random):
    return decoder(random, rope_theta=random.choice([1e4, 5e5]), **SIZES[index])


ROW = Row(name="llama", model="LlamaForCausalLM", draw=draw, draws=len(SIZES))
