"""Decoders with Llama's tensor names, shared by several families."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar, cast

from mt_files import Checks, shorten
from mt_model import (
    MAX_LAYERS,
    Activation,
    AttentionConfig,
    LayerConfig,
    MLAConfig,
    MLPConfig,
    ModelConfig,
    NormConfig,
    Norms,
    RopeConfig,
    StackConfig,
)

from mt_hf.family.link import Link, leaves
from mt_hf.family.rope import check_rope, read_rope, write_rope
from mt_hf.family.table import model_fields, model_values

ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "quick_gelu": "gelu_quick",
        "relu": "relu",
        "relu2": "relu2",
    }
)
ACTIVATION_NAMES: Mapping[Activation, str] = MappingProxyType(
    {
        "silu": "silu",
        "gelu": "gelu",
        "gelu_tanh": "gelu_pytorch_tanh",
        "gelu_quick": "quick_gelu",
        "relu": "relu",
        "relu2": "relu2",
    }
)
_PROJECTIONS: Mapping[str, str] = MappingProxyType({part: f"{part}_proj" for part in "qkv"})
_NORMS: Mapping[str, str] = MappingProxyType(
    {"input_layernorm": "mixer_norm", "post_attention_layernorm": "feed_forward_norm"}
)


@dataclass(frozen=True, kw_only=True)
class DecoderFields:
    """Fields of config.json that Llama, Mistral and Qwen have in common.

    Defaults are taken from transformers, because a config.json may omit fields.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_dropout: float = 0.0
    rope_theta: float | None = None
    rope_scaling: Mapping[str, Any] | None = None
    rope_parameters: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        checks.at_least(1, *sizes, "num_attention_heads", "num_key_value_heads", "head_dim")
        checks.at_most(MAX_LAYERS, "num_hidden_layers")
        check_activation(checks, "hidden_act", self.hidden_act)
        if not checks.errors:
            check_rope(checks, self, lambda: self.rope)
        checks.done()

    @property
    def heads(self) -> tuple[int, int, int]:
        """Number of query heads, of key and value heads, and the width of a head."""
        heads, hidden = self.num_attention_heads, self.hidden_size
        return heads, self.num_key_value_heads or heads, self.head_dim or hidden // heads

    @property
    def rope(self) -> RopeConfig:
        """Rotary embedding of the heads.

        Raises:
            ValueError: A kind or a field is unknown, or a value is refused.
        """
        return read_rope(self)


FieldsT = TypeVar("FieldsT", bound=DecoderFields)
EntryT = TypeVar("EntryT")
EntryLinks: TypeAlias = Callable[[str, str, EntryT, int], Iterator[Link]]
"""Yields the links of an entry: prefixes of tensors and of parameters, the entry, the width."""


def decoder_config(
    given: DecoderFields,
    *,
    windows: Iterable[int | None] = (),
    bias: bool = False,
    mlp_bias: bool = False,
    norms: Norms = "pre",
    **rest: Any,
) -> ModelConfig:
    """Return the model of a config.json.

    Args:
        given: Fields of the config.json.
        windows: Window of each layer; no layer has one by default.
        bias: Whether the projections of attention have biases.
        mlp_bias: Whether the projections of the MLP have biases.
        norms: Place of the norms of each layer.
        rest: Further fields of the attention of each layer.
    """
    heads, groups, width = given.heads
    mixer = AttentionConfig(
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=width,
        rope=given.rope,
        dropout=given.attention_dropout,
        **{"qkv_bias": bias, "out_bias": bias, **rest},
    )
    activation = ACTIVATIONS[given.hidden_act]
    mlp = MLPConfig(ffn_size=given.intermediate_size, activation=activation, bias=mlp_bias)
    each = tuple(windows) or (None,) * given.num_hidden_layers
    layers = tuple(
        LayerConfig(mixer=replace(mixer, window=window), feed_forward=mlp, norms=norms)
        for window in each
    )
    return model_of(given, layers)


