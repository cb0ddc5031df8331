"""Someone's own linear layers, by a recipe."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from mt_files import check_type, did_you_mean, shorten
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mt_fp8.delayed import end_step
from mt_fp8.products import Products, products_of
from mt_fp8.recipe import Recipe
from mt_fp8.recipe import recipe as recipe_of


class QuantizedLinear(nn.Linear):
    """A `torch.nn.Linear` that multiplies by a recipe, with parameters and names as before.

    Under autocast results are in autocast's dtype, and the input and the weight are quantised in
    their own. The product adds the bias, whose gradient is summed in fp32.

    Attributes:
        products: The strategy, with the state of delayed scaling.
    """

    products: Products

    @classmethod
    def of(cls, linear: nn.Linear, products: Products) -> QuantizedLinear:
        """Make one that shares the parameters of a layer."""
        made = cls(linear.in_features, linear.out_features, bias=False, device="meta")
        made.weight, made.bias = linear.weight, linear.bias
        made.products = products
        return made.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer.

        Shape:
            input: [..., in]. Returns [..., out].
        """
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        elif input.dtype != self.weight.dtype:
            raise TypeError(
                f"input is {input.dtype} and the weight {self.weight.dtype}; convert one of them, "
                f"for example with input.to({self.weight.dtype}), or run under torch.autocast"
            )
        if input.shape[-1] != self.in_features:
            raise ValueError(f"input {tuple(input.shape)} must end with {self.in_features}")
        rows = input if input.dim() > 1 else input.unsqueeze(0)
        y = _Linear.apply(rows, self.weight, self.bias, self.products, torch.is_grad_enabled())
        return y if input.dim() > 1 else y.squeeze(0)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        products: Products,
        keeps: bool,  # noqa: FBT001 - torch passes by position
    ) -> Tensor:
        own, matrix = products.operand(x, "input"), products.operand(weight, "weight")
        # The context says what needs a gradient, also where none is made.
        need_x, need_w = ctx.needs_input_grad[:2] if keeps else (False, False)
        kept = products.saved(own) if need_w else ()
        ctx.products, ctx.count, ctx.dtypes = products, len(kept), (x.dtype, weight.dtype)
        ctx.save_for_backward(*kept, *(products.saved(matrix) if need_x else ()))
        return products(own, matrix, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        products: Products = ctx.products
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        kept = ctx.saved_tensors
        grad_x = grad_w = grad_b = None
        if need_x or need_w:
            grad = products.operand(grads[0], "grad")
            if need_x:
                weight = products.restored(kept[ctx.count :], "weight")
                grad_x = products.dgrad(grad, weight)
            if need_w:
                x = products.restored(kept[: ctx.count], "input")
                grad_w = products.wgrad(grad, x)
        if need_b:
            grad_b = grads[0].flatten(0, -2).sum(0)
        return grad_x, grad_w, grad_b, None, None


def convert_linears(
    module: nn.Module, recipe: Recipe | str, *, keep: Iterable[str] = ()
) -> list[str]:
    """Have the `torch.nn.Linear` layers inside a module multiply by a recipe, in place.

    Their parameters stay, with their names. Subclasses of `Linear` stay what they are. With a
    delayed recipe call `update_scales` once for each optimizer step.

    Args:
        module: The model.
        recipe: A recipe, or the name of one.
        keep: Globs of names of layers that stay as they are, such as `lm_head` or `layers.0.*`.

    Returns:
        The names of the converted layers.

    Raises:
        TypeError: An argument is of another type.
        ValueError: There is no such recipe, a glob of `keep` is of no linear layer, no layer is
            left to convert, or the module is a linear layer itself.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        >>> convert_linears(model, "tensorwise", keep=["2"])
        ['0']
    """
    check_type("module", module, nn.Module)
    chosen = recipe_of(recipe) if isinstance(recipe, str) else recipe
    check_type("recipe", chosen, Recipe)
    if type(module) is nn.Linear:
        raise ValueError("module is a linear layer itself; put it into a torch.nn.Sequential")
    linears = {name: m for name, m in module.named_modules() if type(m) is nn.Linear}
    kept = _kept(list(linears), [keep] if isinstance(keep, str) else list(keep))
    names = [name for name in linears if name not in kept]
    if not names:
        why = "keep leaves all as they are" if linears else "there is none inside it"
        raise ValueError(
            f"{type(module).__name__} has no torch.nn.Linear to convert: {why} (a subclass of "
            "Linear is none)"
        )
    for number, name in enumerate(names):
        linear = linears[name]
        products = Products(chosen, seed=number, device=linear.weight.device)
        parent, _, own = name.rpartition(".")
        setattr(module.get_submodule(parent), own, QuantizedLinear.of(linear, products))
    return names


def _kept(names: list[str], globs: list[str]) -> set[str]:
    found: set[str] = set()
    for glob in globs:
        check_type("each of keep", glob, str)
        matching = {name for name in names if fnmatchcase(name, glob)}
        if not matching:
            raise ValueError(
                f"keep: {shorten(glob)} is the name of no linear layer. {did_you_mean(glob, names)}"
            )
        found |= matching
    return found


def update_scales(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """End a step of delayed scaling: once for each optimizer step, before or after it.

    One all-reduce (MAX) of the magnitudes that all layers found; the host waits for nothing. It
    also has all weights quantised anew at their next use, whoever wrote them.

    Args:
        module: The model, the same on all ranks of the group.
        group: Ranks that agree on the scales; `None` is this one alone.
    """
    found = products_of(module)
    delayed = [each.delayed for each in found if each.delayed is not None]
    for recipe in dict.fromkeys(each.recipe for each in delayed):
        end_step([each for each in delayed if each.recipe == recipe], group)
    for each in found:
        each.forget_weight()
