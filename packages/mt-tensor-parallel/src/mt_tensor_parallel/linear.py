"""Column- and row-parallel linear layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod, sqrt
from typing import Self

import torch
from mt_parallel_state import (
    GradSink,
    Group,
    PartitionSpec,
    WgradStore,
    group_rank,
    group_size,
    shard_param,
    shard_size,
)
from torch import Tensor, nn

from mt_tensor_parallel.arguments import check_volume, positive_int
from mt_tensor_parallel.functional import parallel_linear
from mt_tensor_parallel.gemm import Gemm, checked_gemm
from mt_tensor_parallel.overlap import Overlap
from mt_tensor_parallel.shards import take_part

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "choose_gemms",
    "defer_weight_gradients",
    "sum_weight_gradients",
]


def _features(value: int | tuple[int, ...], name: str) -> tuple[int, ...]:
    if not isinstance(value, int | Sequence) or isinstance(value, str):
        raise TypeError(f"{name} must be an int or a tuple of ints, got {value!r}")
    sizes = tuple(value) if isinstance(value, Sequence) else (value,)
    if not sizes:
        raise ValueError(f"{name} must be one or more sizes of at least 1, got {value!r}")
    return tuple(positive_int(size, name) for size in sizes)


def _own_part(
    shape: tuple[int, ...],
    dim: int,
    bound: float,
    group: Group,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> nn.Parameter:
    """Draw the whole tensor uniformly in +-bound on the CPU and keep this rank's part of it."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    device = torch.get_default_device() if device is None else torch.device(device)
    local = list(shape)
    local[dim] //= group_size(group)
    if device.type == "meta":
        return nn.Parameter(torch.empty(local, dtype=dtype, device=device))
    check_volume(shape, "a parameter")
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
        self,
        *,
        group: Group,
        axis: str,
        sequence_parallel: bool,
        gemm: Gemm | None,
        communicate: bool,
        overlap: Overlap | None,
    ) -> None:
        super().__init__()
        self.overlap = overlap
        if sequence_parallel and not communicate:
            raise ValueError(
                "sequence_parallel=True needs communicate=True: the layer gathers and scatters"
            )
        self.group = group
        self.communicate = communicate
        self.wgrad_store: WgradStore | None = None
        self.grad_sink: GradSink | None = None
        self.axis = axis
        self.sequence_parallel = sequence_parallel
        self.gemm: Gemm = checked_gemm(gemm)

    def _take_over(self, linear: nn.Linear) -> None:
        """Replace the parameters by copies of this rank's parts of a linear layer's."""
        for name in ("weight", "bias"):
            own, whole = getattr(self, name), getattr(linear, name)
            if own is not None:
                setattr(self, name, take_part(own, whole, self.group))
        self.train(linear.training)

    def _apply_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, mode: str, *, own_weight: bool
    ) -> Tensor:
        return parallel_linear(
            x,
            weight,
            bias,
            mode="column" if mode == "column" else "row",
            group=self.group if self.communicate else None,
            gemm=self.gemm,
            sequence_parallel=self.sequence_parallel,
            wgrad_store=self.wgrad_store,
            grad_sink=self.grad_sink if own_weight else None,
            overlap=self.overlap,
        )

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
    part, so that every shard is a plain box: `(2, ffn)` with `shard_dim=1` for a gated MLP,
    `(kv_groups, q_per_group + 2, head_dim)` with `shard_dim=0` for attention.

    Collectives and accumulation are those of `parallel_linear` with `mode="column"`.

    Args:
        in_features: Input size, whole on every rank.
        out_features: Whole output size or sizes.
        shard_dim: Which of the output sizes is split.
        group: `None` means not split.
        axis: Axis name for the parameters' sharding records.
        bias: Whether there is one; it is split like the output.
        sequence_parallel: Whether the input is a sequence shard.
        gemm: `None` is `TorchGemm`.
        communicate: `False` leaves the collectives of input and output to the caller, as an
            expert's dispatcher does.
        overlap: How communication along the sequence is hidden; `None` is picked by capability.
        dtype: Of the parameters; `None` is torch's default.
        device: Of the parameters; `"meta"` draws no values.

    Shape:
        Input [B, S, in] (S / ranks under sequence parallelism), output [B, S, *local_out], weight
        [*local_out, in], bias [*local_out].

    Raises:
        ValueError: A size is below 1, the group does not divide the split one, or options exclude
            each other.
    """

    def __init__(  # noqa: PLR0913 - a layer's own settings, all but two by keyword
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        *,
        shard_dim: int = 0,
        group: Group = None,
        axis: str = "tp",
        bias: bool = True,
        sequence_parallel: bool = False,
        gemm: Gemm | None = None,
        communicate: bool = True,
        overlap: Overlap | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            group=group,
            axis=axis,
            sequence_parallel=sequence_parallel,
            gemm=gemm,
            communicate=communicate,
            overlap=overlap,
        )
        out = _features(out_features, "out_features")
        shard_dim = _shard_dim(shard_dim, out)
        local = shard_size(out[shard_dim], group, what=f"out_features[{shard_dim}] of {out}")
        self.shard_dim = shard_dim
        self.local_out = (*out[:shard_dim], local, *out[shard_dim + 1 :])
        bound = 1 / sqrt(positive_int(in_features, "in_features"))
        spec = _spec(shard_dim, axis, group)
        weight = _own_part((*out, in_features), shard_dim, bound, group, dtype=dtype, device=device)
        self.weight = shard_param(weight, spec)
        self.bias = None
        if bias:
            part = _own_part(out, shard_dim, bound, group, dtype=dtype, device=device)
            self.bias = shard_param(part, spec)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        out_features: int | tuple[int, ...] | None = None,
        shard_dim: int = 0,
        group: Group = None,
        axis: str = "tp",
        sequence_parallel: bool = False,
    ) -> Self:
        """Split a `torch.nn.Linear`: this rank's rows of its weight and bias.

        They are copies with its values, dtype, device and `requires_grad`. Nothing is sent: every
        rank of the group has the same layer.

        Args:
            linear: The whole layer.
            out_features: Its output as several dims, as for the constructor; `None` is one dim.
            shard_dim: Which of them is split.
            group: As for the constructor; `None` copies the whole layer.
            axis: As for the constructor.
            sequence_parallel: As for the constructor.

        Raises:
            TypeError: `linear` is no `torch.nn.Linear`.
            ValueError: As of the constructor, or the sizes are not those of `linear`.

        Example:
            >>> from torch import nn
            >>> from mt_tensor_parallel import ColumnParallelLinear
            >>> ColumnParallelLinear.from_linear(nn.Linear(4, 8), group=None).weight.shape
            torch.Size([8, 4])
        """
        linear = _check_linear(linear, cls)
        out = linear.out_features if out_features is None else out_features
        sizes = _features(out, "out_features")
        if prod(sizes) != linear.out_features:
            raise ValueError(
                f"out_features={out} must multiply to the {linear.out_features} of {linear!r}"
            )
        layer = cls(
            linear.in_features,
            sizes,
            shard_dim=shard_dim,
            group=group,
            axis=axis,
            bias=linear.bias is not None,
            sequence_parallel=sequence_parallel,
            dtype=linear.weight.dtype,
            device="meta",
        )
        layer._take_over(linear)
        return layer

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Apply the layer; see the class for shapes.

        Args:
            x: The input.
            weight: Used in place of the layer's own, for example a tied embedding's.
        """
        own_weight = weight is None
        weight = self.weight if weight is None else weight
        several = len(self.local_out) > 1
        bias = self.bias
        if several:
            weight, bias = weight.flatten(0, -2), None if bias is None else bias.flatten()
        y = self._apply_linear(x, weight, bias, "column", own_weight=own_weight)
        return y.unflatten(-1, self.local_out) if several else y


