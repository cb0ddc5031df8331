"""The ranks of an engine, which all do the deeds of the first one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from mt_parallel_state import (
    ParallelLayout,
    ParallelState,
    agreement_device,
    gather_rows,
    share_json,
    twin_group,
)

from mt_infer.engine.intake import Given
from mt_infer.engine.message import pack, unpack
from mt_infer.images import Image
from mt_infer.sampling import Sampling

T = TypeVar("T")
_IDLE = timedelta(days=365)
_PATIENCE = timedelta(seconds=10)


class RankError(RuntimeError):
    """Another rank of the engine failed; the engine can no longer be used."""


def _axes(layout: ParallelLayout) -> str:
    """Return the axes of the ranks of an engine: a replica's, unless replicas share experts."""
    return "tp-pp" if layout.cp == 1 and layout.edp >= layout.dp else "tp-cp-dp-pp"


class Ranks:
    """The ranks of an engine, which do the first one's deeds in its order.

    A deed is a function that every rank has, with arguments that JSON can hold. The first rank
    sends its name and arguments as text, after the number of bytes, and does it; the others
    follow. The result of a deed must depend on the deeds so far alone. If a deed raises, the other
    ranks raise `RankError` before the next one, unless they wait for the rank inside a pass: there
    they see its process end.

    Args:
        state: This rank's place in the layout; None for a rank alone.

    Attributes:
        group: The ranks; None for one.
        has_failed: Whether a rank has failed.
    """

    def __init__(self, state: ParallelState | None) -> None:
        self.state = state
        self.group = group = None if state is None else state.group(_axes(state.layout))
        # In a separate group, a deed can't be mixed up with a pass that another rank has left.
        self._group = None if group is None else twin_group(group, "log", timeout=_IDLE)
        self._rank = 0 if group is None else dist.get_rank(group)
        device = torch.device("cpu") if state is None else state.device
        self._device = agreement_device(self._group, device)
        self.has_failed = False

    @property
    def is_first(self) -> bool:
        """Whether callers use the engine of this rank."""
        return self._rank == 0

    def any(self, problem: str | None) -> str | None:
        """Return the problem of the first rank that has one, or None; all ranks call it."""
        if self._group is None:
            return problem
        _, is_said = self._meet(is_problem=problem is not None)
        return next(each for each in self._share(problem) if each) if is_said else None

    def do(self, deed: Callable[..., T], /, **arguments: Any) -> T:
        """Do a deed on all ranks; the first one calls it.

        Args:
            deed: The function; other ranks find theirs by its name.
            arguments: Its arguments.
        """
        self.tell(deed.__name__, **arguments)
        with self.passing_on_errors():
            return deed(**arguments)

    def lead(self, deed: Callable[..., None], /, **arguments: Any) -> None:
        """Do a deed on this rank and, unless it raises, on the others."""
        self.check_first()
        deed(**arguments)
        self.tell(deed.__name__, **arguments)

    def check_first(self) -> None:
        """Raise ValueError if this is not the first rank."""
        if not self.is_first:
            raise ValueError(f"rank {self._rank} follows rank 0: call serve() there")

    def tell(self, deed: str, /, **arguments: Any) -> None:
        """Tell the other ranks of a deed.

        Raises:
            ValueError: This is not the first rank.
            RankError: Another rank has failed.
        """
        self.check_first()
        if self.has_failed:
            raise RankError("a rank of the engine has failed; make a new engine")
        if self._group is not None:
            self._exchange(pack([deed, arguments]))

    def follow(self, deeds: Mapping[str, Callable[..., Any]]) -> tuple[str, dict[str, Any]]:
        """Do the first rank's deeds up to one outside `deeds`; return its name and arguments.

        Raises:
            RankError: Another rank has failed.
        """
        while True:
            name, arguments = unpack(self._exchange(b""), Sampling, Given, Image)
            if name not in deeds:
                return name, arguments
            with self.passing_on_errors():
                deeds[name](**arguments)

    @contextmanager
    def passing_on_errors(self) -> Iterator[None]:
        """Tell the other ranks about an error of this rank, unless they wait for it in a pass."""
        try:
            yield
        except Exception as error:
            if self._group is not None and not self.has_failed:
                self.has_failed = True
                with suppress(RuntimeError):  # they may wait inside of a pass
                    self._reduced([0, 1, 0], _PATIENCE)
                    self._share(f"{type(error).__name__}: {error}")
            raise

    def gather(self, content: bytes) -> list[bytes]:
        """Return the bytes of each rank; all ranks call it."""
        if self._group is None:
            return [content]
        own = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._device)
        counts = share_json(len(content), self._group, device=self._device)
        whole = gather_rows(own, self._group, counts).cpu()
        return [each.numpy().tobytes() for each in whole.split(counts)]

    def _exchange(self, text: bytes) -> bytes:
        """Send the first rank's text to all ranks."""
        try:
            size, _ = self._meet(len(text))
            body = torch.frombuffer(bytearray(text or bytes(size)), dtype=torch.uint8)
            body = body.to(self._device)
            dist.broadcast(body, group=self._group, group_src=0)
        except RuntimeError:  # a rank may have ended without a word
            self.has_failed = True
            raise
        return body.cpu().numpy().tobytes()

    def _meet(self, size: int = 0, *, is_problem: bool = False) -> tuple[int, bool]:
        """Return the largest size of all ranks, and whether one has a problem.

        Raises:
            RankError: A rank has failed.
        """
        size, has_failed, is_said = self._reduced([size, 0, is_problem])
        if has_failed:
            self.has_failed = True
            reasons = self._share(None)
            rank = next(rank for rank, each in enumerate(reasons) if each)
            raise RankError(f"rank {rank} of the engine failed: {reasons[rank]}")
        return size, bool(is_said)

    def _reduced(self, numbers: list[int], patience: timedelta | None = None) -> list[int]:
        header, group = torch.tensor(numbers, device=self._device), self._group
        work = dist.all_reduce(header, op=dist.ReduceOp.MAX, group=group, async_op=True)
        assert work is not None, "this rank is of the group"  # noqa: S101
        work.wait(patience or _IDLE)
        return header.tolist()

    def _share(self, reason: str | None) -> list[str | None]:
        return share_json(reason, self._group, device=self._device)
