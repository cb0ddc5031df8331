"""What a model is: embeddings, a typed list of layers, and a head, as frozen values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from mt_files import (
    Checks,
    FieldError,
    build,
    check_type,
    divisors,
    multiples_near,
    to_plain,
)

from mt_model.choice import Positions
from mt_model.rope import Rotary

if TYPE_CHECKING:
    from torch import nn

    from mt_model.placement import Placement

Sizes: TypeAlias = tuple[int, ...]

# What is reported under a name like those of losses, and so is the name of none in a layer.
_RESERVED = ("lm", "tokens", "total", "val")
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


class EntryConfig(ABC):
    """What a kind of mixer or feed-forward answers for; nothing else knows the kind."""

    @abstractmethod
    def build(self, model: ModelConfig, *, layer: int, placement: Placement) -> nn.Module:
        """Build the module on the meta device.

        Args:
            model: The whole model's sizes and norms.
            layer: Global index.
            placement: Of this rank.
        """

    @abstractmethod
    def num_parameters(self, hidden_size: int) -> int:
        """Count the parameters at a width."""

    @abstractmethod
    def flops_per_token(self, hidden_size: int, sequence_length: int) -> int:
        """Count the operations of forward and backward for a token; a multiply-add is two."""

    def split_sizes(self, tp: int) -> Iterable[tuple[str, int]]:
        """Give the names and values of the sizes that `tp` ranks must divide."""
        del tp
        return ()

    @property
    def loss_weights(self) -> Mapping[str, float]:
        """What the losses that its module returns weigh in the objective, by name.

        With any, the module returns `(output, losses)`: for each name a scalar in fp32 or fp64,
        the sum over the tokens of its own input.
        """
        return {}


@dataclass(frozen=True, kw_only=True)
class MixerConfig(EntryConfig):
    """What mixes tokens. A kind is a dataclass below this one.

    Its module is called with `(x, shared)`: [B, S, hidden] (S / tp tokens under sequence
    parallelism) and a `Pass`, and returns the same shape, with losses as `loss_weights` says.
    """

    default_kind: ClassVar[str] = "attention"

    @property
    def rotary(self) -> Rotary | None:
        """What the rotary table that the kind reads is made for, if it reads one."""
        return None

    @property
    def shared_table(self) -> tuple[str, int, int] | None:
        """Name, buckets and heads of the table of biases that it shares with others, if any."""
        return None

    @property
    def drops(self) -> bool:
        """Whether it drops anything in training, and so needs sample ids."""
        return False

    @property
    def cache_break(self) -> int | None:
        """Length of a sequence past which what a cache held before doesn't serve, if there is."""
        scaling = None if self.rotary is None else self.rotary.rope.scaling
        return None if scaling is None else scaling.cache_break

    @property
    def wide_cache(self) -> Collection[str]:
        """Names of what is kept in fp32 even of a model in fewer bits, as sums over tokens are."""
        return ()

    def cache_shapes(self, batch_size: int, max_length: int, tp: int) -> Mapping[str, Sizes]:
        """Give the shapes of what one rank keeps of tokens it has seen, by name.

        Raises:
            NotImplementedError: The kind can't generate.
        """
        del batch_size, max_length, tp
        raise NotImplementedError(f"{type(self).__name__} keeps nothing of the tokens it has seen")

    def context_obstacle(self, algorithm: str, *, cp: int, inner: int, tp: int) -> str | None:
        """Say why `cp` ranks can't share a sequence this way; None if they can.

        Args:
            algorithm: How attention gets at the others' keys.
            cp: Ranks that share a sequence.
            inner: Of them, those that swap tokens for heads in the hierarchical algorithm.
            tp: Ranks that share the weights.
        """
        del algorithm, inner, tp
        return f"{type(self).__name__} needs whole sequences; use cp=1" if cp > 1 else None


@dataclass(frozen=True, kw_only=True)
class FeedForwardConfig(EntryConfig):
    """What works on each token alone. A kind is a dataclass below this one.

    Its module is called with `x` and returns the same shape, with losses as `loss_weights` says.
    """

    default_kind: ClassVar[str] = "mlp"


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer: `x + mixer(norm(x))`, then `x + feed_forward(norm(x))` if there is one.

    Attributes:
        mixer: attention, where plain values don't name another `type`.
        feed_forward: an MLP, likewise; None for none.
        repeat: how often the layer comes; 1 in a `ModelConfig`, which has each on its own.
    """

    mixer: MixerConfig
    feed_forward: FeedForwardConfig | None = None
    repeat: int = 1

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "repeat")
        checks.at_most(MAX_LAYERS, "repeat")
        checks.done()

    @property
    def entries(self) -> tuple[EntryConfig, ...]:
        """The mixer, and the feed-forward where there is one."""
        return (self.mixer,) if self.feed_forward is None else (self.mixer, self.feed_forward)

    @property
    def loss_weights(self) -> dict[str, float]:
        """What the layer's losses weigh, by name; both entries may add to the same one."""
        return {name: weight for e in self.entries for name, weight in e.loss_weights.items()}


