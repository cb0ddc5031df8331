"""GPT-NeoX: parallel and serial branches, shares of channels that turn, tied and untied heads."""

from family_row import Row, decoder

SIZES = [
    {"num_attention_heads": 4, "hidden_size": 32},
    {"rotary_pct": 0.5, "use_parallel_residual": False, "attention_bias": False},
    {"rotary_pct": 1.0, "rotary_emb_base": 5000, "tie_word_embeddings": True},
]


def draw(index, random):
    given = decoder(random, hidden_act=random.choice(["gelu", "gelu_pytorch_tanh"]), **SIZES[index])
    del given["num_key_value_heads"], given["rms_norm_eps"]
    return given


ROW = Row(
    name="gpt_neox",
    model="GPTNeoXForCausalLM",
    draw=draw,
    draws=len(SIZES),
    prefixes=("embed_out.", "lm_head."),
)
