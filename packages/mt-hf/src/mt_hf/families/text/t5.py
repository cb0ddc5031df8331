"""T5 and Flan-T5: an encoder and a decoder, each with relative biases and unscaled scores."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from mt_files import Checks, shorten, to_plain
from mt_model import (
    MAX_LAYERS,
    AttentionConfig,
    CrossAttentionConfig,
    MLPConfig,
    ModelConfig,
    NormConfig,
    RelativeConfig,
    StackConfig,
    encoder_decoder_layers,
)

from mt_hf.family.decoder import ACTIVATION_NAMES, ACTIVATIONS, attention_links, first_layer
from mt_hf.family.family import Family
from mt_hf.family.link import Link, leaves

_UNBOUNDED = 1 << 20  # tokens of a sequence, where config.json names no largest number
_HEAD = "lm_head.weight"
_PROJECTIONS = {part: part for part in "qkv"}
WITHOUT_HEAD = (
    "it has neither a decoder nor a head; read the {}ForConditionalGeneration that it was made of"
)
# Of them a config.json of ours says nothing.
_UNSAID = ("pad_token_id", "n_positions", "classifier_dropout", "output_past")


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderFields:
    """The common fields of T5's and mT5's config.json."""

    vocab_size: int
    d_model: int = 512
    d_kv: int = 64
    d_ff: int
    num_layers: int
    num_decoder_layers: int | None = None
    num_heads: int
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    dropout_rate: float = 0.1
    layer_norm_epsilon: float = 1e-6
    feed_forward_proj: str
    dense_act_fn: str | None = None
    is_gated_act: bool | None = None
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    decoder_start_token_id: int | None = None
    max_position_embeddings: int = _UNBOUNDED
    initializer_factor: float = 1.0
    n_positions: int | None = None
    classifier_dropout: float = 0.0
    output_past: bool | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads")
        checks.at_least(1, "num_decoder_layers", "max_position_embeddings")
        checks.at_most(MAX_LAYERS // 4, "num_layers", "num_decoder_layers")
        checks.at_least(0, "pad_token_id", "decoder_start_token_id")
        if not self.is_encoder_decoder:
            checks.add("is_encoder_decoder", "false: an encoder alone is not built")
        name, kind = self.activation
        if name not in ACTIVATIONS or kind not in ("", "gated"):
            text = f"{shorten(self.feed_forward_proj)} is not known; known are "
            checks.add("feed_forward_proj", text + f"{', '.join(ACTIVATIONS)}, and gated-...")
        elif self.dense_act_fn not in (None, name):
            text = f"{shorten(self.dense_act_fn)}, but feed_forward_proj says {name}"
            checks.add("dense_act_fn", text)
        elif self.is_gated_act not in (None, kind == "gated"):
            text = f"{self.is_gated_act}, but feed_forward_proj is {self.feed_forward_proj}"
            checks.add("is_gated_act", text)
        checks.done()

    @property
    def activation(self) -> tuple[str, str]:
        """Name of the activation, and whether it is gated."""
        kind, _, name = self.feed_forward_proj.rpartition("-")
        return ("gelu_new" if (kind, name) == ("gated", "gelu") else name), kind

    @property
    def scales(self) -> bool:
        """Whether the decoder's output is scaled by `d_model ** -0.5` before the head."""
        return False


@dataclass(frozen=True, kw_only=True)
class T5Fields(EncoderDecoderFields):
    """The fields of a T5's config.json, with the defaults of transformers.

    `dense_act_fn` and `is_gated_act` repeat `feed_forward_proj`. `n_positions`, the sequence
    length of pretraining, limits nothing, and `initializer_factor`, `classifier_dropout` and
    `output_past` change no logit. `gated-gelu` means the tanh form.
    """

    vocab_size: int = 32128
    d_ff: int = 2048
    num_layers: int = 6
    num_heads: int = 8
    feed_forward_proj: str = "relu"
    scale_decoder_outputs: bool | None = None

    @property
    def scales(self) -> bool:
        """Whether the decoder's output is scaled by `d_model ** -0.5` before the head."""
        named = self.scale_decoder_outputs
        return self.tie_word_embeddings if named is None else named