def runs(layers: Iterable[LayerConfig]) -> Iterator[tuple[LayerConfig, int]]:
    """Give equal neighbours as one layer and how often it comes."""
    for layer, equal in groupby(layers):
        yield layer, sum(1 for _ in equal)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder language model: embeddings, layers in order, final norm and head.

    Attributes:
        vocab_size: tokens that the model knows.
        hidden_size: width of the residual stream.
        max_sequence_length: longest sequence; also the rows of a learned position table.
        layers: one entry per layer; they may differ. What is given with a `repeat` becomes as many.
        norm: kind and eps of every norm.
        positions: `rope` (at least one layer turns its heads), `learned` (a table added to the
            embedding) or `none`.
        tied: the head is the embedding matrix.
        dropout: probability of dropping an element of the embedding, mixer or feed-forward
            output in training.
        init_std: standard deviation of the initial weights; projections that write to the
            residual stream use `init_std / sqrt(2 * num_layers)` (Radford et al., 2019).
        vocab_multiple: the embedding and the head have rows for a multiple of it, so that ranks
            can share a vocabulary that does not divide. Rows beyond `vocab_size` are zeros, no
            part of the softmax, and have no logits.
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
    vocab_multiple: int = 1

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "vocab_size", "hidden_size", "max_sequence_length", "vocab_multiple")
        checks.at_most(MAX_VOCAB, "vocab_size", "vocab_multiple")
        checks.at_most(MAX_WIDTH, "hidden_size")
        checks.at_most(MAX_LENGTH, "max_sequence_length")
        checks.above(0, "init_std")
        checks.fraction("dropout")
        checks.done()
        count = sum(layer.repeat for layer in self.layers)
        if not 0 < count <= MAX_LAYERS:
            text = f"{count} layers with their repeats; use at most {MAX_LAYERS}, and at least one"
            raise FieldError({"layers": text}, "ModelConfig")
        if count > len(self.layers):
            each = [(replace(layer, repeat=1),) * layer.repeat for layer in self.layers]
            object.__setattr__(self, "layers", tuple(chain.from_iterable(each)))
        rotating = [i for i, layer in enumerate(self.layers) if layer.mixer.rotary is not None]
        if self.positions == "rope" and not rotating:
            checks.add(
                "positions",
                "'rope', but no layer has a rope. Set rope on the layers that turn their heads, "
                "or use positions='learned' or 'none'.",
            )
        if self.positions != "rope" and rotating:
            checks.add(
                "positions",
                f"{self.positions!r}, but layer {rotating[0]} has a rope. Set it to None, or use "
                "positions='rope'.",
            )
        checks.done()
        self._check_losses()
        self._check_tables()

    def _check_tables(self) -> None:
        sizes = self.score_tables
        for index, layer in enumerate(self.layers):
            shared = layer.mixer.shared_table
            if shared is not None and shared[1:] != sizes[shared[0]]:
                (name, buckets, heads), (others, other_heads) = shared, sizes[shared[0]]
                text = (
                    f"layer {index} has {buckets} buckets and {heads} heads in the table {name!r} "
                    f"of score_bias, and a layer before it {others} and {other_heads}; give it "
                    "another name, or null for a table of its own"
                )
                raise FieldError({"layers": text}, "ModelConfig")

    @property
    def score_tables(self) -> dict[str, tuple[int, int]]:
        """Buckets and heads of the tables of biases that layers share, by name."""
        tables: dict[str, tuple[int, int]] = {}
        for layer, _ in runs(self.layers):
            shared = layer.mixer.shared_table
            if shared is not None:
                tables.setdefault(shared[0], shared[1:])
        return tables

    def _check_losses(self) -> None:
        weights: dict[str, float] = {}
        for layer, _ in runs(self.layers):
            for entry in layer.entries:
                for name, weight in entry.loss_weights.items():
                    if not name.isidentifier() or name in _RESERVED:
                        text = f"a loss is called {name!r}; use a word other than {_RESERVED}"
                        raise FieldError({"layers": text}, "ModelConfig")
                    if weights.setdefault(name, weight) != weight or not isfinite(weight):
                        text = (
                            f"the loss {name!r} has the weights {weights[name]} and {weight}; use "
                            "one finite number in all layers, or another name for the others"
                        )
                        raise FieldError({"layers": text}, "ModelConfig")

    @property
    def loss_weights(self) -> dict[str, float]:
        """What each loss of the model weighs in the objective, by name: `lm` 1, then layers'."""
        weights = {"lm": 1.0}
        for layer, _ in runs(self.layers):
            weights |= layer.loss_weights
        return weights

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and of the head: the vocabulary with its padding."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def usual_vocab_multiple(self) -> int:
        """A `vocab_multiple` with which most layouts can share the vocabulary."""
        return 128 if self.vocab_size >= 1024 else 8

    @property
    def num_layers(self) -> int:
        """Length of the layer list."""
        return len(self.layers)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model with padding, from the sizes; a tied head counts once."""
        hidden = self.hidden_size
        norm = hidden * (2 if self.norm.kind == "layer" else 1)
        total = self.vocab_rows * hidden * (1 if self.tied else 2) + norm
        if self.positions == "learned":
            total += self.max_sequence_length * hidden
        total += sum(buckets * heads for buckets, heads in self.score_tables.values())
        for layer, repeats in runs(self.layers):
            each = sum(norm + entry.num_parameters(hidden) for entry in layer.entries)
            total += repeats * each
        return total

    def cache_break(self, held: int, length: int) -> int | None:
        """Return the length between these past which what a cache holds doesn't serve, or None.

        Args:
            held: Tokens that the cache holds.
            length: Tokens with those to come.
        """
        if not held:
            return None
        breaks = (layer.mixer.cache_break for layer, _ in runs(self.layers))
        return next((at for at in breaks if at is not None and held <= at < length), None)

    def flops_per_token(self, sequence_length: int) -> int:
        """Count the operations of forward and backward for one token of a full sequence.

        A multiply-add counts as 2 and backward as twice forward. Projections of attention, MLP and
        head are counted, and the causal half of the score and value products:
        `6 h e ffn + 6 h (q + 2 kv) + 6 q h + 6 q s` per layer and `6 h V` for the head, with
        `e = 3` gated, else 2. Embedding look-up, norms and softmax are not counted, nor is
        recomputation, so that the number is the one MFU is defined on (Chowdhery et al., 2022).

        Args:
            sequence_length: tokens per sequence (`s`).
        """
        total = 6 * self.hidden_size * self.vocab_size
        for layer, repeats in runs(self.layers):
            entries = layer.entries
            each = sum(e.flops_per_token(self.hidden_size, sequence_length) for e in entries)
            total += repeats * each
        return total

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; `ModelConfig.from_dict` of them is equal to this config.

        Equal neighbours in `layers` are one entry with a `repeat`.
        """
        layers = [{**to_plain(layer), "repeat": repeats} for layer, repeats in runs(self.layers)]
        return {**to_plain(self), "layers": layers}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Read what `to_dict` wrote, or what a person did.

        An entry of `layers` may have a `repeat`, and a mixer or feed-forward without a `type` is
        `attention` or `mlp`.

        Raises:
            SchemaError: keys are unknown or missing, or values are of the wrong type or range;
                the message names the path of each, such as `layers[3].mixer.num_heads`.
        """
        return build(cls, data)


def validate_split(config: ModelConfig, tp: int) -> None:
    """Check that `tp` ranks can share every split dim of the model.

    Raises:
        TypeError: `config` is no ModelConfig.
        ValueError: heads, FFN width or vocabulary do not divide by `tp`, or key/value heads
            neither divide by it nor divide it; the message names both and the nearest that do.
    """
    check_type("config", config, ModelConfig)
    if not isinstance(tp, int) or tp < 1:
        raise ValueError(f"tp must be a whole number of ranks, 1 or more; got {tp!r:.80}")
    if config.vocab_rows % tp:
        text = _indivisible("vocab_size", config.vocab_rows, tp)
        raise ValueError(f"{text}; or pad it with vocab_multiple={tp}")
    for index, layer in enumerate(config.layers):
        for entry in layer.entries:
            for name, size in entry.split_sizes(tp):
                if size % tp:
                    raise ValueError(_indivisible(name, size, tp) + f" (layer {index})")


def validate_context(
    config: ModelConfig, algorithms: Sequence[str], *, cp: int, inner: int = 1, tp: int = 1
) -> None:
    """Check that `cp` ranks can share the sequences of every layer.

    Args:
        config: The model.
        algorithms: One for each layer.
        cp: Ranks that share a sequence.
        inner: Of them, those that swap tokens for heads in the hierarchical algorithm.
        tp: Ranks that share the weights.

    Raises:
        ValueError: A layer can't be shared this way; the message says why.
    """
    for index, (layer, algorithm) in enumerate(zip(config.layers, algorithms, strict=True)):
        why = layer.mixer.context_obstacle(algorithm, cp=cp, inner=inner, tp=tp)
        if why is not None:
            raise ValueError(f"{why} (layer {index})")


def _indivisible(name: str, value: int, tp: int) -> str:
    sizes = multiples_near(value, tp)
    smaller = max(d for d in divisors(value) if d <= tp)
    return (
        f"{name}={value} does not divide by tp={tp}. Nearest {name} that does: {sizes}; "
        f"nearest tp for {name}={value}: {smaller}"
    )
