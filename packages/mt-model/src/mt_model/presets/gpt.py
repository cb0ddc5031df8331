"""The builder of a uniform decoder from its sizes, and back."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from mt_files import FieldError, build, shorten, to_plain

from mt_model.attend.score_bias import ScoreBias
from mt_model.attention.config import AttentionConfig
from mt_model.block.entry import FeedForwardConfig
from mt_model.block.norm_config import NormConfig
from mt_model.block.sizes import MAX_LAYERS
from mt_model.feed_forward.mlp_config import MLPConfig
from mt_model.feed_forward.moe_config import MoEConfig
from mt_model.kernels.words import Activation, Norms, Positions, QKNorm, Sinks
from mt_model.language.config import ModelConfig
from mt_model.language.mtp_config import MTPConfig
from mt_model.language.pooled_head_config import PooledHeadConfig
from mt_model.rope.config import RopeConfig
from mt_model.rope.temperature import TemperatureConfig
from mt_model.stack.layer_config import LayerConfig
from mt_model.vision.image_input_config import ImageInputConfig


def gpt(  # noqa: PLR0913 - the keyword list is the vocabulary of a uniform decoder
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int | None = None,
    num_heads: int | None = None,
    layers: Sequence[object] | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    ffn_size: int | None = None,
    max_sequence_length: int = 2048,
    positions: Positions = "rope",
    rope_theta: float | None = None,
    rope: RopeConfig | Mapping[str, Any] | None = None,
    qk_norm: QKNorm = "none",
    norm: Literal["rms", "layer"] = "rms",
    norm_eps: float = 1e-5,
    norm_zero_centered: bool = False,
    norm_rounds_first: bool = False,
    norm_weight: bool = True,
    norm_bias: bool = True,
    norms: Norms = "pre",
    parallel: bool = False,
    shared_norm: bool = False,
    residual_scale: float = 1.0,
    final_norm: bool | None = None,
    activation: Activation = "silu",
    gated: bool = True,
    clamp: float | None = None,
    up_offset: float = 0.0,
    moe: MoEConfig | Mapping[str, Any] | None = None,
    bias: bool = False,
    qkv_bias: bool | None = None,
    out_bias: bool | None = None,
    output_gate: bool = False,
    causal: bool = True,
    tied: bool = True,
    embedding_scale: float = 1.0,
    embedding_norm: bool = False,
    token_types: int = 0,
    head_transform: Activation | None = None,
    head_bias: bool = False,
    pooled_head: PooledHeadConfig | Mapping[str, Any] | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    z_loss: float = 0.0,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    window: int | None = None,
    chunk: int | None = None,
    temperature: TemperatureConfig | Mapping[str, Any] | None = None,
    sinks: Sinks = "none",
    softcap: float | None = None,
    attention_scale: float | None = None,
    score_bias: ScoreBias | Mapping[str, Any] | None = None,
    init_std: float = 0.02,
    embedding_std: float | None = None,
    vocab_multiple: int = 1,
    images: ImageInputConfig | Mapping[str, Any] | None = None,
    mtp: MTPConfig | Mapping[str, Any] | None = None,
    encoder_layers: int = 0,
    decoder_start: int = 0,
) -> ModelConfig:
    """A decoder of `num_layers` equal layers, or of a list of them.

    Args:
        vocab_size: tokens that the model knows.
        hidden_size: width of the residual stream.
        num_layers: number of equal layers.
        num_heads: query heads.
        layers: in place of all that describes one layer: a list of LayerConfigs, or of mappings as
            `ModelConfig.from_dict` takes them.
        num_kv_heads: key/value heads; `num_heads` by default.
        head_dim: `hidden_size // num_heads` by default.
        ffn_size: by default 4 * hidden_size, or 8/3 of it rounded up to 64 when gated (equal
            parameter count; Shazeer, 2020).
        max_sequence_length: longest sequence.
        positions: `rope`, `learned` or `none`.
        rope_theta: base of the rotary embedding, 10000 by default; read only with
            `positions="rope"`.
        rope: all of it, in place of `rope_theta`: a RopeConfig, or its fields as a mapping.
        qk_norm: RMSNorm on queries and keys: `head`, `whole`, `l2` or `none` (`AttentionConfig`).
        norm: `rms` or `layer`.
        norm_eps: eps of every norm.
        norm_zero_centered: weights of norms stand for 1 + w.
        norm_rounds_first: weights of norms multiply after the rounding to the model's dtype.
        norm_weight: norms have weights.
        norm_bias: `layer` norms have biases.
        norms: where they are: `pre`, `output`, `sandwich` or `post`; see `LayerConfig`.
        parallel: attention and feed-forward start from the same input.
        shared_norm: they have one norm in front of both.
        residual_scale: of their outputs, before they are added.
        final_norm: a norm in front of the head; by default unless norms are `post`.
        activation: of the feed-forward.
        gated: gated feed-forward.
        clamp: cuts what the gated feed-forward multiplies.
        up_offset: is added to what the activation is multiplied by.
        moe: a mixture of experts in place of every feed-forward: a MoEConfig, or its fields as a
            mapping; experts have the width `ffn_size` where it names none.
        bias: bias on every projection of the layers; experts say it themselves.
        qkv_bias: bias on that of queries, keys and values; as `bias` where None.
        out_bias: bias on that behind attention; as `bias` where None.
        output_gate: what attention gives is multiplied by a sigmoid gate.
        causal: a query sees the tokens up to its own; False: all of them.
        tied: the head is the embedding matrix.
        embedding_scale: of the embeddings of tokens.
        embedding_norm: a norm of the sum of all embeddings.
        token_types: kinds of tokens with an embedding each.
        head_transform: the activation of a layer in front of the head.
        head_bias: a bias for each token of the vocabulary.
        pooled_head: classes of whole sequences: a PooledHeadConfig, or its fields as a mapping.
        logit_scale: of what the head multiplies.
        logit_softcap: logits become `softcap * tanh(logit / softcap)`.
        z_loss: weight of the squared log-sum-exp of the logits.
        dropout: of embedding, attention and feed-forward outputs.
        attention_dropout: of attention weights.
        window: tokens that a query sees, the last of which is itself; None for all before it.
        chunk: tokens of the chunks that a sequence is cut into, which do not see each other.
        temperature: what multiplies queries by their positions: a TemperatureConfig, or its fields
            as a mapping.
        sinks: a further logit per head in the softmax of attention: `learned`, `zero` or `none`.
        softcap: scores of attention become `softcap * tanh(score / softcap)`.
        attention_scale: of the scores; `head_dim ** -0.5` where None.
        score_bias: what is added to the scores by distance: AlibiConfig() or RelativeConfig(), or
            their fields as a mapping with the `type`, `alibi` or `relative`.
        init_std: standard deviation of the initial weights.
        embedding_std: that of embeddings and head, where it is another.
        vocab_multiple: embedding and head are padded to rows for a multiple of it.
        images: how images stand among the tokens: an ImageInputConfig, or its fields as a mapping.
        mtp: modules that predict further tokens: an MTPConfig, or its fields as a mapping.
        encoder_layers: the first of `layers` that are an encoder's; the others are the decoder's.
        decoder_start: token that a decoder's sequence begins with.

    Raises:
        FieldError: sizes that do not fit each other; it names the argument.
    """
    if layers is not None:
        return _of_list(layers, locals())
    if num_layers is None or num_heads is None:
        missing = "num_layers" if num_layers is None else "num_heads"
        raise FieldError({missing: f"missing; give {missing}, or a list of layers"}, "gpt")
    for name, value in (
        ("hidden_size", hidden_size),
        ("num_heads", num_heads),
        ("num_layers", num_layers),
    ):
        if not isinstance(value, int) or isinstance(value, bool):
            raise FieldError({name: f"expected an integer, found {shorten(value)}"}, "gpt")
    if head_dim is None:
        if num_heads < 1 or hidden_size % num_heads:
            text = (
                f"{shorten(hidden_size)} does not divide by num_heads={shorten(num_heads)}. Choose "
                "num_heads that divides it, or give head_dim."
            )
            raise FieldError({"hidden_size": text}, "gpt")
        head_dim = hidden_size // num_heads
    if not 1 <= num_layers <= MAX_LAYERS:
        raise FieldError({"num_layers": f"{shorten(num_layers)}; use 1 to {MAX_LAYERS}"}, "gpt")
    if ffn_size is None:
        ffn_size = -(-8 * hidden_size // (3 * 64)) * 64 if gated else 4 * hidden_size
    layer = LayerConfig(
        mixer=AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_dim=head_dim,
            rope=_rope(positions, rope_theta, rope),
            qk_norm=qk_norm,
            qkv_bias=bias if qkv_bias is None else qkv_bias,
            out_bias=bias if out_bias is None else out_bias,
            output_gate=output_gate,
            causal=causal,
            dropout=attention_dropout,
            window=window,
            chunk=chunk,
            temperature=_temperature(temperature),
            sinks=sinks,
            softcap=softcap,
            scale=attention_scale,
            score_bias=_score_bias(score_bias),
        ),
        feed_forward=_feed_forward(
            moe,
            ffn_size=ffn_size,
            activation=activation,
            gated=gated,
            bias=bias,
            clamp=clamp,
            up_offset=up_offset,
        ),
        norms=norms,
        parallel=parallel,
        shared_norm=shared_norm,
        residual_scale=residual_scale,
    )
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_sequence_length=max_sequence_length,
        layers=(layer,) * num_layers,
        norm=NormConfig(
            kind=norm,
            eps=norm_eps,
            zero_centered=norm_zero_centered,
            rounds_first=norm_rounds_first,
            weight=norm_weight,
            bias=norm_bias,
        ),
        positions=positions,
        tied=tied,
        final_norm=norms != "post" if final_norm is None else final_norm,
        embedding_scale=embedding_scale,
        embedding_norm=embedding_norm,
        token_types=token_types,
        head_transform=head_transform,
        head_bias=head_bias,
        pooled_head=_pooled_head(pooled_head),
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        z_loss=z_loss,
        dropout=dropout,
        init_std=init_std,
        embedding_std=embedding_std,
        vocab_multiple=vocab_multiple,
        images=_images(images),
        mtp=_mtp(mtp),
        encoder_layers=encoder_layers,
        decoder_start=decoder_start,
    )


def _feed_forward(
    moe: MoEConfig | Mapping[str, Any] | None, *, ffn_size: int, bias: bool, **form: Any
) -> FeedForwardConfig:
    """Make an MLP, or a mixture of experts, which says the form of its experts itself."""
    if moe is None:
        return MLPConfig(ffn_size=ffn_size, bias=bias, **form)
    for name, value in form.items():
        if value != inspect.signature(gpt).parameters[name].default:
            text = f"{shorten(value)} does not go with moe; say moe.{name}"
            raise FieldError({name: text}, "gpt")
    whole = moe if isinstance(moe, MoEConfig) else build(MoEConfig, moe, "moe")
    return replace(whole, ffn_size=ffn_size) if whole.ffn_size is None else whole


def _rope(
    positions: Positions, theta: float | None, rope: RopeConfig | Mapping[str, Any] | None
) -> RopeConfig | None:
    """Join the short and the long form of the rotary embedding."""
    if rope is None:
        if positions != "rope":
            return None
        try:
            return RopeConfig() if theta is None else RopeConfig(theta=theta)
        except FieldError as error:
            raise FieldError({"rope_theta": error.errors["theta"]}, "gpt") from None
    if positions != "rope":
        text = f"does not go with positions={shorten(positions)}; leave it out, or use 'rope'"
        raise FieldError({"rope": text}, "gpt")
    whole = rope if isinstance(rope, RopeConfig) else build(RopeConfig, rope, "rope")
    if theta not in (None, whole.theta):
        text = (
            f"its theta is {whole.theta}, but rope_theta is {shorten(theta)}; say rope.theta, and "
            "leave rope_theta out or give it the same value"
        )
        raise FieldError({"rope": text}, "gpt")
    return whole


def _score_bias(given: ScoreBias | Mapping[str, Any] | None) -> ScoreBias | None:
    if given is None or isinstance(given, ScoreBias):
        return given
    return build(ScoreBias, given, "score_bias")


def _temperature(given: TemperatureConfig | Mapping[str, Any] | None) -> TemperatureConfig | None:
    if given is None or isinstance(given, TemperatureConfig):
        return given
    return build(TemperatureConfig, given, "temperature")


def _images(given: ImageInputConfig | Mapping[str, Any] | None) -> ImageInputConfig | None:
    if given is None or isinstance(given, ImageInputConfig):
        return given
    return build(ImageInputConfig, given, "images")


def _mtp(given: MTPConfig | Mapping[str, Any] | None) -> MTPConfig | None:
    if given is None or isinstance(given, MTPConfig):
        return given
    return build(MTPConfig, given, "mtp")


def _pooled_head(given: PooledHeadConfig | Mapping[str, Any] | None) -> PooledHeadConfig | None:
    if given is None or isinstance(given, PooledHeadConfig):
        return given
    return build(PooledHeadConfig, given, "pooled_head")


def _of_list(layers: Sequence[object], given: Mapping[str, Any]) -> ModelConfig:
    """Build a config of listed layers from the arguments of `gpt`."""
    for name in ("num_layers", "num_heads", *_OF_ONE_LAYER):
        if given[name] != inspect.signature(gpt).parameters[name].default:
            text = f"{shorten(given[name])}; say it in the entries of layers, or leave layers out"
            raise FieldError({name: text}, "gpt")
    plain: dict[str, Any] = {name: given[name] for name in _OF_MODEL}
    plain["pooled_head"] = _pooled_head(given["pooled_head"])
    norm = {field: given[name] for name, field in _OF_NORM.items()}
    plain |= {"images": _images(given["images"]), "mtp": _mtp(given["mtp"])}
    if given["final_norm"] is not None:
        plain["final_norm"] = given["final_norm"]
    ready = [item for item in layers if isinstance(item, LayerConfig)]
    if len(ready) == len(layers):
        return ModelConfig(**plain, norm=NormConfig(**norm), layers=tuple(ready))
    plain |= {"norm": norm, "layers": [to_plain(item) for item in layers]}
    plain |= {name: to_plain(plain[name]) for name in ("images", "mtp", "pooled_head")}
    return ModelConfig.from_dict(plain)


def gpt_arguments(config: ModelConfig) -> dict[str, Any]:
    """Return the arguments of `gpt` that build a config, every one filled in.

    Where they can't, as layers differ, `layers` takes the place of those that describe one.
    """
    whole: dict[str, Any] = {name: getattr(config, name) for name in (*_OF_MODEL, "final_norm")}
    whole |= {name: getattr(config.norm, field) for name, field in _OF_NORM.items()}
    whole["images"] = config.to_dict()["images"]
    whole["mtp"] = to_plain(config.mtp)
    whole["pooled_head"] = to_plain(config.pooled_head)
    mixer, mlp = config.layers[0].mixer, config.layers[0].feed_forward
    one_kind = not config.encoder_layers
    experts = isinstance(mlp, MoEConfig)
    if one_kind and isinstance(mixer, AttentionConfig) and (experts or isinstance(mlp, MLPConfig)):
        shared: dict[str, Any] = {"num_layers": config.num_layers}
        shared |= {name: getattr(config.layers[0], name) for name in _OF_LAYER}
        shared |= {name: getattr(mixer, name) for name in _OF_ATTENTION}
        shared |= _rope_arguments(mixer.rope)
        shared |= {"attention_dropout": mixer.dropout, "attention_scale": mixer.scale}
        shared |= {name: to_plain(mixer)[name] for name in ("score_bias", "temperature")}
        if experts:
            shared |= {name: inspect.signature(gpt).parameters[name].default for name in _OF_MLP}
            shared |= {"ffn_size": mlp.width, "moe": to_plain(mlp)}
        else:
            shared |= {name: getattr(mlp, name) for name in _OF_MLP} | {"moe": None}
        if gpt(**whole, **shared) == config:
            return {**whole, **shared}
    return {**whole, "layers": config.to_dict()["layers"]}


def _rope_arguments(rope: RopeConfig | None) -> dict[str, Any]:
    """Return the short form where it says all."""
    if rope is None:
        return {"rope_theta": None, "rope": None}
    plain = rope == RopeConfig(theta=rope.theta)
    return {"rope_theta": rope.theta, "rope": None if plain else to_plain(rope)}


# Arguments of `gpt` that are fields of the parts of a config, by the names they have there.
_OF_MODEL = (
    *("vocab_size", "hidden_size", "max_sequence_length", "positions", "tied"),
    *("embedding_scale", "embedding_norm", "token_types"),
    *(
        "head_transform",
        "head_bias",
        "logit_scale",
        "logit_softcap",
        "z_loss",
        "dropout",
        "init_std",
    ),
    *("embedding_std", "vocab_multiple", "encoder_layers", "decoder_start"),
)
_OF_NORM: Mapping[str, str] = MappingProxyType(
    {
        "norm": "kind",
        "norm_eps": "eps",
        "norm_zero_centered": "zero_centered",
        "norm_rounds_first": "rounds_first",
        "norm_weight": "weight",
        "norm_bias": "bias",
    }
)
_OF_LAYER = ("norms", "parallel", "shared_norm", "residual_scale")
_OF_ATTENTION = (
    *("num_heads", "num_kv_heads", "head_dim", "qk_norm", "qkv_bias", "out_bias"),
    *("output_gate", "causal", "window", "chunk", "sinks", "softcap"),
)
_OF_MLP = ("ffn_size", "activation", "gated", "bias", "clamp", "up_offset")
_OF_ONE_LAYER = (
    *(*_OF_LAYER, *_OF_ATTENTION[1:], *_OF_MLP, "moe", "rope_theta", "rope"),
    *("attention_dropout", "attention_scale", "score_bias", "temperature"),
)