def _read(given: EncoderDecoderFields) -> ModelConfig:
    name, kind = given.activation
    attention = AttentionConfig(
        num_heads=given.num_heads,
        num_kv_heads=given.num_heads,
        head_dim=given.d_kv,
        dropout=given.dropout_rate,
        scale=1.0,
        score_bias=RelativeConfig(
            buckets=given.relative_attention_num_buckets,
            max_distance=given.relative_attention_max_distance,
        ),
    )
    mlp = MLPConfig(
        ffn_size=given.d_ff,
        activation=ACTIVATIONS[name],
        gated=kind == "gated",
        dropout=given.dropout_rate,
    )
    decoder = given.num_decoder_layers
    start = given.decoder_start_token_id
    return ModelConfig(
        vocab_size=given.vocab_size,
        hidden_size=given.d_model,
        max_sequence_length=given.max_position_embeddings,
        layers=encoder_decoder_layers(
            attention,
            mlp,
            encoder=given.num_layers,
            decoder=given.num_layers if decoder is None else decoder,
        ),
        norm=NormConfig(kind="rms", eps=given.layer_norm_epsilon, rounds_first=True),
        positions="none",
        tied=given.tie_word_embeddings,
        logit_scale=given.d_model**-0.5 if given.scales else 1.0,
        dropout=given.dropout_rate,
        encoder_layers=given.num_layers,
        decoder_start=(given.pad_token_id or 0) if start is None else start,
    )


def _settle(config: StackConfig, names: Collection[str]) -> StackConfig:
    """Decide from the stored tensors whether the head is tied.

    transformers ties the head if the folder has none, and otherwise uses the stored one,
    regardless of config.json, which only decides the scale.
    """
    config = cast("ModelConfig", config)
    if _HEAD not in names:
        return replace(config, tied=True)
    return config if config.logit_scale != 1 else replace(config, tied=False)


