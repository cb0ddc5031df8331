"""Calls of `torch.distributed`, recorded from a program and replayed by NCCL's rules.

NCCL executes the calls of a communicator in order, one after the other, and a call ends only when
its counterparts on all other ranks have run. Programs that pass with gloo, which matches messages
one by one, can therefore deadlock on GPUs.
"""

from __future__ import annotations

import inspect
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.utils._pytree import tree_leaves

from mt_testing.errors import CommunicationError
from mt_testing.fake import fake_world
from mt_testing.place import caller

# For each collective, the arguments whose tensors must agree on all ranks.
_COLLECTIVES: Mapping[str, tuple[str, ...]] = {
    "all_reduce": ("tensor",),
    "broadcast": ("tensor",),
    "reduce": ("tensor",),
    "all_gather": ("tensor",),
    "gather": ("tensor",),
    "scatter": ("tensor",),
    "reduce_scatter": ("output",),
    "barrier": (),
    "all_to_all": (),
    "all_to_all_single": (),
    "all_gather_into_tensor": ("input_tensor",),
    "all_gather_single": ("input_tensor", "input"),
    "reduce_scatter_tensor": ("input",),
    "reduce_scatter_single": ("input",),
}
_SETTINGS = ("op", "src", "dst", "group_src", "group_dst")
_MESSAGES = ("send", "recv", "isend", "irecv")


@dataclass(frozen=True, kw_only=True)
class Message:
    """One side of a transfer between two ranks.

    Attributes:
        source: Global rank of the sender.
        destination: Global rank of the receiver.
        what: Number of elements and dtype.
    """

    source: int
    destination: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} from rank {self.source} to {self.destination}"


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call that a rank makes on a communicator, or a wait for such a call.

    Attributes:
        number: Index of the call on its rank; for a wait, index of the awaited call.
        kind: Name of a collective, `batch` or `wait`.
        lane: The communicator.
        ranks: Global ranks of the communicator.
        what: Operation, sizes and dtypes of a collective, which all ranks must agree on.
        messages: Messages of a batch.
        place: File and line of the caller.
    """

    number: int
    kind: str
    lane: str = ""
    ranks: tuple[int, ...] = ()
    what: str = ""
    messages: tuple[Message, ...] = ()
    place: str = ""

    def __str__(self) -> str:
        inside = "; ".join(map(str, self.messages)) or self.what
        return f"{self.kind}({inside}) on {self.lane} at {self.place}"


class _Work:
    """A replacement for `torch.distributed.Work`: done at once, and its waits are recorded."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self, timeout: Any = None) -> bool:
        self._wait()
        return True

    def is_completed(self) -> bool:
        return True


