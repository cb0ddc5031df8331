"""Parallel linear layers that multiply what mt-fp8 quantises."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from mt_files import check_type
from mt_fp8 import Products, Recipe, Split
from mt_parallel_state import Group, Pending, group_size, start_all_gather
from torch import Tensor, nn

from mt_tensor_parallel.gemm import Gemm, Operand, Role
from mt_tensor_parallel.linear import ColumnParallelLinear, ParallelLinear, linears


class QuantizedGemm(Products, Gemm):
    """The products of a layer by a recipe of mt-fp8, whose all-gathers carry quantised bytes.

    The gathered operand is that of the whole tensor, bit for bit: rows and the blocks in them are
    whole on each rank, and where a scale spans the ranks' parts (`tensorwise`, `delayed`, `nvfp4`,
    the columns of `rowwise`) `splits` says so, and all ranks have the same one. The blocks of the
    weight's gradient are of tokens: a rank's share of a sequence has to be whole blocks, so that
    none reaches over two. See `Products` for the arguments, and `quantize_gemms`.
    """

    row_multiple = 16  # of tokens that products in 8 bits and rotations need

    def gather(self, operand: Operand, group: dist.ProcessGroup) -> Callable[[], Operand]:
        """Begin to join the ranks' operands along the sequence.

        An all-gather of codes and one of scales for each form that the operand has; what all
        ranks have in common is not sent.

        Raises:
            ValueError: A rank's share of the sequence is no whole number of blocks.
        """
        parts = operand.parts()
        pending = [None if dim is None else _start(x, group, dim) for x, dim in parts]

        def finish() -> Operand:
            pairs = zip(pending, parts, strict=True)
            arrived = [x if each is None else each.wait().view(x.dtype) for each, (x, _) in pairs]
            return operand.joined(arrived, ranks=group.size())

        return finish


def _start(x: Tensor, group: dist.ProcessGroup, dim: int) -> Pending:
    # gloo does not know the dtypes of one byte.
    return start_all_gather(x.view(torch.uint8) if x.element_size() == 1 else x, group, dim)


def quantize_gemms(
    module: nn.Module,
    recipe_for: Callable[[str], Recipe | None],
    *,
    context_group: Group = None,
    joint_group: Group = None,
    keeps_weight: bool = True,
    seed: int = 0,
) -> dict[str, QuantizedGemm]:
    """Have the parallel linear layers inside a module multiply by recipes of mt-fp8.

    Scales that span what ranks hold parts of are made of all parts, so the layout changes no code:
    results are those of one rank up to the order of sums. Such a scale costs a small all-reduce
    (MAX) for each tensor, but with a delayed recipe, whose layers all end a step together
    (`mt_fp8.end_step`).

    Args:
        module: The model, or a stage of it.
        recipe_for: Takes the dotted name of a layer; None leaves the layer as it is.
        context_group: Ranks that have other tokens of the same sequences.
        joint_group: Those and the ranks that split the layers, where there are both.
        keeps_weight: As in `mt_fp8.Products`.
        seed: Of random rounding, with each layer's name.

    Returns:
        The strategies by the names of their layers.

    Raises:
        TypeError: `recipe_for` returned something else, or a recipe for a layer that is neither
            column- nor row-parallel.
        ValueError: There are both groups, and no joint one; or blocks of a recipe reach over what
            two ranks hold of a layer.
    """
    made: dict[str, QuantizedGemm] = {}
    for name, layer in linears(module):
        recipe = recipe_for(name)
        if recipe is None:
            continue
        check_type("what recipe_for returns", recipe, Recipe)
        if not isinstance(layer, ParallelLinear):
            raise TypeError(
                f"{name!r} is a {type(layer).__name__}, whose scales this does not know; return "
                "None for it, and give it strategies with choose_gemms"
            )
        _check_blocks(name, layer, recipe)
        gemm = QuantizedGemm(
            recipe,
            splits=_splits(layer, context_group, joint_group),
            keeps_weight=keeps_weight,
            seed=seed ^ zlib.crc32(name.encode()),
            device=layer.weight.device,
        )
        del layer.gemm  # a module does not give way to a plain attribute
        layer.gemm = made[name] = gemm.train(layer.training)
    return made


def _check_blocks(name: str, layer: ParallelLinear, recipe: Recipe) -> None:
    """Check that no block reaches into another rank's part, nor over two parts of a fused weight.

    Blocks begin at the first feature of what a rank has; those of one rank at that of the whole.
    """
    if group_size(layer.group) == 1 or layer.run % recipe.block_size == 0:
        return
    what = "outputs" if isinstance(layer, ColumnParallelLinear) else "inputs"
    raise ValueError(
        f"recipe {recipe.name!r} has blocks of {recipe.block_size}, and a rank has {layer.run} "
        f"{what} of {name!r} in a row, which is no multiple; use other sizes or fewer ranks, "
        "another recipe, or return None for this layer"
    )


def _splits(layer: ParallelLinear, context: Group, joint: Group) -> dict[Role, Split]:
    """Say which ranks hold the rest of what a layer multiplies."""
    own = layer.group if group_size(layer.group) > 1 else None
    if own is not None and context is not None and joint is None:
        raise ValueError(
            "layers are split and so are sequences; give joint_group, the ranks of both groups"
        )
    both = joint if own is not None and context is not None else own or context
    shards = own is not None and layer.sequence_parallel
    tokens = Split(rows=both, both=both) if shards else Split(rows=context, both=context)
    features = Split(rows=context, columns=own, both=both)
    if isinstance(layer, ColumnParallelLinear):
        return {"input": tokens, "weight": Split(rows=own, both=own), "grad": features}
    return {"input": features, "weight": Split(columns=own, both=own), "grad": tokens}
