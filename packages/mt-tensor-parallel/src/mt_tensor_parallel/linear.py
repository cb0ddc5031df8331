"""Column- and row-parallel linear layers, as functions and as modules."""

from __future__ import annotations

from math import prod, sqrt
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mt_parallel_state import PartitionSpec, shard_param
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mt_tensor_parallel.collectives import (
    Group,
    group_rank,
    group_size,
    shard_size,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from mt_tensor_parallel.gemm import Gemm, TorchGemm

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "parallel_linear"]

SEQUENCE_DIM = 1


def _bias_grad(grad_y: Tensor, *, needed: bool) -> Tensor | None:
    return grad_y.flatten(0, -2).sum(0) if needed else None


class _Local(torch.autograd.Function):
    """A linear layer on one rank, for a Gemm that is not torch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gemm: Gemm) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gemm = gemm
        y = gemm.forward(x, weight)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        grad_x = ctx.gemm.dgrad(grads[0], weight) if need_x else None
        grad_w = ctx.gemm.wgrad(grads[0], x) if need_w else None
        return grad_x, grad_w, _bias_grad(grads[0], needed=need_b), None


class _Column(torch.autograd.Function):
    """Input whole (or gathered along the sequence), output features split."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gemm: Gemm,
        group: dist.ProcessGroup,
        sequence_parallel: bool,  # noqa: FBT001 - autograd functions take no keywords
    ) -> Tensor:
        ctx.save_for_backward(x, weight)  # the shard of x; it is gathered anew for wgrad
        ctx.gemm, ctx.group, ctx.sequence_parallel = gemm, group, sequence_parallel
        if sequence_parallel:
            x = start_all_gather(x, group, SEQUENCE_DIM).wait()
        y = gemm.forward(x, weight)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        gemm, group, grad_y = ctx.gemm, ctx.group, grads[0]
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        gather = (
            start_all_gather(x, group, SEQUENCE_DIM) if ctx.sequence_parallel and need_w else None
        )
        reduce = None
        if need_x:
            grad_x = gemm.dgrad(grad_y, weight)
            if ctx.sequence_parallel:
                reduce = start_reduce_scatter(grad_x, group, SEQUENCE_DIM)
            else:
                reduce = start_all_reduce(grad_x, group)
        # The reduction of dgrad runs while wgrad computes.
        grad_w = gemm.wgrad(grad_y, x if gather is None else gather.wait()) if need_w else None
        grad_b = _bias_grad(grad_y, needed=need_b)
        return None if reduce is None else reduce.wait(), grad_w, grad_b, None, None, None


