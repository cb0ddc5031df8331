"""Flat buffers whose buckets are reduced while backward is still running."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Self

import torch
import torch.distributed as dist
from mt_parallel_state import GradSink
from torch import Tensor, nn

from mt_data_parallel.allocation import allocate, plan
from mt_data_parallel.arrival import Sink, Unused, announced, missing_gradients
from mt_data_parallel.assemble import assemble_bucket
from mt_data_parallel.bucket import Bucket, BufferKey, Slot
from mt_data_parallel.grad import MAIN_GRAD
from mt_data_parallel.launch_queue import LaunchQueue
from mt_data_parallel.layout import BufferLayout
from mt_data_parallel.membership import checked, compare, is_shared, keys_of
from mt_data_parallel.param_shard import ParamShard, Phase
from mt_data_parallel.policy import ShardingPolicy
from mt_data_parallel.reduction import GroupChoice

# 25 MiB of fp32, the bucket size that torch's DistributedDataParallel uses.
DEFAULT_BUCKET_SIZE = 25 * 2**20 // 4


class GradBuffer:
    """Gradients of many parameters in flat buffers, summed over a group bucket by bucket.

    Every parameter gets `param.main_grad`, a view into one flat buffer per gradient dtype, in
    reversed parameter order. A post-accumulate-grad hook adds each new `param.grad` into it
    (the first one is copied, so nothing is zeroed) and drops `param.grad`. A bucket whose
    parameters have all seen their `start` number of backwards is reduced (SUM) at once,
    asynchronously, while backward goes on: this count is the only sign that a bucket is complete.
    Buckets are launched in buffer order on all ranks, whichever parameters become ready first. The
    sum is never divided:
    divide the loss by the global token count instead.

    After `finish`, an optimizer steps `shards()`: the parameters, or, if the reduction has shards,
    this rank's ranges of them. The gradient of each is the sum over the group
    (`mt_data_parallel.grad_of`; also `.grad` if it has the parameter's dtype, so torch.optim
    works). `gather_params()` then fetches the ranges that other ranks stepped. If `finish` or
    `gather_params` was forgotten, the next call raises an error.

    Args:
        named_params: Pairs of name and parameter in model order, as from
            `module.named_parameters()`; parameters with `requires_grad=False` are left out. They
            must be the same on all ranks of the group and lie on one device. Under a reduction with
            shards they become row-major views of a flat buffer.
        group: The ranks of the sum: a process group of replicas (all-reduce), a `Reduction`, None
            for one rank (no communication), or a function from name and parameter to one of these
            (experts).
        bucket_size: Elements after which a bucket closes; None puts everything in one bucket,
            which leaves nothing to overlap.
        grad_dtype: Dtype of the buffer; by default fp64 for fp64 parameters, else fp32.
        overlap: Launch a bucket from inside backward; otherwise everything waits for `finish`.
        unused: How `finish` treats parameters without a gradient from any backward of this rank:
            `error` names them, `zero` gives them zero gradients (for branches that only some
            samples take). Under `full` sharding `error` requires the same parameters on all ranks
            in each backward, and `zero` keeps gradients whole until `finish`, as gathers and
            reductions would wait for each other otherwise.
        pad_for_bandwidth: Pad buckets to a multiple of 65536 elements, which some networks prefer.
        whole: Predicate of name and parameter; those that match are owned whole by one rank,
            balanced by the cost of orthogonalising them (Muon).
        policy: How parameters and gradients are kept in memory; made by `shard`.

    Raises:
        ValueError: A parameter is listed twice or belongs to another GradBuffer, devices are
            mixed, or an argument is out of range.
        TypeError: A parameter is complex.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> buffer = GradBuffer(model.named_parameters(), group=None)
        >>> buffer.start(num_backwards=2)
        >>> for _ in range(2):
        ...     model(torch.ones(1, 4)).sum().backward()
        >>> buffer.finish()
        >>> model.weight.main_grad[0].tolist()
        [2.0, 2.0, 2.0, 2.0]
    """

    def __init__(  # noqa: PLR0913 - a buffer's own settings, all but one by keyword
        self,
        named_params: Iterable[tuple[str, Tensor]],
        *,
        group: GroupChoice,
        bucket_size: int | None = DEFAULT_BUCKET_SIZE,
        grad_dtype: torch.dtype | None = None,
        overlap: bool = True,
        unused: Unused = "error",
        pad_for_bandwidth: bool = False,
        whole: Callable[[str, Tensor], bool] | None = None,
        policy: ShardingPolicy | None = None,
    ) -> None:
        if grad_dtype is not None and not isinstance(grad_dtype, torch.dtype):
            raise TypeError(f"grad_dtype must be a torch.dtype or None, got {grad_dtype!r:.60}")
        if grad_dtype is not None and not grad_dtype.is_floating_point:
            raise ValueError(f"grad_dtype must be a floating-point dtype, got {grad_dtype}")
        if whole is not None and not callable(whole):
            raise TypeError(f"whole must be a function or None, got {whole!r:.60}")
        if unused not in ("error", "zero"):
            raise ValueError(f"unused must be 'error' or 'zero', got {unused!r:.60}")
        params = checked(named_params)
        self._unused: Unused = unused
        self._pads = pad_for_bandwidth
        self._layouts: dict[BufferKey, BufferLayout] = {}
        policy = policy or ShardingPolicy()
        self._release, self._encoding = policy.release, policy.encoding
        self._phase = Phase()
        keys = keys_of(params, group, grad_dtype, whole, policy)
        self._buckets = self._allocate(params, keys, bucket_size, policy)
        at_once = unused == "zero" and self._release == "all" and self.is_sharded
        for bucket in self._buckets:
            bucket.at_once = at_once
        slots = {slot.name: slot for bucket in self._buckets for slot in bucket.slots}
        self._slots = {name: slots[name] for name in params}
        self._phase.addends.sort(list(params))
        self._closed = self._agreed = False
        self._is_gathered, self._waits = True, True
        self._queue = LaunchQueue(
            self._buckets, overlap=overlap and not at_once, releases=self._release != "nothing"
        )
        self._at_close: list[Callable[[], None]] = []
        for slot in self._slots.values():
            hook = partial(self._accumulate, slot)
            self.on_close(slot.param.register_post_accumulate_grad_hook(hook).remove)

    @property
    def layouts(self) -> dict[BufferKey, BufferLayout]:
        """The layout of each flat buffer."""
        return dict(self._layouts)

    @property
    def num_buckets(self) -> int:
        """The number of buckets."""
        return len(self._buckets)

    @property
    def num_launched(self) -> tuple[int, int]:
        """The number of reductions begun since `start`, and the number up to `finish`."""
        return self._queue.progress

    @property
    def is_sharded(self) -> bool:
        """Whether ranks step parts of parameters, which are gathered afterwards."""
        return any(bucket.params is not None for bucket in self._buckets)

    def shards(self) -> list[ParamShard]:
        """Return the shards that this rank steps, in model order; there may be none."""
        return [shard for slot in self._slots.values() if (shard := slot.shard)]

    def empty_shard(self) -> ParamShard:
        """Return a shard without elements, for the optimizer of a rank without shards."""
        empty = nn.Parameter(torch.zeros(0))
        return ParamShard(name="", source=empty, param=empty, start=0, end=0, phase=self._phase)

    def addends(self) -> dict[str, float]:
        """Return each parameter's largest gradient magnitude on this rank, before sums over ranks.

        It is in the scale of the sum, and NaN if the gradient had a NaN, so it tells which rank's
        gradient spoilt a sum. It waits for the device and does not communicate. mt-optim reports it
        in `StepResult.bad`.

        Raises:
            RuntimeError: Gradients are still coming.
        """
        self.check_finished()
        return self._phase.addends.magnitudes()

    def gather_params(self) -> None:
        """Fetch the parts of the parameters that other ranks stepped; every rank calls it.

        With the `prefetch` of `shard`, they are under way when it returns, and the forward of a
        module waits for its own; `wait_params` waits for all. Under `full` sharding they are
        fetched on demand. Parameters in codes are encoded first.
        """
        self._is_gathered = True
        self._encode()
        if self._release == "all":
            for bucket in self._buckets:
                bucket.drop()
            return
        by_need = sorted(self._buckets, key=lambda bucket: bucket.is_needed_first)
        # Buckets are in backward order; forwards need them in the opposite order.
        for bucket in reversed(by_need):  # in the order of forwards
            bucket.fetch()
        if self._waits:
            self.wait_params()

    def _encode(self) -> None:
        """Write the codes of this rank's shards, after the last gather has read them."""
        if self._encoding is None:
            return
        encoded = [bucket for bucket in self._buckets if bucket.key.is_encoded]
        for bucket in encoded:
            bucket.arrive()
        self._encoding.encode([bucket.part(slot) for bucket in encoded for slot in bucket.slots])

    def note_gathered(self) -> None:
        """Record that a replayed CUDA graph has run `gather_params`."""
        self._is_gathered = True

    @property
    def waits(self) -> bool:
        """Whether `gather_params` waits for the parameters."""
        return self._waits

    def wait_params(self) -> None:
        """Wait for gathered parameters before they are read."""
        for bucket in self._buckets:
            bucket.arrive()

    def gather_behind(self) -> None:
        """Make `gather_params` return at once; the caller must make forwards wait."""
        self._waits = False

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets in the order in which they are reduced."""
        return tuple(self._buckets)

    def unit_buckets(self, unit: str) -> list[Bucket]:
        """Return the buckets of a unit of the model."""
        return [bucket for bucket in self._buckets if bucket.key.unit == unit]

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Make all parameters whole for reading inside the block; every rank enters it."""
        for bucket in self._buckets:
            if not bucket.is_here:
                bucket.fetch()
        self.wait_params()
        yield
        if self._release == "all":
            for bucket in self._buckets:
                bucket.drop()

    def assemble(
        self, values: Mapping[str, Tensor], *, loads: dict[tuple[int, ...], list[int]] | None = None
    ) -> dict[str, Tensor]:
        """Assemble tensors of parameters from tensors of shards, for a checkpoint.

        Every rank calls it. The parts of a tensor are sent to its rank with the fewest elements so
        far, which spreads memory and writing over the ranks; undivided tensors are returned
        unchanged.

        Args:
            values: A tensor for each shard by name, such as a moment; for the same parameters on
                all ranks.
            loads: Number of elements sent to each rank so far, by the ranks of a group; updated.
                Give the same dict, empty at first, for all tensors of a checkpoint.

        Returns:
            Whole tensors by name. With hybrid sharding only the first replica has the divided
            tensors.

        Raises:
            ValueError: This rank has no shard of a name, or a tensor has another size.
        """
        sizes = {shard.name: shard.param.numel() for shard in self.shards()}
        for name, value in values.items():
            if sizes.get(name) != value.numel():
                raise ValueError(
                    f"values has {value.numel()} elements for {name!r}, of which this rank has "
                    f"{sizes.get(name, 0)}; give the values of shards()"
                )
        whole: dict[str, Tensor] = {}
        loads = {} if loads is None else loads
        for bucket in self._buckets:
            shards = bucket.reduction.shards
            if shards is None:
                held = (slot.name for slot in bucket.slots if slot.name in values)
                whole |= {name: values[name] for name in held}
            elif bucket.reduction.replica == 0:
                members = tuple(dist.get_process_group_ranks(shards))
                so_far = loads.setdefault(members, [0] * len(members))
                whole |= assemble_bucket(bucket, shards, values, so_far)
        return {name: whole[name] for name in self._slots if name in whole}

    def sink(self, param: Tensor) -> GradSink:
        """Return a sink with which a layer adds `param`'s gradients to `main_grad` itself.

        A matrix product that accumulates needs no temporary gradient then
        (`mt_tensor_parallel.sum_weight_gradients`). Autograd may go on adding as well.

        Raises:
            ValueError: `param` is not in the buffer.
        """
        if not isinstance(param, Tensor):
            raise TypeError(f"expected a parameter, got {param!r:.60} ({type(param).__name__})")
        slot = next((slot for slot in self._slots.values() if slot.param is param), None)
        if slot is None:
            raise ValueError(
                f"the buffer has no such parameter (of shape {tuple(param.shape)}, requires_grad="
                f"{param.requires_grad}); it has {len(self._slots)} trained ones"
            )
        return Sink(partial(self._begin, slot), partial(self._end, slot))

    def start(self, num_backwards: int | Mapping[str, int]) -> None:
        """Drop the gradients and expect `num_backwards` backward passes before `finish`.

        Args:
            num_backwards: Backward passes per step (micro-batches), for all parameters or for each
                by name (if a pipeline stage sees some of the micro-batches, or two stages of a rank
                share a parameter). `finish` reduces parameters that got fewer gradients.

        Raises:
            RuntimeError: `finish` was not called since the last `start`, or `gather_params` since
                the last `finish`, or the buffer is closed.
            ValueError: `num_backwards` is below 1, or lacks a parameter.
        """
        if self._closed:
            raise RuntimeError("GradBuffer.start() after close(); make a new GradBuffer")
        if self._phase.reducing:
            raise RuntimeError("GradBuffer.start() was called twice; call finish() in between")
        if not self._is_gathered:
            raise RuntimeError(
                "GradBuffer.start() without gather_params() since the last finish(): ranks have "
                "stepped their own shards only; call gather_params() after the optimizer's step"
            )
        expected = announced(num_backwards, self._slots)
        self._agree()
        self._phase.reducing = True
        self._phase.addends.forget()
        for bucket in self._buckets:
            bucket.expect(expected)
        self._queue.begin()

    def finish(self, *, scale: float = 1.0) -> None:
        """Reduce the remaining buckets and wait until every gradient is the sum over the group.

        Other libraries call it `synchronize`. Every rank takes part in all reductions before any
        rank raises an error, so that no rank waits forever.

        Args:
            scale: Factor of the sums, such as `1 / tokens` for losses that are sums.

        Raises:
            RuntimeError: `start` was not called, there were fewer backwards than announced, or a
                parameter got no gradient and `unused` is `error`.
        """
        if not self._phase.reducing:
            raise RuntimeError("GradBuffer.finish() without start(); call start(num_backwards)")
        # Found now, raised at the end: the other ranks wait in this rank's reductions.
        missing = missing_gradients(list(self._slots.values()), self._unused)
        self._queue.drain()
        self.wait_params()  # of modules without a forward in this step
        self._phase.reducing = False
        self._is_gathered = not self.is_sharded
        if missing:
            raise RuntimeError(missing)
        if scale != 1:
            torch._foreach_mul_([bucket.own_grads for bucket in self._buckets], scale)
            self._phase.addends.factor = scale
        for slot in self._slots.values():
            shard = slot.shard
            if shard is not None and slot.main_grad.dtype == shard.param.dtype:
                shard.param.grad = shard.grad

    def check_finished(self) -> None:
        """Raise an error if gradients are not reduced yet; for code that reads them.

        Raises:
            RuntimeError: `finish` was not called since `start`.
        """
        if self._phase.reducing:
            raise RuntimeError(
                "the gradients are not reduced yet: GradBuffer.finish() was not called since "
                "start(); call it after the step's last backward"
            )

    def on_close(self, *functions: Callable[[], None]) -> None:
        """Register functions that `close` calls, such as removals of hooks."""
        self._at_close += functions

    def close(self) -> None:
        """Remove the hooks and `main_grad`, and release the group.

        The parameters are plain again. After `gather_params`, call `wait_params` first, as leaving
        a `with` block does. Call `close` before `destroy_process_group`: a gloo group with a
        remaining reference keeps its threads, which can abort the process when Python exits.
        """
        self._closed = True
        for function in self._at_close:
            function()
        self._at_close.clear()
        for slot in self._slots.values():
            if getattr(slot.param, MAIN_GRAD, None) is slot.main_grad:
                delattr(slot.param, MAIN_GRAD)
        for bucket in self._buckets:
            bucket.slots.clear()  # a cycle would keep the group until it is collected
            bucket.gathers_over = None
        self._slots.clear()
        self._buckets.clear()
        self._queue.clear()
        self._layouts.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # else other ranks may never send theirs
            self.wait_params()
        self.close()

    def _allocate(
        self,
        params: dict[str, Tensor],
        keys: dict[str, BufferKey],
        bucket_size: int | None,
        policy: ShardingPolicy,
    ) -> list[Bucket]:
        """Allocate the flat buffers and return their buckets in launch order."""
        # A bucket is complete when its earliest parameter (in model order) is.
        position = {name: i for i, name in enumerate(params)}
        buckets: list[Bucket] = []
        for key in dict.fromkeys(keys.values()):
            own = {name: param for name, param in params.items() if keys[name] == key}
            # A parameter that two pipeline stages share has to be cut at the same places on both.
            alone = [name for name, param in own.items() if is_shared(param)]
            size = bucket_size if key.unit is None else None
            pads = self._pads
            layout = plan(own, key, bucket_size=size, alone=alone, pad_for_bandwidth=pads)
            self._layouts[key] = layout
            buckets += allocate(own, key, layout, policy, self._phase)
        earliest = {b: min(position[slot.name] for slot in b.slots) for b in buckets}
        return sorted(buckets, key=lambda bucket: earliest[bucket], reverse=True)

    def _agree(self) -> None:
        """Compare the layouts of all ranks before the first step, as sums are by position."""
        if self._agreed:
            return
        for reduction in dict.fromkeys(bucket.reduction for bucket in self._buckets):
            own = [bucket for bucket in self._buckets if bucket.reduction == reduction]
            for group in (reduction.shards, reduction.replicas):
                if group is not None:
                    compare(own, group)
        self._agreed = True

    def _accumulate(self, slot: Slot, param: Tensor) -> None:
        """Move a fresh `param.grad` into the buffer (runs inside backward)."""
        grad = param.grad
        if grad is None:
            return
        if grad.is_sparse:
            raise TypeError(
                f"{slot.name!r} got a sparse gradient, and a GradBuffer is dense; make its "
                "embedding with sparse=False"
            )

        out, accumulate = self._begin(slot)
        # Autograd hands over the gradient it just made, so copying the first one and adding the
        # others costs no more than accumulating there, and nothing needs zeroing.
        param.grad = None
        out.add_(grad.detach()) if accumulate else out.copy_(grad.detach())
        self._end(slot)

    def _begin(self, slot: Slot) -> tuple[Tensor, bool]:
        """Return the memory for a gradient, and whether to add to it."""
        if not self._phase.reducing:
            raise RuntimeError(
                f"gradient for {slot.name!r} outside of start() and finish(); call "
                "GradBuffer.start(num_backwards) before the step's first backward"
            )
        if slot.accumulated == slot.expected:
            raise RuntimeError(
                f"{slot.name!r} got more than {slot.expected} gradients, the number that "
                "start() was told to expect; pass start() the true number of backward passes"
            )
        slot.bucket.receive()
        return slot.main_grad, slot.fresh > 0

    def _end(self, slot: Slot) -> None:
        """Count a gradient, and launch the buckets that it completes."""
        slot.bucket.count(slot)
        self._queue.launch_ready()
