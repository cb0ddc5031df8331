"""Gemma 2: widths of heads, scales and caps of their own, windows in turns and as listed.

The widths are squares: transformers keeps their roots in fp32 whatever the model's dtype is.
"""

from family_row import Row, decoder

SIZES = [
    {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 36, "head_dim": 4},
    {
        "num_attention_heads": 4,
        "hidden_size": 16,
        "head_dim": 8,
        "query_pre_attn_scalar": 11,
        "hidden_activation": "gelu",
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "attention_bias": True,
    },
    {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "hidden_size": 16,
        "head_dim": 6,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "layer_types": ["full_attention", "sliding_attention"],
        "tie_word_embeddings": False,
    },
]


def draw(index, random):
    window = random.choice([4, 5])
    return decoder(random, sliding_window=window, **{"tie_word_embeddings": True, **SIZES[index]})


ROW = Row(name="gemma2", model="Gemma2ForCausalLM", draw=draw, draws=len(SIZES))
