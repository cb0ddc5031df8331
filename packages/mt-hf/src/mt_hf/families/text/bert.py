"""BERT: bidirectional attention, norms after branches, token types, heads of its two objectives.

A `BertModel`, as sentence encoders are published, has no head: scores are products of its features
with the word embeddings, and its pooler is not read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from mt_files import Checks, shorten, to_plain
from mt_model import (
    MAX_LAYERS,
    AttentionConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    NormConfig,
    PooledHeadConfig,
    StackConfig,
)

from mt_hf.family.decoder import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    check_activation,
    check_heads,
    first_layer,
)
from mt_hf.family.encoder import encoder_layer_links
from mt_hf.family.family import Family
from mt_hf.family.link import Link, leaves
from mt_hf.family.table import model_fields, model_values

_TOKENS, _BOTH, _BARE = "BertForMaskedLM", "BertForPreTraining", "BertModel"
_CLASSES = "cls.seq_relationship"
_TIED_BIAS, _OWN_BIAS = "cls.predictions.bias", "cls.predictions.decoder.bias"
_UNREAD = (
    *("gradient_checkpointing", "classifier_dropout", "directionality", "pooler_fc_size"),
    *("pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"),
)


@dataclass(frozen=True, kw_only=True)
class BertFields:
    """The fields of a BERT's config.json, with the defaults of transformers.

    `architectures` decides the heads. Nothing reads `directionality` and the fields that begin with
    `pooler`, which are from the first release; `classifier_dropout` belongs to unsupported heads.
    """

    architectures: tuple[str, ...] | None = None
    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    tie_word_embeddings: bool = True
    position_embedding_type: str = "absolute"
    is_decoder: bool = False
    gradient_checkpointing: bool = False
    classifier_dropout: float | None = None
    directionality: str = "bidi"
    pooler_fc_size: int = 768
    pooler_num_attention_heads: int = 12
    pooler_num_fc_layers: int = 3
    pooler_size_per_head: int = 128
    pooler_type: str = "first_token_transform"

    def __post_init__(self) -> None:
        checks = Checks(self)
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        checks.at_least(1, *sizes, "intermediate_size", "max_position_embeddings")
        checks.at_least(1, "type_vocab_size")
        checks.at_most(MAX_LAYERS, "num_hidden_layers")
        check_activation(checks, "hidden_act", self.hidden_act)
        check_heads(checks, self.hidden_size, self.num_attention_heads)
        if self.position_embedding_type != "absolute":
            kind = shorten(self.position_embedding_type)
            checks.add("position_embedding_type", f"{kind} is not built; it is 'absolute'")
        if self.is_decoder:
            checks.add("is_decoder", "true: attention to earlier tokens alone is not built here")
        checks.done()

    @property
    def pooled_head(self) -> PooledHeadConfig | None:
        """The head for classes of pairs, if the architecture has it."""
        return PooledHeadConfig() if _BOTH in (self.architectures or ())[:1] else None

    @property
    def is_bare(self) -> bool:
        """Whether the architecture has no head."""
        return _BARE in (self.architectures or ())[:1]


def _read(given: BertFields) -> ModelConfig:
    activation = ACTIVATIONS[given.hidden_act]
    mixer = AttentionConfig(
        num_heads=given.num_attention_heads,
        num_kv_heads=given.num_attention_heads,
        head_dim=given.hidden_size // given.num_attention_heads,
        qkv_bias=True,
        out_bias=True,
        causal=False,
        dropout=given.attention_probs_dropout_prob,
    )
    mlp = MLPConfig(ffn_size=given.intermediate_size, activation=activation, gated=False, bias=True)
    layer = LayerConfig(mixer=mixer, feed_forward=mlp, norms="post", repeat=given.num_hidden_layers)
    values: dict[str, Any] = model_values(given)
    if given.is_bare:
        values["tied"] = True
    return ModelConfig(
        **values,
        layers=(layer,),
        norm=NormConfig(kind="layer", eps=given.layer_norm_eps),
        final_norm=False,
        positions="learned",
        embedding_norm=True,
        token_types=given.type_vocab_size,
        head_transform=None if given.is_bare else activation,
        head_bias=not given.is_bare,
        pooled_head=given.pooled_head,
        dropout=given.hidden_dropout_prob,
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    mixer, mlp = first_layer(config)
    architecture = _TOKENS if config.pooled_head is None else _BOTH
    fields = BertFields(
        architectures=(_BARE if config.head_transform is None else architecture,),
        **model_fields(config),
        num_attention_heads=mixer.num_heads,
        intermediate_size=mlp.ffn_size,
        hidden_act=ACTIVATION_NAMES[mlp.activation],
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=mixer.dropout,
        type_vocab_size=config.token_types,
        layer_norm_eps=config.norm.eps,
    )
    return {name: value for name, value in to_plain(fields).items() if name not in _UNREAD}


def _links(config: ModelConfig) -> Iterator[Link]:
    hidden, vocabulary = config.hidden_size, config.vocab_size
    base = "" if config.head_transform is None else "bert."
    tables = {
        "word_embeddings": ("embedding", vocabulary),
        "position_embeddings": ("embedding.positions", config.max_sequence_length),
        "token_type_embeddings": ("embedding.types", config.token_types),
    }
    for name, (target, rows) in tables.items():
        yield from leaves(f"{base}embeddings.{name}", target, rows, hidden, bias=False)
    yield from leaves(f"{base}embeddings.LayerNorm", "embedding.norm", hidden)
    for index, layer in enumerate(config.layers):
        yield from _layer_links(f"{base}encoder.layer.{index}", f"layers.{index}", layer, hidden)
    if config.head_transform is None:
        return
    head = "cls.predictions"
    yield from leaves(f"{head}.transform.dense", "head.transform", hidden, hidden)
    yield from leaves(f"{head}.transform.LayerNorm", "head.transform.norm", hidden)
    if not config.tied:
        yield from leaves(f"{head}.decoder", "head", vocabulary, hidden, bias=False)
    bias = _TIED_BIAS if config.tied else _OWN_BIAS
    yield Link(source=bias, shape=(vocabulary,), target="head.bias")
    if (pooled := config.pooled_head) is not None:
        yield from leaves("bert.pooler.dense", "pooled_head.dense", hidden, hidden)
        classes = "pooled_head.classifier"
        yield from leaves(_CLASSES, classes, pooled.num_classes, hidden)


def _layer_links(source: str, target: str, layer: LayerConfig, hidden: int) -> Iterator[Link]:
    yield from encoder_layer_links(source, target, layer, hidden, inner="self")
    norm = "output.LayerNorm"
    yield from leaves(f"{source}.attention.{norm}", f"{target}.mixer_output_norm", hidden)
    yield from leaves(f"{source}.{norm}", f"{target}.feed_forward_output_norm", hidden)


def _repeats(config: ModelConfig) -> Mapping[str, str]:
    """Return the copy of the decoder's bias in transformers, if the two are not tied."""
    return {} if config.tied else {_TIED_BIAS: _OWN_BIAS}


def _settle(config: StackConfig, names: Collection[str]) -> StackConfig:
    """Return the model with the head for pairs that published folders of `BertForMaskedLM` have."""
    config = cast("ModelConfig", config)
    if config.pooled_head is None and f"{_CLASSES}.weight" in names:
        return replace(config, pooled_head=PooledHeadConfig())
    return config


FAMILY = Family(
    name="bert",
    architectures=(_TOKENS, _BOTH, _BARE),
    fields=BertFields,
    read=_read,
    write=_write,
    links=_links,
    ignored=("embeddings.position_ids", "pooler."),
    settle=_settle,
    copies=(
        ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        (_OWN_BIAS, _TIED_BIAS),
        (_TIED_BIAS, _OWN_BIAS),
    ),
    repeats=_repeats,
    endings={".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"},
)
