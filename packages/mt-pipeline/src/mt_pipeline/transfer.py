"""Moves activations and their gradients between the ranks of a pipeline."""

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
    """Shape and dtype of what one stage hands to the next.

    Attributes:
        shape: Local shape, as the stage returns it on this rank.
        dtype: A floating dtype for anything that gradients flow through.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}"

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient comes back for it."""
        return self.dtype.is_floating_point or self.dtype.is_complex


class TransferError(RuntimeError):
    """A send or receive failed, which mostly means that the other rank is gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """How the ranks of a pipeline reach each other.

    Attributes:
        rank: This rank's place in the pipeline.
        up: The ranks of the pipeline, in the schedule's order: for messages to higher ranks.
        down: The same ranks: for messages to lower ones. A group of its own: gloo lets the two
            directions of a connection wait for each other, and NCCL all calls of a group.
        batched: Whether the messages of an exchange that go one way are one `batch_isend_irecv`.
    """

    rank: int
    up: dist.ProcessGroup
    down: dist.ProcessGroup
    batched: bool

    def between(self, source: int, destination: int) -> dist.ProcessGroup:
        """The group for messages from one rank to another."""
        return self.up if source < destination else self.down


def connect(
    schedule: Schedule, *, group: dist.ProcessGroup, device: torch.device, batched: bool
) -> Links:
    """Open the connections that a schedule uses; every rank of the group calls it.

    Backends connect two ranks at their first transfer, and block there until both are in it. A
    receive that is posted early would then wait for a rank that waits for this one.

    Args:
        schedule: With communication.
        group: The ranks of the pipeline.
        device: Where activations live.
        batched: Whether transfers go in batches. These use two communicators of the whole group,
            one for each direction.

    Returns:
        What the runs of the schedule, or of its forwards, send and receive through.

    Raises:
        TransferError: Another rank did not come.
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
        for source, destination in sorted(edges):  # one order for all, so that no circle can wait
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
"""How many receives are posted early, at most. Each costs the memory of an activation. When half of
them are used up the others are posted at one go: the other rank is then woken once for all."""
_UNDER_WAY = 4
"""How many sends are under way at most, each with the memory of an activation."""


def meet(group: dist.ProcessGroup, device: torch.device) -> None:
    """Connect all ranks of a group by one all-reduce, before the first batch of transfers.

    A backend may make its communicator in the group's first batch. Then every rank of the group has
    to take part in that batch, also those that send and receive nothing.

    Raises:
        TransferError: Another rank did not come.
    """
    try:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    except RuntimeError as error:
        raise TransferError(
            f"rank {dist.get_rank(group)} could not connect to its group: {error}. Every rank of "
            "the group must make its Executor or Bridge at this point"
        ) from error


class Mailbox:
    """The transfers of one run of one rank.

    An exchange is started and not awaited: what arrives is awaited by the computation that takes
    it, what is sent stays alive until it has gone.

    With `batched` links, the messages of an exchange that go up are one `batch_isend_irecv`, and
    those that go down another. NCCL needs that: it works off what a communicator is given in order,
    so ranks that each send first would wait for each other for ever, unless sends and receives go
    in together; and a receive that is posted early would hold up what is sent the other way, if
    both had one communicator. Otherwise every transfer is a message
    of its own (gloo), and some receives are posted before their exchange, so that a message can
    leave its sender at once. Either way a few sends may be under way.

    Args:
        schedule: Says what is received, and which rank is at the other end.
        links: To the other ranks; None if there are none.
        device: Where received tensors live.
        specs: The spec of the activation of each micro-batch; None if no other rank is there.
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
        # What is being sent stays alive until its send has ended.
        self._leaving: deque[tuple[Action, Tensor, dist.Work | None]] = deque()
        own = () if links is None else schedule.ranks[links.rank]
        self._due = deque(a for a in own if a.op.is_receive and self.carries(a))

    def put(self, send: Action, tensor: Tensor) -> None:
        """Hand over what the send will send; between stages of one rank it arrives at once."""
        if self._schedule.peer(send) is None:
            self._here[self._schedule.other_end(send)] = tensor
        else:
            self._outgoing[send] = tensor.contiguous()

    def take(self, receive: Action) -> Tensor | None:
        """Wait for what a receive brings, and give it away.

        Returns:
            None where nothing comes: the gradient of an activation that has none.
        """
        if receive in self._here:
            return self._here.pop(receive)
        tensor, work = self._arriving.pop(receive, (None, None))
        self._wait(receive, work)
        return tensor

    def exchange(self, actions: Iterable[Action]) -> None:
        """Start the sends and receives of an exchange, and perhaps receives of later ones."""
        actions = [action for action in actions if self.carries(action)]
        if self._links is not None and self._links.batched:
            self.finish(but=_UNDER_WAY - 1)
            lanes: dict[dist.ProcessGroup, list[Action]] = {}
            for action in actions:
                lanes.setdefault(self._lane(action), []).append(action)
            for together in lanes.values():
                self._start_batch(together)
            return
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
        """Wait for all sends but some of the last, and let go of what they sent."""
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
        if len(works) != len(actions):  # NCCL gives one for the whole batch
            works = [works[0]] * len(actions)
        for action, tensor, work in zip(actions, tensors, works, strict=True):
            if action.op.is_send:
                self._leaving.append((action, tensor, work))
            else:
                self._arriving[action] = (tensor, work)

    def carries(self, action: Action) -> bool:
        """Whether a message exists: what has no gradient gets none back."""
        return action.op in (Op.SEND_F, Op.RECV_F) or self._specs[action.microbatch].has_gradient

    def put_zeros(self, send: Action) -> None:
        """Have zeros sent in the place of a result, if the message exists."""
        if self._schedule.peer(send) is not None and self.carries(send):
            with self._naming(send):
                self._outgoing[send] = self.empty(send).zero_()

    def empty(self, message: Action) -> Tensor:
        """Room for what a message brings."""
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
        """Name both ranks and the micro-batch where a transfer fails."""
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
