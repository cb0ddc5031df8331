"""T5: plain and gated feed-forwards, heads of other widths than the stream, tied and own heads."""

from family_row import Row

SIZES = [
    {"num_heads": 4, "d_kv": 4, "d_model": 20, "num_layers": 2, "num_decoder_layers": 3},
    {"num_heads": 2, "d_kv": 6, "d_model": 16, "num_layers": 3, "num_decoder_layers": 2},
    {"num_heads": 4, "d_kv": 3, "d_model": 24, "num_layers": 1, "num_decoder_layers": 1},
    {"num_heads": 2, "d_kv": 8, "d_model": 12, "num_layers": 2, "num_decoder_layers": 2},
]
KINDS = [  # T5 1.0; 1.1 with the head in the folder; tied without a scale; another activation
    {},
    {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    {"feed_forward_proj": "gated-silu"},
]


def draw(index, random):
    sizes = {"vocab_size": 4 * random.randint(10, 16), "d_ff": 4 * random.randint(5, 9)}
    buckets = random.choice([6, 8, 32])
    sizes |= {"relative_attention_num_buckets": buckets, "relative_attention_max_distance": 40}
    ids = {"pad_token_id": 0, "decoder_start_token_id": index, "eos_token_id": None}
    return {**sizes, "dropout_rate": 0.0, **ids, **SIZES[index], **KINDS[index]}


ROW = Row(
    name="t5",
    model="T5ForConditionalGeneration",
    draw=draw,
    draws=len(SIZES),
    has_encoder=True,
    own_heads=(1,),
)
