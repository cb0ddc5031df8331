"""Phi-1 and Phi-2 as a package of their own, which `port_family.py` holds to transformers.

This is `mt_phi.py`, and beside it is a pyproject.toml:
    [project]
    name = "mt-phi"
    version = "1.0"
    dependencies = ["mt-hf"]
    entry-points."mt.models" = { phi = "mt_phi:FAMILY" }
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mt_hf import Family, Link
from mt_model import ModelConfig, RopeConfig, gpt


@dataclass(frozen=True, kw_only=True)
class PhiFields:
    """Every field of config.json that changes numbers, with the defaults of transformers."""

    vocab_size: int = 51200
    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_hidden_layers: int = 24
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    max_position_embeddings: int = 2048
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    resid_pdrop: float = 0.0
    embd_pdrop: float = 0.0
    attention_dropout: float = 0.0
    rope_parameters: Mapping[str, Any] | None = None
    rope_theta: float = 10000.0  # this and the next two: before version 5 of transformers
    partial_rotary_factor: float = 0.5
    rope_scaling: None = None  # other values than this are refused, and so below
    hidden_act: Literal["gelu_new"] = "gelu_new"
    tie_word_embeddings: Literal[False] = False
    qk_layernorm: Literal[False] = False


# What all Phis have in common and the names of their sizes, as arguments of `gpt`.
PHI = {"norm": "layer", "parallel": True, "shared_norm": True, "activation": "gelu_tanh"}
PHI |= {"gated": False, "bias": True, "tied": False, "head_bias": True}
SIZES = {name: name for name in ("vocab_size", "hidden_size", "attention_dropout")}
SIZES |= {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
SIZES |= {"num_kv_heads": "num_key_value_heads", "ffn_size": "intermediate_size"}
SIZES |= {"max_sequence_length": "max_position_embeddings", "norm_eps": "layer_norm_eps"}
SIZES |= {"init_std": "initializer_range", "dropout": "resid_pdrop"}


def read(given: PhiFields) -> ModelConfig:
    if given.embd_pdrop != given.resid_pdrop:
        raise ValueError(f"embd_pdrop={given.embd_pdrop} is not resid_pdrop={given.resid_pdrop}")
    old = {"rope_theta": given.rope_theta, "partial_rotary_factor": given.partial_rotary_factor}
    turns = {"rope_type": "default", **old, **(given.rope_parameters or {})}
    if turns.pop("rope_type") != "default" or turns.keys() != old.keys():
        raise ValueError(f"rope_parameters: {given.rope_parameters} is not built")
    rope = RopeConfig(theta=turns["rope_theta"], fraction=turns["partial_rotary_factor"])
    sizes = {ours: getattr(given, theirs) for ours, theirs in SIZES.items()}
    return gpt(**sizes, **PHI, rope=rope)


def write(config: ModelConfig) -> PhiFields:
    mixer, mlp = config.layers[0].mixer, config.layers[0].feed_forward
    if len(set(config.layers)) > 1 or mixer.rotary is None:
        raise ValueError("its layers differ, or do not turn their heads")
    found = {**vars(mlp), **vars(mixer), **vars(config), "attention_dropout": mixer.dropout}
    found |= {"norm_eps": config.norm.eps, "num_layers": config.num_layers}
    sizes = {theirs: found[ours] for ours, theirs in SIZES.items()}
    turns = {"rope_theta": mixer.rope.theta, "partial_rotary_factor": mixer.rope.fraction}
    return PhiFields(**sizes, **turns, embd_pdrop=config.dropout)


def both(source: str, target: str, *shape: int, **box: Any) -> Iterator[Link]:
    yield Link(source=f"{source}.weight", shape=shape, target=f"{target}.weight", **box)
    yield Link(source=f"{source}.bias", shape=shape[:1], target=f"{target}.bias", **box)


def links(config: ModelConfig) -> Iterator[Link]:
    hidden, rows = config.hidden_size, (config.vocab_size, config.hidden_size)
    yield Link(source="model.embed_tokens.weight", shape=rows, target="embedding.weight")
    for i, layer in enumerate(config.layers):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        mixer, ffn = layer.mixer, layer.feed_forward.ffn_size
        kv, n = mixer.num_kv_heads * mixer.head_dim, mixer.num_heads // mixer.num_kv_heads
        for part, first, last in (("q", 0, n), ("k", n, n + 1), ("v", n + 1, n + 2)):
            name, size = f"{theirs}.self_attn.{part}_proj", (last - first) * kv
            yield from both(name, f"{ours}.mixer.qkv", size, hidden, box={1: (first, last)})
        yield from both(f"{theirs}.self_attn.dense", f"{ours}.mixer.out", hidden, n * kv)
        yield from both(f"{theirs}.mlp.fc1", f"{ours}.feed_forward.up", ffn, hidden)
        yield from both(f"{theirs}.mlp.fc2", f"{ours}.feed_forward.down", hidden, ffn)
        yield from both(f"{theirs}.input_layernorm", f"{ours}.mixer_norm", hidden)
    yield from both("model.final_layernorm", "final_norm", hidden)
    yield from both("lm_head", "head", *rows)


NAMES = {"architectures": ("PhiForCausalLM",), "model_types": ("phi",)}
FAMILY = Family(name="phi", **NAMES, fields=PhiFields, read=read, write=write, links=links)
