"""Column- and row-parallel linear layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod, sqrt
from typing import Any, ClassVar, Self

import torch
from mt_files import check_type
from mt_parallel_state import (
    GradSink,
    Group,
    MatrixSpec,
    PartitionSpec,
    WgradStore,
    group_rank,
    group_size,
    mark_matrix,
    shard_param,
    shard_size,
)
from torch import Tensor, nn

from mt_tensor_parallel.arguments import positive_int
from mt_tensor_parallel.functional import Mode, parallel_linear
from mt_tensor_parallel.gemm import Gemm, checked_gemm
from mt_tensor_parallel.graph import graph_linear, number_of
from mt_tensor_parallel.low_rank import LowRankPlace, low_rank
from mt_tensor_parallel.overlap import Overlap
from mt_tensor_parallel.shards import draw_part, split_dim, take_part


def _features(value: int | tuple[int, ...], name: str) -> tuple[int, ...]:
    if not isinstance(value, int | Sequence) or isinstance(value, str):
        raise TypeError(f"{name} must be an int or a tuple of ints, got {value!r}")
    sizes = tuple(value) if isinstance(value, Sequence) else (value,)
    if not sizes:
        raise ValueError(f"{name} must be one or more sizes of at least 1, got {value!r}")
    return tuple(positive_int(size, name) for size in sizes)


def _spec(dim: int, axis: str, group: Group) -> PartitionSpec:
    return PartitionSpec() if group is None else PartitionSpec(*(None,) * dim, axis)


class GemmLayer(nn.Module):
    """A layer with one weight that a strategy multiplies; the functions below find it by name.

    Attributes:
        weight: The parameter.
        wgrad_store: The store that takes the weight's gradient while it is active, or None.
        grad_sink: The sink that sums the weight's gradient, or None for autograd.
        lead_dims: Number of the weight's dims in front of its outputs: 1 for experts.
        axis: Mesh axis that splits the weight.
        group: The ranks that split it, where the layer communicates over them.
        sequence_parallel: Whether the tokens outside of the layer are split over the group.
    """

    weight: nn.Parameter
    wgrad_store: WgradStore | None = None
    grad_sink: GradSink | None = None
    lead_dims: ClassVar[int] = 0
    axis: str
    group: Group = None
    sequence_parallel: bool = False

    @property
    def has_partial_sums(self) -> bool:
        """Whether ranks that split the weight compute gradients of whole parameters in parts."""
        raise NotImplementedError

    def ranks_of(self, dim: int) -> tuple[int, int]:
        """Return the number of ranks that split a dim of the weight, and this rank's index."""
        raise NotImplementedError

    def low_rank(self, given: tuple[Any, ...], a: Tensor, bs: Sequence[Tensor]) -> list[Tensor]:
        """Return `B A x` for each B beside the weight, whose A are stacked in one matrix.

        Args:
            given: Arguments of `forward`.
            a: A of each B, one below the other.
            bs: The second matrices.

        Shape:
            a: [n * rank, in]; bs: n of [out, rank]; for experts with their dim in front. Returns n
            of [..., out].
        """
        raise NotImplementedError

    def choose_gemm(self, name: str, gemm_for: Callable[[str], Gemm]) -> None:
        """Set the strategy for the layer's name; a layer with several products sets several."""
        raise NotImplementedError


