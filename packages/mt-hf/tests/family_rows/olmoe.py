"""OLMoE: expert weights with and without normalisation, biases, groups of keys."""

from family_row import Row, decoder

SIZES = [
    {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 24},
    {"attention_bias": True, "norm_topk_prob": True, "num_experts_per_tok": 3},
    {"num_key_value_heads": 4, "tie_word_embeddings": True, "num_experts_per_tok": 1},
]


def draw(index, random):
    experts = {"num_experts": 6, "num_experts_per_tok": 2}
    return decoder(random, **{**experts, **SIZES[index]})


ROW = Row(name="olmoe", model="OlmoeForCausalLM", draw=draw, draws=len(SIZES), has_experts=True)