def model_of(given: DecoderFields, layers: tuple[LayerConfig, ...]) -> ModelConfig:
    """Return the model of a config.json, with these layers."""
    norm = NormConfig(kind="rms", eps=given.rms_norm_eps, rounds_first=True)
    return ModelConfig(**model_values(given), layers=layers, norm=norm)


def decoder_fields(kind: type[FieldsT], config: ModelConfig, **rest: Any) -> FieldsT:
    """Return the fields of a model whose layers equal the first one; the caller compares all.

    Args:
        kind: Class of the fields.
        config: The model.
        rest: Further fields of the family.

    Raises:
        ValueError: The first layer is not attention and an MLP.
    """
    mixer, mlp = first_layer(config)
    return fields_of(kind, config, mixer, mlp, **rest)


def fields_of(
    kind: type[FieldsT],
    config: ModelConfig,
    mixer: AttentionConfig | MLAConfig,
    mlp: MLPConfig,
    **rest: Any,
) -> FieldsT:
    """Return the fields of a model whose layers agree in everything that the fields describe.

    Args:
        kind: Class of the fields.
        config: The model.
        mixer: Attention of a layer.
        mlp: Feed-forward of a layer.
        rest: Further fields of the family.
    """
    known = {item.name for item in fields(kind)}
    common = {
        **model_fields(config),
        "intermediate_size": mlp.ffn_size,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": getattr(mixer, "num_kv_heads", mixer.num_heads),
        "head_dim": mixer.head_dim,
        "hidden_act": ACTIVATION_NAMES[mlp.activation],
        "rms_norm_eps": config.norm.eps,
        "attention_dropout": mixer.dropout,
        "attention_bias": mixer.out_bias,
        "mlp_bias": mlp.bias,
        "sliding_window": mixer.window if isinstance(mixer, AttentionConfig) else None,
        **write_rope(mixer.rope),
    }
    shared = {name: value for name, value in common.items() if name in known}
    return kind(**shared | rest)


def check_activation(checks: Checks, name: str, activation: str) -> None:
    """Add a problem for an unknown activation."""
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        checks.add(name, f"{shorten(activation)} is not known; known are {known}")


def check_heads(checks: Checks, hidden_size: int, num_attention_heads: int) -> None:
    """Add a problem for heads that do not divide the hidden size."""
    if not checks.errors and hidden_size % num_attention_heads:
        text = f"is not a multiple of num_attention_heads={num_attention_heads}"
        checks.add("hidden_size", f"{hidden_size} {text}")


def first_layer(config: StackConfig) -> tuple[AttentionConfig, MLPConfig]:
    """Return the mixer and the feed-forward of the first layer.

    Raises:
        ValueError: They are not attention and an MLP.
    """
    mixer, mlp = config.layers[0].mixer, config.layers[0].feed_forward
    if not isinstance(mixer, AttentionConfig) or not isinstance(mlp, MLPConfig):
        found = " and ".join(type(entry).__name__ for entry in config.layers[0].entries)
        raise ValueError(f"layer 0 is {found}, and not attention and an MLP")  # noqa: TRY004
    return mixer, mlp


def first_mixer(config: StackConfig) -> AttentionConfig:
    """Return the attention of the first layer.

    Raises:
        ValueError: The mixer is no attention.
    """
    mixer = config.layers[0].mixer
    if not isinstance(mixer, AttentionConfig):
        raise ValueError(f"layer 0 has {type(mixer).__name__}, and no attention")  # noqa: TRY004
    return mixer


