"""The sharding record that a parameter carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import cast

from mt_files import check_type
from torch import Tensor, nn

from mt_parallel_state.layout import AXES, EMBEDDING, MIRROR, ParallelLayout
from mt_parallel_state.matrix import MatrixSpec
from mt_parallel_state.spec import PartitionSpec

_ATTRIBUTE = "_mt_sharding"
_TABLE = "_mt_shardings"
_PARTIAL_AXES = (*AXES, EMBEDDING, MIRROR)


@dataclass(frozen=True)
class ParamSharding:
    """The split of a parameter, and the sums that its gradient still lacks.

    Attributes:
        spec: The axes that split each dim.
        partial_grad: Axes over which the gradient arrives as a partial sum and must be SUMmed
            before use: `("tp",)` for a replicated norm weight applied to sequence shards,
            `("embedding",)` for a tied embedding on the first and last pipeline stage,
            `("pp",)` for a parameter that every stage has a copy of,
            `("mirror",)` for a stage that a bidirectional schedule has on two ranks.
            Data-parallel reduction is not listed; every parameter needs it.
        is_copy: Another pipeline rank owns this parameter (the head's copy of a tied embedding,
            the second direction's copy of a stage).
            A copy is neither counted in norms nor written to checkpoints.
        matrix: The matrices in the parameter; None for vectors and embedding tables.
    """

    spec: PartitionSpec = field(default_factory=PartitionSpec)
    _: KW_ONLY
    partial_grad: tuple[str, ...] = ()
    is_copy: bool = False
    matrix: MatrixSpec | None = None

    def __post_init__(self) -> None:
        check_type("spec", self.spec, PartitionSpec)
        if self.matrix is not None:
            check_type("matrix", self.matrix, MatrixSpec)
        if isinstance(self.partial_grad, str):
            raise TypeError(
                f"partial_grad must be a tuple of axis names, got the string "
                f"{self.partial_grad!r}; write ({self.partial_grad!r},)"
            )
        if len(set(self.partial_grad)) != len(self.partial_grad):
            raise ValueError(
                f"partial_grad={self.partial_grad!r} names an axis twice, and each entry is one "
                "SUM; name each axis once"
            )
        for axis in self.partial_grad:
            if axis not in _PARTIAL_AXES:
                raise ValueError(
                    f"unknown axis {axis!r} in partial_grad; it takes {', '.join(_PARTIAL_AXES)}"
                )
            if axis in self.spec.axes:
                raise ValueError(
                    f"axis {axis!r} splits the parameter ({self.spec!r}), so its gradient cannot "
                    f"be a partial sum over {axis!r}"
                )


_COMPLETE = (
    ParamSharding()
)  # of every parameter without a record: an optimizer's step asks for each


def shard_param(
    param: nn.Parameter,
    spec: PartitionSpec,
    *,
    partial_grad: Sequence[str] = (),
    is_copy: bool = False,
) -> nn.Parameter:
    """Record on `param` how it is split, and return it; what `mark_matrix` recorded stays.

    The record is an attribute of the parameter: it survives `module.to(...)` and state dict
    loading. What makes a new parameter drops it; see `shardings`.
    """
    check_type("param", param, Tensor)
    check_type("spec", spec, PartitionSpec)
    if len(spec.dims) > param.dim():
        raise ValueError(f"{spec!r} has more dims than the parameter of shape {tuple(param.shape)}")
    partial = partial_grad if isinstance(partial_grad, str) else tuple(partial_grad)
    record = ParamSharding(
        spec,
        partial_grad=cast("tuple[str, ...]", partial),
        is_copy=is_copy,
        matrix=sharding_of(param).matrix,
    )
    setattr(param, _ATTRIBUTE, record)
    return param


def mark_matrix(param: nn.Parameter, matrix: MatrixSpec | None) -> nn.Parameter:
    """Record the matrices of `param`, and return it; the rest of its record stays."""
    setattr(param, _ATTRIBUTE, replace(sharding_of(param), matrix=matrix))
    return param


def sharding_of(param: nn.Parameter) -> ParamSharding:
    """Return the record of `param`; a parameter without one is replicated and complete."""
    check_type("param", param, Tensor)
    return getattr(param, _ATTRIBUTE, _COMPLETE)


def shardings(module: nn.Module) -> dict[str, ParamSharding]:
    """Return the record of each parameter of `module` by its name, and keep them in the module.

    `copy.deepcopy`, `to_empty` and `fully_shard` make new parameters, which have no records. The
    table stays: each submodule has the records of its own parameters by name. Later calls give the
    records to new parameters, so that `sharding_of` works for these too. A parameter's own record
    wins over the table.
    """
    check_type("module", module, nn.Module)
    found: dict[str, ParamSharding] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name, param in owner.named_parameters(recurse=False, remove_duplicate=False):
            table = owner.__dict__.setdefault(_TABLE, {})
            if hasattr(param, _ATTRIBUTE):
                table[name] = sharding_of(param)
            elif name in table:
                setattr(param, _ATTRIBUTE, table[name])
            found[f"{prefix}.{name}" if prefix else name] = sharding_of(param)
    return found


def global_shape_of(param: nn.Parameter, layout: ParallelLayout) -> tuple[int, ...]:
    """Return the shape of the logical parameter of which `param` is one shard."""
    return sharding_of(param).spec.global_shape(param.shape, layout)


def offsets_of(param: nn.Parameter, layout: ParallelLayout, rank: int) -> tuple[int, ...]:
    """Return where `param`, as held by `rank`, starts in each dim of the logical parameter."""
    shape = global_shape_of(param, layout)
    return sharding_of(param).spec.offsets(shape, layout, layout.coordinates(rank))
