"""GPT-2: its own widths, tied and untied heads, scores scaled by the layer or not at all."""

from family_row import Row

SIZES = [
    {"n_head": 4, "n_embd": 24, "n_inner": 44},
    {"n_head": 2, "n_embd": 20, "scale_attn_by_inverse_layer_idx": True},
    {"n_head": 3, "n_embd": 24, "tie_word_embeddings": False, "scale_attn_weights": False},
]
NEITHER = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
NO_IDS = {"bos_token_id": None, "eos_token_id": None}


def draw(index, random):
    sizes = {"vocab_size": 4 * random.randint(10, 16), "n_layer": 2, "n_positions": 80}
    activation = random.choice(["gelu_new", "gelu", "gelu_pytorch_tanh"])
    return {**sizes, "activation_function": activation, **NEITHER, **NO_IDS, **SIZES[index]}


ROW = Row(name="gpt2", model="GPT2LMHeadModel", draw=draw, draws=len(SIZES))
