"""Flat buffers whose buckets are reduced while backward is still running."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Self

import torch
import torch.distributed as dist
from mt_parallel_state import GradSink, sharding_of
from torch import Tensor, nn

from mt_data_parallel.assemble import assemble_bucket
from mt_data_parallel.bucket import Bucket, BufferKey, Slot, Units, allocate, plan
from mt_data_parallel.grad import MAIN_GRAD
from mt_data_parallel.layout import BufferLayout
from mt_data_parallel.piece import Piece
from mt_data_parallel.reduction import GroupChoice, reduction_of

# 25 MiB of fp32, the bucket size that torch's DistributedDataParallel uses.
DEFAULT_BUCKET_SIZE = 25 * 2**20 // 4


class _Sink:
    """Takes one parameter's gradients from whoever computes them (`mt_parallel_state.GradSink`).

    Every gradient counts as one of the backwards that `start` announced.
    """

    def __init__(self, buffer: GradBuffer, slot: Slot) -> None:
        self._buffer, self._slot = buffer, slot

    def begin(self) -> tuple[Tensor, bool]:
        """Return where the gradient goes, and whether to add it there.

        Raises:
            RuntimeError: Not between `start` and `finish`, or more gradients than announced.
        """
        return self._buffer._begin(self._slot)

    def end(self) -> None:
        """Say that it is there; buckets that are complete with it are launched."""
        self._buffer._end(self._slot)


class GradBuffer:
    """Gradients of many parameters in flat buffers, summed over a group bucket by bucket.

    Every parameter gets `param.main_grad`, a view into one flat buffer per gradient dtype, in
    reversed parameter order. A post-accumulate-grad hook adds each new `param.grad` into it
    (the first one is copied, so nothing is zeroed) and drops `param.grad`. A bucket whose
    parameters have all seen their `start` number of backwards is reduced (SUM) at once,
    asynchronously, while backward goes on: this count is the only sign that a bucket is complete.
    Buckets are always launched in buffer order, so ranks
    whose parameters become ready in different orders still agree. The sum is never divided:
    divide the loss by the global token count instead.

    After `finish`, an optimizer steps `pieces()`: parameters, or under a reduction with shards
    this rank's ranges of them, each with the sum over the group as its gradient
    (`mt_data_parallel.grad_of`; also `.grad`, where it has the parameter's dtype, so
    torch.optim works). `gather_params()` then fetches what other ranks stepped. Without shards
    pieces are the parameters, and there is nothing to fetch.
    A parameter that got no gradient has a zero one.

    Args:
        named_params: Pairs of name and parameter in model order, as `module.named_parameters()`
            gives them; those with `requires_grad=False` are left out. The same on all ranks of
            the group. All on one device. Those of a reduction with shards become views of a flat
            buffer and row-major.
        group: Over whom: a process group of ranks that hold replicas, which is an all-reduce; a
            `Reduction`; None for one rank: no communication; or a function of name and parameter
            that returns one of these, where they differ (experts).
        bucket_size: Elements after which a bucket closes; None puts everything in one bucket,
            which leaves nothing to overlap.
        grad_dtype: Dtype of the buffer; by default fp64 for fp64 parameters, else fp32.
        overlap: Launch a bucket from inside backward; otherwise everything waits for `finish`.
        whole: Says by name and parameter which ones are never cut into ranges but owned whole by
            one rank, balanced by the cost of orthogonalising them (Muon).
        units: What is whole only while it is needed; made by `shard`.

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

    def __init__(
        self,
        named_params: Iterable[tuple[str, Tensor]],
        *,
        group: GroupChoice,
        bucket_size: int | None = DEFAULT_BUCKET_SIZE,
        grad_dtype: torch.dtype | None = None,
        overlap: bool = True,
        whole: Callable[[str, Tensor], bool] | None = None,
        units: Units | None = None,
    ) -> None:
        if grad_dtype is not None and not isinstance(grad_dtype, torch.dtype):
            raise TypeError(f"grad_dtype must be a torch.dtype or None, got {grad_dtype!r:.60}")
        if grad_dtype is not None and not grad_dtype.is_floating_point:
            raise ValueError(f"grad_dtype must be a floating-point dtype, got {grad_dtype}")
        if whole is not None and not callable(whole):
            raise TypeError(f"whole must be a function or None, got {whole!r:.60}")
        params = _checked(named_params)
        self._overlap = overlap
        self._layouts: dict[BufferKey, BufferLayout] = {}
        units = units or Units()
        self._release = units.release
        keys = _keys(params, group, grad_dtype, whole, units.of)
        self._buckets = self._allocate(params, keys, bucket_size, units)
        slots = {slot.name: slot for bucket in self._buckets for slot in bucket.slots}
        self._slots = {name: slots[name] for name in params}
        self._closed = self._started = self._agreed = False
        self._next = 0
        self._sequence: list[Bucket] = []
        self._at_close: list[Callable[[], None]] = []
        for slot in self._slots.values():
            hook = partial(self._accumulate, slot)
            self.on_close(slot.param.register_post_accumulate_grad_hook(hook).remove)

    @property
    def layouts(self) -> dict[BufferKey, BufferLayout]:
        """Where every parameter lies, per flat buffer."""
        return dict(self._layouts)

    @property
    def num_buckets(self) -> int:
        """How many reductions one `start` to `finish` takes."""
        return len(self._buckets)

    @property
    def is_sharded(self) -> bool:
        """Whether some parameters are stepped in parts, and have to be fetched afterwards."""
        return any(bucket.params is not None for bucket in self._buckets)

    def pieces(self) -> list[Piece]:
        """Return what this rank steps, in model order; under shards it may be nothing at all."""
        return [piece for slot in self._slots.values() if (piece := slot.piece)]

    def gather_params(self) -> None:
        """Fetch the parts of the parameters that other ranks stepped; every rank calls it."""
        if self._release == "all":  # they are fetched when they are needed
            for bucket in self._buckets:
                bucket.drop()
            return
        for bucket in self._buckets:
            bucket.fetch()
        for bucket in self._buckets:
            bucket.arrive()

    def unit_buckets(self, unit: str) -> list[Bucket]:
        """Return the buckets of a unit of the model."""
        return [bucket for bucket in self._buckets if bucket.key.unit == unit]

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Have all parameters whole inside the block, to be read; every rank enters it."""
        for bucket in self._buckets:
            if not bucket.is_here:
                bucket.fetch()
                bucket.arrive()
        yield
        if self._release == "all":
            self.gather_params()

    def assemble(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Bring tensors of pieces together to tensors of parameters, as checkpoints write them.

        Every rank calls it. What is cut into parts is sent to the rank that has the parameter's
        first element (so the memory and the writing are shared out as well); the rest is returned
        as it came.

        Args:
            values: For pieces by name a tensor with their elements, such as a moment; of the same
                parameters on all ranks.

        Returns:
            Whole tensors by name. Under two levels only the first replica has those that are cut.

        Raises:
            ValueError: A name is no piece of this rank, or a tensor has another size.
        """
        sizes = {piece.name: piece.param.numel() for piece in self.pieces()}
        for name, value in values.items():
            if sizes.get(name) != value.numel():
                raise ValueError(
                    f"values has {value.numel()} elements for {name!r}, of which this rank has "
                    f"{sizes.get(name, 0)}; give the values of pieces()"
                )
        whole: dict[str, Tensor] = {}
        for bucket in self._buckets:
            shards = bucket.reduction.shards
            if shards is None:
                held = (slot.name for slot in bucket.slots if slot.name in values)
                whole |= {name: values[name] for name in held}
            elif bucket.reduction.replica == 0:
                whole |= assemble_bucket(bucket, shards, values)
        return {name: whole[name] for name in self._slots if name in whole}

    def sink(self, param: Tensor) -> GradSink:
        """Where a layer adds `param`'s gradients itself, straight into `main_grad`.

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
        return _Sink(self, slot)

    def start(self, num_backwards: int | Mapping[str, int]) -> None:
        """Forget the gradients and expect `num_backwards` backward passes before `finish`.

        Args:
            num_backwards: Gradient accumulations per step (micro-batches), for all parameters or
                for each by name (where a pipeline stage sees some of the micro-batches, or two
                stages of a rank share a parameter). A parameter that takes no part in one of them
                is reduced by `finish`.

        Raises:
            RuntimeError: `finish` was not called since the last `start`, or the buffer is closed.
            ValueError: `num_backwards` is below 1, or lacks a parameter.
        """
        if self._closed:
            raise RuntimeError("GradBuffer.start() after close(); make a new GradBuffer")
        if self._started:
            raise RuntimeError("GradBuffer.start() was called twice; call finish() in between")
        expected = (
            num_backwards
            if isinstance(num_backwards, Mapping)
            else dict.fromkeys(self._slots, num_backwards)
        )
        missing = [name for name in self._slots if name not in expected]
        if missing:
            raise ValueError(f"num_backwards has no entry for {missing[0]!r}; name every parameter")
        fewest = min((expected[name] for name in self._slots), default=1)
        if fewest < 1:
            raise ValueError(f"num_backwards must be at least 1, got {fewest}")
        self._agree()
        self._started = True
        self._next = 0
        for bucket in self._buckets:
            bucket.expect(expected)
        # The same on all ranks, whichever of their parameters become ready first.
        rounds = max((bucket.rounds for bucket in self._buckets), default=0)
        self._sequence = [b for turn in range(rounds) for b in self._buckets if turn < b.rounds]

    def finish(self) -> None:
        """Reduce what is left and wait until every gradient is the sum over the group.

        Raises:
            RuntimeError: `start` was not called.
        """
        if not self._started:
            raise RuntimeError("GradBuffer.finish() without start(); call start(num_backwards)")
        while self._next < len(self._sequence):
            self._launch()
        works: list[dist.Work | None] = []
        for bucket in self._buckets:
            bucket.settle()
            works.append(bucket.launch_replicas())
        for work in works:
            if work is not None:
                work.wait()
        self._started = False
        for slot in self._slots.values():
            if slot.piece is not None and slot.main_grad.dtype == slot.param.dtype:
                slot.piece.param.grad = slot.piece.grad

    def on_close(self, *functions: Callable[[], None]) -> None:
        """Have functions called by `close`, such as those that remove hooks."""
        self._at_close += functions

    def close(self) -> None:
        """Remove the hooks and `main_grad`, and let go of the group.

        The parameters are plain again. Call it before `destroy_process_group`: a gloo group that
        somebody still holds keeps its threads, which can abort the process when Python exits.
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
        self._slots.clear()
        self._buckets.clear()
        self._sequence.clear()
        self._layouts.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _allocate(
        self,
        params: dict[str, Tensor],
        keys: dict[str, BufferKey],
        bucket_size: int | None,
        units: Units,
    ) -> list[Bucket]:
        """Allocate the flat buffers and return their buckets in launch order."""
        # A bucket is complete when its earliest parameter (in model order) is.
        position = {name: i for i, name in enumerate(params)}
        buckets: list[Bucket] = []
        for key in dict.fromkeys(keys.values()):
            own = {name: param for name, param in params.items() if keys[name] == key}
            # What two pipeline stages share has to be cut at the same places on both.
            alone = [name for name, param in own.items() if _is_shared(param)]
            size = bucket_size if key.unit is None else None
            layout = plan(own, key, bucket_size=size, alone=alone)
            self._layouts[key] = layout
            buckets += allocate(own, key, layout, units)
        earliest = {b: min(position[slot.name] for slot in b.slots) for b in buckets}
        return sorted(buckets, key=lambda bucket: earliest[bucket], reverse=True)

    def _agree(self) -> None:
        """Before the first step: compare the layouts of all ranks, which are summed by position."""
        if self._agreed:
            return
        for reduction in dict.fromkeys(bucket.reduction for bucket in self._buckets):
            own = [bucket for bucket in self._buckets if bucket.reduction == reduction]
            for group in (reduction.shards, reduction.replicas):
                if group is not None:
                    _compare(own, group)
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
        """Return where a gradient goes, and whether to add it there."""
        if not self._started:
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
        """Count a gradient, and launch the buckets that are complete with it."""
        slot.accumulated += 1
        slot.fresh += 1
        if slot.accumulated == slot.expected:
            slot.bucket.pending -= 1
        while (
            self._overlap
            and self._next < len(self._sequence)
            and self._sequence[self._next].is_ready
        ):
            self._launch()

    def _launch(self) -> None:
        """Start the next reduction."""
        if self._next and self._release != "nothing":
            self._sequence[self._next - 1].settle()  # at most two are whole at a time
        self._sequence[self._next].launch()
        self._next += 1


