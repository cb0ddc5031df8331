"""Shards: the parts of parameters that this rank steps, with their gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from mt_data_parallel.addend import Addends
from mt_data_parallel.grad import grad_of


@dataclass(slots=True)
class Phase:
    """The phase of a GradBuffer, shared by all its shards.

    Attributes:
        reducing: Whether gradients are still coming: between `start` and `finish`.
        addends: The magnitudes of this rank's own gradients.
    """

    reducing: bool = False
    addends: Addends = field(default_factory=Addends)


@dataclass(frozen=True, kw_only=True, eq=False)
class ParamShard:
    """The part of one parameter that one rank steps: all of it, or a range of its elements.

    `param` is a leaf tensor with a gradient of its own, so any optimizer takes it as a parameter.
    Writing into it writes into the model's parameter. An optimizer keeps state for shards only,
    so its state is sharded like them.

    Attributes:
        name: The parameter's name.
        source: The model's parameter, with its sharding record, number of dims and attributes.
        param: The tensor to step: `source` itself if nothing is sharded, else a view of this rank's
            part, in the parameter's shape if it is whole and flat otherwise.
        start: First element of the flattened (row-major) parameter that `param` holds.
        end: One past the last one.
        peers: Global ranks that step the parts of the parameter, this one included; empty if it is
            not cut.
        replica: Index of this rank among the replicas of the shard.
        phase: The phase of its GradBuffer.
    """

    name: str
    source: Tensor
    param: Tensor
    start: int
    end: int
    peers: tuple[int, ...] = ()
    replica: int = 0
    phase: Phase | None = None

    @property
    def grad(self) -> Tensor | None:
        """The gradient of `param`, in its shape; None if there is none yet (it counts as zero).

        Raises:
            RuntimeError: The buffer was started and not finished, so gradients are not summed yet.
        """
        if self.phase is not None and self.phase.reducing:
            raise RuntimeError(
                f"gradient of the shard {self.name!r} before GradBuffer.finish(): it is not summed "
                "over the ranks yet; call finish() after the step's last backward"
            )
        return grad_of(self.param)

    @property
    def is_whole(self) -> bool:
        """Whether the shard is the whole parameter, as far as this rank holds it."""
        return self.end - self.start == self.source.numel()


def param_shards(named_params: Iterable[tuple[str, Tensor] | ParamShard]) -> list[ParamShard]:
    """Return shards; a named parameter becomes a shard of all its elements.

    Args:
        named_params: Pairs of name and parameter, as `module.named_parameters()` gives them, or
            shards, as `GradBuffer.shards()` does.

    Raises:
        TypeError: An item is neither.
    """
    shards: list[ParamShard] = []
    for item in named_params:
        if isinstance(item, ParamShard):
            shards.append(item)
            continue
        if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[1], Tensor):
            raise TypeError(
                f"expected a shard or a pair of name and parameter, got {item!r:.60} "
                f"({type(item).__name__}); pass module.named_parameters() or GradBuffer.shards()"
            )
        name, param = item
        shards.append(ParamShard(name=name, source=param, param=param, start=0, end=param.numel()))
    return shards
