"""ParallelState: a layout bound to the process groups of one running world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from mt_files import check_type
from torch.distributed.device_mesh import DeviceMesh

from mt_parallel_state.check import CheckMode, Ledger
from mt_parallel_state.groups import (
    create_group,
    destroy_group,
    next_state_index,
    register_alias,
    unregister_alias,
    world_store,
)
from mt_parallel_state.layout import EMBEDDING, MIRROR, ParallelLayout
from mt_parallel_state.levels import cut_into_levels
from mt_parallel_state.options import GroupOptions, check_options


class ParallelState:
    """This rank's view of a layout: sizes, indices and process groups per axis.

    Nothing is global: two states with two layouts can live in one process. Every rank must build
    its states in the same order. Groups are made when first asked for, by their members only, and
    once per distinct list of ranks. A world of one rank needs no `torch.distributed` at all.

    Args:
        layout: The layout. Its ranks are `offset` to `offset + world_size - 1` of the world.
        rank: This rank in the layout; `None` asks `torch.distributed` (0 where it is not
            initialised).
        device: The device of this rank; `None` is the current CUDA device where the process
            group can use one, else the CPU.
        timeout: Timeout of the collectives in these groups; `None` is torch's default.
        check: Compares every call on these groups between its ranks before it starts (see
            `CheckMode`); for finding errors, slow.
        offset: First world rank of the layout, for several models side by side. Ranks outside the
            layout build no state for it.
        options: Options of the groups of an axes string, e.g. `{"ep":
            GroupOptions(high_priority=True)}`. They belong to the list of ranks, under any name.
            Levels inherit the options of their axes, unless the options name their own ranks.

    Raises:
        ValueError: The layout does not fit the world, this process is outside it, `rank` is
            not this process's rank, or two names of the same ranks have different options.
        RuntimeError: The layout has several ranks and `torch.distributed` is not initialised.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        *,
        rank: int | None = None,
        device: torch.device | str | None = None,
        timeout: timedelta | None = None,
        check: CheckMode | None = None,
        offset: int = 0,
        options: Mapping[str, GroupOptions] | None = None,
    ) -> None:
        check_type("layout", layout, ParallelLayout)
        check_type("offset", offset, int)
        for name, value, kind in (
            ("rank", rank, int),
            ("timeout", timeout, timedelta),
            ("check", check, CheckMode),
            ("options", options, Mapping),
        ):
            if value is not None:
                check_type(name, value, kind)
        options = dict(options or {})
        check_options(layout, options)
        self.layout = layout
        self.offset = offset
        self.rank = _bind_rank(layout, rank, offset)
        self.device = _device(device)
        self._timeout, self._closed = timeout, False
        self._options = {tuple(self.ranks(axes)): given for axes, given in options.items()}
        # Key: ranks. Value: the group, the name for which it was made, and its options.
        self._groups: dict[tuple[int, ...], tuple[dist.ProcessGroup, str, GroupOptions | None]] = {}
        self._checked: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._coordinates = layout.coordinates(self.rank)
        self._index, self._ledger = 0, None
        if layout.world_size > 1:
            ranks = range(offset, offset + layout.world_size)
            self._index = next_state_index(ranks, self.rank)
            if check is not None:
                prefix = f"mt_parallel_state/check/{self._identity}"
                store = dist.PrefixStore(prefix, world_store())
                self._ledger = Ledger(store, offset + self.rank, check)

    def size(self, axes: str) -> int:
        """Return the number of ranks in this rank's group of `axes`."""
        pseudo = axes in (EMBEDDING, MIRROR)  # some ranks are in no group, or alone in theirs
        return len(self.ranks(axes)) if pseudo else self.layout.size(axes)

    def index(self, axes: str) -> int:
        """Return this rank's position in its group of `axes`."""
        if axes in self._coordinates:
            return self._coordinates[axes]
        return self.ranks(axes).index(self.rank)

    def ranks(self, axes: str) -> list[int]:
        """Return the layout ranks of this rank's group of `axes`, ascending."""
        return self.layout.group_of(axes, self.rank)

    def group(self, axes: str) -> dist.ProcessGroup | None:
        """Return the process group of `axes` that this rank is in; `None` if it is alone there.

        The first call for a list of ranks makes the group and needs every member to make the same
        call; ranks outside do nothing. Later calls, also under another name for the same ranks,
        return the same object.

        Raises:
            RuntimeError: The state is closed.
        """
        ranks = tuple(self.ranks(axes))
        return self._of(ranks, axes)

    def level_groups(self, axes: str, sizes: Sequence[int]) -> tuple[dist.ProcessGroup | None, ...]:
        """Return this rank's group at each level of `axes`, innermost first.

        A level on which it is alone has `None`. See `cut_into_levels`. Every member of `axes` makes
        the same call.

        Raises:
            ValueError: A level's group exists with other options, see `options`.
            RuntimeError: The state is closed.
        """
        levels = cut_into_levels(self.ranks(axes), sizes)
        own = [next(group for group in level if self.rank in group) for level in levels]
        return tuple(self._of(tuple(part), axes, f".level{i}") for i, part in enumerate(own))

    def device_mesh(self, axes: str) -> DeviceMesh:
        """Return a `DeviceMesh` over this rank's group of `axes`, one mesh dim per axis as named.

        It shares the groups of this state; axes of size 1 get a group of one rank. For code that
        takes a mesh (DTensor, FSDP2).
        """
        if self.layout.world_size == 1:
            raise RuntimeError("a DeviceMesh needs torch.distributed; this state has one rank")
        names = tuple(axes.split("-"))
        position = {rank: self.layout.coordinates(rank) for rank in self.ranks(axes)}
        keys = self.layout.axis_names(axes)
        ordered = sorted(position, key=lambda r: tuple(position[r][key] for key in keys))
        mesh = torch.tensor(self._global(tuple(ordered)), dtype=torch.int).view(
            [self.layout.size(k) for k in keys]
        )
        groups = [self._group(tuple(self.ranks(key)), key) for key in keys]
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], self.device.type, mesh_dim_names=names)
        return DeviceMesh.from_group(groups, self.device.type, mesh, mesh_dim_names=names)

    def close(self) -> None:
        """Destroy the groups this state made; it makes no more. The default group stays."""
        self._closed = True
        while self._checked:
            unregister_alias(self._checked.popitem()[1])
        while self._groups:
            destroy_group(self._groups.popitem()[1][0])

    def __enter__(self) -> ParallelState:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ParallelState({self.layout!r}, rank={self.rank}, device={self.device})"

    def _of(self, ranks: tuple[int, ...], axes: str, part: str = "") -> dist.ProcessGroup | None:
        """Return the group of these ranks, `part` of `axes`, checked if this state checks."""
        if len(ranks) == 1:
            return None
        group = self._group(ranks, axes, part)
        if self._ledger is None:
            return group
        if ranks not in self._checked:
            from mt_parallel_state.checked_group import CheckedGroup

            alias = CheckedGroup(
                group, ranks=self._global(ranks), axes=axes + part, ledger=self._ledger
            )
            register_alias(alias, group)
            self._checked[ranks] = alias
        return self._checked[ranks]

    def _group(self, ranks: tuple[int, ...], axes: str, part: str = "") -> dist.ProcessGroup:
        if self._closed:
            raise RuntimeError(
                f"this ParallelState is closed, so there is no group of {axes + part!r}; ask "
                "before close(), or build another state on every rank"
            )
        inherited = self._options.get(tuple(self.ranks(axes)))
        options = self._options.get(ranks, inherited)
        if ranks not in self._groups:
            members = self._global(ranks)
            name = f"mt-{self._identity}-{'_'.join(map(str, members))}"
            made = create_group(members, name=name, timeout=self._timeout, options=options)
            self._groups[ranks] = (made, axes + part, options)
        group, name, made_with = self._groups[ranks]
        if options != made_with:
            raise ValueError(
                f"{axes + part!r} would have {options}, but its group of ranks {list(ranks)} was "
                f"made as {name!r} with {made_with}; give the axes of that group options of their "
                "own, which then hold for both"
            )
        return group

    @property
    def _identity(self) -> str:
        """Return what tells this state from any other of the world, on every rank of its layout."""
        return f"{self.offset}-{self.layout.world_size}-{self._index}"

    def _global(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.offset + rank for rank in ranks)


