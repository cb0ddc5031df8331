"""A list of layers and the residual stream between them, as frozen values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import isfinite
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from mt_files import Checks, FieldError, build, to_plain

from mt_model.block.entry import MixerConfig
from mt_model.block.sizes import MAX_LAYERS, MAX_LENGTH, MAX_WIDTH, indivisible
from mt_model.block.stream import StreamConfig
from mt_model.stack.layer_config import LayerConfig, runs
from mt_model.stack.table import table

if TYPE_CHECKING:
    from mt_parallel_state import ParallelState
    from torch import nn

# What is reported under a name like those of losses, and so is the name of none in a layer.
_RESERVED = ("lm", "tokens", "total", "val")


@dataclass(frozen=True, kw_only=True)
class StackConfig(StreamConfig, ABC):
    """Layers in order with a norm after the last one; subclasses add the input and the output.

    Attributes:
        hidden_size: Width of the residual stream.
        max_sequence_length: Longest sequence; also the rows of a learned position table.
        layers: One entry per layer; they may differ. An entry with a `repeat` becomes that many.
        norm: Form of every norm.
        final_norm: Norm after the last layer; layers with `post` norms end in one already.
        dropout: Probability of dropping an element of the embedding, mixer or feed-forward
            output in training.
        init_std: Standard deviation of the initial weights; projections that write to the
            residual stream use `init_std / sqrt(2 * num_layers)` (Radford et al., 2019).
        embedding_std: Standard deviation of embeddings and head; `init_std` where None. In muP it
            stays while `init_std` falls with the root of the width (Yang et al., 2022).
    """

    default_kind: ClassVar[str] = "model"
    inputs: ClassVar[Literal["tokens", "images"]] = "tokens"
    max_items: ClassVar[Mapping[str, int]] = MappingProxyType({"layers": MAX_LAYERS})
    layers: tuple[LayerConfig, ...]
    final_norm: bool = True
    init_std: float = 0.02
    embedding_std: float | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "hidden_size", "max_sequence_length")
        checks.at_most(MAX_WIDTH, "hidden_size")
        checks.at_most(MAX_LENGTH, "max_sequence_length")
        checks.above(0, "init_std", "embedding_std")
        checks.fraction("dropout")
        self._check_own(checks)
        checks.done()
        count = sum(layer.repeat for layer in self.layers)
        if not 0 < count <= MAX_LAYERS:
            text = f"{count} layers with their repeats; use at most {MAX_LAYERS}, and at least one"
            raise FieldError({"layers": text}, type(self).__name__)
        if count > len(self.layers):
            each = [(replace(layer, repeat=1),) * layer.repeat for layer in self.layers]
            object.__setattr__(self, "layers", tuple(chain.from_iterable(each)))
        self._check_losses()
        self._check_tables()
        self.check_experts(ep=1, etp=1)

    @abstractmethod
    def _check_own(self, checks: Checks) -> None:
        """Check the fields that a subclass adds, before the layers are checked."""

    @abstractmethod
    def build(self, state: ParallelState | None = None, **arguments: Any) -> nn.Module:
        """Build the model, or a stage of it.

        Args:
            state: This rank's place; None is a single process.
            arguments: Further arguments of `Stack`.
        """

    def __str__(self) -> str:
        """Return a table of the layers, equal neighbours in one row, with parameters and FLOPs."""
        return table(self)

    @property
    def own_losses(self) -> dict[str, float]:
        """Weights in the objective of the losses that arise outside of the layers, by name."""
        return {}

    @property
    def loss_counts(self) -> dict[str, str]:
        """Name of the count that each loss is divided by, by the loss's name."""
        return dict.fromkeys(self.loss_weights, "tokens")

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weight of each loss in the objective, by name: the model's own, then the layers'."""
        weights = dict(self.own_losses)
        for layer, _ in runs(self.all_layers):
            weights |= layer.loss_weights
        return weights

    @property
    def all_layers(self) -> tuple[LayerConfig, ...]:
        """The layers, then the layers of further modules such as MTP, numbered on."""
        return self.layers

    @property
    def runs(self) -> tuple[tuple[LayerConfig, int], ...]:
        """Runs of equal layers: the layer and how often it comes."""
        return tuple(runs(self.layers))

    @property
    def mixers(self) -> dict[int, MixerConfig]:
        """Mixers by the index of their layer in `all_layers`, where a layer has one."""
        found = ((index, layer.mixer) for index, layer in enumerate(self.all_layers))
        return {index: mixer for index, mixer in found if mixer is not None}

    @property
    def drops(self) -> bool:
        """Whether anything is dropped in training."""
        layers = (layer for layer, _ in runs(self.all_layers))
        entries = chain.from_iterable((layer.mixer, layer.feed_forward) for layer in layers)
        return bool(self.dropout) or any(entry.drops for entry in entries if entry is not None)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def score_tables(self) -> dict[str, tuple[int, int]]:
        """Number of buckets and of heads of each table of biases that layers share, by name."""
        tables: dict[str, tuple[int, int]] = {}
        for mixer in self.mixers.values():
            shared = mixer.shared_table
            if shared is not None:
                tables.setdefault(shared[0], shared[1:])
        return tables

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model, from its sizes."""
        total = self.norm.num_parameters(self.hidden_size) * self.final_norm
        total += sum(buckets * heads for buckets, heads in self.score_tables.values())
        for layer, repeats in runs(self.all_layers):
            total += repeats * self.layer_parameters(layer)
        return total

    @property
    def num_buffers(self) -> int:
        """Number of elements that a checkpoint keeps beside the parameters."""
        entries = chain.from_iterable(layer.entries for layer in self.all_layers)
        return sum(entry.num_buffers for entry in entries)

    def layer_parameters(self, layer: LayerConfig) -> int:
        """Count the parameters of one layer, with its norms."""
        each = sum(entry.num_parameters(self.hidden_size) for entry in layer.entries)
        return each + self.norm.num_parameters(self.hidden_size) * layer.num_norms

    def flops_per_token(self, sequence_length: int) -> int:
        """Count the operations of forward and backward for one token of a full sequence.

        A multiply-add counts as 2 and backward as twice forward. Projections of mixers and
        feed-forwards are counted, and the products of attention that are not masked. Norms and
        softmax are not counted, nor is recomputation, so that the number is the one MFU is defined
        on (Chowdhery et al., 2022).

        Args:
            sequence_length: Tokens per sequence.

        Raises:
            ValueError: There are no tokens.
        """
        if sequence_length < 1:
            raise ValueError(f"sequence_length={sequence_length} is not at least 1")
        total = 0
        for layer, repeats in runs(self.all_layers):
            entries = layer.entries
            each = sum(e.flops_per_token(self.hidden_size, sequence_length) for e in entries)
            total += repeats * each
        return total

    def cache_break(self, held: int, length: int) -> int | None:
        """Return a length from `held` to below `length` past which cached keys fail, or None.

        Args:
            held: Number of tokens in the cache.
            length: Number of tokens with the new ones.
        """
        if not held:
            return None
        breaks = (mixer.cache_break for mixer in self.mixers.values())
        return next((at for at in breaks if at is not None and held <= at < length), None)

    def part_of(self, name: str) -> StackConfig:
        """Return the stack whose settings give a parameter its initial values.

        Args:
            name: Name of the parameter in the whole model.
        """
        del name
        return self

    def rows_of(self, name: str) -> int | None:
        """Return how many rows of a parameter are in use, where rows of padding follow; else None.

        Args:
            name: Name of the parameter in the whole model.
        """
        del name
        return None

    def rows_behind(self) -> Iterable[tuple[str, int, int, LayerConfig]]:
        """Give name, parameters, FLOPs per token and layer of the modules after the layers."""
        return ()

    def outside(self) -> tuple[str, str, str]:
        """Describe the norms, the input and the head outside of the layers, for `str(config)`."""
        return "", "", ""

    def check_split(self, tp: int) -> None:
        """Check that `tp` ranks can share every split dim, as `validate_split` says."""
        for index, layer in enumerate(self.all_layers):
            for entry in layer.entries:
                for name, size in entry.split_sizes(tp):
                    if size % tp:
                        raise ValueError(indivisible(name, size, tp) + f" (layer {index})")

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts."""
        entries = (layer.entries for layer, _ in runs(self.all_layers))
        return any(tuple(e.expert_sizes()) for e in chain.from_iterable(entries))

    def check_experts(self, *, ep: int, etp: int) -> None:
        """Check that ranks can share the experts of every layer.

        Raises:
            ValueError: No layer has experts, or their number or width does not divide.
        """
        if ep > 1 and not self.has_experts:
            raise ValueError(
                f"ep={ep} ranks share experts, and no layer has any; use ep=1, or layers whose "
                "feed_forward is of type moe"
            )
        ranks = {"ep": ep, "etp": etp}
        for index, layer in enumerate(self.all_layers):
            for entry in layer.entries:
                for name, size, axis in entry.expert_sizes():
                    if size % ranks[axis]:
                        text = indivisible(name, size, ranks[axis]).replace("tp=", f"{axis}=")
                        raise ValueError(f"{text} (layer {index})")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, of which `from_dict` makes an equal config.

        Equal neighbours in `layers` are one entry with a `repeat`.
        """
        layers = [{**to_plain(layer), "repeat": repeats} for layer, repeats in self.runs]
        return {**to_plain(self), "layers": layers}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build a config from plain values, as `to_dict` or a person wrote them.

        An entry of `layers` may have a `repeat`, and a mixer or feed-forward without a `type` is
        `attention` or `mlp`. `StackConfig.from_dict` reads any kind of model, a `ModelConfig` where
        there is no `type`.

        Raises:
            SchemaError: keys are unknown or missing, or values are of the wrong type or range;
                the message names the path of each, such as `layers[3].mixer.num_heads`.
        """
        return build(cls, data)

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
                raise FieldError({"layers": text}, type(self).__name__)

    def _check_losses(self) -> None:
        weights: dict[str, float] = {}
        counts = self.loss_counts.values()
        reserved = tuple(dict.fromkeys((*self.own_losses, *_RESERVED, *counts)))
        for layer, _ in runs(self.all_layers):
            for entry in layer.entries:
                for name, weight in entry.loss_weights.items():
                    if not name.isidentifier() or name in reserved:
                        text = f"a loss is called {name!r}; use a word other than {reserved}"
                        raise FieldError({"layers": text}, type(self).__name__)
                    if weights.setdefault(name, weight) != weight or not isfinite(weight):
                        text = (
                            f"the loss {name!r} has the weights {weights[name]} and {weight}; use "
                            "one finite number in all layers, or another name for the others"
                        )
                        raise FieldError({"layers": text}, type(self).__name__)
