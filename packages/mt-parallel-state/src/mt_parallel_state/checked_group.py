"""A process group that compares every call between its ranks before it starts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mt_parallel_state.check import Ledger, describe, difference

_OWN = (__name__, "mt_parallel_state.check")
_WORDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "alltoall_base": "all_to_all_single",
    "alltoall": "all_to_all",
}
_CALLERS = 3  # frames in a call site: a layer calls a collective calls torch


def _checked(
    name: str, tensors: Callable[..., Any], *, splits: Callable[..., Any] | None = None
) -> Any:
    """Make the method `name` of a group, compared between the ranks before it runs.

    Args:
        name: The method of the inner group.
        tensors: Takes the method's arguments and picks the tensors that must be alike.
        splits: Takes them and gives the sizes sent to and expected from each rank.
    """

    def method(self: CheckedGroup, *arguments: Any, **options: Any) -> Any:
        opts = options.get("opts", arguments[-1] if arguments else None)
        op = getattr(opts, "reduceOp", None)
        what = {
            "reduce_op": None if op is None else str(op.op).rpartition(".")[2],
            "root": getattr(opts, "rootRank", None),
        }
        sizes = None if splits is None else splits(*arguments)
        self._agree(_WORDS.get(name, name), tensors(*arguments), what, sizes)
        return getattr(self.inner, name)(*arguments, **options)

    return method


def _rows(output: Tensor, tensor: Tensor, *_: Any) -> list[Tensor]:
    return [tensor[:0]]  # ranks may send different numbers of rows


def _row_splits(
    output: Tensor, tensor: Tensor, outputs: list[int], inputs: list[int], *_: Any
) -> tuple[list[int], list[int]]:
    # Without sizes the rows are split equally: one number stands for all.
    return list(inputs) or [tensor.shape[0]], list(outputs) or [output.shape[0]]


class CheckedGroup(dist.ProcessGroup):
    """A group that wraps another group, compares its calls and is used like it.

    `torch.distributed` calls the methods below on any group it is given, so every function that
    takes a `group=` works. Functional collectives, compiled graphs and a DeviceMesh use the inner
    group, by its name: they work, and are not compared. (Older versions of torch, such as 2.11, do
    not trace this class: there a graph breaks at each use of the group, and the call is compared.)

    Args:
        inner: The group that does the work.
        ranks: Its global ranks.
        axes: Name of the group in errors. Ranks may have asked for the group under different names,
            so announcements are keyed by its ranks.
        ledger: The ranks' announcements of their calls.
    """

    def __init__(
        self, inner: dist.ProcessGroup, *, ranks: Sequence[int], axes: str, ledger: Ledger
    ) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner, self.ranks = inner, tuple(ranks)
        self._key = "_".join(map(str, self.ranks))
        self._name, self._ledger = f"{axes}-{self._key}", ledger
        self._calls = 0
        self._messages: dict[tuple[int, int], int] = {}

    # Versions of torch.distributed call these methods by different names.
    allreduce = _checked("allreduce", lambda tensors, *_: tensors)
    allreduce_coalesced = _checked("allreduce_coalesced", lambda tensors, *_: tensors)
    broadcast = _checked("broadcast", lambda tensors, *_: tensors)
    reduce = _checked("reduce", lambda tensors, *_: tensors)
    barrier = _checked("barrier", lambda *_: [])
    allgather = _checked("allgather", lambda outputs, inputs, *_: inputs)
    gather = _checked("gather", lambda outputs, inputs, *_: inputs)
    gather_single = _checked("gather_single", lambda output, tensor, *_: [tensor])
    scatter = _checked("scatter", lambda outputs, inputs, *_: outputs)
    reduce_scatter = _checked("reduce_scatter", lambda outputs, inputs, *_: [*inputs[0], *outputs])
    _allgather_base = _checked("_allgather_base", lambda output, tensor, *_: [tensor, output])
    all_gather_single = _checked("all_gather_single", lambda output, tensor, *_: [tensor, output])
    _reduce_scatter_base = _checked(
        "_reduce_scatter_base", lambda output, tensor, *_: [tensor, output]
    )
    reduce_scatter_single = _checked(
        "reduce_scatter_single", lambda output, tensor, *_: [tensor, output]
    )
    alltoall_base = _checked("alltoall_base", _rows, splits=_row_splits)
    all_to_all_single = _checked("all_to_all_single", _rows, splits=_row_splits)
    alltoall = _checked(
        "alltoall",
        lambda outputs, inputs, *_: [inputs[0].flatten()[:0]],
        splits=lambda outputs, inputs, *_: (
            [tensor.numel() for tensor in inputs],
            [tensor.numel() for tensor in outputs],
        ),
    )

    def getGroupName(self) -> str:  # noqa: N802 - what C++ calls, for `group_name` too
        """Return the inner group's name, so that calls by name go to the inner group."""
        return self.inner.group_name

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> Any:
        """Send, and compare when the transfer is waited for."""
        message = self._message("send", tensors, self.rank(), dstRank, tag)
        return _CheckedWork(self.inner.send(tensors, dstRank, tag), message)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> Any:
        """Receive, and compare when the transfer is waited for."""
        message = self._message("recv", tensors, srcRank, self.rank(), tag)
        return _CheckedWork(self.inner.recv(tensors, srcRank, tag), message)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        """Receive from the first rank to announce a message to this rank."""
        return _AnySource(self, tensors, tag)

    def _get_backend(self, device: torch.device) -> Any:
        return _OneByOne(self.inner._get_backend(device))

    def _agree(self, op: str, tensors: Any, what: dict[str, Any], splits: Any) -> None:
        call = self._announcement(op, tensors, what, self._calls)
        if splits is not None:
            call["splits"] = {"input": splits[0], "output": splits[1]}
        key = f"{self._key}/{self._calls}"
        self._calls += 1
        problem = difference(self._ledger.agree(key, self.ranks, call))
        if problem is not None:
            raise self._ledger.fail(problem)

    def _first_sender(self, tensors: list[Tensor], tag: int) -> int:
        own, number = self.rank(), sum(self._messages.values())
        call = self._announcement("recv", tensors, {"from": "any rank", "tag": tag}, number)
        senders = {
            rank: f"{self._message_key(src, own, self._messages.get((src, own), 0))}/send"
            for src, rank in enumerate(self.ranks)
            if src != own
        }
        return self.ranks.index(self._ledger.first(senders, call))

    def _message_key(self, src: int, dst: int, number: int) -> str:
        return f"{self._key}/message/{src}-{dst}/{number}"

    def _message(self, op: str, tensors: Any, src: int, dst: int, tag: int) -> _Message:
        number = self._messages.get((src, dst), 0)
        self._messages[src, dst] = number + 1
        ends = (self.ranks[src], self.ranks[dst])
        call = self._announcement(op, tensors, {"from": ends[0], "to": ends[1], "tag": tag}, number)
        key = self._message_key(src, dst, number)
        peer = ends[1] if op == "send" else ends[0]
        return _Message(self._ledger, key, call, peer)

    def _announcement(
        self, op: str, tensors: Any, what: dict[str, Any], number: int
    ) -> dict[str, Any]:
        kinds = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors]
        return {
            "op": op,
            "what": {"of": " -> ".join(kinds) or None, **what},
            "number": number,
            "group": f"{self._name} (ranks {', '.join(map(str, self.ranks))})",
            "at": call_site(sys._getframe(2)),
        }


