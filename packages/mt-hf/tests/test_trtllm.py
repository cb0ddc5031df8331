"""Checkpoints of TensorRT-LLM: its documents' names, shapes and ranks, and the model's values.

TensorRT-LLM itself is not installed. The tables are written from its documents (checkpoint.md) and
from what its converters of Llama, Qwen, Mixtral and Gemma name, cut and join.
"""

import json

import pytest
import torch
import transformers
from family_row import ROWS
from mt_hf import ExchangeError, export_trtllm, open_pretrained
from safetensors.torch import load_file

LLAMA = {
    **{"vocab_size": 50, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4},
    **{"max_position_embeddings": 64, "attention_bias": True},
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}
# A rank of tp 2: 3 heads of queries and one of keys and of values, each 4 wide.
LAYER = {
    "attention.qkv.weight": (3 * 4 + 4 + 4, 24),
    "attention.qkv.bias": (3 * 4 + 4 + 4,),
    "attention.dense.weight": (24, 3 * 4),
    "attention.dense.bias": (24,),
    "mlp.fc.weight": (18, 24),
    "mlp.gate.weight": (18, 24),
    "mlp.proj.weight": (24, 18),
    "input_layernorm.weight": (24,),
    "post_layernorm.weight": (24,),
}
FIRST = {
    "transformer.vocab_embedding.weight": (50, 24),
    **{f"transformer.layers.{n}.{name}": shape for n in range(2) for name, shape in LAYER.items()},
}
LAST = {
    **{f"transformer.layers.0.{name}": shape for name, shape in LAYER.items()},
    "transformer.ln_f.weight": (24,),
    "lm_head.weight": (25, 24),
}


def llama(folder, **given):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, **given}))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(3)))
    model.save_pretrained(folder)
    return open_pretrained(folder)


def test_names_shapes_ranks_and_config_are_of_its_documents(tmp_path) -> None:
    source = llama(tmp_path / "source")
    made = export_trtllm(source, tmp_path / "out", tp=2, pp=2)
    assert (made.architecture, made.ranks, made.windows) == ("LlamaForCausalLM", 4, None)
    names = {"config.json", *(f"rank{rank}.safetensors" for rank in range(4))}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    for rank, expected in enumerate((FIRST, FIRST, LAST, LAST)):
        found = load_file(tmp_path / "out" / f"rank{rank}.safetensors")
        assert {name: tuple(tensor.shape) for name, tensor in found.items()} == expected
        assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out/config.json").read_text()) == {
        **{"architecture": "LlamaForCausalLM", "dtype": "bfloat16", "logits_dtype": "float32"},
        **{"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2},
        **{"head_size": 4, "hidden_size": 24, "intermediate_size": 36, "vocab_size": 50},
        **{"max_position_embeddings": 64, "norm_epsilon": 1e-6, "hidden_act": "silu"},
        **{"position_embedding_type": "rope_gpt_neox", "rotary_base": 10000.0},
        "rotary_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0},
        **{"attn_bias": True, "mlp_bias": False, "tie_word_embeddings": False},
        **{"use_parallel_embedding": False, "embedding_sharding_dim": 0},
        "mapping": {"world_size": 4, "tp_size": 2, "pp_size": 2},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
    }


def ranks_of(folder):
    """The mapping's sizes, and the tensors of each rank by stage and rank of tp."""
    config = json.loads((folder / "config.json").read_text())
    tp, pp = config["mapping"]["tp_size"], config["mapping"]["pp_size"]
    files = [load_file(folder / f"rank{rank}.safetensors") for rank in range(tp * pp)]
    return config, [files[stage * tp : (stage + 1) * tp] for stage in range(pp)]


def joined(folder):
    """The tensors of a checkpoint by the names of Hugging Face, joined from all ranks."""
    config, stages = ranks_of(folder)
    found, layer, layers = {}, 0, config["num_hidden_layers"]
    for stage, ranks in enumerate(stages):
        first, count = layer, layers // len(stages) + (stage < layers % len(stages))
        for name in ranks[0]:
            parts = [each[name] for each in ranks]
            if name.startswith("transformer.layers."):
                number, leaf = name.removeprefix("transformer.layers.").split(".", 1)
                target = f"model.layers.{first + int(number)}"
                found |= {f"{target}.{k}": v for k, v in own(leaf, parts, config).items()}
            else:
                found |= outside(name, parts, config)
        layer += count
    return found


def outside(name, parts, config):
    if name == "lm_head.weight":
        return {name: torch.cat(parts)[: config["vocab_size"]]}
    if name == "transformer.ln_f.weight":
        return {"model.norm.weight": same(parts)}
    cut = config["use_parallel_embedding"]
    return {"model.embed_tokens.weight": torch.cat(parts) if cut else same(parts)}


def own(leaf, parts, config):
    """The tensors of a layer of Hugging Face that one of its tensors has."""
    block, kind = leaf.rsplit(".", 1)
    names = {
        "attention.dense": ("self_attn.o_proj", None if kind == "bias" else 1),
        "mlp.gate": ("mlp.up_proj", 0),
        "mlp.proj": ("mlp.down_proj", 1),
        "mlp.fc": ("mlp.gate_proj", 0),
        "mlp.router": ("block_sparse_moe.gate", None),
        "attention.q_layernorm": ("self_attn.q_norm", None),
        "attention.k_layernorm": ("self_attn.k_norm", None),
        "input_layernorm": ("input_layernorm", None),
        "post_layernorm": ("post_attention_layernorm", None),
        "pre_feedforward_layernorm": ("pre_feedforward_layernorm", None),
        "post_feedforward_layernorm": ("post_feedforward_layernorm", None),
    }
    if block == "attention.qkv":
        return qkv(kind, parts, config)
    if "moe" in config and block in ("mlp.fc", "mlp.proj"):
        return experts(block, parts)
    theirs, dim = names[block]
    return {f"{theirs}.{kind}": same(parts) if dim is None else torch.cat(parts, dim)}