class _Recorder:
    """Replacements for the functions of `torch.distributed`, which record their calls."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def collective(self, name: str, signature: inspect.Signature) -> Callable[..., Any]:
        alike = _COLLECTIVES[name]

        def call(*args: Any, **kwargs: Any) -> _Work | None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            tensors = [x for x in tree_leaves(dict(given)) if isinstance(x, Tensor)]
            shown = [_shown(given[key]) for key in alike if isinstance(given.get(key), Tensor)]
            shown += [f"{key}={_setting(given[key])}" for key in _SETTINGS if key in given]
            _mirror(name, given)
            device = tensors[0].device if tensors else None
            work = self._add(name, given["group"], device, what=", ".join(shown))
            if given.get("async_op"):
                return work
            work.wait()
            return None

        return call

    def message(self, name: str, signature: inspect.Signature) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> _Work | int | None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given, way = bound.arguments, "dst" if "send" in name else "src"
            group, tensor = given["group"], given["tensor"]
            peer = given[way]
            if peer is None:
                peer = _ranks(group)[given[f"group_{way}"]]
            message = _message(tensor, peer, sends=way == "dst")
            # A message outside a batch uses a communicator of its two ranks, for both directions.
            pair = tuple(sorted((message.source, message.destination)))
            work = self._add(name, group, tensor.device, messages=(message,), pair=pair)
            if name[0] == "i":
                return work
            work.wait()
            return peer if name == "recv" else None

        return call

    def batch(self, transfers: Sequence[dist.P2POp]) -> list[_Work]:
        group, device = transfers[0].group, transfers[0].tensor.device
        messages = tuple(_message(x.tensor, x.peer, sends=x.op is dist.isend) for x in transfers)
        return [self._add("batch", group, device, messages=messages)]

    def _add(
        self,
        kind: str,
        group: dist.ProcessGroup | None,
        device: torch.device | None,
        *,
        what: str = "",
        messages: tuple[Message, ...] = (),
        pair: tuple[int, ...] = (),
    ) -> _Work:
        group, number = group or c10d._get_default_group(), len(self.calls)
        file, line = caller(__file__)
        lane = group.group_name + "".join(f"-{rank}" for rank in pair)
        self.calls.append(
            Call(
                number=number,
                kind=kind,
                # One group may have a backend for each device.
                lane=lane if device is None else f"{lane}/{device.type}",
                ranks=pair or _ranks(group),
                what=what,
                messages=messages,
                place=f"{file.rpartition('/')[2]}:{line}",
            )
        )
        return _Work(lambda: self.calls.append(Call(number=number, kind="wait")))


def _ranks(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _shown(tensor: Tensor) -> str:
    return f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"


def _setting(value: Any) -> str:
    return str(getattr(value, "op", value))


def _message(tensor: Tensor, peer: int, *, sends: bool) -> Message:
    ends = (dist.get_rank(), peer) if sends else (peer, dist.get_rank())
    return Message(source=ends[0], destination=ends[1], what=_shown(tensor))


def _mirror(name: str, given: Mapping[str, Any]) -> None:
    """Fill the output of a gather as if every rank had this rank's input."""
    if name == "all_gather":
        for part in given["tensor_list"]:
            part.copy_(given["tensor"])
    elif name == "all_gather_into_tensor":
        whole, own = given["output_tensor"], given["input_tensor"]
        if whole.numel():
            whole.view(-1, own.numel()).copy_(own.reshape(1, -1).clone())


@contextmanager
def recorded_calls() -> Iterator[list[Call]]:
    """Record the calls of `torch.distributed`, without communicating.

    In a `fake_world` one process can play one rank after the other. A sum keeps this rank's values,
    a gather returns this rank's part for every rank, and received tensors keep their content, so a
    program whose calls depend on such values cannot be recorded. Tensors may be on `meta`.
    Functional collectives and methods of a group are not recorded.

    Example:
        >>> with fake_world(2, rank=0), recorded_calls() as calls:
        ...     work = dist.all_reduce(torch.ones(3), async_op=True)
        ...     _ = work.wait()
        >>> [call.kind for call in calls]
        ['all_reduce', 'wait']
    """
    recorder = _Recorder()
    stand_ins: dict[str, Any] = {"batch_isend_irecv": recorder.batch}
    for name in (*_COLLECTIVES, *_MESSAGES):
        if hasattr(dist, name):
            make = recorder.message if name in _MESSAGES else recorder.collective
            stand_ins[name] = make(name, inspect.signature(getattr(dist, name)))
    with ExitStack() as stack:
        for name, function in stand_ins.items():
            for module in (dist, c10d):
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, function))
        yield recorder.calls


def recorded_ranks(world_size: int, program: Callable[[int], object]) -> list[list[Call]]:
    """Run a program as each rank of a `fake_world` in turn, and return the calls of each rank.

    Args:
        world_size: Number of ranks.
        program: Function to call with the global rank.
    """
    ranks = []
    for rank in range(world_size):
        with fake_world(world_size, rank), recorded_calls() as calls:
            program(rank)
        ranks.append(calls)
    return ranks


def replay(ranks: Sequence[Sequence[Call]]) -> None:
    """Run recorded calls by NCCL's rules, and return if all of them end.

    A communicator has a queue on each rank. A collective ends when it is first in the queues of all
    ranks of the communicator; a batch ends when each of its messages has met its counterpart in the
    first call of the other rank's queue. Before its first call a communicator connects, which needs
    all its ranks. A rank stops at each wait. The real host may run ahead, so a program that ends
    here also ends there.

    Args:
        ranks: The calls of each global rank, from `recorded_ranks`.

    Raises:
        CommunicationError: Ranks deadlock, a call never ends, or two sides disagree on an operation
            or a message.
    """
    _Replay(ranks).run()


