"""Mixtral: one or two of many experts or all of them, windows and none."""

from family_row import Row, decoder

SIZES = [
    {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 24, "num_local_experts": 4},
    {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 4},
    {"num_local_experts": 4, "num_experts_per_tok": 1},
    {"num_local_experts": 2, "head_dim": 10, "tie_word_embeddings": True},
]


def draw(index, random):
    return decoder(random, rope_theta=1e6, **SIZES[index])


ROW = Row(name="mixtral", model="MixtralForCausalLM", draw=draw, draws=len(SIZES), has_experts=True)
