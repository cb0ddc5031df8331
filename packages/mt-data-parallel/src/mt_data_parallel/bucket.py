"""Buckets: slices of flat buffers that one collective covers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from mt_data_parallel.addend import Addends
from mt_data_parallel.encoding import EncodedShard
from mt_data_parallel.exchange import Exchange, start_gather
from mt_data_parallel.param_shard import ParamShard
from mt_data_parallel.pending_sum import PendingSum
from mt_data_parallel.policy import Release
from mt_data_parallel.reduction import Reduction


@dataclass(frozen=True, kw_only=True)
class BufferKey:
    """The common properties of the parameters in one flat buffer.

    Attributes:
        grad_dtype: Dtype of their gradients.
        param_dtype: Dtype of the parameters in a sharded buffer, uint8 for codes; None if the
            buffer holds gradients only.
        shard_dtype: Dtype of the shards that the optimizer steps; None if the buffer is not
            sharded.
        reduction: The groups over which gradients are summed.
        whole: Whether each parameter is owned whole by one rank.
        unit: The unit of the model to which all its parameters belong, if there are units.
        is_encoded: Whether the buffer holds codes in the place of parameters.
    """

    grad_dtype: torch.dtype
    param_dtype: torch.dtype | None
    shard_dtype: torch.dtype | None
    reduction: Reduction
    whole: bool = False
    unit: str | None = None
    is_encoded: bool = False


@dataclass(slots=True, eq=False)
class Bucket:
    """One slice of a flat buffer, covered by a single collective.

    Attributes:
        key: The common properties of its parameters.
        grads: The gradients.
        params: The parameters at the same offsets, if they are sharded.
        own_grads: This rank's part of the sums: a view of `grads`, or memory of its own.
        own_params: This rank's part of the parameters, likewise.
        release: The tensors to release while they are not needed.
        offload: Whether this rank's parts are in the host's memory.
        addends: Records every gradient before it is summed.
        own_codes: The codes of `own_params`, if `params` are codes.
        gathers_over: The group with the other parts. It has connections of its own if gathers and
            sums alternate, as ranks may differ in which of the two comes first.
        slots: The parameters, in buffer order.
        pending: Number of parameters that still lack gradients.
        at_once: Whether gradients stay whole until `finish` reduces them, in one round.
        rounds: Reductions from `start` to `finish`: one, or one per backward if gradients are
            released.
        done: Number of reductions begun.
        is_idle: Whether the whole parameters may be released.
        is_needed_first: Whether a forward needs the parameters from its beginning.
    """

    key: BufferKey
    grads: Tensor
    params: Tensor | None
    own_grads: Tensor
    own_params: Tensor | None
    release: Release
    offload: bool
    addends: Addends
    own_codes: Tensor | None = None
    gathers_over: dist.ProcessGroup | None = None
    at_once: bool = False
    slots: list[Slot] = field(default_factory=list)
    pending: int = 0
    rounds: int = 1
    done: int = 0
    is_idle: bool = False
    is_needed_first: bool = False
    # The sum under way, its result, and whether it is the first of the step.
    _sum: tuple[PendingSum, Tensor, bool] | None = None
    _coming: tuple[Exchange | dist.Work | None, Tensor] | None = None  # with what is sent

    @property
    def reduction(self) -> Reduction:
        """Over whom gradients are summed."""
        return self.key.reduction

    @property
    def is_ready(self) -> bool:
        """Whether the next reduction has all it waits for."""
        if self.rounds == 1:
            return self.pending == 0
        return all(slot.accumulated >= min(self.done + 1, slot.expected) for slot in self.slots)

    @property
    def is_here(self) -> bool:
        """Whether the whole parameters are in memory, or on their way."""
        return self.params is None or self.params.untyped_storage().size() > 0

    @property
    def is_coming(self) -> bool:
        """Whether the whole parameters are on their way."""
        return self._coming is not None

    def expect(self, expected: Mapping[str, int]) -> None:
        """Forget what came, and expect as many gradients of each parameter."""
        self.pending, self.done = len(self.slots), 0
        most = max(expected[slot.name] for slot in self.slots)
        self.rounds = 1 if self.release == "nothing" or self.at_once else most
        for slot in self.slots:
            slot.accumulated, slot.fresh, slot.expected = 0, 0, expected[slot.name]
            slot.param.grad = None

    def count(self, slot: Slot) -> None:
        """Note a gradient of one of the parameters."""
        slot.accumulated += 1
        slot.fresh += 1
        if slot.accumulated == slot.expected:
            self.pending -= 1
        if self.at_once and all(s.accumulated >= slot.accumulated for s in self.slots):
            self.is_idle = self.release == "all"

    def receive(self) -> None:
        """Make room for a gradient."""
        if self._sum is not None:
            self.settle()
        if self.release != "nothing" and self.grads.untyped_storage().size() == 0:
            resize(self.grads, self.grads.numel())

    def launch(self) -> None:
        """Start to sum the gradients; `settle` waits for it."""
        self.receive()
        # The sum overwrites the gradients, so their extremes are recorded now.
        self.addends.note({slot.name: self.grads[slot.inside] for slot in self.slots if slot.fresh})
        for slot in self.slots:
            # Without a gradient since the last reduction the memory holds an old value.
            if slot.fresh == 0:
                slot.main_grad.zero_()
            slot.fresh = 0
        self.done += 1
        self.is_idle = self.release == "all"
        how, is_first = self.reduction, self.done == 1
        group = how.replicas if how.shards is None else how.shards
        if group is None:
            if how.scale != 1:
                self.grads.mul_(how.scale)
            self._take(self.grads, is_first=is_first)
            return
        # A later round is added to the first, and a collective can't write into the host's memory:
        # both need memory of their own.
        out = self.own_grads if is_first and not self.offload else self._staging(self.own_grads)
        self._sum = (PendingSum(self.grads, out, group, how, how.scale), out, is_first)

    def launch_replicas(self) -> None:
        """Start to sum this rank's part over the replicas, after the sum over the shards."""
        how = self.reduction
        if how.shards is None or how.replicas is None:
            return
        own = self._staging(self.own_grads).copy_(self.own_grads) if self.offload else None
        out = self.own_grads if own is None else own
        self._sum = (PendingSum(out, out, how.replicas, how, 1.0), out, True)

    def advance(self) -> None:
        """Start the second step of a two-step sum."""
        if self._sum is not None:
            self._sum[0].advance()

    def settle(self) -> None:
        """Wait for the sum under way, and release its addends."""
        if self._sum is None:
            return
        (total, out, is_first), self._sum = self._sum, None
        total.wait()
        self._take(out, is_first=is_first)

    def fetch(self) -> None:
        """Start to gather the parameters from all ranks; `arrive` waits."""
        self.is_idle = False
        if self.params is None or self.own_params is None:
            return
        self.arrive()  # of what was there before
        if not self.is_here:
            resize(self.params, self.params.numel())
        own = self.own_params if self.own_codes is None else self.own_codes
        # The collective needs the device and dtype of the whole parameters.
        if own.device != self.params.device or own.dtype != self.params.dtype:
            own = self._staging(own, self.params.dtype).copy_(own, non_blocking=True)
        group = self.gathers_over
        if group is None:
            self.params.copy_(own)
            return
        self._coming = (start_gather(self.params, own, group), own)

    def arrive(self) -> None:
        """Wait for the parameters."""
        coming, self._coming = self._coming, None
        if coming is not None and coming[0] is not None:
            coming[0].wait()

    def drop(self) -> None:
        """Release the whole parameters, where they are whole only while needed."""
        self.arrive()
        self.is_idle = False
        if self.params is not None and self.release == "all":
            resize(self.params, 0)

    def part(self, slot: Slot) -> EncodedShard:
        """Return the part of an encoded parameter that this rank steps, with its codes."""
        own, codes, size = self.own_params, self.own_codes, self.own_grads.numel()
        assert own is not None  # noqa: S101 - it is encoded
        assert codes is not None  # noqa: S101
        first = self.reduction.shard * size
        start = max(slot.start, first)
        inside = slice(start - first, max(min(slot.inside.stop, first + size), start) - first)
        return EncodedShard(
            name=slot.name,
            source=slot.param,
            values=own[inside],
            codes=codes[inside],
            start=start - slot.start,
            shards=self.reduction.shards,
        )

    def _take(self, out: Tensor, *, is_first: bool) -> None:
        """Put a sum into `own_grads`, and release its addends."""
        if out.data_ptr() != self.own_grads.data_ptr():
            self.own_grads.copy_(out) if is_first else self.own_grads.add_(out)
        if self.release != "nothing":
            resize(self.grads, 0)

    def _staging(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory on the device that communicates."""
        return torch.empty_like(like, dtype=dtype, device=self.grads.device)


def resize(tensor: Tensor, numel: int) -> None:
    """Release the memory of a flat tensor, or allocate it again; views remain valid."""
    tensor.untyped_storage().resize_(numel * tensor.element_size())


@dataclass(slots=True, eq=False)
class Slot:
    """One parameter, its view into the flat buffer and its gradients since `start`.

    Attributes:
        name: The parameter's name.
        param: The parameter.
        main_grad: Its gradient in the bucket.
        shard: The part that this rank steps, if any.
        bucket: The bucket with the gradient.
        start: Offset of the first element in the bucket.
        accumulated: Number of gradients since `start`.
        fresh: Number of gradients since the last reduction.
        expected: Number of gradients that `start` announced.
    """

    name: str
    param: Tensor
    main_grad: Tensor
    shard: ParamShard | None
    bucket: Bucket
    start: int
    accumulated: int = 0
    fresh: int = 0
    expected: int = 1

    @property
    def inside(self) -> slice:
        """The range of the parameter in the bucket."""
        return slice(self.start, self.start + self.param.numel())