@dataclass
class _Rank:
    """The progress of a rank."""

    program: Sequence[Call]
    at: int = 0
    done: set[int] = field(default_factory=set)
    # Unfinished calls of each communicator, with the messages not yet sent or received.
    queues: dict[str, deque[tuple[Call, list[Message]]]] = field(
        default_factory=lambda: defaultdict(deque)
    )

    @property
    def call(self) -> Call | None:
        return self.program[self.at] if self.at < len(self.program) else None

    def first(self, lane: str) -> tuple[Call, list[Message]] | None:
        queue = self.queues[lane]
        return queue[0] if queue else None

    def end(self, lane: str) -> None:
        self.done.add(self.queues[lane].popleft()[0].number)


class _Replay:
    def __init__(self, ranks: Sequence[Sequence[Call]]) -> None:
        self.ranks = [_Rank(program) for program in ranks]
        self.come: dict[str, set[int]] = defaultdict(set)

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for number in range(len(self.ranks)):
                moved |= self._advance(number)
            lanes = {
                (lane, queue[0][0].ranks)
                for rank in self.ranks
                for lane, queue in rank.queues.items()
                if queue
            }
            for lane, members in sorted(lanes):
                while self._settle(lane, members):
                    moved = True
        if any(rank.call or any(rank.queues.values()) for rank in self.ranks):
            raise CommunicationError(f"ranks wait forever\n{self._described()}")

    def _advance(self, number: int) -> bool:
        """Let a rank continue as far as it can."""
        rank, moved = self.ranks[number], False
        while (call := rank.call) is not None:
            if call.kind == "wait":
                if call.number not in rank.done:
                    break
            else:
                come = self.come[call.lane]
                moved |= number not in come
                come.add(number)
                if not come.issuperset(call.ranks):
                    break
                rank.queues[call.lane].append((call, list(call.messages)))
            rank.at += 1
            moved = True
        return moved

    def _settle(self, lane: str, members: tuple[int, ...]) -> bool:
        """End the calls of a communicator that can end."""
        firsts = {rank: first for rank in members if (first := self.ranks[rank].first(lane))}
        calls = {rank: call for rank, (call, _) in firsts.items() if not call.messages}
        if len(calls) == len(members):
            if len({(call.kind, call.what) for call in calls.values()}) > 1:
                shown = "\n".join(f"  rank {rank}: {call}" for rank, call in calls.items())
                raise CommunicationError(f"ranks differ in one call of {lane}\n{shown}")
            for rank in members:
                self.ranks[rank].end(lane)
            return True
        moved = False
        for rank, (call, left) in firsts.items():
            for message in [each for each in left if each.source == rank]:
                moved |= self._deliver(message, left, firsts.get(message.destination), call)
        for rank, (call, left) in firsts.items():
            if call.messages and not left:
                self.ranks[rank].end(lane)
        return moved

    def _deliver(
        self,
        message: Message,
        left: list[Message],
        other: tuple[Call, list[Message]] | None,
        call: Call,
    ) -> bool:
        ends = (message.source, message.destination)
        there = next((m for m in (other or (0, []))[1] if (m.source, m.destination) == ends), None)
        if there is None or other is None:
            return False
        if there.what != message.what:
            raise CommunicationError(
                f"{message} is sent at {call.place}, where {there} is received at {other[0].place}"
            )
        left.remove(message)
        other[1].remove(there)
        return True

    def _described(self) -> str:
        lines = []
        for number, rank in enumerate(self.ranks):
            call, where = rank.call, "at its end"
            if call is not None and call.kind == "wait":
                where = f"waits for {rank.program[_issued(rank.program, call.number)]}"
            elif call is not None:
                absent = sorted(set(call.ranks) - self.come[call.lane])
                where = f"connects {call.lane}, without ranks {absent}, for {call}"
            lines.append(f"  rank {number} {where}")
            for queue in rank.queues.values():
                if queue:
                    lines.append(f"    first of its communicator: {queue[0][0]}")
        return "\n".join(lines)


def _issued(program: Sequence[Call], number: int) -> int:
    return next(i for i, c in enumerate(program) if c.number == number and c.kind != "wait")
