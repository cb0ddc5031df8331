"""Norms, layers and scales against the modules of Hugging Face transformers, with equal weights."""

import importlib

import pytest
import torch
from mt_hf import from_pretrained, save_pretrained
from mt_model import GPT, NormConfig, gpt
from mt_model.block.norm import build_norm

SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 48}
SIZES |= {"intermediate_size": 24, "max_position_embeddings": 32}
OURS = {"hidden_size": 16, "num_heads": 4, "num_layers": 2, "vocab_size": 48, "ffn_size": 24}
OURS |= {"max_sequence_length": 32}
NORMS = {
    ("llama", "LlamaRMSNorm"): {"rounds_first": True},
    ("gemma2", "Gemma2RMSNorm"): {"zero_centered": True},
    ("qwen3_next", "Qwen3NextRMSNorm"): {"zero_centered": True},
    ("gpt_oss", "GptOssRMSNorm"): {},
    ("olmo2", "Olmo2RMSNorm"): {},
    ("cohere", "CohereLayerNorm"): {"kind": "layer", "bias": False},
    ("olmo", "OlmoLayerNorm"): {"kind": "layer", "weight": False},
}


def theirs(family, name):
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


def rand(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_that_of_its_family(name, dtype):
    form = NormConfig(**{"eps": 1e-5, **NORMS[name]})
    cls = theirs(*name)
    other = cls(32) if name[0] == "olmo" else cls(32, eps=1e-5)
    other = other.to(dtype)
    norm = build_norm(form, 32, dtype=dtype).to_empty(device="cpu")
    if form.weight:
        weight = 0.3 * rand(32, seed=1, dtype=dtype) + (not form.zero_centered)
        with torch.no_grad():
            norm.weight.copy_(weight)
            other.weight.copy_(weight)
    x = rand(64, 32, dtype=dtype)
    ours, expected = norm(x), other(x)
    assert ours.dtype == expected.dtype == dtype
    if dtype == torch.bfloat16:  # equal bits, but for a value between two
        assert (ours != expected).float().mean() < 0.005
    else:
        torch.testing.assert_close(ours, expected, rtol=2e-6, atol=1e-6)


def fused_qkv(query, key, value, heads):
    """Rows [heads * D, hidden] of each as [groups, queries + 2, D, hidden]; vectors alike."""
    groups = heads[1]
    rest = query.shape[1:]
    q, k, v = (x.unflatten(0, (groups, -1, 4)) for x in (query, key, value))
    return torch.cat((q, k, v), 1).view(groups, -1, 4, *rest)


def llama_like(state, i, kv_heads):
    """Our layer's weights from a layer with Llama's names."""
    old, new = f"model.layers.{i}.", f"layers.{i}."
    qkv = (state[f"{old}self_attn.{n}_proj.weight"] for n in "qkv")
    mlp = [state[f"{old}mlp.{n}_proj.weight"] for n in ("gate", "up", "down")]
    return {
        f"{new}mixer.qkv.weight": fused_qkv(*qkv, (4, kv_heads)),
        f"{new}mixer.out.weight": state[f"{old}self_attn.o_proj.weight"].unflatten(1, (4, 4)),
        f"{new}feed_forward.up.weight": torch.stack(mlp[:2]),
        f"{new}feed_forward.down.weight": mlp[2],
    }


NAMES = {  # of norms in our layers and in theirs
    "pre": {
        "mixer_norm": "input_layernorm",
        "feed_forward_norm": "post_attention_layernorm",
    },
    "sandwich": {
        "mixer_norm": "input_layernorm",
        "mixer_output_norm": "post_attention_layernorm",
        "feed_forward_norm": "pre_feedforward_layernorm",
        "feed_forward_output_norm": "post_feedforward_layernorm",
    },
}
GEMMA2 = {
    "head_dim": 4,
    "query_pre_attn_scalar": 9,
    "sliding_window": 3,
    "num_key_value_heads": 2,
    "attn_implementation": "eager",
}
GRANITE = {
    "num_key_value_heads": 2,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.4,
    "logits_scaling": 8.0,
    "tie_word_embeddings": True,
}


def their_model(family, prefix, options):
    module = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    config = getattr(module, f"{prefix}Config")(**SIZES, **options)
    torch.manual_seed(0)
    model = theirs(family, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param + 0.2 * torch.randn_like(param))
    return model


def assert_same_logits_and_gradients(other, config, weights):
    ours = GPT(config)
    left = {name for name, _ in ours.named_parameters()} - weights.keys()
    assert not left, left
    ours.load_state_dict(weights)
    tokens = torch.randint(3, 48, (2, 10), generator=torch.Generator().manual_seed(1))
    expected, found = other(tokens).logits, ours(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    grad = rand(*found.shape, seed=5)
    (given,) = torch.autograd.grad(expected, other.get_input_embeddings().weight, grad)
    (own,) = torch.autograd.grad(found, ours.embedding.weight, grad)
    assert (own - given).norm() < 1e-5 * given.norm()


def test_gemma_2_is_sandwiched_scaled_and_capped():
    other = their_model("gemma2", "Gemma2", GEMMA2)
    state = other.state_dict()
    config = gpt(
        **OURS,
        num_kv_heads=2,
        norm_eps=1e-6,
        norm_zero_centered=True,
        norms="sandwich",
        activation="gelu_tanh",
        embedding_scale=4.0,
        softcap=50.0,
        logit_softcap=30.0,
        attention_scale=1 / 3,
        window=3,
    )
    layers = config.to_dict()["layers"][0]
    wide = {**layers, "repeat": 1, "mixer": {**layers["mixer"], "window": None}}
    config = type(config).from_dict({**config.to_dict(), "layers": [{**layers, "repeat": 1}, wide]})
    weights = {"embedding.weight": state["model.embed_tokens.weight"]}
    weights["final_norm.weight"] = state["model.norm.weight"]
    for i in range(2):
        weights |= llama_like(state, i, 2)
        for own, name in NAMES["sandwich"].items():
            weights[f"layers.{i}.{own}.weight"] = state[f"model.layers.{i}.{name}.weight"]
    assert_same_logits_and_gradients(other, config, weights)


def test_granite_scales_embeddings_residuals_scores_and_logits():
    other = their_model("granite", "Granite", GRANITE)
    state = other.state_dict()
    config = gpt(
        **OURS,
        num_kv_heads=2,
        norm_eps=1e-6,
        norm_rounds_first=True,
        embedding_scale=12.0,
        residual_scale=0.22,
        attention_scale=0.4,
        logit_scale=0.125,
    )
    weights = {"embedding.weight": state["model.embed_tokens.weight"]}
    weights["final_norm.weight"] = state["model.norm.weight"]
    for i in range(2):
        weights |= llama_like(state, i, 2)
        for own, name in NAMES["pre"].items():
            weights[f"layers.{i}.{own}.weight"] = state[f"model.layers.{i}.{name}.weight"]
    assert_same_logits_and_gradients(other, config, weights)


@pytest.mark.parametrize("parallel", [True, False])
def test_gpt_neox_has_both_branches_on_one_input(parallel):
    options = {"use_parallel_residual": parallel, "rotary_pct": 1.0}
    other = their_model("gpt_neox", "GPTNeoX", options)
    state = other.state_dict()
    config = gpt(
        **OURS,
        norm="layer",
        parallel=parallel,
        activation="gelu",
        gated=False,
        bias=True,
        tied=False,
    )
    weights = {
        "embedding.weight": state["gpt_neox.embed_in.weight"],
        "head.weight": other.get_output_embeddings().weight.detach(),
    }
    for leaf in ("weight", "bias"):
        weights[f"final_norm.{leaf}"] = state[f"gpt_neox.final_layer_norm.{leaf}"]
        for i in range(2):
            old, new = f"gpt_neox.layers.{i}.", f"layers.{i}."
            qkv = state[f"{old}attention.query_key_value.{leaf}"]  # by head: query, key, value
            out = state[f"{old}attention.dense.{leaf}"]
            weights |= {
                f"{new}mixer_norm.{leaf}": state[f"{old}input_layernorm.{leaf}"],
                f"{new}feed_forward_norm.{leaf}": state[f"{old}post_attention_layernorm.{leaf}"],
                f"{new}mixer.qkv.{leaf}": qkv.unflatten(0, (4, 3, 4)),
                f"{new}mixer.out.{leaf}": out.unflatten(1, (4, 4)) if out.dim() == 2 else out,
                f"{new}feed_forward.up.{leaf}": state[f"{old}mlp.dense_h_to_4h.{leaf}"],
                f"{new}feed_forward.down.{leaf}": state[f"{old}mlp.dense_4h_to_h.{leaf}"],
            }
    assert_same_logits_and_gradients(other, config, weights)


def test_bert_embeds_types_and_norms_the_sum():
    from transformers.models.bert.configuration_bert import BertConfig

    other = theirs("bert", "BertEmbeddings")(BertConfig(**SIZES, layer_norm_eps=1e-5)).eval()
    config = gpt(**OURS, positions="learned", norm="layer", embedding_norm=True, token_types=2)
    model = GPT(config).eval()
    state = {
        "embedding.weight": other.word_embeddings.weight,
        "embedding.positions.weight": other.position_embeddings.weight,
        "embedding.types.weight": other.token_type_embeddings.weight,
        "embedding.norm.weight": other.LayerNorm.weight,
        "embedding.norm.bias": other.LayerNorm.bias,
    }
    with torch.no_grad():
        for name, value in state.items():
            value.copy_(rand(*value.shape, seed=len(name)))
    model.load_state_dict(state, strict=False)
    tokens = torch.arange(12).view(2, 6)
    types = tokens % 2
    found, _ = model.begin(None, {"tokens": tokens, "token_types": types})
    torch.testing.assert_close(found, other(tokens, token_type_ids=types), rtol=1e-5, atol=1e-6)
    without, _ = model.begin(None, {"tokens": tokens})
    torch.testing.assert_close(without, other(tokens), rtol=1e-5, atol=1e-6)


def test_types_for_a_model_without_them_are_refused():
    tokens = torch.arange(6).view(1, 6)
    with pytest.raises(ValueError, match="has token_types, but the model was built with token_"):
        GPT(gpt(**OURS))(None, {"tokens": tokens, "token_types": tokens % 2})


def test_the_scale_of_embeddings_is_rounded_as_gemma_rounds_it():
    scale = 48.3
    model = GPT(gpt(**OURS, embedding_scale=scale), dtype=torch.bfloat16)
    tokens = torch.arange(12).view(2, 6)
    weight = model.embedding.weight
    cls = theirs("gemma2", "Gemma2TextScaledWordEmbedding")
    other = cls(48, 16, padding_idx=0, embed_scale=scale).bfloat16()
    other.load_state_dict({"weight": weight})
    found, _ = model.begin(None, {"tokens": tokens})
    assert torch.equal(found, other(tokens))
    assert not torch.equal(found, (weight[tokens].float() * scale).bfloat16())


@pytest.mark.parametrize("rounds_first", [True, False])
def test_a_llama_is_exported_wherever_its_norms_round_and_with_a_z_loss(rounds_first, tmp_path):
    forms = {"norm_rounds_first": rounds_first, "z_loss": 1e-4, "embedding_std": 0.1}
    model = GPT(gpt(**OURS, norm_eps=1e-6, **forms))
    save_pretrained(model, tmp_path / "out")
    again = from_pretrained(tmp_path / "out")
    assert again.config.norm.rounds_first  # as transformers computes it
    tokens = torch.arange(12).view(2, 6)
    torch.testing.assert_close(again(tokens), model(tokens), rtol=1e-5, atol=1e-5)
