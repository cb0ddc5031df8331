"""Parallel linear layers as nodes of a compiled graph.

A graph takes tensors and constants, and one graph serves all layers of a kind. So the graph refers
to a layer by a number in a tensor. The node runs the eager code: the layer's `Gemm`, its overlapped
communication, and its sink, to which backward adds the weight's gradient layer by layer.
"""

from __future__ import annotations

from itertools import count
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from mt_parallel_state import GradSink, Group, WgradStore, group_size
from torch import Tensor
from torch.fx.node import has_side_effect

from mt_tensor_parallel.autocast import as_autocast, check_dtypes
from mt_tensor_parallel.functional import LinearContext, Mode, check_sequence, linear_context
from mt_tensor_parallel.gemm import SEQUENCE_DIM, Gemm
from mt_tensor_parallel.overlap import Overlap


class GraphLayer(Protocol):
    """The attributes of a layer that a graph reads when it runs."""

    gemm: Gemm
    communicate: bool
    group: Group
    sequence_parallel: bool
    overlap: Overlap | None
    wgrad_store: WgradStore | None
    grad_sink: GradSink | None

    @property
    def weight(self) -> Tensor:
        """The parameter."""
        ...


# Operators of torch take no objects, so they look layers up here. The references are weak.
_layers: WeakValueDictionary[int, GraphLayer] = WeakValueDictionary()
_numbers = count()


def number_of(layer: GraphLayer) -> Tensor:
    """Give a layer a number by which graphs find it.

    Shape:
        Returns [], on the CPU.
    """
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(number, device="cpu")


class _Kind(NamedTuple):
    """The constants that a graph has for a layer.

    Attributes:
        mode: Which features are split.
        ranks: Number of ranks that split the sequence outside of the split region.
        sums: Whether the layer's sink takes the weight's gradient.
    """

    mode: Mode
    ranks: int
    sums: bool


def graph_linear(
    layer: GraphLayer, number: Tensor, operands: tuple[Tensor, Tensor, Tensor | None], mode: Mode
) -> Tensor:
    """Apply a layer as one node of the traced graph.

    Args:
        layer: The layer, whose settings become constants of the graph.
        number: The layer's number from `number_of`.
        operands: Input, weight and bias, as for `parallel_linear`.
        mode: As for `parallel_linear`.
    """
    x, weight, bias = operands
    if layer.gemm.is_torch:
        check_dtypes(x, weight, "x")
    rows = as_autocast(x if x.dim() > 1 else x.unsqueeze(0))
    ranks = group_size(layer.group) if layer.sequence_parallel else 1
    if ranks > 1:
        check_sequence(x, mode, layer.group)
    y = _linear(
        rows,
        as_autocast(weight),
        None if bias is None else as_autocast(bias),
        number,
        mode,
        ranks,
        layer.grad_sink is not None,
    )
    return y if x.dim() > 1 else y.squeeze(0)


def _context(number: Tensor, kind: _Kind) -> LinearContext:
    layer = _layers[int(number)]
    return linear_context(
        layer.weight,
        gemm=layer.gemm,
        group=layer.group if layer.communicate else None,
        sequence_parallel=kind.ranks > 1,
        wgrad_store=layer.wgrad_store if kind.sums else None,
        grad_sink=layer.grad_sink if kind.sums else None,
        overlap=layer.overlap,
    )


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor, *kind: Any) -> Tensor:
    context = _context(number, _Kind(*kind))
    mode: Mode = (
        "column" if context.group is None else kind[0]
    )  # on one rank both modes are the same
    return context.forward(mode, x, weight, bias).contiguous()


def _run_fake(x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor, *kind: Any) -> Tensor:
    del bias, number
    mode, ranks, _ = kind
    shape = [*x.shape[:-1], weight.shape[0]]
    if ranks > 1:
        length = shape[SEQUENCE_DIM]
        shape[SEQUENCE_DIM] = length * ranks if mode == "column" else length // ranks
    return x.new_empty(shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    x, weight, _, number, *kind = inputs
    need_x, need_w = ctx.needs_input_grad[:2]
    # Backward reads only the shape of a tensor whose partner needs no gradient, so keep no rows.
    ctx.save_for_backward(x if need_w else x[:0], weight if need_x else weight[:0], number)
    ctx.kind = kind


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, number = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    grads = _backward(grad, x, weight, number, *ctx.kind, *needs)
    made = (needs[0], needs[1] and not ctx.kind[2], needs[2])
    wanted = (g if is_made else None for g, is_made in zip(grads, made, strict=True))
    return (*wanted, *(None for _ in range(1 + len(ctx.kind))))


def _run_backward(
    grad: Tensor, x: Tensor, weight: Tensor, number: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    kind, needs = _Kind(*rest[:3]), rest[3:]
    context = _context(number, kind)
    if context.waits:  # the graph reuses the memory of its arguments after this node
        grad, x = grad.clone(), x.clone()
    mode: Mode = "column" if context.group is None else kind.mode
    grads = context.backward(mode, x, weight, grad, needs)
    first, second, third = (grad.new_empty(0) if g is None else g.contiguous() for g in grads)
    return first, second, third


def _run_backward_fake(
    grad: Tensor, x: Tensor, weight: Tensor, number: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    del number
    (mode, ranks, sums), (need_x, need_w, need_b) = rest[:3], rest[3:]
    nothing, width = grad.new_empty(0), grad.shape[-1]
    grad_x = nothing
    if need_x:
        shape = [*grad.shape[:-1], weight.shape[1]]
        if ranks > 1:
            length = shape[SEQUENCE_DIM]
            shape[SEQUENCE_DIM] = length // ranks if mode == "column" else length * ranks
        grad_x = grad.new_empty(shape)
    grad_w = grad.new_empty(width, x.shape[-1]) if need_w and not sums else grad.new_empty(0)
    return grad_x, grad_w, grad.new_empty(width) if need_b else grad.new_empty(0)


def _define() -> tuple[Any, Any]:
    """Register the two operators; `torch.library.custom_op` would import dynamo."""
    space, kind = "mt_tensor_parallel", "Tensor number, str mode, int ranks, bool sums"
    library = torch.library
    library.define(f"{space}::linear", f"(Tensor x, Tensor weight, Tensor? bias, {kind}) -> Tensor")
    library.define(
        f"{space}::linear_backward",
        f"(Tensor grad, Tensor x, Tensor weight, {kind}, bool need_x, bool need_w, bool need_b)"
        " -> (Tensor, Tensor, Tensor)",
    )
    library.impl(f"{space}::linear", "default", _run)
    library.impl(f"{space}::linear_backward", "default", _run_backward)
    library.register_fake(f"{space}::linear", _run_fake)
    library.register_fake(f"{space}::linear_backward", _run_backward_fake)
    library.register_autograd(f"{space}::linear", _gradient, setup_context=_setup)
    made = torch.ops.mt_tensor_parallel
    # It writes to the sink, so the compiler must keep it even if nothing reads its results.
    has_side_effect(made.linear_backward.default)
    return made.linear.default, made.linear_backward.default


_linear, _backward = _define()
