"""Qwen3-Next: alternating gated delta nets and gated attention, and experts in most layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mt_files import Checks
from mt_model import (
    MAX_LAYERS,
    AttentionConfig,
    GatedDeltaNetConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    RopeConfig,
)

from mt_hf.families.text.mamba2 import check_silu
from mt_hf.family.decoder import decoder_links
from mt_hf.family.experts import feed_forward_links
from mt_hf.family.family import Family
from mt_hf.family.link import Link, leaves
from mt_hf.family.rope import check_rope, read_rope, write_rope
from mt_hf.family.table import Names, model_fields, model_values, read_values, write_values

_LINEAR, _FULL = "linear_attention", "full_attention"
_ATTENTION: Names = {
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "attention_bias": "qkv_bias",
    "attention_dropout": "dropout",
}
_EXPERTS: Names = {
    "num_experts": "num_experts",
    "moe_intermediate_size": "ffn_size",
    "num_experts_per_tok": "top_k",
    "norm_topk_prob": "normalize",
    "router_aux_loss_coef": "aux_loss",
    "shared_expert_intermediate_size": "shared_size",
}
_DELTA: Names = {
    "linear_conv_kernel_dim": "conv_size",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
    "linear_num_key_heads": "num_key_heads",
    "linear_num_value_heads": "num_value_heads",
}


@dataclass(frozen=True, kw_only=True)
class Qwen3NextFields:
    """The fields of a Qwen3-Next's config.json, with the defaults of transformers.

    Layers in `mlp_only_layers`, and those whose number from 1 is no multiple of
    `decoder_sparse_step`, have an MLP of `intermediate_size`; with 0 `num_experts` all have. The
    loss of `router_aux_loss_coef` counts in training here regardless of `output_router_logits`; it
    changes no logit.
    """

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 48
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 256
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_dropout: float = 0.0
    rope_theta: float | None = None
    partial_rotary_factor: float = 0.25
    rope_parameters: Mapping[str, Any] | None = None
    rope_scaling: Mapping[str, Any] | None = None
    layer_types: tuple[str, ...] | None = None
    full_attention_interval: int = 4
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] | None = None
    num_experts: int = 512
    num_experts_per_tok: int = 10
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    norm_topk_prob: bool = True
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001

    def __post_init__(self) -> None:
        checks = Checks(self)
        counts = ("num_hidden_layers", "full_attention_interval", "decoder_sparse_step")
        checks.at_least(1, *counts, "num_experts_per_tok", "moe_intermediate_size")
        checks.at_least(1, "shared_expert_intermediate_size")
        checks.at_least(0, "num_experts")
        checks.at_most(MAX_LAYERS, "num_hidden_layers")
        check_silu(checks, "hidden_act", self.hidden_act)
        checks.done()
        if len(self.kinds) != self.num_hidden_layers or not {*self.kinds} <= {_LINEAR, _FULL}:
            text = f"{_LINEAR} or {_FULL} is needed for each of {self.num_hidden_layers} layers"
            checks.add("layer_types", text)
        if not checks.errors:
            check_rope(checks, self, lambda: self.rope)
        checks.done()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer."""
        every, count = self.full_attention_interval, self.num_hidden_layers
        turns = tuple(_LINEAR if (i + 1) % every else _FULL for i in range(count))
        return self.layer_types or turns

    @property
    def rope(self) -> RopeConfig:
        """The rotary embedding, from any of its places in config.json."""
        found = self.rope_scaling or self.rope_parameters or {}
        rope = read_rope(self, partial=True)
        if found.get("partial_rotary_factor") is not None:
            return rope
        return replace(rope, fraction=self.partial_rotary_factor)

    @property
    def feed_forwards(self) -> list[MLPConfig | MoEConfig]:
        """The feed-forward of each layer."""
        mlp = MLPConfig(ffn_size=self.intermediate_size)
        if not self.num_experts:
            return [mlp] * self.num_hidden_layers
        moe = MoEConfig(**read_values(self, _EXPERTS), shared_gate=True)
        every, plain = self.decoder_sparse_step, self.mlp_only_layers or ()
        layers = range(self.num_hidden_layers)
        return [mlp if i in plain or (i + 1) % every else moe for i in layers]


def _read(given: Qwen3NextFields) -> ModelConfig:
    attention = AttentionConfig(
        **read_values(given, _ATTENTION),
        rope=given.rope,
        qk_norm="head",
        out_bias=given.attention_bias,
        output_gate=True,
    )
    delta = GatedDeltaNetConfig(**read_values(given, _DELTA))
    mixers = {_LINEAR: delta, _FULL: attention}
    layers = zip(given.kinds, given.feed_forwards, strict=True)
    return ModelConfig(
        **model_values(given),
        layers=tuple(LayerConfig(mixer=mixers[kind], feed_forward=each) for kind, each in layers),
        norm=NormConfig(eps=given.rms_norm_eps, zero_centered=True),
        positions="rope" if _FULL in given.kinds else "none",
    )