def _compare(buckets: list[Bucket], group: dist.ProcessGroup) -> None:
    """Raise ValueError where another rank of the group has another layout."""
    own = repr([(slot.name, slot.param.shape) for bucket in buckets for slot in bucket.slots])
    own += repr([(bucket.grads.numel(), bucket.grads.dtype) for bucket in buckets])
    digest = int.from_bytes(hashlib.sha256(own.encode()).digest()[:7])
    device = buckets[0].grads.device
    found = torch.zeros(group.size(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(found, torch.tensor([digest], device=device), group=group)
    others = [rank for rank, other in enumerate(found.tolist()) if other != digest]
    if others:
        raise ValueError(
            f"ranks {others} of the group have other parameters than this one (names, order, "
            "shapes, dtypes) or another bucket_size; give every rank the same"
        )


def _keys(
    params: Mapping[str, Tensor],
    group: GroupChoice,
    grad_dtype: torch.dtype | None,
    whole: Callable[[str, Tensor], bool] | None,
    units: Callable[[str], str] | None,
) -> dict[str, BufferKey]:
    """Return the flat buffer that each parameter belongs to."""
    keys: dict[str, BufferKey] = {}
    for name, param in params.items():
        reduction = reduction_of(group, name, param)
        sharded = reduction.shards is not None
        keys[name] = BufferKey(
            grad_dtype=grad_dtype or _default_grad_dtype(param.dtype),
            param_dtype=param.dtype if sharded else None,
            reduction=reduction,
            whole=sharded and whole is not None and bool(whole(name, param)),
            unit=None if units is None else units(name),
        )
    return keys


def _is_shared(param: Tensor) -> bool:
    return isinstance(param, nn.Parameter) and "embedding" in sharding_of(param).partial_grad


def _default_grad_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _checked(named_params: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the trainable parameters with elements by name, refusing what cannot be buffered."""
    params: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    for name, param in named_params:
        if not isinstance(param, Tensor):
            raise TypeError(
                f"expected pairs of name and parameter, got {param!r:.60} for {name!r:.60}; pass "
                "module.named_parameters()"
            )
        if not param.requires_grad or not param.numel():
            continue
        if param.is_complex():
            raise TypeError(
                f"parameter {name!r} is complex, and gradients are summed as real numbers; "
                "train torch.view_as_real of it"
            )
        if name in params:
            raise ValueError(f"parameter {name!r} is listed twice; names must be unique")
        if id(param) in names:
            raise ValueError(
                f"parameter {name!r} is listed twice, also as {names[id(param)]!r}; list a shared "
                "parameter once, as module.named_parameters() does"
            )
        if hasattr(param, MAIN_GRAD):
            raise ValueError(
                f"parameter {name!r} already belongs to a GradBuffer; close() that one first"
            )
        params[name] = param
        names[id(param)] = name
    devices = {param.device for param in params.values()}
    if len(devices) > 1:
        raise ValueError(
            f"parameters lie on {sorted(map(str, devices))}; a GradBuffer holds one device, make "
            "one buffer for each"
        )
    return params
