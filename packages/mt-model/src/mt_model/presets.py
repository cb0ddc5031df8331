"""Builders of layer lists: a uniform GPT from its sizes, and named shapes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from mt_files import FieldError, build, did_you_mean, shorten, to_plain

from mt_model.choice import Activation, Positions, QKNorm, Sinks
from mt_model.config import (
    MAX_LAYERS,
    LayerConfig,
    ModelConfig,
    NormConfig,
)
from mt_model.kinds import AttentionConfig, MLPConfig
from mt_model.rope import RopeConfig
from mt_model.score_bias import ScoreBias

_DEFAULT_THETA = RopeConfig().theta


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
    rope_theta: float | None = _DEFAULT_THETA,
    rope: RopeConfig | Mapping[str, Any] | None = None,
    qk_norm: QKNorm = "none",
    norm: Literal["rms", "layer"] = "rms",
    norm_eps: float = 1e-5,
    activation: Activation = "silu",
    gated: bool = True,
    bias: bool = False,
    qkv_bias: bool | None = None,
    out_bias: bool | None = None,
    output_gate: bool = False,
    causal: bool = True,
    tied: bool = True,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    window: int | None = None,
    sinks: Sinks = "none",
    softcap: float | None = None,
    attention_scale: float | None = None,
    score_bias: ScoreBias | Mapping[str, Any] | None = None,
    init_std: float = 0.02,
    vocab_multiple: int = 1,
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
        rope_theta: base of the rotary embedding; read only with `positions="rope"`.
        rope: all of it, in place of `rope_theta`: a RopeConfig, or its fields as a mapping.
        qk_norm: RMSNorm on queries and keys: `head`, `whole`, `l2` or `none` (`AttentionConfig`).
        norm: `rms` or `layer`.
        norm_eps: eps of every norm.
        activation: of the feed-forward.
        gated: gated feed-forward.
        bias: bias on every projection of the layers.
        qkv_bias: bias on that of queries, keys and values; as `bias` where None.
        out_bias: bias on that behind attention; as `bias` where None.
        output_gate: what attention gives is multiplied by a sigmoid gate.
        causal: a query sees the tokens up to its own; False: all of them.
        tied: the head is the embedding matrix.
        dropout: of embedding, attention and feed-forward outputs.
        attention_dropout: of attention weights.
        window: tokens that a query sees, the last of which is itself; None for all before it.
        sinks: a further logit per head in the softmax of attention: `learned`, `zero` or `none`.
        softcap: scores of attention become `softcap * tanh(score / softcap)`.
        attention_scale: of the scores; `head_dim ** -0.5` where None.
        score_bias: what is added to the scores by distance: AlibiConfig() or RelativeConfig(), or
            their fields as a mapping with the `type`, `alibi` or `relative`.
        init_std: standard deviation of the initial weights.
        vocab_multiple: embedding and head are padded to rows for a multiple of it.

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
            sinks=sinks,
            softcap=softcap,
            scale=attention_scale,
            score_bias=_score_bias(score_bias),
        ),
        feed_forward=MLPConfig(ffn_size=ffn_size, activation=activation, gated=gated, bias=bias),
    )
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_sequence_length=max_sequence_length,
        layers=(layer,) * num_layers,
        norm=NormConfig(kind=norm, eps=norm_eps),
        positions=positions,
        tied=tied,
        dropout=dropout,
        init_std=init_std,
        vocab_multiple=vocab_multiple,
    )


def _rope(
    positions: Positions, theta: float | None, rope: RopeConfig | Mapping[str, Any] | None
) -> RopeConfig | None:
    """Join the short and the long form of the rotary embedding."""
    if rope is None:
        if positions != "rope" or theta is None:
            return None
        try:
            return RopeConfig(theta=theta)
        except FieldError as error:
            raise FieldError({"rope_theta": error.errors["theta"]}, "gpt") from None
    if positions != "rope":
        text = f"does not go with positions={shorten(positions)}; leave it out, or use 'rope'"
        raise FieldError({"rope": text}, "gpt")
    whole = rope if isinstance(rope, RopeConfig) else build(RopeConfig, rope, "rope")
    if theta not in (None, _DEFAULT_THETA, whole.theta):
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


def _of_list(layers: Sequence[object], given: Mapping[str, Any]) -> ModelConfig:
    """Build a config of listed layers from the arguments of `gpt`."""
    for name in ("num_layers", "num_heads", *_OF_ONE_LAYER):
        if given[name] != inspect.signature(gpt).parameters[name].default:
            text = f"{shorten(given[name])}; say it in the entries of layers, or leave layers out"
            raise FieldError({name: text}, "gpt")
    same = ("vocab_size", "hidden_size", "max_sequence_length", "positions", "tied", "dropout")
    plain = {name: given[name] for name in (*same, "init_std", "vocab_multiple")}
    plain["norm"] = {"kind": given["norm"], "eps": given["norm_eps"]}
    plain["layers"] = [to_plain(item) for item in layers]
    return ModelConfig.from_dict(plain)


def gpt_arguments(config: ModelConfig) -> dict[str, Any]:
    """Return the arguments of `gpt` that build a config, every one filled in.

    Where they can't, as layers differ, `layers` takes the place of those that describe one.
    """
    whole: dict[str, Any] = {
        name: getattr(config, name)
        for name in ("vocab_size", "hidden_size", "num_layers", "max_sequence_length")
    }
    whole |= {"positions": config.positions, "norm": config.norm.kind, "norm_eps": config.norm.eps}
    whole |= {"tied": config.tied, "dropout": config.dropout, "init_std": config.init_std}
    whole["vocab_multiple"] = config.vocab_multiple
    mixer, mlp = config.layers[0].mixer, config.layers[0].feed_forward
    if isinstance(mixer, AttentionConfig) and isinstance(mlp, MLPConfig):
        shared = {name: getattr(mixer, name) for name in _OF_ATTENTION}
        shared |= _rope_arguments(mixer.rope)
        shared |= {"attention_dropout": mixer.dropout, "attention_scale": mixer.scale}
        shared["score_bias"] = to_plain(mixer)["score_bias"]
        shared |= {name: getattr(mlp, name) for name in _OF_MLP}
        if gpt(**whole, **shared) == config:
            return {**whole, **shared}
    del whole["num_layers"]
    return {**whole, "layers": config.to_dict()["layers"]}


def _rope_arguments(rope: RopeConfig | None) -> dict[str, Any]:
    """Return the short form where it says all."""
    if rope is None:
        return {"rope_theta": None, "rope": None}
    plain = rope == RopeConfig(theta=rope.theta)
    return {"rope_theta": rope.theta, "rope": None if plain else to_plain(rope)}


_OF_ATTENTION = (
    *("num_heads", "num_kv_heads", "head_dim", "qk_norm", "qkv_bias", "out_bias"),
    *("output_gate", "causal", "window", "sinks", "softcap"),
)
_OF_MLP = ("ffn_size", "activation", "gated", "bias")
_OF_ONE_LAYER = (
    *_OF_ATTENTION[1:],
    *_OF_MLP,
    "rope_theta",
    "rope",
    "attention_dropout",
    "attention_scale",
    "score_bias",
)

_GPT2: Mapping[str, Any] = MappingProxyType(
    {
        "max_sequence_length": 1024,
        "positions": "learned",
        "norm": "layer",
        "activation": "gelu_tanh",
        "gated": False,
        "bias": True,
    }
)


def _shape(vocab: int, hidden: int, layers: int, heads: int, **rest: Any) -> Mapping[str, Any]:
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "num_layers": layers, "num_heads": heads}
    return MappingProxyType({**sizes, **rest})


def _mamba2(hidden: int, layers: int) -> Mapping[str, Any]:
    """Shapes of Dao & Gu (2024): twice as wide inside, heads of 64, one group."""
    mixer = {"type": "mamba2", "num_heads": hidden // 32, "head_dim": 64, "state_size": 128}
    return MappingProxyType(
        {
            "vocab_size": 50288,
            "hidden_size": hidden,
            "positions": "none",
            "layers": ({"mixer": mixer, "repeat": layers},),
        }
    )


_LLAMA3: Mapping[str, Any] = MappingProxyType(
    {"num_kv_heads": 8, "rope_theta": 500000.0, "max_sequence_length": 8192}
)

# GPT-2's 50257 tokens are padded to 50304 = 128 * 393 so that the vocabulary divides by tp.
_PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny": _shape(512, 64, 4, 4, num_kv_heads=2, ffn_size=192, max_sequence_length=256),
        "gpt2-124m": _shape(50304, 768, 12, 12, **_GPT2),
        "gpt2-355m": _shape(50304, 1024, 24, 16, **_GPT2),
        "gpt2-1.5b": _shape(50304, 1600, 48, 25, **_GPT2),
        "gpt-1.3b": _shape(50304, 2048, 24, 16, ffn_size=5504, max_sequence_length=2048),
        "llama-2-7b": _shape(
            32000, 4096, 32, 32, ffn_size=11008, max_sequence_length=4096, tied=False
        ),
        "llama-3-8b": _shape(128256, 4096, 32, 32, ffn_size=14336, tied=False, **_LLAMA3),
        "llama-3-70b": _shape(128256, 8192, 80, 64, ffn_size=28672, tied=False, **_LLAMA3),
        "llama-3.2-1b": _shape(128256, 2048, 16, 32, ffn_size=8192, **_LLAMA3),
        "qwen3-0.6b": _shape(
            151936,
            1024,
            28,
            16,
            num_kv_heads=8,
            head_dim=128,
            ffn_size=3072,
            qk_norm="head",
            rope_theta=1e6,
            norm_eps=1e-6,
            max_sequence_length=32768,
        ),
        "mamba2-130m": _mamba2(768, 24),
        "mamba2-370m": _mamba2(1024, 48),
        "mamba2-780m": _mamba2(1536, 48),
        "mamba2-1.3b": _mamba2(2048, 48),
        "mamba2-2.7b": _mamba2(2560, 64),
    }
)

PRESETS: tuple[str, ...] = tuple(_PRESETS)


def preset(name: str, **overrides: Any) -> ModelConfig:
    """The named shape, with any argument of `gpt` replaced.

    Raises:
        FieldError: the name or an override is unknown, or sizes do not fit; the message suggests
            the nearest.
    """
    if name not in _PRESETS:
        text = f"{shorten(name)} is not known. {did_you_mean(name, PRESETS)}"
        raise FieldError({"preset": text})
    known = sorted(inspect.signature(gpt).parameters)
    for key in overrides:
        if key not in known:
            text = f"unknown override of preset {name!r}. {did_you_mean(key, known)}"
            raise FieldError({key: text})
    return gpt(**{**_PRESETS[name], **overrides})
