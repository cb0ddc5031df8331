"""BERT: sizes other than powers of two, one and three token types, tied and untied heads."""

from family_row import Row

SIZES = [
    {"num_attention_heads": 3, "hidden_size": 30, "intermediate_size": 44, "hidden_act": "gelu"},
    {"num_attention_heads": 4, "hidden_size": 20, "hidden_act": "relu", "type_vocab_size": 3},
    {"num_attention_heads": 2, "hidden_size": 24, "tie_word_embeddings": False},
    {
        "num_attention_heads": 1,
        "hidden_size": 18,
        "type_vocab_size": 1,
        "hidden_act": "gelu_pytorch_tanh",
    },
]
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def draw(index, random):
    sizes = {"vocab_size": 4 * random.randint(10, 16), "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 4 * random.randint(5, 12), "max_position_embeddings": 40}
    eps = random.choice([1e-12, 1e-5])
    return {**sizes, "layer_norm_eps": eps, "pad_token_id": None, **NO_DROPOUT, **SIZES[index]}


def one_bias(model):
    """Without tied weights transformers has a second bias, which nothing reads."""
    head = model.cls.predictions
    head.bias.copy_(head.decoder.bias)


ROW = Row(
    name="bert",
    model="BertForMaskedLM",
    draw=draw,
    draws=len(SIZES),
    generates=False,
    prepare=one_bias,
)
