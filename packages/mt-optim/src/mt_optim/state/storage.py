"""The precision and place of states between steps."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mt_data_parallel import ParamShard
from torch import Tensor

from mt_optim.checks import check_number
from mt_optim.parameters.group import MASTER_DTYPES
from mt_optim.rules.rule import Rule
from mt_optim.state.host import HostMemory, Mover, choose_offloaded
from mt_optim.state.moments import MomentStorage
from mt_optim.state.remainder import join, split

MASTERS = ("full", "remainder")


class StateStorage:
    """Keeps the state of shards, whatever their rule: the master, the moments and the step.

    Args:
        moments_dtype: Format of the moments, as for `MomentStorage`.
        masters: Form of the masters of bf16 parameters: `full`, an fp32 copy, or `remainder`, the
            17 bits that the parameter lacks.
        offload: Share of the elements whose state is on the host, with full masters.
        offload_dir: A folder for files with these states; None for the host's memory.

    Raises:
        ValueError: A setting is out of range, or two contradict each other.
        TypeError: A setting has the wrong type.
    """

    def __init__(
        self,
        *,
        moments_dtype: str = "full",
        masters: str = "full",
        offload: float = 0.0,
        offload_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self._moments = MomentStorage(moments_dtype)
        if masters not in MASTERS:
            raise ValueError(f"masters must be one of {', '.join(MASTERS)}; got {masters!r:.60}")
        if not 0 <= check_number("offload", offload) <= 1:
            raise ValueError(f"offload is a share of the states, from 0 to 1; got {offload}")
        if offload_dir is not None and not offload:
            raise ValueError(
                f"offload_dir is {os.fspath(offload_dir)!r:.60} and offload is 0, so nothing goes "
                "there; make offload more, or leave offload_dir out"
            )
        self._masters, self._offload = masters, offload
        self._host = HostMemory(offload_dir)
        self._offloaded: set[str] = set()
        self._numel = self._offloaded_numel = 0
        self._mover: Mover | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mover": None}  # it has streams of a device

    def place(self, shards: Sequence[ParamShard]) -> None:
        """Choose the new shards whose state is on the host.

        The choice depends on their sizes only, so ranks with shards of equal sizes choose alike.
        """
        numels, masters = [shard.param.numel() for shard in shards], 0
        self._numel += sum(numels)
        target = self._offload * self._numel - self._offloaded_numel
        for place in choose_offloaded(numels, target) if self._offload else ():
            self._offloaded.add(shards[place].name)
            self._offloaded_numel += numels[place]
            masters += numels[place] * MASTER_DTYPES[shards[place].param.dtype].itemsize
        self._host.require(masters)  # moments come beside them, by the rule

    @property
    def is_plain(self) -> bool:
        """Whether every state is kept as its rule takes it, on the device."""
        return self._masters == "full" and not self._offloaded and not self._moments.has_format

    def is_offloaded(self, shard: ParamShard) -> bool:
        """Whether the state of a shard is on the host, where it is stepped."""
        return shard.name in self._offloaded

    def mover(self, device: torch.device) -> Mover:
        """Return the mover for copies between device and host, which keeps its buffers."""
        if self._mover is None:
            self._mover = Mover(device)
        return self._mover

    def is_converted(self, shard: ParamShard) -> bool:
        """Whether a step makes copies of the master or the moments of a shard."""
        is_split = self._masters == "remainder" and not self.is_offloaded(shard)
        return is_split or self._moments.converts(MASTER_DTYPES[shard.param.dtype])

    def new(self, shard: ParamShard, rule: Rule) -> dict[str, Tensor]:
        """Return the state before the first step.

        Raises:
            ValueError: The rule can't step the shard, or its master has no remainder.
        """
        param, dtype = shard.param.detach(), MASTER_DTYPES[shard.param.dtype]
        if self._masters == "remainder" and param.numel() and param.dtype != torch.bfloat16:
            raise ValueError(
                f"masters 'remainder' is for bf16, and it is {param.dtype}; use masters 'full'"
            )
        master = shard.param if param.dtype == dtype else param.to(dtype)
        if self.is_offloaded(shard):
            master = self._host.copy(master)
        state = rule.new_state(shard, master)
        for key in rule.moments:
            state |= self._moments.pack(key, state[key])
        if self.is_offloaded(shard):
            kept = {key: self._host.keep(state[key]) for key in state if key != "step"}
            return {**state, **kept, "master": master}
        if param.dtype == dtype:
            return state
        if self._masters == "full":
            return {**state, "master": master}
        _, distance, ties = split(master)
        return {**state, "remainder": distance, "ties": ties}

    def master(self, shard: ParamShard, state: Mapping[str, Tensor]) -> Tensor:
        """Return the full-precision parameter; a copy if a remainder is kept."""
        if "remainder" in state:
            return join(shard.param.detach(), state["remainder"], state["ties"])
        return state.get("master", shard.param)

    def set_master(self, shard: ParamShard, state: Mapping[str, Tensor], value: Tensor) -> None:
        """Set the master, and with remainders the parameter too."""
        if "remainder" not in state:
            own = state.get("master", shard.param)
            if own.data_ptr() != value.data_ptr():
                own.copy_(value)
            return
        param, distance, ties = split(value.to(shard.param.device, torch.float32))
        shard.param.copy_(param)
        state["remainder"].copy_(distance)
        state["ties"].copy_(ties)

    def moment(self, shard: ParamShard, state: Mapping[str, Tensor], key: str) -> Tensor:
        """Return a moment in its format, or in fp32 if the format has scales."""
        scaled = self._moments.is_scaled and self._moments.converts(
            MASTER_DTYPES[shard.param.dtype]
        )
        return self._moments.unpack(key, state, torch.float32 if scaled else state[key].dtype)

    def set_moment(self, state: dict[str, Tensor], key: str, value: Tensor) -> None:
        """Set a moment."""
        self._moments.write(state, key, value)

    def opened(
        self, shard: ParamShard, state: dict[str, Tensor], rule: Rule
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return master and state of a shard in full precision, for a rule to update."""
        master = self.master(shard, state)
        if not self._moments.converts(master.dtype):
            return master, state
        return master, self._moments.opened(state, rule.moments, master.dtype)

    def close(
        self,
        shard: ParamShard,
        state: dict[str, Tensor],
        rule: Rule,
        opened: tuple[Tensor, dict[str, Tensor]],
    ) -> None:
        """Store the results of a rule in the tensors that `opened` returned."""
        master, new = opened
        if new is not state:
            for key in rule.moments:
                self._moments.write(state, key, new[key])
        if "remainder" in state:
            self.set_master(shard, state, master)

    def saved(self, shard: ParamShard, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a state for a state dict, in one form for every kind of masters."""
        if "remainder" not in state:
            return dict(state)
        kept = {key: value for key, value in state.items() if key not in ("remainder", "ties")}
        return {**kept, "master": self.master(shard, state)}

    def template(
        self, shard: ParamShard, state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """Return tensors with the shapes that `load` expects, and the names of optional ones."""
        if "remainder" in state:
            kept = {key: value for key, value in state.items() if key not in ("remainder", "ties")}
            return {**kept, "master": shard.param}, ()
        is_own = shard.param.dtype == MASTER_DTYPES[shard.param.dtype]
        return dict(state), ("master",) if is_own else ()

    def load(
        self, shard: ParamShard, state: dict[str, Tensor], values: Mapping[str, Tensor]
    ) -> None:
        """Copy the values of a state dict into the existing tensors."""
        for key, value in values.items():
            if key == "master":
                self.set_master(shard, state, value)
            elif key in state:
                state[key].copy_(value)
            else:
                state[key] = value.clone()
        if "master" in state and "master" not in values:  # saved by an fp32 run without masters
            state["master"].copy_(shard.param)

    def move(self, shard: ParamShard, state: dict[str, Tensor], *, away: bool) -> None:
        """Move a state to the host, or back to the device of its shard."""
        for key in [key for key in state if key != "step"]:
            kept = state[key]
            state[key] = self._host.copy(kept) if away else kept.to(shard.param.device)