class _Row(torch.autograd.Function):
    """Input features split, output summed over the group (and split along the sequence)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gemm: Gemm,
        group: dist.ProcessGroup,
        sequence_parallel: bool,  # noqa: FBT001 - autograd functions take no keywords
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gemm, ctx.group, ctx.sequence_parallel = gemm, group, sequence_parallel
        y = gemm.forward(x, weight)
        if sequence_parallel:
            y = start_reduce_scatter(y, group, SEQUENCE_DIM).wait()
        else:
            y = start_all_reduce(y, group).wait()
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        grad_b = _bias_grad(grads[0], needed=need_b)
        grad_y = grads[0]
        if ctx.sequence_parallel:
            grad_y = start_all_gather(grad_y, ctx.group, SEQUENCE_DIM).wait()
        grad_x = ctx.gemm.dgrad(grad_y, weight) if need_x else None
        grad_w = ctx.gemm.wgrad(grad_y, x) if need_w else None
        return grad_x, grad_w, grad_b, None, None, None


def parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    mode: Literal["column", "row"],
    group: Group = None,
    gemm: Gemm | None = None,
    sequence_parallel: bool = False,
) -> Tensor:
    """``x @ weight.T + bias`` with ``weight`` split over ``group``.

    ``mode="column"`` splits the output features. Forward sends nothing, backward all-reduces the
    input's gradient while the weight's is computed. With ``sequence_parallel`` the input is a
    sequence shard: forward all-gathers it, backward gathers it again and reduce-scatters its
    gradient.

    ``mode="row"`` splits the input features. Forward all-reduces the output, backward sends
    nothing; with ``sequence_parallel`` forward reduce-scatters along the sequence, backward
    all-gathers. The bias is whole, and is added once, after the reduction.

    Args:
        x: The input.
        weight: This rank's part of the weight.
        bias: Its bias; a part for column, whole for row.
        mode: Which features are split.
        group: ``None`` means the weight is whole.
        gemm: ``None`` is :class:`TorchGemm`.
        sequence_parallel: Whether activations outside the split region are split along dim 1.

    Shape:
        x: [B, S, in] (column) or [B, S, in / ranks] (row); any leading dims without sequence
        parallelism. With it, S is S / ranks for the input of column and the output of row.
        weight: [out / ranks, in] (column) or [out, in / ranks] (row). Returns [B, S, out / ranks]
        (column) or [B, S, out] (row).

    Raises:
        ValueError: Unknown mode, fewer than 3 dims under sequence parallelism, or a sequence that
            the group does not divide.
    """
    if mode not in ("column", "row"):
        raise ValueError(f"mode must be 'column' or 'row', got {mode!r}")
    if group is None or group.size() == 1:
        if gemm is None or type(gemm) is TorchGemm:
            return F.linear(x, weight, bias)  # what TorchGemm computes, with torch's own backward
        return cast(Tensor, _Local.apply(x, weight, bias, gemm))
    if sequence_parallel:
        if x.dim() < 3:
            raise ValueError(
                f"sequence parallelism splits dim 1 of [B, S, ...], got x of shape {tuple(x.shape)}"
            )
        if mode == "row":
            shard_size(x.shape[SEQUENCE_DIM], group, what="the sequence length")
    function = _Column if mode == "column" else _Row
    gemm = TorchGemm() if gemm is None else gemm
    return cast(Tensor, function.apply(x, weight, bias, gemm, group, sequence_parallel))


def _features(value: int | tuple[int, ...], name: str) -> tuple[int, ...]:
    sizes = (value,) if isinstance(value, int) else tuple(value)
    if not sizes or any(size < 1 for size in sizes):
        raise ValueError(f"{name} must be one or more sizes of at least 1, got {value!r}")
    return sizes


def _own_part(
    shape: tuple[int, ...],
    dim: int,
    bound: float,
    group: Group,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> nn.Parameter:
    """Draws the whole tensor uniformly in +-bound on the CPU and keeps this rank's part of it."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    device = torch.get_default_device() if device is None else torch.device(device)
    local = list(shape)
    local[dim] //= group_size(group)
    if device.type == "meta":
        return nn.Parameter(torch.empty(local, dtype=dtype, device=device))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    whole = torch.empty(shape, dtype=wide, device="cpu").uniform_(-bound, bound)
    part = whole.narrow(dim, group_rank(group) * local[dim], local[dim])
    return nn.Parameter(part.to(dtype=dtype, device=device, copy=True).contiguous())


def _spec(dim: int, axis: str, group: Group) -> PartitionSpec:
    return PartitionSpec() if group is None else PartitionSpec(*(None,) * dim, axis)