def _bind_rank(layout: ParallelLayout, rank: int | None, offset: int) -> int:
    if offset < 0:
        raise ValueError(f"offset={offset} must be at least 0")
    if layout.world_size == 1:  # this process alone, whatever world it is in
        return 0 if rank is None else rank
    if rank is not None and not 0 <= rank < layout.world_size:
        raise ValueError(f"rank={rank} is not in the layout of {layout.world_size} ranks")
    if not dist.is_initialized():
        raise RuntimeError(
            f"the layout has {layout.world_size} ranks, but torch.distributed is not initialised; "
            "call init_process_group(detect_env()) first"
        )
    world, own = dist.get_world_size(), dist.get_rank()
    sizes = f"tp={layout.tp} x cp={layout.cp} x dp={layout.dp} x pp={layout.pp}"
    if offset == 0 and layout.world_size > world:
        raise ValueError(
            f"the layout needs {layout.world_size} ranks ({sizes}), but the world has {world}; "
            f"start {layout.world_size} ranks or use ParallelLayout.fit({world}, ...)"
        )
    last = offset + layout.world_size - 1
    if last >= world:
        raise ValueError(
            f"offset={offset} puts the layout's {layout.world_size} ranks ({sizes}) on {offset} to "
            f"{last}, but the world's are 0 to {world - 1}; use an offset of 0 to "
            f"{world - layout.world_size}"
        )
    if not offset <= own <= last:
        raise ValueError(
            f"this process is rank {own}, and the layout is on ranks {offset} to {last} of a world "
            f"of {world}: build this state there only, or use ParallelLayout.fit({world}, ...)"
        )
    if rank is not None and rank != own - offset:
        raise ValueError(
            f"rank={rank} was given, but this process is rank {own - offset} of the layout"
        )
    return own - offset


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        check_type("device", device, torch.device, str)
        try:
            return torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"device {device!r}: {error}") from error
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