class _Message:
    """One side of a point-to-point transfer."""

    def __init__(self, ledger: Ledger, key: str, call: dict[str, Any], peer: int) -> None:
        self._ledger, self._call, self._peer = ledger, call, peer
        ours, theirs = ("send", "recv") if call["op"] == "send" else ("recv", "send")
        self._theirs, self._met = f"{key}/{theirs}", False
        ledger.announce(f"{key}/{ours}", call)
        # If the other side came first, refuse a wrong size before the transfer can do harm.
        self._compare(ledger.peek(self._theirs))

    def meet(self) -> None:
        """Wait for the other side and compare, once."""
        if not self._met:
            self._compare(self._ledger.meet(self._peer, self._theirs, self._call))
            self._met = True

    def _compare(self, other: dict[str, Any] | None) -> None:
        if other is not None and other["what"] != self._call["what"]:
            raise self._ledger.fail(
                "the two sides of a message differ\n  "
                f"rank {self._ledger.rank}: {describe(self._call)}\n  "
                f"rank {self._peer}: {describe(other)}"
            )


class _CheckedWork:
    """A transfer under way; waiting for it first compares the two sides."""

    def __init__(self, work: dist.Work, message: _Message) -> None:
        self._work, self._message = work, message

    def wait(self, *arguments: Any, **options: Any) -> Any:
        self._message.meet()
        return self._work.wait(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _AnySource:
    """A receive from any rank, whose sender is found when the receive is waited for."""

    def __init__(self, group: CheckedGroup, tensors: list[Tensor], tag: int) -> None:
        self._group, self._tensors, self._tag = group, tensors, tag
        self._source, self._work = -1, None

    def wait(self, *arguments: Any, **options: Any) -> Any:
        if self._work is None:
            self._source = self._group._first_sender(self._tensors, self._tag)
            self._work = self._group.recv(self._tensors, self._source, self._tag)
        return self._work.wait(*arguments, **options)

    def _source_rank(self) -> int:
        return self._source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _OneByOne:
    """A backend that does not coalesce, so that each transfer of a batch can be compared."""

    supports_coalescing = False

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def call_site(frame: FrameType | None) -> str:
    """Return the nearest callers outside torch and this module, innermost first."""
    found: list[str] = []
    while frame is not None and len(found) < _CALLERS:
        module = frame.f_globals.get("__name__", "")
        if module not in _OWN and module.partition(".")[0] != "torch":
            path = frame.f_code.co_filename.rpartition("/")[2]
            found.append(f"{path}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found) or "an unknown place"