class _ParallelLinear(nn.Module):
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, *, group: Group, axis: str, sequence_parallel: bool, gemm: Gemm | None
    ) -> None:
        super().__init__()
        self.group = group
        self.axis = axis
        self.sequence_parallel = sequence_parallel
        self.gemm: Gemm = TorchGemm() if gemm is None else gemm

    def extra_repr(self) -> str:
        """The shapes and settings that torch prints."""
        return (
            f"weight={list(self.weight.shape)}, bias={self.bias is not None}, axis={self.axis!r}, "
            f"ranks={group_size(self.group)}, sequence_parallel={self.sequence_parallel}, "
            f"gemm={self.gemm!r}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer whose output features are split over a group.

    The output may have several dims, one of which is split; a fused projection keeps a dim per
    part, so that every shard is a plain box: ``(2, ffn)`` with ``shard_dim=1`` for a gated MLP,
    ``(kv_groups, q_per_group + 2, head_dim)`` with ``shard_dim=0`` for attention.

    Collectives and accumulation are those of :func:`parallel_linear` with ``mode="column"``.

    Args:
        in_features: Input size, whole on every rank.
        out_features: Whole output size or sizes.
        shard_dim: Which of the output sizes is split.
        group: ``None`` means not split.
        axis: Axis name for the parameters' sharding records.
        bias: Whether there is one; it is split like the output.
        sequence_parallel: Whether the input is a sequence shard.
        gemm: ``None`` is :class:`TorchGemm`.
        dtype: Of the parameters; ``None`` is torch's default.
        device: Of the parameters; ``"meta"`` draws no values.

    Shape:
        Input [B, S, in] (S / ranks under sequence parallelism), output [B, S, *local_out], weight
        [*local_out, in], bias [*local_out].

    Raises:
        ValueError: The group does not divide the split size.
    """

    def __init__(  # noqa: PLR0913 - a layer's own settings, all but two by keyword
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        *,
        shard_dim: int = 0,
        group: Group = None,
        axis: str = "tp",
        bias: bool = False,
        sequence_parallel: bool = False,
        gemm: Gemm | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(group=group, axis=axis, sequence_parallel=sequence_parallel, gemm=gemm)
        out = _features(out_features, "out_features")
        shard_dim = _shard_dim(shard_dim, out)
        local = shard_size(out[shard_dim], group, what=f"out_features[{shard_dim}] of {out}")
        self.local_out = (*out[:shard_dim], local, *out[shard_dim + 1 :])
        bound = 1 / sqrt(in_features)
        spec = _spec(shard_dim, axis, group)
        weight = _own_part((*out, in_features), shard_dim, bound, group, dtype=dtype, device=device)
        self.weight = shard_param(weight, spec)
        self.bias = None
        if bias:
            part = _own_part(out, shard_dim, bound, group, dtype=dtype, device=device)
            self.bias = shard_param(part, spec)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer; see the class for shapes."""
        several = len(self.local_out) > 1
        y = parallel_linear(
            x,
            self.weight.flatten(0, -2) if several else self.weight,
            self.bias.flatten() if several and self.bias is not None else self.bias,
            mode="column",
            group=self.group,
            gemm=self.gemm,
            sequence_parallel=self.sequence_parallel,
        )
        return y.unflatten(-1, self.local_out) if several else y


class RowParallelLinear(_ParallelLinear):
    """A linear layer whose input features are split over a group.

    The mirror of :class:`ColumnParallelLinear`: the input may have several feature dims, one of
    which is split. Collectives are those of :func:`parallel_linear` with ``mode="row"``. The bias
    is replicated and added once, after the reduction; under sequence parallelism its gradient is a
    partial sum over the sequence shards, which its record says (``partial_grad=(axis,)``).

    Args:
        in_features: Whole input size or sizes.
        out_features: Output size, whole on every rank.
        shard_dim: Which of the input sizes is split.
        group: ``None`` means not split.
        axis: Axis name for the parameters' sharding records.
        bias: Whether there is one.
        sequence_parallel: Whether the output is a sequence shard.
        gemm: ``None`` is :class:`TorchGemm`.
        dtype: Of the parameters; ``None`` is torch's default.
        device: Of the parameters; ``"meta"`` draws no values.

    Shape:
        Input [B, S, *local_in], output [B, S, out] (S / ranks under sequence parallelism), weight
        [out, *local_in], bias [out].

    Raises:
        ValueError: The group does not divide the split size, or the sequence.
    """

    def __init__(  # noqa: PLR0913 - a layer's own settings, all but two by keyword
        self,
        in_features: int | tuple[int, ...],
        out_features: int,
        *,
        shard_dim: int = 0,
        group: Group = None,
        axis: str = "tp",
        bias: bool = False,
        sequence_parallel: bool = False,
        gemm: Gemm | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(group=group, axis=axis, sequence_parallel=sequence_parallel, gemm=gemm)
        sizes = _features(in_features, "in_features")
        shard_dim = _shard_dim(shard_dim, sizes)
        local = shard_size(sizes[shard_dim], group, what=f"in_features[{shard_dim}] of {sizes}")
        self.local_in = (*sizes[:shard_dim], local, *sizes[shard_dim + 1 :])
        bound = 1 / sqrt(prod(sizes))
        shape = (out_features, *sizes)
        weight = _own_part(shape, shard_dim + 1, bound, group, dtype=dtype, device=device)
        self.weight = shard_param(weight, _spec(shard_dim + 1, axis, group))
        self.bias = None
        if bias:
            whole = _own_part((out_features,), 0, bound, None, dtype=dtype, device=device)
            partial = (axis,) if sequence_parallel and group is not None else ()
            self.bias = shard_param(whole, PartitionSpec(), partial_grad=partial)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer; see the class for shapes."""
        several = len(self.local_in) > 1
        return parallel_linear(
            x.flatten(-len(self.local_in)) if several else x,
            self.weight.flatten(1) if several else self.weight,
            self.bias,
            mode="row",
            group=self.group,
            gemm=self.gemm,
            sequence_parallel=self.sequence_parallel,
        )


def _shard_dim(shard_dim: int, sizes: tuple[int, ...]) -> int:
    if not 0 <= shard_dim < len(sizes):
        raise ValueError(f"shard_dim must be 0 to {len(sizes) - 1} for {sizes}, got {shard_dim}")
    return shard_dim
