"""Llama 4: chunks and layers without a rotation, temperatures, experts in all layers and some."""

from family_row import Row, decoder

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SIZES = [
    {
        "num_attention_heads": 6,
        "hidden_size": 24,
        "head_dim": 10,
        "num_hidden_layers": 3,
        "no_rope_layers": [1, 0, 1],
        "rope_parameters": LLAMA3,
        "interleave_moe_layer_step": 2,
    },
    {
        "num_experts_per_tok": 2,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 4,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "attn_scale": 0.6,
    },
    {
        "moe_layers": [1],
        "use_qk_norm": False,
        "no_rope_layers": [0, 1],
        "attn_temperature_tuning": False,
        "layer_types": ["chunked_attention", "full_attention"],
    },
]


def draw(index, random):
    sizes = {
        "head_dim": 8,
        "num_local_experts": 6,
        "intermediate_size_mlp": 20,
        "attention_chunk_size": 5,
        "floor_scale": 3,
    }
    return decoder(random, **{**sizes, **SIZES[index]})


ROW = Row(
    name="llama4_text",
    module="llama4",
    config="Llama4TextConfig",
    model="Llama4ForCausalLM",
    draw=draw,
    draws=len(SIZES),
    has_experts=True,
)
