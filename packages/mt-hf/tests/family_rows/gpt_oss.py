"""GPT-OSS: windows in every other layer and as listed, scaled and plain angles, tight limits."""

from family_row import Row, decoder

PLAIN = {"rope_type": "default", "rope_theta": 5000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
SIZES = [
    {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 24, "head_dim": 8},
    {"rope_parameters": YARN, "sliding_window": 4, "swiglu_limit": 0.5, "num_experts_per_tok": 1},
    {
        "rope_parameters": PLAIN,
        "layer_types": ["full_attention", "sliding_attention"],
        "attention_bias": False,
        "tie_word_embeddings": True,
    },
]


def draw(index, random):
    experts = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 6}
    return decoder(random, **{**experts, "sliding_window": 5, **SIZES[index]})


ROW = Row(name="gpt_oss", model="GptOssForCausalLM", draw=draw, draws=len(SIZES), has_experts=True)