class ParallelLinear(GemmLayer):
    """Base of the column- and row-parallel layers, which split different features.

    Attributes:
        run: Number of consecutive split features on a rank: all of them, unless a fused weight is
            split inside its parts.
    """

    bias: nn.Parameter | None
    run: int
    gemm: Gemm
    _split: ClassVar[str]

    def __init__(  # noqa: PLR0913 - a layer's own settings, all but two by keyword
        self,
        in_features: int | tuple[int, ...],
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
        super().__init__()
        if sequence_parallel and not communicate:
            raise ValueError(
                "sequence_parallel=True needs communicate=True: the layer gathers and scatters"
            )
        column = self._split == "out_features"
        if bias and not column and not communicate:
            raise ValueError(
                "bias=True with communicate=False would be added on every rank, before the sum "
                "over the group; use bias=False and add one after that sum"
            )
        self.group, self.axis = group, axis
        self.communicate, self.sequence_parallel = communicate, sequence_parallel
        self.overlap = overlap
        self.gemm = checked_gemm(gemm)
        self._number = number_of(self)
        sizes = _features(out_features if column else in_features, self._split)
        whole = in_features if column else out_features
        whole = positive_int(whole, "in_features" if column else "out_features")
        if not isinstance(shard_dim, int) or not 0 <= shard_dim < len(sizes):
            allowed = f"0 to {len(sizes) - 1} for {sizes}"
            raise ValueError(f"shard_dim must be {allowed}, got {shard_dim}")
        local = shard_size(sizes[shard_dim], group, what=f"{self._split}[{shard_dim}] of {sizes}")
        self._local = (*sizes[:shard_dim], local, *sizes[shard_dim + 1 :])
        self.run = prod(self._local[shard_dim:])
        bound = 1 / sqrt(whole if column else prod(sizes))
        make = partial(
            draw_part, fill=lambda x: x.uniform_(-bound, bound), dtype=dtype, device=device
        )
        shape, dim = ((*sizes, whole), shard_dim) if column else ((whole, *sizes), shard_dim + 1)
        self.weight = shard_param(make(shape, dim, group=group), _spec(dim, axis, group))
        mark_matrix(self.weight, MatrixSpec(in_dims=1 if column else len(sizes)))
        self.bias = None
        if bias and column:
            part = make(sizes, shard_dim, group=group)
            self.bias = shard_param(part, _spec(shard_dim, axis, group))
        elif bias:
            partial_grad = (axis,) if sequence_parallel and group is not None else ()
            own = make((whole,), 0, group=None)
            self.bias = shard_param(own, PartitionSpec(), partial_grad=partial_grad)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        sizes: int | tuple[int, ...] | None = None,
        shard_dim: int = 0,
        group: Group = None,
        axis: str = "tp",
        sequence_parallel: bool = False,
    ) -> Self:
        """Return a layer with this rank's part of the weight and bias of a `torch.nn.Linear`.

        The parts are copies with its values, dtype, device and `requires_grad`. Nothing is sent:
        every rank of the group has the same whole layer.

        Args:
            linear: The whole layer.
            sizes: The output features of a column-parallel layer, or the input features of a
                row-parallel one, as several dims; `None` is one dim.
            shard_dim: Index of the split dim.
            group: As for the constructor; `None` copies the whole layer.
            axis: As for the constructor.
            sequence_parallel: As for the constructor.

        Raises:
            TypeError: `linear` is no `torch.nn.Linear`.
            ValueError: As for the constructor, or the sizes do not fit `linear`.

        Example:
            >>> from torch import nn
            >>> from mt_tensor_parallel import ColumnParallelLinear
            >>> ColumnParallelLinear.from_linear(nn.Linear(4, 8), group=None).weight.shape
            torch.Size([8, 4])
        """
        check_type("linear", linear, nn.Linear)
        features = {"in_features": linear.in_features, "out_features": linear.out_features}
        whole = features[cls._split]
        split = _features(whole if sizes is None else sizes, "sizes")
        if prod(split) != whole:
            raise ValueError(f"sizes={sizes} must multiply to the {whole} {cls._split} of {linear}")
        layer = cls(
            **{**features, cls._split: split},
            shard_dim=shard_dim,
            group=group,
            axis=axis,
            bias=linear.bias is not None,
            sequence_parallel=sequence_parallel,
            dtype=linear.weight.dtype,
            device="meta",
        )
        for name in ("weight", "bias"):
            own, given = getattr(layer, name), getattr(linear, name)
            if own is not None:
                setattr(layer, name, take_part(own, given, group))
        return layer.train(linear.training)

    def matrix(self, given: Tensor | None = None) -> Tensor:
        """Return the weight, or a given one, as a matrix.

        Shape:
            Returns [out, in] of this rank.
        """
        weight = self.weight if given is None else given
        return weight.flatten(0, -2) if self._split == "out_features" else weight.flatten(1)

    def _apply_linear(self, x: Tensor, given: Tensor | None, bias: Tensor | None) -> Tensor:
        mode: Mode = "column" if self._split == "out_features" else "row"
        weight = self.matrix(given)
        if torch.compiler.is_compiling() and given is None and self._is_node:
            return graph_linear(self, self._number, (x, weight, bias), mode)
        return parallel_linear(
            x,
            weight,
            bias,
            mode=mode,
            group=self.group if self.communicate else None,
            gemm=self.gemm,
            sequence_parallel=self.sequence_parallel,
            wgrad_store=self.wgrad_store,
            grad_sink=self.grad_sink if given is None else None,
            overlap=self.overlap,
        )

    @property
    def has_partial_sums(self) -> bool:
        """See `GemmLayer`: without communication, and where tokens are split."""
        return group_size(self.group) > 1 and (self.sequence_parallel or not self.communicate)

    def ranks_of(self, dim: int) -> tuple[int, int]:
        """See `GemmLayer`."""
        if dim != split_dim(self.weight):
            return 1, 0
        return group_size(self.group), group_rank(self.group)

    def low_rank(self, given: tuple[Any, ...], a: Tensor, bs: Sequence[Tensor]) -> list[Tensor]:
        """See `GemmLayer`; `low_rank` of this package names the collectives."""
        x, is_column = given[0], self._split == "out_features"
        place = LowRankPlace(
            split="outputs" if is_column else "inputs",
            group=self.group,
            communicate=self.communicate,
            sequence_parallel=self.sequence_parallel,
        )
        return low_rank(x if is_column else x.flatten(-len(self._local)), a, bs, place)

    def choose_gemm(self, name: str, gemm_for: Callable[[str], Gemm]) -> None:
        """See `GemmLayer`."""
        del self.gemm  # a module does not give way to a plain attribute
        self.gemm = gemm_for(name)

    @property
    def _is_node(self) -> bool:
        """Whether the layer is a node of a compiled graph: it adds to a sink, or communicates.

        With operands that are not tensors the layer runs outside the graph, whose nodes can keep
        only tensors for backward.
        """
        sends = self.communicate and group_size(self.group) > 1
        return self.gemm.keeps_tensors and (sends or self.grad_sink is not None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give a copied layer its own number."""
        super().__setstate__(state)
        self._number = number_of(self)

    def extra_repr(self) -> str:
        """Return the shapes and settings that torch prints."""
        return (
            f"weight={list(self.weight.shape)}, bias={self.bias is not None}, axis={self.axis!r}, "
            f"ranks={group_size(self.group)}, sequence_parallel={self.sequence_parallel}, "
            f"gemm={self.gemm!r}"
        )


class ColumnParallelLinear(ParallelLinear):
    """A linear layer whose output features are split over a group.

    The output may have several dims, one of which is split; a fused projection keeps a dim per
    part, so that every shard is a plain box: `(2, ffn)` with `shard_dim=1` for a gated MLP,
    `(kv_groups, q_per_group + 2, head_dim)` with `shard_dim=0` for attention.

    Collectives and accumulation are as in `parallel_linear` with `mode="column"`.

    Args:
        in_features: Input size, whole on every rank.
        out_features: Whole output size or sizes.
        shard_dim: Index of the split output size.
        group: Ranks that split the layer; `None` means not split.
        axis: Axis name for the parameters' sharding records.
        bias: Whether the layer has a bias, which is split like the output.
        sequence_parallel: Whether the input is a sequence shard.
        gemm: The strategy of the products; `None` is `TorchGemm`.
        communicate: `False` leaves the collectives of input and output to the caller, as an
            expert's dispatcher does.
        overlap: How products hide communication along the sequence; `None` picks by capability.
        dtype: Dtype of the parameters; `None` is torch's default.
        device: Device of the parameters; `"meta"` draws no values.

    Shape:
        Input [B, S, in] (S / ranks under sequence parallelism), output [B, S, *local_out], weight
        [*local_out, in], bias [*local_out].

    Raises:
        ValueError: A size is below 1, the group does not divide the split one, or options exclude
            each other.
    """

    _split = "out_features"

    def forward(self, x: Tensor, weight: Tensor | None = None, *, with_bias: bool = True) -> Tensor:
        """Apply the layer; see the class for shapes.

        Args:
            x: The input.
            weight: A weight to use instead of the layer's, for example a tied embedding's.
            with_bias: False leaves the bias to the caller's next operation.
        """
        bias = self.bias.flatten() if self.bias is not None and with_bias else None
        y = self._apply_linear(x, weight, bias)
        return y.unflatten(-1, self._local) if len(self._local) > 1 else y


class RowParallelLinear(ParallelLinear):
    """A linear layer whose input features are split over a group.

    The mirror of `ColumnParallelLinear`: the input may have several feature dims, one of
    which is split. Collectives are as in `parallel_linear` with `mode="row"`. The bias is
    replicated and added once, after the reduction; under sequence parallelism its gradient is a
    partial sum over the sequence shards, which its record says (`partial_grad=(axis,)`).

    Args:
        in_features: Whole input size or sizes.
        out_features: Output size, whole on every rank.
        shard_dim: Index of the split input size.
        group: Ranks that split the layer; `None` means not split.
        axis: Axis name for the parameters' sharding records.
        bias: Whether the layer has a bias.
        sequence_parallel: Whether the output is a sequence shard.
        gemm: The strategy of the products; `None` is `TorchGemm`.
        communicate: `False` leaves the collectives of input and output to the caller, as an
            expert's dispatcher does. A bias is then the caller's too: it needs `bias=False`.
        overlap: How products hide communication along the sequence; `None` picks by capability.
        dtype: Dtype of the parameters; `None` is torch's default.
        device: Device of the parameters; `"meta"` draws no values.

    Shape:
        Input [B, S, *local_in], output [B, S, out] (S / ranks under sequence parallelism), weight
        [out, *local_in], bias [out].

    Raises:
        ValueError: A size is below 1, the group does not divide the split one or the sequence, or
            options exclude each other.
    """

    _split = "in_features"

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Apply the layer; see the class for shapes.

        Args:
            x: The input.
            weight: A weight to use instead of the layer's.
        """
        flat = x.flatten(-len(self._local)) if len(self._local) > 1 else x
        return self._apply_linear(flat, weight, self.bias)


def linears(module: nn.Module) -> list[tuple[str, GemmLayer]]:
    """Return the `GemmLayer`s inside a module with their dotted names."""
    check_type("module", module, nn.Module)
    return [(name, m) for name, m in module.named_modules() if isinstance(m, GemmLayer)]


def defer_weight_gradients(module: nn.Module, store: WgradStore | None) -> None:
    """Give all parallel linear layers inside `module` the store that they ask in backward.

    Call it once, when the model is built. `store.deferring()` switches the store on and off, also
    between a forward and its backward.
    """
    for _, layer in linears(module):
        layer.wgrad_store = store


def choose_gemms(module: nn.Module, gemm_for: Callable[[str], Gemm]) -> None:
    """Give each parallel linear layer inside `module` the strategy for its dotted name.

    If the strategy is an `nn.Module`, it becomes the layer's submodule `gemm`, with its state.
    """
    for name, layer in linears(module):
        layer.choose_gemm(name, gemm_for)


def sum_weight_gradients(
    module: nn.Module, sink_of: Callable[[nn.Parameter], GradSink | None]
) -> None:
    """Have the parallel linear layers inside `module` add their weights' gradients to sinks.

    `sink_of` is `buffer.sink` of an `mt_data_parallel.GradBuffer`: backward then multiplies
    straight into `main_grad`, without a temporary gradient and a copy. `lambda param: None`
    ends it. A weight with a sink must be used once per forward, by its own layer: autograd no
    longer sums its uses.
    """
    for _, layer in linears(module):
        layer.grad_sink = sink_of(layer.weight) if layer.weight.requires_grad else None
