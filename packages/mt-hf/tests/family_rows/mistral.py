"""Mistral: windows shorter and longer than the sequence, and none."""

from family_row import Row, decoder

SIZES = [
    {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 24, "sliding_window": 3},
    {"sliding_window": None, "head_dim": 10},
    {"sliding_window": 500, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
]


def draw(index, random):
    return decoder(random, rope_theta=1e6, **SIZES[index])


ROW = Row(name="mistral", model="MistralForCausalLM", draw=draw, draws=len(SIZES))
