"""What every kind of mixer and feed-forward answers for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
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
    """What a kind of mixer or feed-forward answers for; nothing else knows the kind."""

    kind_hint: ClassVar[str] = (
        "A kind of your own comes from a file under `plugins:`, or from a package's entry point "
        "mt.layers."
    )

    @abstractmethod
    def build(self, stream: StreamConfig, *, layer: int, shard: ShardContext) -> nn.Module:
        """Build the module on the meta device.

        Args:
            stream: The residual stream that the module reads and writes.
            layer: Global index.
            shard: This rank's share of the model.
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

    def expert_sizes(self) -> Iterable[tuple[str, int, str]]:
        """Give the names and values of sizes that ranks of experts must divide, with the axis."""
        return ()

    @property
    def num_buffers(self) -> int:
        """How many elements a checkpoint keeps beside the parameters."""
        return 0

    @property
    def loss_weights(self) -> Mapping[str, float]:
        """What the losses that its module returns weigh in the objective, by name.

        With any, the module returns `(output, losses)`: for each name a scalar in fp32 or fp64,
        the sum over the tokens of its own input.
        """
        return {}

    @property
    def evaluated(self) -> Self:
        """The same without what only training has, as a folder of weights describes it."""
        kind: Any = self
        return replace(kind, dropout=0.0) if "dropout" in hints_of(type(self)) else self

    @property
    def drops(self) -> bool:
        """Whether it drops anything in training, and so needs sample ids."""
        return False


@dataclass(frozen=True, kw_only=True)
class MixerConfig(EntryConfig):
    """What mixes tokens. A kind is a dataclass below this one.

    Its module is called with `(x, shared)`: [B, S, hidden] (S / tp tokens under sequence
    parallelism) and a `ForwardContext`, and returns the same shape, with the losses that
    `loss_weights` names.
    """

    default_kind: ClassVar[str] = "attention"

    @property
    def rotary(self) -> Rotary | None:
        """What the rotary table that the kind reads is made for, if it reads one."""
        return None

    @property
    def query_temperature(self) -> TemperatureConfig | None:
        """What it multiplies queries with by their positions, if it does."""
        return None

    @property
    def shared_table(self) -> tuple[str, int, int] | None:
        """Name, buckets and heads of the table of biases that it shares with others, if any."""
        return None

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
    def token_cache(self) -> Mapping[str, Literal["key", "value"]]:
        """Names of what is kept by head for each token, each with whose scales its codes have.

        That may be kept in low precision, [B, heads, tokens, D]; a state of all tokens may not.
        """
        return {}

    @property
    def token_heads(self) -> int:
        """Heads of `token_cache` in the whole model."""
        return 0

    @property
    def hides_padding(self) -> bool:
        """Whether tokens don't see the padding that a cache holds; a state of them all does."""
        return False

    @property
    def is_causal(self) -> bool:
        """Whether a token sees none that come after it."""
        return True

    @property
    def clipped_heads(self) -> int:
        """Number of key heads whose scores grow with the weights, which QK-clip bounds."""
        return 0

    @property
    def needs_memory(self) -> bool:
        """Whether it attends to a memory, which an encoder made."""
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

    Its module is called with `x`, or with `(x, shared)` where it `drops` anything, and returns the
    same shape, with losses as `loss_weights` says.
    """

    default_kind: ClassVar[str] = "mlp"
