"""Transfers of activations and gradients between the ranks of a pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from mt_parallel_state import twin_group
from mt_schedule import Action, Op, Schedule
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of the tensor that one stage sends to the next.

    Attributes:
        shape: Local shape, as the stage returns it on this rank.
        dtype: The dtype; it must be floating point or complex for gradients to flow.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}"

    @property
    def has_gradient(self) -> bool:
        """Whether the next stage sends a gradient back."""
        return self.dtype.is_floating_point or self.dtype.is_complex


class TransferError(RuntimeError):
    """A send or receive failed, which usually means that the other rank is gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """Connections between the ranks of a pipeline.

    Attributes:
        rank: This rank's place in the pipeline.
        up: Group of the pipeline's ranks, in the schedule's order, for messages to higher ranks.
        down: Another group of the same ranks, for messages to lower ranks. It is separate because
            in gloo the two directions of a connection wait for each other, and in NCCL all calls
            of a group.
        batched: Whether the messages of an exchange that go in one direction are one
            `batch_isend_irecv`.
    """

    rank: int
    up: dist.ProcessGroup
    down: dist.ProcessGroup
    batched: bool

    def between(self, source: int, destination: int) -> dist.ProcessGroup:
        """Return the group for messages from one rank to another."""
        return self.up if source < destination else self.down


def connect(
    schedule: Schedule, *, group: dist.ProcessGroup, device: torch.device, batched: bool
) -> Links:
    """Open the connections that a schedule uses; every rank of the group calls it.

    Backends connect two ranks at their first transfer, and block there until both take part. An
    early receive could then wait for a rank that itself waits for this one.

    Args:
        schedule: A schedule with communication.
        group: The ranks of the pipeline.
        device: Device of the activations.
        batched: Whether transfers go in batches, which use two communicators of the whole group,
            one for each direction.

    Returns:
        The connections, for runs of the schedule and of its forwards alone.

    Raises:
        TransferError: Another rank did not take part.
    """
    rank = dist.get_rank(group)
    edges = {
        (at, peer)
        for at, _, action in schedule
        if action.op.is_send and (peer := schedule.peer(action)) is not None
    }
    if batched:
        meet(group, device)
        down = twin_group(group)
        meet(down, device)
        return Links(rank=rank, up=group, down=down, batched=True)
    token = torch.zeros(1, device=device)
    try:
        links = Links(rank=rank, up=group, down=twin_group(group), batched=False)
        # All ranks open connections in the same order, so that no circle of waiting can arise.
        for source, destination in sorted(edges):
            lane = links.between(source, destination)
            if rank == source:
                dist.send(token, group=lane, group_dst=destination)
            elif rank == destination:
                dist.recv(token, group=lane, group_src=source)
    except RuntimeError as error:
        raise TransferError(
            f"pipeline rank {rank} could not connect to its neighbours: {error}. Every rank of "
            "the group must make its Executor at this point"
        ) from error
    return links


_EARLY = 8
"""Largest number of receives that are posted early; each costs the memory of an activation. When
half of them are used up, the others are posted together, which wakes the other rank only once."""
_UNDER_WAY = 4
"""Largest number of sends in flight; each costs the memory of an activation."""


def meet(group: dist.ProcessGroup, device: torch.device) -> None:
    """Connect all ranks of a group by one all-reduce, before the first batch of transfers.

    A backend may create its communicator in the group's first batch. Then every rank of the group
    has to take part in that batch, even a rank that sends and receives nothing.

    Raises:
        TransferError: Another rank did not take part.
    """
    try:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    except RuntimeError as error:
        raise TransferError(
            f"rank {dist.get_rank(group)} could not connect to its group: {error}. Every rank of "
            "the group must make its Executor at this point"
        ) from error


