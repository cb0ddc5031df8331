"""Gemma 3's text model: two rotary embeddings, one scaled, windows in five of six and as listed.

The widths are squares: transformers keeps their roots in fp32 whatever the model's dtype is.
"""

from family_row import Row, decoder

FULL, LOCAL = "full_attention", "sliding_attention"
SIZES = [
    {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 36, "head_dim": 4},
    {
        "num_attention_heads": 4,
        "hidden_size": 16,
        "head_dim": 8,
        "query_pre_attn_scalar": 11,
        "hidden_activation": "gelu",
        "layer_types": [LOCAL, FULL],
        "rope_parameters": {
            FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
            LOCAL: {"rope_type": "default", "rope_theta": 30.0},
        },
    },
    {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "hidden_size": 16,
        "head_dim": 6,
        "attention_bias": True,
        "final_logit_softcapping": 3.0,
        "layer_types": [FULL, FULL],
        "tie_word_embeddings": False,
    },
]


def draw(index, random):
    window = random.choice([4, 5])
    return decoder(random, sliding_window=window, **{"tie_word_embeddings": True, **SIZES[index]})


ROW = Row(
    name="gemma3_text",
    module="gemma3",
    model="Gemma3ForCausalLM",
    config="Gemma3TextConfig",
    draw=draw,
    draws=len(SIZES),
)
