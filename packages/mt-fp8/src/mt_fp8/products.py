"""The three products of a linear layer, of quantised tensors."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mt_files import check_type, multiples_near
from mt_kernels import Selector
from torch import Tensor, nn

from mt_fp8.cast import CAST_KERNELS, CastKernel
from mt_fp8.delayed import DelayedScales
from mt_fp8.matmul import MATMUL_KERNELS, MatmulKernel, matmul
from mt_fp8.operand import Form, Operand
from mt_fp8.qtensor import QTensor
from mt_fp8.quantize import amax_of, quantize, scaling_of
from mt_fp8.recipe import ROLES, Recipe, Role
from mt_fp8.scaling import HADAMARD, Scaling

Group: TypeAlias = dist.ProcessGroup | None
_SEED = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which ranks hold the rest of a matrix of which this rank has a part.

    A scale that spans a cut is computed from the magnitudes of all parts (an all-reduce, MAX), so
    it equals the whole matrix's; ranks that hold the same part may be in the group.

    Attributes:
        rows: Ranks with the other rows: tokens, of a weight the output features.
        columns: Ranks with the other columns: features, of a weight the input features.
        both: Ranks with anything of the matrix.
    """

    rows: Group = None
    columns: Group = None
    both: Group = None


class Products(nn.Module):
    """The three products of one linear layer by a recipe, with the state of its scales.

    Forward quantises input and weight along their features. The weight's gradient multiplies over
    the tokens, and the input's over the output features, so these products need a second form of
    each operand: quantised once more from the tensor itself, or transposed where the transpose is
    exact (one scale, square blocks). Backward needs, and the layer keeps, only the second form of
    the input. A weight is quantised again when its memory or torch's version counter changes; code
    that writes past the counter (through `.data`, a flat buffer or a collective) calls
    `forget_weight`.

    Delayed scaling takes note of magnitudes in training mode only, and `end_step` of all layers
    ends a step of it.

    Args:
        recipe: Quantisation of input, weight and gradient.
        splits: By role, which ranks hold the rest of the tensor; what is not named is whole.
        keeps_weight: Keep the quantised weight until it changes; False quantises it in every
            forward, for weights that full sharding gathers only while a layer runs.
        seed: Seed of the layer, for stochastic rounding.
        device: Device of the state.

    Attributes:
        delayed: The state of delayed scaling; None for other recipes.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        splits: Mapping[Role, Split] | None = None,
        keeps_weight: bool = True,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_type("recipe", recipe, Recipe)
        self.recipe, self.splits = recipe, dict(splits or {})
        self.keeps_weight, self.seed = keeps_weight, seed
        self.delayed: DelayedScales | None = None
        if recipe.history:
            self.delayed = DelayedScales(recipe, device=device)
        self._weight: tuple[object, Tensor, Operand] | None = None
        self._held: Callable[[], Operand] | None = None
        self._counted: Counter[Role] = Counter()
        # Each product, and each orientation of each operand, keeps its kernel.
        self._casts: dict[tuple[Role, bool], Selector[CastKernel]] = {
            (role, column): Selector(CAST_KERNELS) for role in ROLES for column in (False, True)
        }
        self._matmuls: dict[str, Selector[MatmulKernel]] = {
            name: Selector(MATMUL_KERNELS) for name in ("forward", "dgrad", "wgrad")
        }
        self.begin_step(0)

    def operand(self, x: Tensor, role: Role) -> Operand:
        """Quantise a tensor.

        Shape:
            x: [..., in] for the input, [out, in] for the weight, [..., out] for the gradient.
        """
        made = self._weight_operand(x) if role == "weight" else self._made(x, role)
        if made.amax is not None and self.delayed is not None and self.training:
            self.delayed.note(role, made.amax)
        return made

    def skip(self, role: Role) -> None:
        """Count an absent tensor, so that later ones are rounded as if it were there."""
        self._counted[role] += 1

    def saved(self, operand: Operand) -> tuple[Tensor, ...]:
        """Return the tensors to keep for backward, of an input or a weight."""
        if _turns(self.recipe.scaling(operand.role)):
            return operand.kept()
        # Only a weight's second form has more uses; an input that has it would gather it too.
        of = self._columns if operand.role == "weight" else self._turned
        return dataclasses.replace(operand, rows=None, columns=of(operand)).kept()

    def restored(self, tensors: Sequence[Tensor], role: Role) -> Operand:
        """Make the operand again of what `saved` returned."""
        turned = not _turns(self.recipe.scaling(role))
        scaling = self.recipe.scaling(role, column=turned)
        return Operand.from_kept(tensors, role, scaling, turned=turned)

    def forward(self, x: Operand, weight: Operand, bias: Tensor | None = None) -> Tensor:
        """Return `x @ weight.T + bias`, in the dtype of the input.

        Shape:
            x: [..., in]. weight: [out, in]. bias: [out]. Returns [..., out].
        """
        y = self._multiply("forward", x.rows, weight.rows, x.dtype, bias)
        return y.unflatten(0, x.shape[:-1])

    def dgrad(self, grad_y: Operand, weight: Operand) -> Tensor:
        """Return the gradient of the input, `grad_y @ weight`.

        Shape:
            grad_y: [..., out]. weight: [out, in]. Returns [..., in].
        """
        columns = self._columns(weight)
        grad_x = self._multiply("dgrad", grad_y.rows, columns, grad_y.dtype)
        return grad_x.unflatten(0, grad_y.shape[:-1])

    def wgrad(self, grad_y: Operand, x: Operand) -> Tensor:
        """Return the gradient of the weight, `grad_y.T @ x` over all leading dims.

        Shape:
            grad_y: [..., out]. x: [..., in]. Returns [out, in].
        """
        columns = self._columns(grad_y), self._columns(x)
        return self._multiply("wgrad", *columns, grad_y.dtype)

    def wgrad_into(self, grad_y: Operand, x: Operand, out: Tensor, *, accumulate: bool) -> None:
        """Set `out` to the weight's gradient, or add it, rounded to nothing else but its dtype.

        Shape:
            grad_y: [..., out]. x: [..., in]. out: contiguous, [out, in] with any dims cut in more.
        """
        columns = self._columns(grad_y), self._columns(x)
        grad = self._multiply("wgrad", *columns, out.dtype).view_as(out)
        out.add_(grad) if accumulate else out.copy_(grad)

    def forget_weight(self) -> None:
        """Quantise the weight again at its next use."""
        self._weight = None

    def hold(self, weight: Callable[[], Operand] | None) -> None:
        """Multiply by this operand of the weight, whatever the parameter has; None: by that.

        For weights held in codes alone (`PrimaryWeights`). It is asked for in every
        forward, and what it has along rows has to serve along columns too.
        """
        self._held = weight

    def begin_step(self, step: int, *, part: int = 0, parts: int = 1) -> None:
        """Say which optimizer step comes, on which the random numbers of its rounding depend.

        Args:
            step: Its number.
            part: Where ranks share its micro-batches in turns, whose turn this rank has.
            parts: How many such ranks there are.
        """
        self._step, self._part, self._parts = step, part, parts
        self._counted.clear()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.recipe.name!r})"

    def _weight_operand(self, weight: Tensor) -> Operand:
        if self._held is not None:
            return self._held()
        if not self.keeps_weight:
            return self._made(weight, "weight")
        key = (weight.data_ptr(), _version(weight), weight.shape, weight.dtype)
        if self._weight is None or self._weight[0] != key:
            # The tensor is held, so that no other one gets its address meanwhile.
            self._weight = key, weight.detach(), self._made(weight, "weight")
        return self._weight[2]

    @torch.no_grad()
    def _made(self, x: Tensor, role: Role) -> Operand:
        matrix, scaling = x.detach().flatten(0, -2), self.recipe.scaling(role)
        made = Operand(role=role, dtype=x.dtype, shape=tuple(x.shape), source=matrix)
        self._counted[role] += 1
        if scaling is None:
            made.rows = matrix
            return made
        if self.delayed is not None:
            made.amax = amax_of(matrix, scaling)
        made.rows = self._quantized(matrix, role, made.amax)
        if role == "grad":  # both are wanted, now or after the tensor is gone
            made.columns = self._columns(made)
            made.source = None
        return made

    def _columns(self, operand: Operand) -> Form:
        if operand.columns is None:
            operand.columns = self._turned(operand)
        return operand.columns

    @torch.no_grad()
    def _turned(self, operand: Operand) -> Form:
        rows = operand.rows
        if isinstance(rows, QTensor) and _turns(rows.scaling):
            return rows.transposed()
        if isinstance(rows, Tensor):
            return rows.t()
        if operand.source is None:
            raise ValueError(
                f"this operand has no second form of the {operand.role}: it was gathered, or "
                "restored, for other products"
            )
        tokens = operand.num_rows
        if self.recipe.hadamard and operand.role != "weight" and tokens % HADAMARD:
            raise ValueError(
                f"recipe {self.recipe.name!r} rotates {HADAMARD} tokens at a time for the weight's "
                f"gradient, and there are {tokens}; use {multiples_near(tokens, HADAMARD)}, or a "
                "recipe with hadamard=False"
            )
        return self._quantized(operand.source.t(), operand.role, operand.amax, column=True)

    def _quantized(
        self, matrix: Tensor, role: Role, amax: Tensor | None, *, column: bool = False
    ) -> QTensor:
        """Quantise a matrix along its rows, with scales of the whole of which it is a part."""
        scaling, split = scaling_of(self.recipe, role, column=column), self.splits.get(role)
        kernel = self._casts[role, column]
        if self.delayed is not None:
            if (factor := self.delayed.of(role)) is not None:
                return quantize(matrix, scaling, factor=factor, kernel=kernel)
            margin = scaling.margin + self.recipe.margin
            scaling = dataclasses.replace(scaling, margin=margin)
        group = None if split is None else split.both
        seed = self._seed_of(role, group, column=column) if scaling.stochastic else None
        if split is None:
            return quantize(matrix, scaling, amax=amax, seed=seed, kernel=kernel)
        if scaling.block == "row":
            across = split.rows if column else split.columns
            amax = None if across is None else _agreed(amax_of(matrix, scaling), across)
        elif amax is not None and group is not None:
            amax = _agreed(amax.clone(), group)
        group = group if amax is None else None
        return quantize(matrix, scaling, amax=amax, seed=seed, group=group, kernel=kernel)

    def _multiply(
        self,
        name: str,
        a: Form | None,
        b: Form | None,
        dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return `a @ b.T + bias`; if an operand is not quantised, multiply both in `dtype`."""
        if a is None or b is None:
            raise ValueError("an operand lacks the form that is multiplied; make it by `operand`")
        if isinstance(a, QTensor) and isinstance(b, QTensor):
            return matmul(a, b, bias=bias, out_dtype=dtype, kernel=self._matmuls[name])
        left, right = (
            x.dequantize(dtype) if isinstance(x, QTensor) else x.to(dtype) for x in (a, b)
        )
        return F.linear(left, right, bias)

    def _seed_of(self, role: Role, group: Group, *, column: bool) -> int:
        """Return a seed of its own for each tensor of a step, and for each part of a tensor.

        Which micro-batch a tensor is of counts, not which rank has it.
        """
        micro_batch = (self._counted[role] - 1) * self._parts + self._part
        rank = 0 if group is None else dist.get_rank(group)
        words = (self.seed, self._step, ROLES.index(role), micro_batch, int(column), rank)
        mixed = 0
        for word in words:
            mixed = (mixed * 6364136223846793005 + word + 1442695040888963407) % _SEED
        return mixed


def _turns(scaling: Scaling | None) -> bool:
    """Whether one form serves along rows and along columns."""
    return scaling is None or scaling.is_square


def _version(weight: Tensor) -> int | None:
    return None if weight.is_inference() else weight._version


def _agreed(amax: Tensor, group: Group) -> Tensor:
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return amax


def products_of(module: nn.Module) -> list[Products]:
    """Return the strategies inside a module, in the order of its modules."""
    return [each for each in module.modules() if isinstance(each, Products)]
