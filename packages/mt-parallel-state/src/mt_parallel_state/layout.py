"""Rank arithmetic: which rank sits where in a tp x cp x ep x dp x pp world.

Nothing here knows about `torch.distributed`; every answer follows from the sizes and the order
string alone, so a layout of thousands of ranks can be inspected on a laptop.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from mt_files import check_type, did_you_mean, multiples_near, shorten

EMBEDDING = "embedding"
"""The pseudo axis of tied embeddings: the first and the last pipeline stage."""
MIRROR = "mirror"
"""The pseudo axis of bidirectional schedules: pipeline ranks r and pp - 1 - r hold the same."""

AXES = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")
DENSE = frozenset({"tp", "cp", "dp"})  # of the dense view alone
EXPERT = frozenset({"etp", "ep", "edp"})
_ORDER_AXES = ("tp", "cp", "ep", "dp", "pp")
_DENSE_TO_EXPERT = {"tp": "etp", "dp": "edp"}
_PSEUDO = (EMBEDDING, MIRROR)
MOST_RANKS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """The sizes of the parallel axes and the order in which they fill the world.

    A rank is a mixed-radix number: `rank = sum(index[axis] * stride[axis])`, where the stride of an
    axis is the product of the sizes to its left in `order` (the leftmost axis has stride 1).

    The same ranks are factorised twice. The *dense* view is tp x cp x dp x pp. The *expert* view is
    etp x ep x edp x pp, in which etp takes the place of tp in `order`, edp the place of dp, and cp
    has size 1 ("parallel folding"). Its data-parallel size is derived:
    `edp = tp * cp * dp / (etp * ep)`. Both views must form the same pipeline groups. Without
    experts (`ep == 1` and `etp == tp`) the expert view is the dense one, with cp and dp as edp.

    Attributes:
        tp: Tensor-parallel size.
        cp: Context-parallel size.
        ep: Expert-parallel size.
        dp: Data-parallel size.
        pp: Number of pipeline stages.
        etp: Tensor-parallel size inside one expert. `None` means `tp` when `ep == 1` (expert layers
            are split like dense ones) and 1 otherwise (each expert is whole).
        order: The axes, fastest varying first, joined by `-`. Axes of size 1 may be left out.

    Raises:
        TypeError: A size is not an int, or `order` is not a string.
        ValueError: A size is below 1, there are more than 2**20 ranks, `order` is not a permutation
            of the axes, the expert view does not fit, or the two views disagree on the pipeline
            groups.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    etp: int | None = None
    order: str = "tp-cp-ep-dp-pp"

    def __post_init__(self) -> None:
        for axis in (*_ORDER_AXES, "etp"):
            value = getattr(self, axis)
            if axis == "etp" and value is None:
                continue
            check_type(axis, value, int)
            if value < 1:
                raise ValueError(f"{axis} must be at least 1, got {value}")
        if self.world_size > MOST_RANKS:
            raise ValueError(
                f"{self._sizes()} make {self.world_size} ranks; a layout has at most {MOST_RANKS}"
            )
        self._check_order()
        if self.etp is None:
            object.__setattr__(self, "etp", self.tp if self.ep == 1 else 1)
        self._check_expert_view()

    @classmethod
    def fit(
        cls,
        world_size: int,
        *,
        tp: int = 1,
        cp: int = 1,
        ep: int = 1,
        pp: int = 1,
        etp: int | None = None,
        order: str = "tp-cp-ep-dp-pp",
    ) -> ParallelLayout:
        """Build the layout that fills `world_size` ranks; the data-parallel size is derived.

        Raises:
            ValueError: `world_size` is not a multiple of `tp * cp * pp`.
        """
        check_type("world_size", world_size, int)
        cls(tp=tp, cp=cp, pp=pp)
        replica = tp * cp * pp
        dp, rest = divmod(world_size, replica)
        if rest or dp < 1:
            raise ValueError(
                f"a world of {world_size} ranks cannot hold tp={tp} x cp={cp} x pp={pp}: one "
                f"replica needs {replica} ranks; use a world of "
                f"{multiples_near(world_size, replica)} ranks, or make tp x cp x pp a "
                f"divisor of {world_size}"
            )
        return cls(tp=tp, cp=cp, ep=ep, dp=dp, pp=pp, etp=etp, order=order)

    @property
    def world_size(self) -> int:
        """The number of ranks: tp * cp * dp * pp."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def edp(self) -> int:
        """The data-parallel size of the expert view: tp * cp * dp / (etp * ep)."""
        return self.tp * self.cp * self.dp // (self._etp * self.ep)

    @property
    def _etp(self) -> int:
        return self.tp if self.etp is None else self.etp

    def size(self, axes: str) -> int:
        """Return the number of ranks in one group of `axes` (`"tp"`, `"dp-cp"`, `"embedding"`)."""
        if axes in _PSEUDO:
            return min(self.pp, 2)
        return prod(self._axis_size(axis) for axis in self._resolve(axes))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of `rank` on every axis of both views: tp, cp, dp, pp, etp, ep, edp."""
        self._check_rank(rank)
        return {axis: _index(rank, digits) for axis, digits in self._both_views.items()}

    def groups(self, axes: str) -> list[list[int]]:
        """Return all groups of `axes`: each varies those axes and fixes the others.

        Every group lists its ranks in ascending order, and the groups are ordered by their first
        rank. They partition the world, except `"embedding"`, which leaves out inner stages.
        A string that names ep, etp or edp reads the expert view (tp as etp, dp as edp).

        Args:
            axes: Axis names joined by `-`, in any order.
        """
        if axes in _PSEUDO:
            return [group for stages in self.groups("pp") for group in _pseudo(axes, stages)]
        inner, outer = self._split(axes)
        offsets = _spans(inner)
        return [[base + offset for offset in offsets] for base in _spans(outer)]

    def group_of(self, axes: str, rank: int) -> list[int]:
        """Return the group of `axes` that holds `rank`; `[rank]` if no group does."""
        self._check_rank(rank)
        if axes in _PSEUDO:
            groups = _pseudo(axes, self.group_of("pp", rank))
            return next((group for group in groups if rank in group), [rank])
        inner, _ = self._split(axes)
        base = rank - sum(rank // stride % size * stride for stride, size in inner)
        return [base + offset for offset in _spans(inner)]

    def axis_names(self, axes: str) -> tuple[str, ...]:
        """Return the axes of an axes string as `coordinates` names them, in the order given."""
        chosen = self._resolve(axes)
        return tuple(a if a in chosen else _DENSE_TO_EXPERT[a] for a in axes.split("-"))

    def _axis_size(self, axis: str) -> int:
        return self._etp if axis == "etp" else int(getattr(self, axis))

    def _ordered_axes(self) -> tuple[str, ...]:
        named = tuple(self.order.split("-"))
        return named + tuple(axis for axis in _ORDER_AXES if axis not in named)

    @property
    def _has_experts(self) -> bool:
        return self.ep > 1 or self._etp != self.tp

    @cached_property
    def _both_views(self) -> dict[str, tuple[tuple[int, int], ...]]:
        return {**self._digits(expert=False), **self._digits(expert=True)}

    def _digits(self, *, expert: bool) -> dict[str, tuple[tuple[int, int], ...]]:
        """Return for each axis of a view its digits in a rank: stride and size, minor one first."""
        if expert and not self._has_experts:
            dense = self._digits(expert=False)
            edp = tuple(sorted(dense["cp"] + dense["dp"]))
            return {"etp": dense["tp"], "ep": ((1, 1),), "edp": edp, "pp": dense["pp"]}
        digits: dict[str, tuple[tuple[int, int], ...]] = {}
        stride = 1
        for axis in self._ordered_axes():
            if axis == ("cp" if expert else "ep"):
                continue
            name = _DENSE_TO_EXPERT.get(axis, axis) if expert else axis
            digits[name] = ((stride, self._axis_size(name)),)
            stride *= self._axis_size(name)
        return digits

    def _split(self, axes: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the digits of a rank that vary in a group of `axes`, and those that don't."""
        chosen = self._resolve(axes)
        view = self._digits(expert=bool(EXPERT & chosen))
        inner = [digit for axis in view if axis in chosen for digit in view[axis]]
        outer = [digit for axis in view if axis not in chosen for digit in view[axis]]
        return inner, outer

    def _resolve(self, axes: str) -> frozenset[str]:
        """Return the axis names that an axes string stands for, all from one view."""
        if not isinstance(axes, str):
            raise TypeError(f"axes must be a string such as 'dp-cp', got {axes!r}")
        names = axes.split("-")
        for name in names:
            if name not in AXES:
                raise ValueError(_unknown_axis(name))
        if EXPERT & set(names):
            if "cp" in names:
                raise ValueError(
                    f"axes {axes!r} mix cp with the expert view, which has no cp axis; "
                    "use names among etp, ep, edp, pp (tp and dp are read as etp and edp)"
                )
            names = [_DENSE_TO_EXPERT.get(name, name) for name in names]
        if len(set(names)) != len(names):
            raise ValueError(f"axes {axes!r} name an axis twice (as {'-'.join(names)})")
        return frozenset(names)

    def _check_rank(self, rank: int) -> None:
        check_type("rank", rank, int)
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank {rank} is out of range: the world has {self.world_size} ranks "
                f"({self._sizes()}), so the rank is 0 to {self.world_size - 1}"
            )

    def _sizes(self) -> str:
        return f"tp={self.tp}, cp={self.cp}, dp={self.dp}, pp={self.pp}"

    def _check_order(self) -> None:
        if not isinstance(self.order, str):
            raise TypeError(f"order must be a string such as 'tp-cp-ep-dp-pp', got {self.order!r}")
        named = self.order.split("-")
        valid = f"a permutation of {'-'.join(_ORDER_AXES)}"
        for axis in named:
            if axis not in _ORDER_AXES:
                raise ValueError(f"order {self.order!r:.80} has {axis!r:.80}; it must be {valid}")
            if named.count(axis) > 1:
                raise ValueError(f"order {self.order!r:.80} names {axis} twice; it must be {valid}")
        for axis in _ORDER_AXES:
            if axis not in named and self._axis_size(axis) > 1:
                raise ValueError(
                    f"order {self.order!r} leaves out {axis}, which has size "
                    f"{self._axis_size(axis)}; only axes of size 1 may be left out"
                )

    def _check_expert_view(self) -> None:
        per_stage = self.tp * self.cp * self.dp
        need = self._etp * self.ep
        if per_stage % need:
            raise ValueError(
                f"etp={self._etp} x ep={self.ep} = {need} does not divide the {per_stage} ranks of "
                f"a pipeline stage (tp={self.tp} x cp={self.cp} x dp={self.dp}); choose etp and ep "
                f"whose product divides {per_stage}, or a stage of "
                f"{multiples_near(per_stage, need)} ranks"
            )
        ((dense, _),) = self._digits(expert=False)["pp"]
        ((expert, _),) = self._digits(expert=True)["pp"]
        if self.pp > 1 and dense != expert:
            raise ValueError(
                f"the dense view ({self._sizes()}) and the expert view (etp={self._etp}, "
                f"ep={self.ep}, edp={self.edp}, pp={self.pp}) form different pipeline groups under "
                f"order {self.order!r}: consecutive stages are {dense} and {expert} ranks apart; "
                "put pp last in order, or choose etp x ep so that edp equals dp"
            )


def _index(rank: int, digits: Iterable[tuple[int, int]]) -> int:
    """Read the index of an axis off a rank."""
    result, weight = 0, 1
    for stride, size in digits:
        result += rank // stride % size * weight
        weight *= size
    return result


def _pseudo(axes: str, stages: list[int]) -> list[list[int]]:
    """Return the groups of a pseudo axis among the ranks of one pipeline."""
    if axes == EMBEDDING:
        return [sorted({stages[0], stages[-1]})]
    half = (len(stages) + 1) // 2
    return [sorted({stages[i], stages[-1 - i]}) for i in range(half)]


def _spans(digits: Iterable[tuple[int, int]]) -> list[int]:
    """Return all sums of index * stride over the given digits, ascending."""
    ranges = [[i * stride for i in range(size)] for stride, size in digits]
    return sorted(sum(offsets) for offsets in product(*ranges))


def _unknown_axis(name: str) -> str:
    near = did_you_mean(name, (*AXES, *_PSEUDO))
    return f"unknown axis {shorten(name)} (axes are joined by '-'). {near}"