def fields_of(fields: type[EncoderDecoderFields], config: ModelConfig) -> dict[str, Any]:
    """Return the config.json fields of a model.

    Args:
        fields: The class of the family's fields.
        config: The model.

    Raises:
        ValueError: The encoder's first layer is not attention with a relative bias, and an MLP.
    """
    encoder, mlp = first_layer(config)
    bias = encoder.score_bias
    if not isinstance(bias, RelativeConfig):
        raise ValueError("layer 0 has no relative bias")  # noqa: TRY004
    name, act = _names(mlp)
    scale = {"scale_decoder_outputs": config.logit_scale != 1} if fields is T5Fields else {}
    found = fields(
        vocab_size=config.vocab_size,
        d_model=config.hidden_size,
        d_kv=encoder.head_dim,
        d_ff=mlp.ffn_size,
        num_layers=config.encoder_layers,
        num_decoder_layers=max(1, (config.num_layers - config.encoder_layers) // 2),
        num_heads=encoder.num_heads,
        relative_attention_num_buckets=bias.buckets,
        relative_attention_max_distance=bias.max_distance,
        dropout_rate=config.dropout,
        layer_norm_epsilon=config.norm.eps,
        feed_forward_proj=name,
        dense_act_fn=act,
        is_gated_act=mlp.gated,
        tie_word_embeddings=config.tied,
        decoder_start_token_id=config.decoder_start,
        max_position_embeddings=config.max_sequence_length,
        **scale,
    )
    return {name: value for name, value in to_plain(found).items() if name not in _UNSAID}


def _names(mlp: MLPConfig) -> tuple[str, str]:
    """Name of the feed-forward in transformers, and its activation."""
    name = ACTIVATION_NAMES[mlp.activation]
    if not mlp.gated:
        return name, name
    return ("gated-gelu", "gelu_new") if mlp.activation == "gelu_tanh" else (f"gated-{name}", name)


def _links(config: ModelConfig) -> Iterator[Link]:
    hidden, rows = config.hidden_size, (config.vocab_size, config.hidden_size)
    leaf = partial(leaves, bias=False)
    yield from leaf("shared", "embedding", *rows)
    first = config.encoder_layers
    for index, layer in enumerate(config.layers):
        mlp = cast("MLPConfig | None", layer.feed_forward)
        after, target = index - first, f"layers.{index}"
        side = "encoder" if after < 0 else "decoder"
        block = f"{side}.block.{index if after < 0 else after // 2}.layer"
        part = 0 if after < 0 else after % 2
        yield from leaf(f"{block}.{part}.layer_norm", f"{target}.mixer_norm", hidden)
        yield from _mixer(f"{block}.{part}", f"{target}.mixer", layer.mixer, hidden)
        if mlp is not None:
            behind, ours = f"{block}.{part + 1}", f"{target}.feed_forward"
            yield from leaf(f"{behind}.layer_norm", f"{ours}_norm", hidden)
            yield from _mlp(f"{behind}.DenseReluDense", ours, mlp, hidden)
    for side, sizes in config.score_tables.items():
        table = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias"
        yield from leaf(table, f"score_tables.{side}", *sizes)
    for side, ours in (("encoder", "encoder_norm"), ("decoder", "final_norm")):
        yield from leaf(f"{side}.final_layer_norm", ours, hidden)
    if not config.tied:
        yield from leaf(_HEAD.removesuffix(".weight"), "head", *rows)


def _mixer(source: str, target: str, mixer: object, hidden: int) -> Iterator[Link]:
    if isinstance(mixer, AttentionConfig):
        name = f"{source}.SelfAttention"
        yield from attention_links(name, target, mixer, hidden, names=_PROJECTIONS, out="o")
    elif isinstance(mixer, CrossAttentionConfig):
        name, width = f"{source}.EncDecAttention", mixer.num_heads * mixer.head_dim
        yield from leaves(f"{name}.q", f"{target}.query", width, hidden, bias=False)
        yield from _parts(name, f"{target}.key_value", ("k", "v"), (width, hidden), dim=1)
        yield from leaves(f"{name}.o", f"{target}.out", hidden, width, bias=False)


def _mlp(source: str, target: str, mlp: MLPConfig, hidden: int) -> Iterator[Link]:
    up, shape = f"{target}.up", (mlp.ffn_size, hidden)
    if mlp.gated:
        yield from _parts(source, up, ("wi_0", "wi_1"), shape, dim=0)
    else:
        yield from leaves(f"{source}.wi", up, *shape, bias=False)
    yield from leaves(f"{source}.wo", f"{target}.down", hidden, mlp.ffn_size, bias=False)


def _parts(
    source: str, target: str, names: tuple[str, ...], shape: tuple[int, int], *, dim: int
) -> Iterator[Link]:
    """Yield the links of weights concatenated along a dim of a fused weight."""
    for place, name in enumerate(names):
        for link in leaves(f"{source}.{name}", target, *shape, bias=False):
            yield replace(link, box={dim: (place, place + 1)})


FAMILY = Family(
    name="t5",
    architectures=("T5ForConditionalGeneration",),
    fields=T5Fields,
    read=_read,
    write=partial(fields_of, T5Fields),
    links=_links,
    settle=_settle,
    refused={"T5EncoderModel": WITHOUT_HEAD.format("T5")},
    ignored=(".layer.1.EncDecAttention.relative_attention_bias.weight",),
    copies=(
        ("encoder.embed_tokens.weight", "shared.weight"),
        ("decoder.embed_tokens.weight", "shared.weight"),
        (_HEAD, "shared.weight"),
    ),
)
