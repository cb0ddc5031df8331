"""Shards: the parts of parameters that this rank steps, with their gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from mt_data_parallel.addend import Addends
from mt_data_parallel.grad import grad_of


@dataclass(slots=True)
class Phase:
    """What all shards of a buffer are in.

    Attributes:
        reducing: Whether gradients are still coming: between `start` and `finish`.
        addends: How large this rank's own gradients were, of all parameters of the buffer.
    """

    reducing: bool = False
    addends: Addends = field(default_factory=Addends)


@dataclass(frozen=True, kw_only=True, eq=False)
class ParamShard:
    """What one rank steps of one parameter: all of it, or a range of its elements.

    `param` is a leaf tensor with a gradient of its own, so any optimizer takes it as a parameter.
    Writing into it writes into the model's parameter. An optimizer keeps state for shards only,
    so its state is sharded like them.

    Attributes:
        name: The parameter's name.
        source: The model's parameter, for everything that is decided by parameter: its sharding
            record, its number of dims, its attributes.
        param: What is stepped: `source` itself where nothing is sharded, else a view of this
            rank's part of it, in the parameter's shape where it is whole and flat where it is not.
        start: First element of the flattened (row-major) parameter that `param` holds.
        end: One past the last one.
        peers: Global ranks that step the other parts, this one among them; empty where the
            parameter is not cut.
        replica: This rank's place among groups of peers that step the same.
        phase: Of the GradBuffer that it is a shard of.
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
            RuntimeError: The buffer that it belongs to was started and not finished, so gradients
                are not summed yet.
        """
        if self.phase is not None and self.phase.reducing:
            raise RuntimeError(
                f"gradient of the shard {self.name!r} before GradBuffer.finish(): it is not summed "
                "over the ranks yet; call finish() after the step's last backward"
            )
        return grad_of(self.param)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the parameter (as far as this rank holds it)."""
        return self.end - self.start == self.source.numel()


def param_shards(named_params: Iterable[tuple[str, Tensor] | ParamShard]) -> list[ParamShard]:
    """Return shards, of which parameters with names are whole ones.

    Args:
        named_params: Pairs of name and parameter, as `module.named_parameters()` gives them, or
            shards, as `GradBuffer.shards()` does.

    Raises:
        TypeError: Something is neither.
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