def _write(config: ModelConfig) -> Qwen3NextFields:
    found: dict[str, Any] = {}
    kinds, dense = [], []
    for index, layer in enumerate(config.layers):
        mixer, entry = layer.mixer, layer.feed_forward
        is_known = isinstance(mixer, GatedDeltaNetConfig | AttentionConfig)
        if not is_known or not isinstance(entry, MLPConfig | MoEConfig):
            names = " and ".join(type(each).__name__ for each in layer.entries)
            text = f"layer {index} is {names}, and not a delta net or attention, and a feed-forward"
            raise ValueError(text)
        kinds.append(_FULL if isinstance(mixer, AttentionConfig) else _LINEAR)
        if isinstance(entry, MLPConfig):
            dense.append(index)
            found["intermediate_size"] = entry.ffn_size
        else:
            found |= write_values(entry, _EXPERTS)
        found |= _fields_of(mixer)
    return Qwen3NextFields(
        **model_fields(config),
        rms_norm_eps=config.norm.eps,
        layer_types=tuple(kinds),
        mlp_only_layers=tuple(dense),
        **{"num_experts": 0, **found},
    )


def _fields_of(mixer: AttentionConfig | GatedDeltaNetConfig) -> dict[str, Any]:
    """Return the fields of one layer for all layers of its kind; the engine compares them all."""
    if isinstance(mixer, GatedDeltaNetConfig):
        return write_values(mixer, _DELTA)
    rope = RopeConfig() if mixer.rope is None else mixer.rope
    return {
        **write_values(mixer, _ATTENTION),
        "partial_rotary_factor": rope.fraction,
        **write_rope(rope),
    }


def _mixer_links(
    source: str, target: str, mixer: AttentionConfig | GatedDeltaNetConfig, hidden: int
) -> Iterator[Link]:
    """Yield the tensors of one mixer."""
    if isinstance(mixer, AttentionConfig):
        yield from _attention_links(source, target, mixer, hidden)
    else:
        source = f"{source.removesuffix('self_attn')}linear_attn"
        yield from _delta_net_links(source, target, mixer, hidden)


def _delta_net_links(
    source: str, target: str, mixer: GatedDeltaNetConfig, hidden: int
) -> Iterator[Link]:
    """Yield the tensors of one delta net; its convolution has the channels of q, then k, then v."""
    keys, values = mixer.num_key_heads, mixer.num_value_heads * mixer.value_dim
    for name, ours, shape in (
        ("in_proj_qkvz.weight", "qkvz.weight", (keys * sum(mixer.parts), hidden)),
        ("in_proj_ba.weight", "ba.weight", (2 * mixer.num_value_heads, hidden)),
        ("A_log", "A_log", (mixer.num_value_heads,)),
        ("dt_bias", "dt_bias", (mixer.num_value_heads,)),
        ("norm.weight", "norm.weight", (mixer.value_dim,)),
        ("out_proj.weight", "out.weight", (hidden, values)),
    ):
        yield Link(source=f"{source}.{name}", shape=shape, target=f"{target}.{ours}")
    channels, start = sum(mixer.parts[:3]), 0
    for width in mixer.parts[:3]:
        yield Link(
            source=f"{source}.conv1d.weight",
            shape=(keys * channels, 1, mixer.conv_size),
            part={0: (keys * start, keys * (start + width))},
            target=f"{target}.conv.weight",
            box={1: (start, start + width)},
        )
        start += width


def _attention_links(
    source: str, target: str, mixer: AttentionConfig, hidden: int
) -> Iterator[Link]:
    """Yield the tensors of one attention: each head's gate follows its query in `q_proj`."""
    queries, width = mixer.queries_per_group, mixer.head_dim
    parts = {"weight": (hidden,), **({"bias": ()} if mixer.qkv_bias else {})}
    for leaf, rest in parts.items():
        for head in range(mixer.num_heads):
            group, place = divmod(head, queries)
            for offset, first in ((0, queries), (width, 0)):  # gates come first in ours
                start = 2 * head * width + offset
                yield Link(
                    source=f"{source}.q_proj.{leaf}",
                    shape=(2 * mixer.num_heads * width, *rest),
                    part={0: (start, start + width)},
                    target=f"{target}.qkv.{leaf}",
                    box={0: (group, group + 1), 1: (first + place, first + place + 1)},
                )
        for name, place in (("k_proj", 2 * queries), ("v_proj", 2 * queries + 1)):
            yield Link(
                source=f"{source}.{name}.{leaf}",
                shape=(mixer.num_kv_heads * width, *rest),
                target=f"{target}.qkv.{leaf}",
                box={1: (place, place + 1)},
            )
    back = (hidden, mixer.num_heads * width)
    yield from leaves(f"{source}.o_proj", f"{target}.out", *back, bias=mixer.out_bias)
    for norm in ("q_norm", "k_norm"):
        yield from leaves(f"{source}.{norm}", f"{target}.{norm}", width, bias=False)


FAMILY = Family(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    fields=Qwen3NextFields,
    read=_read,
    write=_write,
    links=partial(decoder_links, attention=_mixer_links, mlp=feed_forward_links),
    ignored=(".rotary_emb.inv_freq", "mtp."),
)
