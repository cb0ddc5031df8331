"""What a model is: embeddings, a typed list of layers, and a head, as frozen values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain, groupby
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from mt_files import (
    Checks,
    FieldError,
    build,
    check_type,
    divisors,
    multiples_near,
    to_plain,
)

from mt_model.choice import Activation, Norms, Positions
from mt_model.norm_config import NormConfig
from mt_model.rope import Rotary

if TYPE_CHECKING:
    from torch import nn

    from mt_model.placement import Placement

Sizes: TypeAlias = tuple[int, ...]

# What is reported under a name like those of losses, and so is the name of none in a layer.
_RESERVED = ("lm", "tokens", "total", "val")
# Above these no parameter's size fits 64 bits, or a list of layers no memory.
MAX_WIDTH, MAX_HEADS, MAX_VOCAB, MAX_LENGTH = 1 << 24, 1 << 16, 1 << 30, 1 << 27
MAX_TYPES = 1 << 16
MAX_LAYERS = 4096  # above the deepest networks published


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

    @property
    def hides_padding(self) -> bool:
        """Whether tokens don't see the padding that a cache holds; a state of them all does."""
        return False

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
    """One layer: a mixer and a feed-forward, each a branch of the residual stream with its norms.

    With f a branch and n its norms, the stream x becomes `x + s f(n(x))` (`pre`, Llama and GPT-2),
    `x + s n(f(x))` (`output`, OLMo-2), `x + s n2(f(n1(x)))` (`sandwich`, Gemma 2) or
    `n(x + s f(x))` (`post`, BERT), where s is `residual_scale`.

    Attributes:
        mixer: attention, where plain values don't name another `type`; None for none.
        feed_forward: an MLP, likewise; None for none. One of the two is there.
        repeat: how often the layer comes; 1 in a `ModelConfig`, which has each on its own.
        norms: where the norms are: `pre`, `output`, `sandwich` or `post`.
        parallel: both branches start from the layer's input, and are added at once (GPT-NeoX).
        shared_norm: parallel branches have one norm in front of both (GPT-J, Phi).
        residual_scale: what a branch is multiplied by before it is added (Granite).
    """

    mixer: MixerConfig | None
    feed_forward: FeedForwardConfig | None = None
    repeat: int = 1
    norms: Norms = "pre"
    parallel: bool = False
    shared_norm: bool = False
    residual_scale: float = 1.0

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "repeat")
        checks.at_most(MAX_LAYERS, "repeat")
        checks.above(0, "residual_scale")
        checks.done()
        if not self.entries:
            checks.add("mixer", "None, and so is feed_forward; a layer has one of them at least")
        if self.parallel and (len(self.entries) == 1 or self.norms == "post"):
            checks.add(
                "parallel",
                "True, but there is only one branch, or the norm of the one is the input of the "
                "other (norms='post'). Use parallel=False.",
            )
        if self.shared_norm and not (self.parallel and self.norms in ("pre", "sandwich")):
            checks.add(
                "shared_norm",
                "True, but only parallel branches with a norm in front can share one. Use "
                "parallel=True and norms='pre' or 'sandwich', or shared_norm=False.",
            )
        checks.done()

    @property
    def num_norms(self) -> int:
        """Norms of the layer itself, before and after its branches."""
        branches = len(self.entries)
        each = branches * (2 if self.norms == "sandwich" else 1)
        return each - 1 if self.shared_norm else each

    @property
    def entries(self) -> tuple[EntryConfig, ...]:
        """The mixer and the feed-forward, as far as they are there."""
        return tuple(entry for entry in (self.mixer, self.feed_forward) if entry is not None)

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
        norm: the form of every norm.
        positions: `rope` (at least one layer turns its heads), `learned` (a table added to the
            embedding) or `none`.
        tied: the head is the embedding matrix.
        final_norm: a norm in front of the head; layers with `post` norms end in one already.
        embedding_scale: of the embeddings of tokens, rounded to the model's dtype (Gemma:
            `sqrt(hidden_size)`); not of positions, token types or given embeddings.
        embedding_norm: a norm of the sum of all embeddings, before its dropout (BERT).
        token_types: kinds of tokens with an embedding each, `batch["token_types"]` (BERT: 2).
        head_transform: the activation of a layer in front of the head, behind the final norm:
            `norm(act(W x + b))` (BERT); None for none.
        head_bias: a bias for each token of the vocabulary.
        logit_scale: of what the head multiplies (Cohere, Granite, muP: 1 / width multiplier).
        logit_softcap: logits become `softcap * tanh(logit / softcap)` (Gemma 2), with the bias.
        z_loss: weight of the loss `z`, the squared log-sum-exp of the logits (Chowdhery et al.,
            2022); 0 for none.
        dropout: probability of dropping an element of the embedding, mixer or feed-forward
            output in training.
        init_std: standard deviation of the initial weights; projections that write to the
            residual stream use `init_std / sqrt(2 * num_layers)` (Radford et al., 2019).
        embedding_std: that of embeddings and head; `init_std` where None. In muP it stays while
            `init_std` falls with the root of the width (Yang et al., 2022).
        vocab_multiple: the embedding and the head have rows for a multiple of it, so that ranks
            can share a vocabulary that does not divide. Rows beyond `vocab_size` are zeros, no
            part of the softmax, and have no logits.
    """

    vocab_size: int
    hidden_size: int
    max_sequence_length: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig = NormConfig()  # noqa: RUF009 - it is frozen
    positions: Positions = "rope"
    tied: bool = True
    final_norm: bool = True
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    token_types: int = 0
    head_transform: Activation | None = None
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    z_loss: float = 0.0
    dropout: float = 0.0
    init_std: float = 0.02
    vocab_multiple: int = 1
    embedding_std: float | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "vocab_size", "hidden_size", "max_sequence_length", "vocab_multiple")
        checks.at_most(MAX_VOCAB, "vocab_size", "vocab_multiple")
        checks.at_most(MAX_WIDTH, "hidden_size")
        checks.at_most(MAX_LENGTH, "max_sequence_length")
        checks.at_least(0, "token_types", "z_loss")
        checks.at_most(MAX_TYPES, "token_types")
        checks.above(0, "init_std", "embedding_std", "embedding_scale")
        checks.above(0, "logit_scale", "logit_softcap")
        checks.fraction("dropout")
        checks.done()
        count = sum(layer.repeat for layer in self.layers)
        if not 0 < count <= MAX_LAYERS:
            text = f"{count} layers with their repeats; use at most {MAX_LAYERS}, and at least one"
            raise FieldError({"layers": text}, "ModelConfig")
        if count > len(self.layers):
            each = [(replace(layer, repeat=1),) * layer.repeat for layer in self.layers]
            object.__setattr__(self, "layers", tuple(chain.from_iterable(each)))
        rotating = [i for i, mixer in self.mixers.items() if mixer.rotary is not None]
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
        for index, mixer in self.mixers.items():
            shared = mixer.shared_table
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
        for mixer in self.mixers.values():
            shared = mixer.shared_table
            if shared is not None:
                tables.setdefault(shared[0], shared[1:])
        return tables

    def _check_losses(self) -> None:
        weights: dict[str, float] = {}
        reserved = (*_RESERVED, "z") if self.z_loss else _RESERVED
        for layer, _ in self.runs:
            for entry in layer.entries:
                for name, weight in entry.loss_weights.items():
                    if not name.isidentifier() or name in reserved:
                        text = f"a loss is called {name!r}; use a word other than {reserved}"
                        raise FieldError({"layers": text}, "ModelConfig")
                    if weights.setdefault(name, weight) != weight or not isfinite(weight):
                        text = (
                            f"the loss {name!r} has the weights {weights[name]} and {weight}; use "
                            "one finite number in all layers, or another name for the others"
                        )
                        raise FieldError({"layers": text}, "ModelConfig")

    @property
    def loss_weights(self) -> dict[str, float]:
        """What each loss of the model weighs in the objective, by name: `lm` 1, then others."""
        weights = {"lm": 1.0}
        if self.z_loss:
            weights["z"] = self.z_loss
        for layer, _ in self.runs:
            weights |= layer.loss_weights
        return weights

    def __str__(self) -> str:
        """A table of the layers, equal neighbours in one row, with parameters and FLOPs."""
        return import_module("mt_model.table").table(self)

    @property
    def runs(self) -> tuple[tuple[LayerConfig, int], ...]:
        """Equal neighbours of the layer list as one layer, and how often it comes."""
        return tuple(runs(self.layers))

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and of the head: the vocabulary with its padding."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def usual_vocab_multiple(self) -> int:
        """A `vocab_multiple` with which most layouts can share the vocabulary."""
        return 128 if self.vocab_size >= 1024 else 8

    @property
    def mixers(self) -> dict[int, MixerConfig]:
        """The mixers by the index of their layer, for the layers that have one."""
        found = ((index, layer.mixer) for index, layer in enumerate(self.layers))
        return {index: mixer for index, mixer in found if mixer is not None}

    @property
    def num_layers(self) -> int:
        """Length of the layer list."""
        return len(self.layers)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model with padding, from the sizes; a tied head counts once."""
        hidden = self.hidden_size
        norm = self.norm.num_parameters(hidden)
        total = self.vocab_rows * (hidden * (1 if self.tied else 2) + self.head_bias)
        total += norm * (self.final_norm + self.embedding_norm) + self.token_types * hidden
        if self.head_transform is not None:
            total += hidden * (hidden + 1) + norm
        if self.positions == "learned":
            total += self.max_sequence_length * hidden
        total += sum(buckets * heads for buckets, heads in self.score_tables.values())
        for layer, repeats in self.runs:
            each = sum(entry.num_parameters(hidden) for entry in layer.entries)
            total += repeats * (each + norm * layer.num_norms)
        return total

    def cache_break(self, held: int, length: int) -> int | None:
        """Return the length between these past which what a cache holds doesn't serve, or None.

        Args:
            held: Tokens that the cache holds.
            length: Tokens with those to come.
        """
        if not held:
            return None
        breaks = (mixer.cache_break for mixer in self.mixers.values())
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
        if self.head_transform is not None:
            total += 6 * self.hidden_size**2
        for layer, repeats in self.runs:
            entries = layer.entries
            each = sum(e.flops_per_token(self.hidden_size, sequence_length) for e in entries)
            total += repeats * each
        return total

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; `ModelConfig.from_dict` of them is equal to this config.

        Equal neighbours in `layers` are one entry with a `repeat`.
        """
        layers = [{**to_plain(layer), "repeat": repeats} for layer, repeats in self.runs]
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
        if layer.mixer is None:
            continue
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