def qkv(kind, parts, config):
    width, tp = config["head_size"], len(parts)
    heads, groups = config["num_attention_heads"] // tp, max(1, config["num_key_value_heads"] // tp)
    split = [each.split([heads * width, groups * width, groups * width]) for each in parts]
    repeats = max(1, tp // config["num_key_value_heads"])
    found = {"q": torch.cat([each[0] for each in split])}
    for index, name in ((1, "k"), (2, "v")):
        copies = [each[index] for each in split]
        for n, copy in enumerate(copies):
            assert torch.equal(copy, copies[n // repeats * repeats])
        found[name] = torch.cat(copies[::repeats])
    return {f"self_attn.{name}_proj.{kind}": tensor for name, tensor in found.items()}


def experts(block, parts):
    if block == "mlp.proj":
        whole = torch.cat(parts, 2)
        return {f"block_sparse_moe.experts.{n}.w2.weight": each for n, each in enumerate(whole)}
    halves = [each.chunk(2, 1) for each in parts]
    found = {}
    for index, name in enumerate(("w3", "w1")):
        whole = torch.cat([each[index] for each in halves], 1)
        found |= {f"block_sparse_moe.experts.{n}.{name}.weight": e for n, e in enumerate(whole)}
    return found


def same(parts):
    assert all(torch.equal(parts[0], each) for each in parts)
    return parts[0]


# Family, draw, tp and pp.
JOINS = [
    ("llama", 0, 2, 2),
    ("llama", 2, 4, 1),  # four ranks share a head of keys
    ("qwen2", 0, 2, 1),
    ("qwen3", 0, 2, 2),
    ("mistral", 0, 1, 2),
    ("mixtral", 0, 2, 2),
    ("gemma2", 0, 2, 1),
    ("gemma3_text", 0, 2, 1),
]


@pytest.mark.parametrize(("family", "index", "tp", "pp"), JOINS)
def test_joined_ranks_are_the_model(tmp_path, family, index, tp, pp) -> None:
    row = next(row for row in ROWS if row.name == family)
    row.build(index).save_pretrained(tmp_path / "source")
    source = open_pretrained(tmp_path / "source")
    export_trtllm(source, tmp_path / "out", kind="f32", tp=tp, pp=pp)
    found, expected = joined(tmp_path / "out"), load_file(tmp_path / "source/model.safetensors")
    if source.given["tie_word_embeddings"]:
        expected.pop("lm_head.weight", None)
        head = found.pop("lm_head.weight", None)
        assert head is None or torch.equal(head, found["model.embed_tokens.weight"])
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        is_raised = family.startswith("gemma") and "norm" in name
        assert torch.equal(found[name], value + 1 if is_raised else value), name


def test_a_head_is_padded_to_the_ranks_and_routers_stay_wide(tmp_path) -> None:
    source = llama(tmp_path / "source", num_key_value_heads=3, num_hidden_layers=1)
    export_trtllm(source, tmp_path / "out", kind="f32", tp=3)
    _, [ranks] = ranks_of(tmp_path / "out")
    head = torch.cat([each["lm_head.weight"] for each in ranks])
    assert head.shape == (51, 24)
    assert torch.equal(head[:50], source.tensors["lm_head.weight"].map())
    assert not head[50:].any()
    row = next(row for row in ROWS if row.name == "mixtral")
    row.build(1).save_pretrained(tmp_path / "experts")
    made = export_trtllm(open_pretrained(tmp_path / "experts"), tmp_path / "mixtral", kind="f16")
    assert made.windows == (4, 4)
    config, [[only]] = ranks_of(tmp_path / "mixtral")
    kinds = {name.rsplit(".", 2)[1]: tensor.dtype for name, tensor in only.items()}
    assert kinds["router"] == torch.float32
    assert kinds["fc"] == torch.float16
    assert config["moe"] == {"num_experts": 6, "top_k": 3, "normalization_mode": 1}
    assert config["hidden_act"] == "swiglu"


@pytest.mark.parametrize(
    ("given", "how", "reason"),
    [
        ({"mlp_bias": True}, {}, "its MLPs have biases"),
        ({"hidden_act": "relu"}, {}, "its activation is relu"),
        ({}, {"tp": 4}, "tp 4 does not divide the 6 heads of queries"),
        ({}, {"tp": 3}, "tp 3 does not divide the 2 heads of keys"),
        ({}, {"pp": 4}, "pp 4: it has 3 layers"),
        ({}, {"tp": 0}, "must be 1 or more"),
    ],
)
def test_models_and_ranks_that_do_not_fit_are_named(tmp_path, given, how, reason) -> None:
    source = llama(tmp_path / "source", **given)
    with pytest.raises(ExchangeError, match=reason):
        export_trtllm(source, tmp_path / "out", **how)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_family_without_a_mapping_is_named(tmp_path) -> None:
    row = next(row for row in ROWS if row.name == "gpt2")
    row.build(0).save_pretrained(tmp_path / "source")
    with pytest.raises(ExchangeError, match="gpt2 has no mapping to TensorRT-LLM"):
        export_trtllm(open_pretrained(tmp_path / "source"), tmp_path / "out")
