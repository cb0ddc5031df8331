"""mT5: a T5 of gated feed-forwards with a head of its own, and what else transformers takes."""

from family_row import Row

SIZES = [
    {"num_heads": 2, "d_kv": 6, "d_model": 16, "num_layers": 2, "num_decoder_layers": 3},
    {"num_heads": 4, "d_kv": 4, "d_model": 20, "num_layers": 3, "num_decoder_layers": 2},
]
KINDS = [{"feed_forward_proj": "relu"}, {}]  # tied; as published


def draw(index, random):
    sizes = {"vocab_size": 4 * random.randint(10, 16), "d_ff": 4 * random.randint(5, 9)}
    ids = {"pad_token_id": 0, "decoder_start_token_id": index, "eos_token_id": None}
    return {**sizes, "dropout_rate": 0.0, **ids, **SIZES[index], **KINDS[index]}


ROW = Row(
    name="mt5",
    model="MT5ForConditionalGeneration",
    draw=draw,
    draws=len(SIZES),
    has_encoder=True,
    own_heads=(1,),
)