def decoder_links(
    config: ModelConfig,
    *,
    norms: Mapping[str, str] = _NORMS,
    attention: EntryLinks[Any] | None = None,
    mlp: EntryLinks[Any] | None = None,
) -> Iterator[Link]:
    """Yield the links of each parameter, with the names of Llama, Mistral and Qwen.

    Args:
        config: The model.
        norms: Our name for each name of a layer's norms, for families with other norms.
        attention: Function to use instead of `attention_links`.
        mlp: Function to use instead of `mlp_links`.
    """
    hidden = config.hidden_size
    yield from end_links(config)
    for index, layer in enumerate(config.layers):
        source, target = f"model.layers.{index}", f"layers.{index}"
        mixer, entry = cast("Any", layer.mixer), cast("Any", layer.feed_forward)
        for norm, ours in norms.items():
            yield from leaves(f"{source}.{norm}", f"{target}.{ours}", hidden, bias=False)
        link = attention or attention_links
        yield from link(f"{source}.self_attn", f"{target}.mixer", mixer, hidden)
        link = mlp or mlp_links
        yield from link(f"{source}.mlp", f"{target}.feed_forward", entry, hidden)


def end_links(
    config: ModelConfig,
    embedding: str = "model.embed_tokens",
    norm: str = "model.norm",
    head: str = "lm_head",
) -> Iterator[Link]:
    """Yield the links of embedding, final norm and head.

    Args:
        config: The model.
        embedding: Name of the token embedding.
        norm: Name of the final norm.
        head: Name of the head's weight, if it is not tied to the embedding.
    """
    rows, bias = (config.vocab_size, config.hidden_size), config.norm.has_bias
    yield from leaves(embedding, "embedding", *rows, bias=False)
    yield from leaves(norm, "final_norm", config.hidden_size, bias=bias)
    if not config.tied:
        yield from leaves(head, "head", *rows, bias=False)


def attention_links(
    source: str,
    target: str,
    mixer: AttentionConfig,
    hidden: int,
    *,
    names: Mapping[str, str] = _PROJECTIONS,
    out: str = "o_proj",
) -> Iterator[Link]:
    """Yield the links of query, key, value and output projections, and of their norms.

    Args:
        source: Prefix of the tensors.
        target: Prefix of the parameters.
        mixer: The attention.
        hidden: Width of the residual stream.
        names: Names of the projections of queries, keys and values, by `q`, `k` and `v`.
        out: Name of the output projection.
    """
    queries = mixer.queries_per_group
    width = {"q": mixer.num_heads * mixer.head_dim}
    width["k"] = width["v"] = mixer.num_kv_heads * mixer.head_dim
    places = {"q": (0, queries), "k": (queries, queries + 1), "v": (queries + 1, queries + 2)}
    parts = {"weight": (hidden,), **({"bias": ()} if mixer.qkv_bias else {})}
    for leaf, rest in parts.items():
        for part, place in places.items():
            yield Link(
                source=f"{source}.{names[part]}.{leaf}",
                shape=(width[part], *rest),
                target=f"{target}.qkv.{leaf}",
                box={1: place},
            )
    back = (hidden, width["q"])
    yield from leaves(f"{source}.{out}", f"{target}.out", *back, bias=mixer.out_bias)
    if mixer.qk_norm in ("head", "whole"):
        whole = mixer.qk_norm == "whole"
        for part in ("q", "k"):
            name, size = f"{part}_norm", width[part] if whole else mixer.head_dim
            yield from leaves(f"{source}.{name}", f"{target}.{name}", size, bias=False)


def mlp_links(source: str, target: str, mlp: MLPConfig, hidden: int) -> Iterator[Link]:
    """Yield the links of gate, up and down projections.

    Args:
        source: Prefix of the tensors.
        target: Prefix of the parameters.
        mlp: The feed-forward.
        hidden: Width of the residual stream.
    """
    ffn, parts = mlp.ffn_size, {"gate_proj": (0, 1), "up_proj": (1, 2)}
    for name, place in parts.items() if mlp.gated else [("up_proj", None)]:
        box = {} if place is None else {0: place}
        for link in leaves(f"{source}.{name}", f"{target}.up", ffn, hidden, bias=mlp.bias):
            yield replace(link, box=box)
    yield from leaves(f"{source}.down_proj", f"{target}.down", hidden, ffn, bias=mlp.bias)
