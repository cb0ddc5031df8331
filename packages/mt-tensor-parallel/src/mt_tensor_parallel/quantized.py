"""Parallel linear layers with quantised products of mt-fp8."""

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
    """The products of a layer by a recipe of mt-fp8; its all-gathers send quantised bytes.

    The gathered operand equals the operand of the whole tensor bit for bit: each rank has whole
    rows and whole blocks, and where a scale spans several ranks' parts (`tensorwise`, `delayed`,
    `nvfp4`, the columns of `rowwise`), `splits` says so and all ranks use the same scale. Blocks
    for the weight's gradient consist of tokens, so a rank's share of a sequence must be a whole
    number of blocks. See `Products` for the arguments, and `quantize_gemms`.
    """

    row_multiple = 16  # products in 8 bits and rotations need a multiple of 16 tokens

    def gather(self, operand: Operand, group: dist.ProcessGroup) -> Callable[[], Operand]:
        """Start the all-gathers of the ranks' operands along the sequence.

        Each form of the operand has an all-gather of codes and one of scales. Parts that all ranks
        have in common are not sent.

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
    # gloo does not know one-byte dtypes such as fp8.
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
    """Give the parallel linear layers inside a module quantised products of mt-fp8.

    A scale that spans the parts of several ranks is computed from all parts, so the layout changes
    no codes: results equal one rank's up to the order of sums. Such a scale costs a small
    all-reduce (MAX) for each tensor, except with a delayed recipe, whose layers end a step together
    (`mt_fp8.end_step`).

    Args:
        module: The model, or a stage of it.
        recipe_for: Returns the recipe for a layer's dotted name, or None to leave the layer.
        context_group: Ranks with other tokens of the same sequences.
        joint_group: Ranks of the context group and of the layers' groups, if both exist.
        keeps_weight: As in `mt_fp8.Products`.
        seed: Seed of random rounding, combined with each layer's name.

    Returns:
        The strategies by the names of their layers.

    Raises:
        TypeError: `recipe_for` returned no recipe, or a recipe for another kind of layer.
        ValueError: There are both groups but no joint group, or blocks of a recipe would cover
            parts of two ranks.
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
    """Check that no block covers parts of two ranks, or two parts of a fused weight.

    On several ranks, blocks begin at the first feature of each rank.
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
    """Return the ranks that hold the other parts of each operand."""
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