class RowParallelLinear(_ParallelLinear):
    """A linear layer whose input features are split over a group.

    The mirror of `ColumnParallelLinear`: the input may have several feature dims, one of
    which is split. Collectives are those of `parallel_linear` with `mode="row"`. The bias
    is replicated and added once, after the reduction; under sequence parallelism its gradient is a
    partial sum over the sequence shards, which its record says (`partial_grad=(axis,)`).

    Args:
        in_features: Whole input size or sizes.
        out_features: Output size, whole on every rank.
        shard_dim: Which of the input sizes is split.
        group: `None` means not split.
        axis: Axis name for the parameters' sharding records.
        bias: Whether there is one.
        sequence_parallel: Whether the output is a sequence shard.
        gemm: `None` is `TorchGemm`.
        communicate: `False` leaves the collectives of input and output to the caller, as an
            expert's dispatcher does. A bias is then the caller's too: it needs `bias=False`.
        overlap: How communication along the sequence is hidden; `None` is picked by capability.
        dtype: Of the parameters; `None` is torch's default.
        device: Of the parameters; `"meta"` draws no values.

    Shape:
        Input [B, S, *local_in], output [B, S, out] (S / ranks under sequence parallelism), weight
        [out, *local_in], bias [out].

    Raises:
        ValueError: A size is below 1, the group does not divide the split one or the sequence, or
            options exclude each other.
    """

    def __init__(  # noqa: PLR0913 - a layer's own settings, all but two by keyword
        self,
        in_features: int | tuple[int, ...],
        out_features: int,
        *,
        shard_dim: int = 0,
        group: Group = None,
        axis: str = "tp",
        bias: bool = True,
        sequence_parallel: bool = False,
        gemm: Gemm | None = None,
        communicate: bool = True,
        overlap: Overlap | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            group=group,
            axis=axis,
            sequence_parallel=sequence_parallel,
            gemm=gemm,
            communicate=communicate,
            overlap=overlap,
        )
        if bias and not communicate:
            raise ValueError(
                "bias=True with communicate=False would be added on every rank, before the sum "
                "over the group; use bias=False and add one after that sum"
            )
        sizes = _features(in_features, "in_features")
        shard_dim = _shard_dim(shard_dim, sizes)
        local = shard_size(sizes[shard_dim], group, what=f"in_features[{shard_dim}] of {sizes}")
        self.local_in = (*sizes[:shard_dim], local, *sizes[shard_dim + 1 :])
        bound = 1 / sqrt(prod(sizes))
        shape = (positive_int(out_features, "out_features"), *sizes)
        weight = _own_part(shape, shard_dim + 1, bound, group, dtype=dtype, device=device)
        self.weight = shard_param(weight, _spec(shard_dim + 1, axis, group))
        self.bias = None
        if bias:
            whole = _own_part((out_features,), 0, bound, None, dtype=dtype, device=device)
            partial = (axis,) if sequence_parallel and group is not None else ()
            self.bias = shard_param(whole, PartitionSpec(), partial_grad=partial)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        in_features: int | tuple[int, ...] | None = None,
        shard_dim: int = 0,
        group: Group = None,
        axis: str = "tp",
        sequence_parallel: bool = False,
    ) -> Self:
        """Split a `torch.nn.Linear`: this rank's columns of its weight, and its whole bias.

        They are copies with its values, dtype, device and `requires_grad`. Nothing is sent: every
        rank of the group has the same layer.

        Args:
            linear: The whole layer.
            in_features: Its input as several dims, as for the constructor; `None` is one dim.
            shard_dim: Which of them is split.
            group: As for the constructor; `None` copies the whole layer.
            axis: As for the constructor.
            sequence_parallel: As for the constructor.

        Raises:
            TypeError: `linear` is no `torch.nn.Linear`.
            ValueError: As of the constructor, or the sizes are not those of `linear`.

        Example:
            >>> from torch import nn
            >>> from mt_tensor_parallel import RowParallelLinear
            >>> RowParallelLinear.from_linear(nn.Linear(4, 8), group=None).weight.shape
            torch.Size([8, 4])
        """
        linear = _check_linear(linear, cls)
        given = linear.in_features if in_features is None else in_features
        sizes = _features(given, "in_features")
        if prod(sizes) != linear.in_features:
            raise ValueError(
                f"in_features={given} must multiply to the {linear.in_features} of {linear!r}"
            )
        layer = cls(
            sizes,
            linear.out_features,
            shard_dim=shard_dim,
            group=group,
            axis=axis,
            bias=linear.bias is not None,
            sequence_parallel=sequence_parallel,
            dtype=linear.weight.dtype,
            device="meta",
        )
        layer._take_over(linear)
        return layer

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Apply the layer; see the class for shapes.

        Args:
            x: The input.
            weight: Used in place of the layer's own.
        """
        own_weight = weight is None
        weight = self.weight if weight is None else weight
        if len(self.local_in) > 1:
            x, weight = x.flatten(-len(self.local_in)), weight.flatten(1)
        return self._apply_linear(x, weight, self.bias, "row", own_weight=own_weight)


def _check_linear(linear: object, cls: type) -> nn.Linear:
    if not isinstance(linear, nn.Linear):
        raise TypeError(
            f"{cls.__name__}.from_linear takes a torch.nn.Linear, got {type(linear).__name__}"
        )
    return linear


def _linears(module: nn.Module) -> Iterator[tuple[str, _ParallelLinear]]:
    return (
        (name, each) for name, each in module.named_modules() if isinstance(each, _ParallelLinear)
    )


def defer_weight_gradients(module: nn.Module, store: WgradStore | None) -> None:
    """Give all parallel linear layers inside `module` the store that they ask in backward.

    Once, when the model is built: what switches it on and off is `store.deferring()`, also between
    a forward and its backward.
    """
    for _, layer in _linears(module):
        layer.wgrad_store = store


def choose_gemms(module: nn.Module, gemm_for: Callable[[str], Gemm]) -> None:
    """Give each parallel linear layer inside `module` the strategy for its dotted name.

    A strategy that is an `nn.Module` becomes the layer's submodule `gemm`, with its state.
    """
    for name, layer in list(_linears(module)):
        del layer.gemm  # a module does not give way to a plain attribute
        layer.gemm = gemm_for(name)


def sum_weight_gradients(
    module: nn.Module, sink_of: Callable[[nn.Parameter], GradSink | None]
) -> None:
    """Have the parallel linear layers inside `module` add their weights' gradients to sinks.

    `sink_of` is `buffer.sink` of an `mt_data_parallel.GradBuffer`: backward then multiplies
    straight into `main_grad`, without a temporary gradient and a copy. `lambda param: None`
    ends it. A weight with a sink must be used once per forward, by its own layer: autograd no
    longer sums its uses.
    """
    for _, layer in _linears(module):
        layer.grad_sink = sink_of(layer.weight) if layer.weight.requires_grad else None


def _shard_dim(shard_dim: int, sizes: tuple[int, ...]) -> int:
    if not isinstance(shard_dim, int) or not 0 <= shard_dim < len(sizes):
        raise ValueError(f"shard_dim must be 0 to {len(sizes) - 1} for {sizes}, got {shard_dim}")
    return shard_dim
