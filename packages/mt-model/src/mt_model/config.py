"""What a model is: embeddings, a typed list of layers, and a head, as frozen values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, TypeAlias

from mt_files import Checks, FieldError, build, divisors, to_plain

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu2"]
Positions: TypeAlias = Literal["rope", "learned", "none"]
Recompute: TypeAlias = Literal["none", "selective", "full"]

# Above these no parameter's size fits 64 bits, or a list of layers no memory.
MAX_WIDTH, MAX_HEADS, MAX_VOCAB, MAX_LENGTH = 1 << 24, 1 << 16, 1 << 30, 1 << 27
MAX_LAYERS = 4096  # above the deepest networks published


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """The normalisation in front of every mixer, feed-forward and head.

    Attributes:
        kind: `rms` (weight only) or `layer` (weight and bias).
        eps: added to the mean square or variance before the inverse root.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-5

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.above(0, "eps")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Causal softmax attention; `num_kv_heads < num_heads` is grouped-query attention.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key and value heads; each serves `num_heads // num_kv_heads` query heads.
        head_dim: width of one head; `num_heads * head_dim` need not be the hidden size.
        rope_theta: base of the rotary embedding (half-split pairing); None turns no head.
        qk_norm: RMSNorm over `head_dim` on queries and keys before the rotation.
        qkv_bias: bias on the fused query, key and value projection.
        out_bias: bias on the output projection.
        dropout: probability of dropping an attention weight in training.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        checks = Checks(self)
        sizes = ("num_heads", "num_kv_heads", "head_dim")
        checks.at_least(1, *sizes)
        checks.at_most(MAX_HEADS, *sizes)
        checks.fraction("dropout")
        checks.above(0, "rope_theta")
        checks.done()
        if self.num_heads % self.num_kv_heads:
            good = _around(self.num_kv_heads, divisors(self.num_heads))
            checks.add(
                "num_heads",
                f"{self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}: every "
                "key/value head serves the same number of query heads. Nearest num_kv_heads that "
                f"does: {good}.",
            )
        if self.rope_theta is not None and self.head_dim % 2:
            checks.add(
                "head_dim",
                f"{self.head_dim} is odd, and rope_theta={self.rope_theta} turns pairs of "
                "channels. Use an even head_dim, or no RoPE (gpt's positions is 'learned' or "
                "'none').",
            )
        checks.done()

    @property
    def queries_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Two projections with an activation between: `down(act(up x))`, or gated `act(g x) * up x`.

    Attributes:
        ffn_size: width between the projections.
        activation: `silu`, `gelu` (exact, erf), `gelu_tanh` (GPT-2's) or `relu2` (squared ReLU).
        gated: multiply the activation by a second projection (SwiGLU with `silu`).
        bias: bias on both projections.
    """

    ffn_size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "ffn_size")
        checks.at_most(MAX_WIDTH, "ffn_size")
        checks.done()


MixerConfig: TypeAlias = AttentionConfig
FeedForwardConfig: TypeAlias = MLPConfig


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer: `x + mixer(norm(x))`, then `x + feed_forward(norm(x))` if there is one."""

    mixer: MixerConfig
    feed_forward: FeedForwardConfig | None = None

    def __post_init__(self) -> None:
        Checks(self).done()

    def num_parameters(self, hidden_size: int, norm_size: int) -> int:
        """Parameters of the layer at a width, with norms of so many."""
        mixer, mlp = self.mixer, self.feed_forward
        query, key = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
        total = norm_size + (query + 2 * key) * (hidden_size + mixer.qkv_bias)
        total += hidden_size * (query + mixer.out_bias) + 2 * mixer.head_dim * mixer.qk_norm
        if mlp is not None:
            up = mlp.ffn_size * (2 if mlp.gated else 1)
            total += norm_size + up * (hidden_size + mlp.bias)
            total += hidden_size * (mlp.ffn_size + mlp.bias)
        return total


def runs(layers: Iterable[LayerConfig]) -> Iterator[tuple[LayerConfig, int]]:
    """Equal neighbours as one layer and how often it comes."""
    for layer, equal in groupby(layers):
        yield layer, sum(1 for _ in equal)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder language model: embeddings, layers in order, final norm and head.

    Attributes:
        vocab_size: rows of the embedding and of the head (padded as the tokenizer's user likes).
        hidden_size: width of the residual stream.
        max_sequence_length: longest sequence; also the rows of a learned position table.
        layers: one entry per layer; they may differ.
        norm: kind and eps of every norm.
        positions: `rope` (at least one layer turns its heads), `learned` (a table added to the
            embedding) or `none`.
        tied: the head is the embedding matrix.
        dropout: probability of dropping an element of the embedding, mixer or feed-forward
            output in training.
        init_std: standard deviation of the initial weights; projections that write to the
            residual stream use `init_std / sqrt(2 * num_layers)` (Radford et al., 2019).
    """

    vocab_size: int
    hidden_size: int
    max_sequence_length: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig = NormConfig()
    positions: Positions = "rope"
    tied: bool = True
    dropout: float = 0.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "vocab_size", "hidden_size", "max_sequence_length")
        checks.at_most(MAX_VOCAB, "vocab_size")
        checks.at_most(MAX_WIDTH, "hidden_size")
        checks.at_most(MAX_LENGTH, "max_sequence_length")
        checks.above(0, "init_std")
        checks.fraction("dropout")
        checks.done()
        if not 0 < len(self.layers) <= MAX_LAYERS:
            text = f"{len(self.layers)} layers; a model has 1 to {MAX_LAYERS} LayerConfigs"
            raise FieldError({"layers": text}, "ModelConfig")
        rotating = [i for i, layer in enumerate(self.layers) if layer.mixer.rope_theta is not None]
        if self.positions == "rope" and not rotating:
            checks.add(
                "positions",
                "'rope', but no layer has a rope_theta. Set rope_theta on the layers that turn "
                "their heads, or use positions='learned' or 'none'.",
            )
        if self.positions != "rope" and rotating:
            theta = self.layers[rotating[0]].mixer.rope_theta
            checks.add(
                "positions",
                f"{self.positions!r}, but layer {rotating[0]} has rope_theta={theta}. Set it to "
                "None, or use positions='rope'.",
            )
        checks.done()

    @property
    def num_layers(self) -> int:
        """Length of the layer list."""
        return len(self.layers)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, from the sizes alone; a tied head counts once."""
        hidden = self.hidden_size
        norm = hidden * (2 if self.norm.kind == "layer" else 1)
        total = self.vocab_size * hidden * (1 if self.tied else 2) + norm
        if self.positions == "learned":
            total += self.max_sequence_length * hidden
        for layer, repeats in runs(self.layers):
            total += repeats * layer.num_parameters(hidden, norm)
        return total

    def settings(self) -> dict[str, Any]:
        """Return the arguments of `gpt` that build this config, every one filled in.

        Where layers differ, `layers` with what `to_dict` has of them takes the place of those
        that describe one layer.
        """
        whole: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("vocab_size", "hidden_size", "num_layers", "max_sequence_length")
        }
        whole |= {"positions": self.positions, "norm": self.norm.kind, "norm_eps": self.norm.eps}
        whole |= {"tied": self.tied, "dropout": self.dropout, "init_std": self.init_std}
        mixer, mlp = self.layers[0].mixer, self.layers[0].feed_forward
        if mlp is None or len({*self.layers}) > 1:
            return {**whole, "layers": self.to_dict()["layers"]}
        if len({mixer.qkv_bias, mixer.out_bias, mlp.bias}) > 1:
            return {**whole, "layers": self.to_dict()["layers"]}
        return {
            **whole,
            "num_heads": mixer.num_heads,
            "num_kv_heads": mixer.num_kv_heads,
            "head_dim": mixer.head_dim,
            "ffn_size": mlp.ffn_size,
            "rope_theta": mixer.rope_theta,
            "qk_norm": mixer.qk_norm,
            "activation": mlp.activation,
            "gated": mlp.gated,
            "bias": mlp.bias,
            "attention_dropout": mixer.dropout,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `ModelConfig.from_dict` of them is equal to this config."""
        return to_plain(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Read what `to_dict` wrote.

        Raises:
            SchemaError: keys are unknown or missing, or values are of the wrong type or range;
                the message names the path of each, such as `layers[3].mixer.num_heads`.
        """
        return build(cls, data)


def validate_split(config: ModelConfig, tp: int) -> None:
    """Check that `tp` ranks can share every split dim of the model.

    Raises:
        ValueError: heads, FFN width or vocabulary do not divide by `tp`, or key/value heads
            neither divide by it nor divide it; the message names both and the nearest that do.
    """
    if config.vocab_size % tp:
        raise ValueError(_indivisible("vocab_size", config.vocab_size, tp))
    for index, layer in enumerate(config.layers):
        for name, size in _split_sizes(layer, tp):
            if size % tp:
                raise ValueError(_indivisible(name, size, tp) + f" (layer {index})")


def _split_sizes(layer: LayerConfig, tp: int) -> Iterator[tuple[str, int]]:
    """The sizes of a layer that `tp` ranks must divide."""
    mixer, mlp = layer.mixer, layer.feed_forward
    yield "num_heads", mixer.num_heads
    if tp % mixer.num_kv_heads:
        yield "num_kv_heads", mixer.num_kv_heads
    elif mixer.num_kv_heads < tp:
        yield "head_dim", mixer.head_dim  # what is split where there are more ranks than groups
    if mlp is not None:
        yield "ffn_size", mlp.ffn_size


def _indivisible(name: str, value: int, tp: int) -> str:
    below, above = value // tp * tp, (value // tp + 1) * tp
    sizes = " or ".join(str(v) for v in (below, above) if v)
    smaller = max(d for d in divisors(value) if d <= tp)
    return (
        f"{name}={value} does not divide by tp={tp}. Nearest {name} that does: {sizes}; "
        f"nearest tp for {name}={value}: {smaller}"
    )


def _around(value: int, allowed: list[int]) -> str:
    """Name the allowed values on both sides of a value."""
    around = [v for v in allowed if v < value][-1:] + [v for v in allowed if v > value][:1]
    return " or ".join(map(str, around))
