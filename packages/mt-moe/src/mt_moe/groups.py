"""The process groups of a mixture-of-experts layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mt_parallel_state import Group, group_rank, group_size, shard_size

if TYPE_CHECKING:
    from mt_parallel_state import ParallelState


@dataclass(frozen=True, kw_only=True)
class ExpertGroups:
    """The ranks that share experts, tokens and dense weights; a group of None is one rank.

    Attributes:
        experts: Ranks that together have every expert once; tokens are sent within this group.
        etp: Number of ranks over which each expert is sharded.
        places: For each rank of `experts`, its index along ep and along etp; None is
            `(rank // etp, rank % etp)`.
        tp: Ranks that shard the shared expert, and under sequence parallelism the tokens.
        tokens: Ranks with tokens of the same sequences and micro-batch, for balancing losses,
            Sinkhorn and capacity.
        step: Ranks with tokens of the same step and layers, for `global_aux`.
        buffers: Communication buffers by size, shared by the layers with these groups.

    Raises:
        ValueError: The places or `etp` don't fit the group.
    """

    experts: Group = None
    etp: int = 1
    places: tuple[tuple[int, int], ...] | None = None
    tp: Group = None
    tokens: Group = None
    step: Group = None
    buffers: dict[tuple[int, ...], Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        ranks = group_size(self.experts)
        shard_size(ranks, None, what="experts")
        if not 1 <= self.etp <= ranks or ranks % self.etp:
            raise ValueError(
                f"etp={self.etp} does not divide the {ranks} ranks of the experts' group"
            )
        if self.places is not None:
            wanted = [(i, j) for i in range(self.ep) for j in range(self.etp)]
            if sorted(self.places) != wanted:
                raise ValueError(
                    f"places={self.places} must name each of {wanted} once, for ep={self.ep} and "
                    f"etp={self.etp}"
                )

    @classmethod
    def of(cls, state: ParallelState, *, tokens: str = "tp-cp") -> ExpertGroups:
        """Return the groups of a `ParallelState`, whose layout has `ep` and `etp`.

        Args:
            state: State of this rank.
            tokens: Axes over which sequences are split.
        """
        layout = state.layout
        axes = [layout.coordinates(rank) for rank in state.ranks("etp-ep")]
        return cls(
            experts=state.group("etp-ep"),
            etp=layout.size("etp"),
            places=tuple((each["ep"], each["etp"]) for each in axes),
            tp=state.group("tp"),
            tokens=state.group(tokens),
            step=state.group("tp-cp-dp"),
        )

    @property
    def ep(self) -> int:
        """The number of parts into which the experts are divided."""
        return group_size(self.experts) // self.etp

    @property
    def place(self) -> tuple[int, int]:
        """This rank's index along ep and along etp."""
        return self.all_places[group_rank(self.experts)]

    @property
    def all_places(self) -> tuple[tuple[int, int], ...]:
        """The place of each rank of `experts`."""
        if self.places is not None:
            return self.places
        return tuple(divmod(rank, self.etp) for rank in range(group_size(self.experts)))

    def local_experts(self, num_experts: int) -> int:
        """Return the number of experts on each rank.

        Raises:
            ValueError: The experts don't divide evenly.
        """
        if num_experts % self.ep or num_experts < 1:
            raise ValueError(
                f"num_experts={num_experts} can't be divided evenly over ep={self.ep} ranks; use a "
                f"multiple of {self.ep}"
            )
        return num_experts // self.ep
