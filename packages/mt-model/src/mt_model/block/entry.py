"""The configuration of a mixer or feed-forward, which knows everything of its kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from mt_files import hints_of

from mt_model.block.sizes import Sizes
from mt_model.rope.config import Rotary

if TYPE_CHECKING:
    from torch import nn

    from mt_model.block.shard_context import ShardContext
    from mt_model.block.stream import StreamConfig
    from mt_model.rope.temperature import TemperatureConfig


class EntryConfig(ABC):
    """Base of the configs of mixers and feed-forwards; no other code knows the kinds."""

    kind_hint: ClassVar[str] = (
        "A kind of your own comes from a file under `plugins:`, or from a package's entry point "
        "mt.layers."
    )

    @abstractmethod
    def build(self, stream: StreamConfig, *, layer: int, shard: ShardContext) -> nn.Module:
        """Build the module on the meta device.

        Args:
            stream: The residual stream that the module reads and writes.
            layer: Layer index in the whole model.
            shard: This rank's share of the model.
        """

    @abstractmethod
    def num_parameters(self, hidden_size: int) -> int:
        """Count the parameters at a width."""

    @abstractmethod
    def flops_per_token(self, hidden_size: int, sequence_length: int) -> int:
        """Count the operations of forward and backward for a token; a multiply-add is two."""

    def split_sizes(self, tp: int) -> Iterable[tuple[str, int]]:
        """Yield names and values of the sizes that `tp` ranks must divide."""
        del tp
        return ()

    def expert_sizes(self) -> Iterable[tuple[str, int, str]]:
        """Yield names and values of the sizes that expert ranks must divide, with the axis."""
        return ()

    @property
    def num_buffers(self) -> int:
        """Number of elements that a checkpoint keeps beside the parameters."""
        return 0

    @property
    def loss_weights(self) -> Mapping[str, float]:
        """Weights in the objective of the losses that its module returns, by name.

        A module with losses returns `(output, losses)`: for each name a scalar in fp32 or fp64,
        the sum over the tokens of its own input.
        """
        return {}

    @property
    def evaluated(self) -> Self:
        """The config without settings that only training has, as a folder of weights has it."""
        kind: Any = self
        return replace(kind, dropout=0.0) if "dropout" in hints_of(type(self)) else self

    @property
    def drops(self) -> bool:
        """Whether it drops anything in training, and needs sample ids for it."""
        return getattr(self, "dropout", 0) > 0


@dataclass(frozen=True, kw_only=True)
class MixerConfig(EntryConfig):
    """A mixer of tokens. Each kind is a dataclass derived from this one.

    Its module is called with `(x, shared)`: [B, S, hidden] (S / tp tokens under sequence
    parallelism) and a `ForwardContext`, and returns the same shape, with the losses that
    `loss_weights` names.

    Attributes:
        wide_cache: Names of the cache tensors that stay in fp32 in any model, such as sums over
            tokens.
        token_cache: Names of the per-head cache tensors of each token, each with its key or value
            scales. They are [B, heads, tokens, D], and may be kept in low precision; states may
            not.
        hides_padding: Whether cached padding stays invisible to tokens, as attention masks it and
            a state leaves it out in front of a prompt.
        needs_memory: Whether it attends to the output of an encoder.
    """

    default_kind: ClassVar[str] = "attention"
    wide_cache: ClassVar[Collection[str]] = ()
    token_cache: ClassVar[Mapping[str, Literal["key", "value"]]] = MappingProxyType({})
    hides_padding: ClassVar[bool] = False
    needs_memory: ClassVar[bool] = False

    @property
    def rotary(self) -> Rotary | None:
        """The rotary embedding and head size of the table that the mixer reads, if it reads one."""
        return None

    @property
    def query_temperature(self) -> TemperatureConfig | None:
        """Factors of queries by their positions, if the mixer has them."""
        return None

    @property
    def shared_table(self) -> tuple[str, int, int] | None:
        """Name, buckets and heads of the bias table that it shares with other layers, if any."""
        return None

    @property
    def cache_break(self) -> int | None:
        """Length of a sequence past which earlier cached keys no longer serve, if there is one."""
        scaling = None if self.rotary is None else self.rotary.rope.scaling
        return None if scaling is None else scaling.cache_break

    @property
    def token_heads(self) -> int:
        """Number of heads of `token_cache` in the whole model."""
        return 0

    @property
    def is_causal(self) -> bool:
        """Whether a token sees no later token."""
        return True

    @property
    def clipped_heads(self) -> int:
        """Number of key heads whose scores grow with the weights, which QK-clip bounds."""
        return 0

    def cache_shapes(self, batch_size: int, max_length: int, tp: int) -> Mapping[str, Sizes]:
        """Return the shapes of one rank's cache tensors, by name.

        Raises:
            NotImplementedError: The kind can't generate.
        """
        del batch_size, max_length, tp
        raise NotImplementedError(f"{type(self).__name__} keeps nothing of the tokens it has seen")

    def page_shapes(self, blocks: int, block_size: int, tp: int) -> Mapping[str, Sizes]:
        """Return the shapes of one rank's pages of `token_cache`, by name."""
        return self.cache_shapes(blocks, block_size, tp)

    def context_obstacle(self, algorithm: str, *, cp: int, inner: int, tp: int) -> str | None:
        """Return why `cp` ranks can't share a sequence this way; None if they can.

        Args:
            algorithm: Algorithm by which attention reaches the keys of other ranks.
            cp: Number of ranks that share a sequence.
            inner: Number of ranks that swap tokens for heads in the hierarchical algorithm.
            tp: Number of ranks that share the weights.
        """
        del algorithm, inner, tp
        return f"{type(self).__name__} needs whole sequences; use cp=1" if cp > 1 else None


@dataclass(frozen=True, kw_only=True)
class FeedForwardConfig(EntryConfig):
    """A function of each token alone. Each kind is a dataclass derived from this one.

    Its module is called with `x`, or with `(x, shared)` where it `drops` anything, and returns the
    same shape, with the losses that `loss_weights` names.
    """

    default_kind: ClassVar[str] = "mlp"
