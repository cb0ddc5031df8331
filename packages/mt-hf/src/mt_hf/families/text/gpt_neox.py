"""GPT-NeoX and Pythia: parallel branches, and a rotary embedding of few channels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from mt_files import Checks
from mt_model import (
    MAX_LAYERS,
    AttentionConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
)

from mt_hf.family.decoder import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    check_activation,
    check_heads,
    end_links,
    first_layer,
)
from mt_hf.family.family import Family
from mt_hf.family.link import Link, leaves
from mt_hf.family.rope import check_rope, read_rope, write_rope
from mt_hf.family.table import model_fields, model_values


@dataclass(frozen=True, kw_only=True)
class GPTNeoXFields:
    """The fields of a GPT-NeoX's config.json, with the defaults of transformers.

    `classifier_dropout` belongs to a head that a language model does not have. Before version 5 of
    transformers, `rotary_emb_base` and `rotary_pct` were used instead of `rope_parameters`.
    """

    vocab_size: int = 50432
    hidden_size: int = 6144
    num_hidden_layers: int = 44
    num_attention_heads: int = 64
    intermediate_size: int = 24576
    hidden_act: str = "gelu"
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    classifier_dropout: float = 0.1
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    use_parallel_residual: bool = True
    attention_bias: bool = True
    rope_theta: float | None = None
    rotary_emb_base: float | None = None
    rotary_pct: float = 0.25
    rope_scaling: Mapping[str, Any] | None = None
    rope_parameters: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
        checks.at_least(1, *sizes, "num_hidden_layers", "num_attention_heads")
        checks.at_most(MAX_LAYERS, "num_hidden_layers")
        check_activation(checks, "hidden_act", self.hidden_act)
        check_heads(checks, self.hidden_size, self.num_attention_heads)
        if not checks.errors:
            check_rope(checks, self, lambda: self.rope)
        checks.done()

    @property
    def rope(self) -> RopeConfig:
        """The rotary embedding, from any of its places in config.json."""
        found = dict(self.rope_scaling or self.rope_parameters or {})
        rope = read_rope(self, partial=True)
        if found.get("rope_theta") is None and self.rotary_emb_base is not None:
            rope = replace(rope, theta=self.rotary_emb_base)
        if found.get("partial_rotary_factor") is None:
            rope = replace(rope, fraction=self.rotary_pct)
        return rope


def _read(given: GPTNeoXFields) -> ModelConfig:
    layer = LayerConfig(
        mixer=AttentionConfig(
            num_heads=given.num_attention_heads,
            num_kv_heads=given.num_attention_heads,
            head_dim=given.hidden_size // given.num_attention_heads,
            rope=given.rope,
            qkv_bias=given.attention_bias,
            out_bias=given.attention_bias,
            dropout=given.attention_dropout,
        ),
        feed_forward=MLPConfig(
            ffn_size=given.intermediate_size,
            activation=ACTIVATIONS[given.hidden_act],
            gated=False,
            bias=True,
        ),
        parallel=given.use_parallel_residual,
    )
    return ModelConfig(
        **model_values(given),
        layers=(layer,) * given.num_hidden_layers,
        norm=NormConfig(kind="layer", eps=given.layer_norm_eps),
        dropout=given.hidden_dropout,
    )


def _write(config: ModelConfig) -> GPTNeoXFields:
    mixer, mlp = first_layer(config)
    if mixer.rope is None:
        raise ValueError("layer 0 turns no heads")
    rope = write_rope(mixer.rope)
    return GPTNeoXFields(
        **model_fields(config),
        num_attention_heads=mixer.num_heads,
        intermediate_size=mlp.ffn_size,
        hidden_act=ACTIVATION_NAMES[mlp.activation],
        attention_dropout=mixer.dropout,
        hidden_dropout=config.dropout,
        layer_norm_eps=config.norm.eps,
        use_parallel_residual=config.layers[0].parallel,
        attention_bias=mixer.qkv_bias,
        rotary_emb_base=rope["rope_theta"],
        rotary_pct=mixer.rope.fraction,
        rope_scaling=rope["rope_scaling"],
    )


def _links(config: ModelConfig) -> Iterator[Link]:
    hidden = config.hidden_size
    yield from end_links(config, "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out")
    for index, layer in enumerate(config.layers):
        source, target = f"gpt_neox.layers.{index}", f"layers.{index}"
        ffn = cast("MLPConfig", layer.feed_forward).ffn_size
        bias = cast("AttentionConfig", layer.mixer).qkv_bias
        yield from leaves(f"{source}.input_layernorm", f"{target}.mixer_norm", hidden)
        norm, ours = f"{source}.post_attention_layernorm", f"{target}.feed_forward_norm"
        yield from leaves(norm, ours, hidden)
        # Each head has its rows of the query, the key and the value, as ours do.
        fused, ours = f"{source}.attention.query_key_value", f"{target}.mixer.qkv"
        yield from leaves(fused, ours, 3 * hidden, hidden, bias=bias)
        out, ours = f"{source}.attention.dense", f"{target}.mixer.out"
        yield from leaves(out, ours, hidden, hidden, bias=bias)
        ours = f"{target}.feed_forward"
        yield from leaves(f"{source}.mlp.dense_h_to_4h", f"{ours}.up", ffn, hidden)
        yield from leaves(f"{source}.mlp.dense_4h_to_h", f"{ours}.down", hidden, ffn)


FAMILY = Family(
    name="gpt_neox",
    architectures=("GPTNeoXForCausalLM",),
    fields=GPTNeoXFields,
    read=_read,
    write=_write,
    links=_links,
    ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    copies=(("embed_out.weight", "gpt_neox.embed_in.weight"),),
)
