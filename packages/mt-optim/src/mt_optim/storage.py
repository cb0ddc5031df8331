"""How and where states are kept between steps: in which precision, on the device or the host."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from mt_data_parallel import Piece
from torch import Tensor

from mt_optim.group import MASTER_DTYPES, check_number
from mt_optim.host import HostMemory, Mover, choose_offloaded
from mt_optim.remainder import join, split
from mt_optim.rule import Rule

_FORMATS: dict[str, torch.dtype | None] = {
    "full": None,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
MOMENTS_DTYPES = tuple(_FORMATS)
MASTERS = ("full", "remainder")
_BLOCK = 256  # elements that share a scale
_SCALE = "_scale"


class StateStorage:
    """Keeps the state of pieces, whatever their rule: the master, the moments and the step.

    Args:
        moments_dtype: What moments are kept in, as of `MomentStorage`.
        masters: What is kept of the masters of bf16 parameters: `full`, an fp32 copy, or
            `remainder`, what the parameter lacks of it, in 17 bits.
        offload: Which share of the elements has its state on the host. Those have a full master.
        offload_dir: A folder for files that hold it; None for the host's memory.

    Raises:
        ValueError: A setting is out of range, or two don't go together.
        TypeError: One is of another type.
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

    def place(self, pieces: Sequence[Piece]) -> None:
        """Decide which of some new pieces have their state on the host.

        It is decided by their sizes, so that ranks with pieces of equal sizes decide alike.
        """
        numels = [piece.param.numel() for piece in pieces]
        self._numel += sum(numels)
        target = self._offload * self._numel - self._offloaded_numel
        for place in choose_offloaded(numels, target) if self._offload else ():
            self._offloaded.add(pieces[place].name)
            self._offloaded_numel += numels[place]

    @property
    def is_plain(self) -> bool:
        """Whether every state is kept as its rule takes it, on the device."""
        return self._masters == "full" and not self._offloaded and not self._moments.has_format

    def is_offloaded(self, piece: Piece) -> bool:
        """Whether the state of a piece is on the host, where it is stepped."""
        return piece.name in self._offloaded

    def mover(self, device: torch.device) -> Mover:
        """Return what copies between a device and the host; it keeps its buffers."""
        if self._mover is None:
            self._mover = Mover(device)
        return self._mover

    def is_converted(self, piece: Piece) -> bool:
        """Whether a step makes copies of the master or the moments of a piece."""
        is_split = self._masters == "remainder" and not self.is_offloaded(piece)
        return is_split or self._moments.converts(MASTER_DTYPES[piece.param.dtype])

    def new(self, piece: Piece, rule: Rule) -> dict[str, Tensor]:
        """Return the state before the first step.

        Raises:
            ValueError: The rule can't step the piece, or its master has no remainder.
        """
        param, dtype = piece.param.detach(), MASTER_DTYPES[piece.param.dtype]
        if self._masters == "remainder" and param.numel() and param.dtype != torch.bfloat16:
            raise ValueError(
                f"masters 'remainder' is for bf16, and it is {param.dtype}; use masters 'full'"
            )
        master = piece.param if param.dtype == dtype else param.to(dtype)
        if self.is_offloaded(piece):
            master = self._host.copy(master)
        state = rule.new_state(piece, master)
        for key in rule.moments:
            state |= self._moments.pack(key, state[key])
        if self.is_offloaded(piece):
            kept = {key: self._host.keep(state[key]) for key in state if key != "step"}
            return {**state, **kept, "master": master}
        if param.dtype == dtype:
            return state
        if self._masters == "full":
            return {**state, "master": master}
        _, distance, ties = split(master)
        return {**state, "remainder": distance, "ties": ties}

    def master(self, piece: Piece, state: Mapping[str, Tensor]) -> Tensor:
        """Return the full-precision parameter; a copy where a remainder is kept."""
        if "remainder" in state:
            return join(piece.param.detach(), state["remainder"], state["ties"])
        return state.get("master", piece.param)

    def set_master(self, piece: Piece, state: Mapping[str, Tensor], value: Tensor) -> None:
        """Set what `master` gives; where a remainder is kept the parameter with it."""
        if "remainder" not in state:
            own = state.get("master", piece.param)
            if own.data_ptr() != value.data_ptr():
                own.copy_(value)
            return
        param, distance, ties = split(value.to(piece.param.device, torch.float32))
        piece.param.copy_(param)
        state["remainder"].copy_(distance)
        state["ties"].copy_(ties)

    def moment(self, piece: Piece, state: Mapping[str, Tensor], key: str) -> Tensor:
        """Return a moment as it is kept, or in fp32 where that has scales."""
        scaled = self._moments.is_scaled and self._moments.converts(
            MASTER_DTYPES[piece.param.dtype]
        )
        return self._moments.unpack(key, state, torch.float32 if scaled else state[key].dtype)

    def set_moment(self, state: dict[str, Tensor], key: str, value: Tensor) -> None:
        """Set what `moment` gives."""
        self._moments.write(state, key, value)

    def opened(
        self, piece: Piece, state: dict[str, Tensor], rule: Rule
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return master and state of a piece in full precision, for a rule to update."""
        master = self.master(piece, state)
        if not self._moments.converts(master.dtype):
            return master, state
        return master, self._moments.opened(state, rule.moments, master.dtype)

    def close(
        self,
        piece: Piece,
        state: dict[str, Tensor],
        rule: Rule,
        opened: tuple[Tensor, dict[str, Tensor]],
    ) -> None:
        """Keep what a rule made of `opened`."""
        master, new = opened
        if new is not state:
            for key in rule.moments:
                self._moments.write(state, key, new[key])
        if "remainder" in state:
            self.set_master(piece, state, master)

    def saved(self, piece: Piece, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a state as a state dict has it, which is the same for every kind of masters."""
        if "remainder" not in state:
            return dict(state)
        kept = {key: value for key, value in state.items() if key not in ("remainder", "ties")}
        return {**kept, "master": self.master(piece, state)}

    def template(
        self, piece: Piece, state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """Return tensors of the shapes that `load` takes, and the names of those it can miss."""
        if "remainder" in state:
            kept = {key: value for key, value in state.items() if key not in ("remainder", "ties")}
            return {**kept, "master": piece.param}, ()
        is_own = piece.param.dtype == MASTER_DTYPES[piece.param.dtype]
        return dict(state), ("master",) if is_own else ()

    def load(self, piece: Piece, state: dict[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Copy what a state dict has into the tensors that are there."""
        for key, value in values.items():
            if key == "master":
                self.set_master(piece, state, value)
            elif key in state:
                state[key].copy_(value)
            else:
                state[key] = value.clone()
        if "master" in state and "master" not in values:  # a parameter that elsewhere is its own
            state["master"].copy_(piece.param)

    def move(self, piece: Piece, state: dict[str, Tensor], *, away: bool) -> None:
        """Move a state to the host, or back to the device of its piece."""
        for key in [key for key in state if key != "step"]:
            kept = state[key]
            state[key] = self._host.copy(kept) if away else kept.to(piece.param.device)


class MomentStorage:
    """Keeps the tensors of a state in a format; rules see them in the masters' dtype.

    fp16 and fp8 (e4m3) have a scale, a power of two, for each 256 elements in memory order, as
    gradients and even more their squares lie far below what these formats hold. What is stored and
    read again is stored with the same values. The square of a small gradient never becomes zero,
    which would make the step of Adam infinite: it becomes the smallest number of its block.

    Args:
        name: full (as the masters), fp32, bf16, fp16 or fp8.

    Attributes:
        has_format: Whether moments may be kept in another dtype than the masters'.
        is_scaled: Whether the format has scales.

    Raises:
        ValueError: There is no such format.
    """

    def __init__(self, name: str = "full") -> None:
        if name not in _FORMATS:
            raise ValueError(
                f"moments_dtype must be one of {', '.join(MOMENTS_DTYPES)}; got {name!r:.60}"
            )
        self._dtype = _FORMATS[name]
        self.has_format = self._dtype is not None
        self.is_scaled = name in ("fp16", "fp8")

    def converts(self, dtype: torch.dtype) -> bool:
        """Whether moments of masters of this dtype are kept in another one."""
        return self._dtype is not None and self._dtype != dtype

    def pack(self, key: str, value: Tensor) -> dict[str, Tensor]:
        """Return what is kept for a moment, by name."""
        if self._dtype is None or value.dtype == self._dtype:
            return {key: value}
        if not self.is_scaled:
            return {key: value.to(self._dtype)}
        kept, scales = _quantize(value, self._dtype, is_square=key.endswith("_sq"))
        return {key: kept, key + _SCALE: scales}

    def unpack(self, key: str, state: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return a moment in a dtype; the tensor that is kept itself where it has that."""
        kept = state[key]
        if key + _SCALE not in state:
            return kept.to(dtype)
        blocks = _blocks(kept.to(torch.float32)) * state[key + _SCALE].unsqueeze(1)
        return blocks.flatten()[: kept.numel()].view(kept.shape).to(dtype)

    def opened(
        self, state: dict[str, Tensor], keys: Iterable[str], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return a state with its moments in a dtype, for a rule to update."""
        return {**state, **{key: self.unpack(key, state, dtype) for key in keys}}

    def write(self, state: dict[str, Tensor], key: str, value: Tensor) -> None:
        """Keep a new value, in the tensors that are there."""
        if state[key] is not value:
            for name, kept in self.pack(key, value).items():
                state[name].copy_(kept)


def _blocks(x: Tensor) -> Tensor:
    flat = x.flatten()
    missing = -flat.numel() % _BLOCK
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, _BLOCK)


def _quantize(x: Tensor, dtype: torch.dtype, *, is_square: bool) -> tuple[Tensor, Tensor]:
    """Return the elements in units of their block's scale, and the scales in fp32."""
    limit = torch.finfo(dtype)
    bits = math.ceil(math.log2(limit.max))
    blocks = _blocks(x.to(torch.float32))
    largest = blocks.abs().amax(1)
    mantissa, exponent = torch.frexp(largest)
    exponent = exponent - bits + (torch.ldexp(mantissa, torch.tensor(bits)) > limit.max).int()
    # Both the scale and its inverse have to be numbers of fp32.
    scale = torch.ldexp(torch.ones_like(largest), exponent.clamp(-126, 126))
    scale = torch.where(torch.isfinite(largest), scale, largest)
    units = blocks / scale.unsqueeze(1)
    if is_square:
        units = torch.where(units > 0, units.clamp(min=limit.smallest_normal * limit.eps), units)
    units = units.clamp(-limit.max, limit.max)  # torch 2.11 makes NaN of more, and newer ones don't
    return units.flatten()[: x.numel()].view(x.shape).to(dtype), scale
