"""What families of decoders with Llama's tensor names share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar, cast

from mt_files import Checks, shorten

from mt_model.choice import Activation, QKNorm
from mt_model.config import LayerConfig, ModelConfig, NormConfig
from mt_model.families.rope import check_rope, read_rope, write_rope
from mt_model.hugging_face.link import Link
from mt_model.kinds import AttentionConfig, MLPConfig
from mt_model.rope import RopeConfig

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
_NORMS: Mapping[str, str] = MappingProxyType(
    {"input_layernorm": "mixer_norm", "post_attention_layernorm": "feed_forward_norm"}
)


@dataclass(frozen=True, kw_only=True)
class DecoderFields:
    """The fields of config.json that Llama, Mistral and Qwen have in common.

    The defaults are those of transformers, as a config.json may leave them out.
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
        if self.hidden_act not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            checks.add("hidden_act", f"{shorten(self.hidden_act)} is not known; known are {known}")
        if not checks.errors:
            check_rope(checks, self, lambda: self.rope)
        checks.done()

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key and value heads, and the width of a head."""
        heads, hidden = self.num_attention_heads, self.hidden_size
        return heads, self.num_key_value_heads or heads, self.head_dim or hidden // heads

    @property
    def rope(self) -> RopeConfig:
        """How heads turn.

        Raises:
            ValueError: A kind or a field is not known, or a value is refused.
        """
        return read_rope(self)


FieldsT = TypeVar("FieldsT", bound=DecoderFields)
EntryT = TypeVar("EntryT")
EntryLinks: TypeAlias = Callable[[str, str, EntryT, int], Iterator[Link]]
"""Yields the links of an entry: prefixes of tensors and of parameters, the entry, the width."""


def decoder_config(
    given: DecoderFields,
    *,
    windows: Iterable[int | None],
    qk_norm: QKNorm = "none",
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
) -> ModelConfig:
    """Return the model of a config.json; `windows` has one for each layer."""
    heads, groups, width = given.heads
    mlp = MLPConfig(
        ffn_size=given.intermediate_size, activation=ACTIVATIONS[given.hidden_act], bias=mlp_bias
    )
    layers = tuple(
        LayerConfig(
            mixer=AttentionConfig(
                num_heads=heads,
                num_kv_heads=groups,
                head_dim=width,
                rope=given.rope,
                qk_norm=qk_norm,
                qkv_bias=qkv_bias,
                out_bias=out_bias,
                dropout=given.attention_dropout,
                window=window,
            ),
            feed_forward=mlp,
        )
        for window in windows
    )
    return ModelConfig(
        vocab_size=given.vocab_size,
        hidden_size=given.hidden_size,
        max_sequence_length=given.max_position_embeddings,
        layers=layers,
        norm=NormConfig(kind="rms", eps=given.rms_norm_eps, rounds_first=True),
        tied=given.tie_word_embeddings,
        init_std=given.initializer_range or ModelConfig.init_std,
    )


def decoder_fields(kind: type[FieldsT], config: ModelConfig, **rest: Any) -> FieldsT:
    """Return the fields of a model whose layers are as the first one; the engine compares all.

    Args:
        kind: Which fields.
        config: The model.
        rest: What the family has beside those that all have.

    Raises:
        ValueError: The first layer is not attention and an MLP.
    """
    mixer, mlp = first_layer(config)
    known = {item.name for item in fields(kind)}
    common = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": mlp.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "hidden_act": ACTIVATION_NAMES[mlp.activation],
        "max_position_embeddings": config.max_sequence_length,
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm.eps,
        "tie_word_embeddings": config.tied,
        "attention_dropout": mixer.dropout,
        **write_rope(mixer.rope),
    }
    return kind(**{name: value for name, value in common.items() if name in known}, **rest)


def first_layer(config: ModelConfig) -> tuple[AttentionConfig, MLPConfig]:
    """Return the mixer and the feed-forward of the first layer.

    Raises:
        ValueError: They are not attention and an MLP.
    """
    mixer, mlp = config.layers[0].mixer, config.layers[0].feed_forward
    if not isinstance(mixer, AttentionConfig) or not isinstance(mlp, MLPConfig):
        found = " and ".join(type(entry).__name__ for entry in config.layers[0].entries)
        raise ValueError(f"layer 0 is {found}, and not attention and an MLP")  # noqa: TRY004
    return mixer, mlp


def decoder_links(
    config: ModelConfig,
    *,
    norms: Mapping[str, str] = _NORMS,
    attention: EntryLinks[AttentionConfig] | None = None,
    mlp: EntryLinks[MLPConfig] | None = None,
) -> Iterator[Link]:
    """Yield what Llama, Mistral and Qwen call each parameter.

    Args:
        config: The model.
        norms: Ours for the name of each norm of a layer, in families that have others.
        attention: What is linked in place of `attention_links`.
        mlp: What is linked in place of `mlp_links`.
    """
    hidden, rows = config.hidden_size, (config.vocab_size, config.hidden_size)
    yield Link(source="model.embed_tokens.weight", shape=rows, target="embedding.weight")
    for index, layer in enumerate(config.layers):
        source, target = f"model.layers.{index}", f"layers.{index}"
        mixer, entry = cast("AttentionConfig", layer.mixer), cast("MLPConfig", layer.feed_forward)
        for norm, ours in norms.items():
            name = f"{source}.{norm}.weight"
            yield Link(source=name, shape=(hidden,), target=f"{target}.{ours}.weight")
        link = attention or attention_links
        yield from link(f"{source}.self_attn", f"{target}.mixer", mixer, hidden)
        link = mlp or mlp_links
        yield from link(f"{source}.mlp", f"{target}.feed_forward", entry, hidden)
    yield Link(source="model.norm.weight", shape=(hidden,), target="final_norm.weight")
    if not config.tied:
        yield Link(source="lm_head.weight", shape=rows, target="head.weight")


def attention_links(
    source: str, target: str, mixer: AttentionConfig, hidden: int, *, out: str = "o_proj"
) -> Iterator[Link]:
    """Yield separate projections of queries, keys and values, and the one back, with norms.

    Args:
        source: Prefix of the tensors.
        target: Prefix of the parameters.
        mixer: The attention.
        hidden: Width of the residual stream.
        out: Name of the projection back.
    """
    queries = mixer.queries_per_group
    width = {"q": mixer.num_heads * mixer.head_dim}
    width["k"] = width["v"] = mixer.num_kv_heads * mixer.head_dim
    places = {"q": (0, queries), "k": (queries, queries + 1), "v": (queries + 1, queries + 2)}
    leaves = {"weight": (hidden,), **({"bias": ()} if mixer.qkv_bias else {})}
    for leaf, rest in leaves.items():
        for part, place in places.items():
            yield Link(
                source=f"{source}.{part}_proj.{leaf}",
                shape=(width[part], *rest),
                target=f"{target}.qkv.{leaf}",
                box={1: place},
            )
    name, shape = f"{source}.{out}.weight", (hidden, width["q"])
    yield Link(source=name, shape=shape, target=f"{target}.out.weight")
    if mixer.out_bias:
        yield Link(source=f"{source}.{out}.bias", shape=(hidden,), target=f"{target}.out.bias")
    if mixer.qk_norm in ("head", "whole"):
        whole = mixer.qk_norm == "whole"
        for part in ("q", "k"):
            name, size = f"{part}_norm.weight", width[part] if whole else mixer.head_dim
            yield Link(source=f"{source}.{name}", shape=(size,), target=f"{target}.{name}")


def mlp_links(source: str, target: str, mlp: MLPConfig, hidden: int) -> Iterator[Link]:
    """Yield gate, up and down projections.

    Args:
        source: Prefix of the tensors.
        target: Prefix of the parameters.
        mlp: The feed-forward.
        hidden: Width of the residual stream.
    """
    ffn, parts = mlp.ffn_size, {"gate_proj": (0, 1), "up_proj": (1, 2)}
    for name, place in parts.items() if mlp.gated else [("up_proj", None)]:
        box = {} if place is None else {0: place}
        for leaf, shape in (("weight", (ffn, hidden)), ("bias", (ffn,))):
            if leaf == "weight" or mlp.bias:
                yield Link(
                    source=f"{source}.{name}.{leaf}",
                    shape=shape,
                    target=f"{target}.up.{leaf}",
                    box=box,
                )
    for leaf, shape in (("weight", (hidden, ffn)), ("bias", (hidden,))):
        if leaf == "weight" or mlp.bias:
            name = f"{source}.down_proj.{leaf}"
            yield Link(source=name, shape=shape, target=f"{target}.down.{leaf}")