class Mailbox:
    """The transfers of one run of one rank.

    An exchange is started without waiting for it: the computation that needs a received tensor
    waits for it, and a sent tensor stays alive until it has left.

    With `batched` links, the messages of an exchange that go up are one `batch_isend_irecv`, and
    the messages that go down are another. NCCL needs that, because it executes the calls of a
    communicator in order: two ranks that both send first would wait for each other forever, unless
    sends and receives are posted together; and with one communicator for both directions, an
    early receive would hold up a send in the other direction. Without `batched` links (gloo),
    every transfer is a separate message, and some receives are posted before their exchange, so
    that a message can leave its sender at once. In both cases a few sends may be in flight.

    Args:
        schedule: The schedule, which knows the other end of each message.
        links: Connections to the other ranks; None if there are none.
        device: Device of received tensors.
        specs: Activation spec of each micro-batch; None if there is no other rank.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        links: Links | None,
        device: torch.device,
        specs: Sequence[TensorSpec] | None,
    ) -> None:
        self._schedule = schedule
        self._links = links
        self._device = device
        self._specs = specs or ()
        self._outgoing: dict[Action, Tensor] = {}
        self._here: dict[Action, Tensor] = {}
        self._arriving: dict[Action, tuple[Tensor, dist.Work | None]] = {}
        # A tensor must stay alive until its send has ended.
        self._leaving: deque[tuple[Action, Tensor, dist.Work | None]] = deque()
        own = () if links is None else schedule.ranks[links.rank]
        self._due = deque(a for a in own if a.op.is_receive and self.carries(a))

    def put(self, send: Action, tensor: Tensor) -> None:
        """Provide the tensor of a send; between stages of one rank it arrives at once."""
        if self._schedule.peer(send) is None:
            self._here[self._schedule.other_end(send)] = tensor
        else:
            self._outgoing[send] = tensor.contiguous()

    def take(self, receive: Action) -> Tensor | None:
        """Wait for the tensor of a receive, and return it.

        Returns:
            The tensor; None in place of the gradient of an activation without one.
        """
        if receive in self._here:
            return self._here.pop(receive)
        tensor, work = self._arriving.pop(receive, (None, None))
        self._wait(receive, work)
        return tensor

    def exchange(self, actions: Iterable[Action]) -> None:
        """Start the sends and receives of an exchange, and perhaps some later receives."""
        actions = [action for action in actions if self.carries(action)]
        if self._links is not None and self._links.batched:
            self.finish(but=_UNDER_WAY - 1)
            # One batch for each direction: see the class.
            lanes: dict[dist.ProcessGroup, list[Action]] = {}
            for action in actions:
                lanes.setdefault(self._lane(action), []).append(action)
            for together in lanes.values():
                self._start_batch(together)
            return
        # Receives of an exchange that were not posted early come before its sends.
        for action in actions:
            while action.op.is_receive and action not in self._arriving:
                self._receive_next()
        for action in actions:
            if action.op.is_send:
                self.finish(but=_UNDER_WAY - 1)
                tensor = self._outgoing.pop(action)
                with self._naming(action):
                    work = dist.isend(
                        tensor, group=self._lane(action), group_dst=self._peer(action)
                    )
                self._leaving.append((action, tensor, work))
        if len(self._arriving) <= _EARLY // 2:
            while self._due and len(self._arriving) < _EARLY:
                self._receive_next()

    def _receive_next(self) -> None:
        action = self._due.popleft()
        with self._naming(action):
            tensor = self.empty(action)
            work = dist.irecv(tensor, group=self._lane(action), group_src=self._peer(action))
        self._arriving[action] = (tensor, work)

    def finish(self, *, but: int = 0) -> None:
        """Wait for all sends except the last `but`, and release their tensors."""
        while len(self._leaving) > but:
            send, _, work = self._leaving.popleft()
            self._wait(send, work)

    def _start_batch(self, actions: list[Action]) -> None:
        tensors = []
        for action in actions:
            with self._naming(action):
                send = action.op.is_send
                tensors.append(self._outgoing.pop(action) if send else self.empty(action))
        transfers = [
            dist.P2POp(
                dist.isend if action.op.is_send else dist.irecv,
                tensor,
                group=self._lane(action),
                group_peer=self._peer(action),
            )
            for action, tensor in zip(actions, tensors, strict=True)
        ]
        with self._naming(actions[0]):
            works = dist.batch_isend_irecv(transfers)
        if len(works) != len(actions):  # NCCL returns one handle for the whole batch
            works = [works[0]] * len(actions)
        for action, tensor, work in zip(actions, tensors, works, strict=True):
            if action.op.is_send:
                self._leaving.append((action, tensor, work))
            else:
                self._arriving[action] = (tensor, work)

    def carries(self, action: Action) -> bool:
        """Return whether a message exists: an activation without a gradient gets none back."""
        return action.op in (Op.SEND_F, Op.RECV_F) or self._specs[action.microbatch].has_gradient

    def put_zeros(self, send: Action) -> None:
        """Send zeros instead of a result, if the message exists."""
        if self._schedule.peer(send) is not None and self.carries(send):
            with self._naming(send):
                self._outgoing[send] = self.empty(send).zero_()

    def empty(self, message: Action) -> Tensor:
        """Return an uninitialized tensor for a message."""
        spec = self._specs[message.microbatch]
        return torch.empty(spec.shape, dtype=spec.dtype, device=self._device)

    def _lane(self, action: Action) -> dist.ProcessGroup:
        links, peer = self._links, self._peer(action)
        assert links is not None, f"{action} goes to another rank"  # noqa: S101 (checked before)
        ends = (links.rank, peer) if action.op.is_send else (peer, links.rank)
        return links.between(*ends)

    def _peer(self, action: Action) -> int:
        peer = self._schedule.peer(action)
        assert peer is not None, f"{action} leads to no other rank"  # noqa: S101 (checked before)
        return peer

    def _wait(self, action: Action, work: dist.Work | None) -> None:
        if work is not None:
            with self._naming(action):
                work.wait()

    @contextmanager
    def _naming(self, action: Action) -> Iterator[None]:
        """Name both ranks and the micro-batch if a transfer fails."""
        try:
            yield
        except RuntimeError as error:
            what = "activation" if action.op in (Op.SEND_F, Op.RECV_F) else "gradient"
            way = "sending it to" if action.op.is_send else "receiving it from"
            raise TransferError(
                f"stage {action.stage}, {what} of micro-batch {action.microbatch}: {way} pipeline "
                f"rank {self._peer(action)} failed: {error}. Look for the first error on that "
                "rank; activation() must give the same spec on both ranks"
            ) from error
