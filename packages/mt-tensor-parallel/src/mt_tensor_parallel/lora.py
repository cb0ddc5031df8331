"""Low-rank adapters on parallel linear layers (Hu et al. 2021, arXiv 2106.09685)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from mt_files import check_type
from mt_parallel_state import (
    Group,
    MatrixSpec,
    PartitionSpec,
    all_gather,
    copy_to_group,
    group_rank,
    group_size,
    hash_key,
    mark_matrix,
    random_uniform,
    reduce_from_group,
    reduce_scatter,
    shard_param,
    sharding_of,
)
from torch import Tensor, nn

from mt_tensor_parallel.arguments import check_number, check_volume
from mt_tensor_parallel.gemm import SEQUENCE_DIM
from mt_tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from mt_tensor_parallel.shards import split_dim

ParallelLinear = ColumnParallelLinear | RowParallelLinear


class LoraLinear(nn.Module):
    """A frozen parallel linear layer plus a trained product of two thin matrices.

    `y = base(x) + (alpha / rank) B A x`. For a column-parallel base, A is whole on every rank and
    B is split like the base's output; for a row-parallel base, A is split like the base's input and
    B is whole. B starts at zero, so the layer starts as its base. Only `A x` is communicated: rank
    numbers a token. Under sequence parallelism the gradient of the whole matrix is a partial sum
    over the sequence shards, which its sharding record says (`partial_grad`); for a column-parallel
    base with `communicate=False` it is a partial sum over the ranks' features.

    A depends on `seed`, `name` and the global index of the element alone. The mask of dropout
    depends on those and on the step that `set_lora_step` gives, so that every layout of the tensor
    parallel group and every recomputation draws the same mask, without communication.

    A state dict says whether the adapter is merged into the base's weight.

    Args:
        base: The layer; its parameters are frozen.
        rank: Rank of the product.
        alpha: The product is scaled by alpha / rank; `rank` by default.
        dropout: Probability of dropping an element of the adapter's input in training.
        seed: Seed of A and of the masks.
        name: The layer's name in the model; equal layers need different names to draw different
            values.

    Shape:
        As the base.

    Raises:
        ValueError: `rank` or `dropout` is out of range, or the base is row-parallel and leaves its
            sum to the caller.
    """

    def __init__(
        self,
        base: ParallelLinear,
        rank: int,
        *,
        alpha: float | None = None,
        dropout: float = 0.0,
        seed: int = 0,
        name: str = "",
    ) -> None:
        super().__init__()
        check_type("base", base, ColumnParallelLinear, RowParallelLinear)
        check_type("rank", rank, int)
        if alpha is not None:
            check_number(alpha, "alpha")
        if rank < 1 or not 0 <= dropout < 1:
            raise ValueError(f"rank={rank} must be at least 1 and dropout={dropout} in [0, 1)")
        if isinstance(base, RowParallelLinear) and not base.communicate:
            raise ValueError("LoRA needs a row-parallel base with communicate=True")
        check_volume((rank, base.weight.shape.numel()), "an adapter")
        self.base = base.requires_grad_(requires_grad=False)
        self.rank, self.alpha = rank, float(rank if alpha is None else alpha)
        self.dropout, self.merged = dropout, False
        self._key = hash_key("lora", seed, name)
        # A tensor, so that a compiled or captured step reads the key of each replay.
        self._mask_key: Tensor | None = None
        column = isinstance(base, ColumnParallelLinear)
        cut = base.weight.dim() - 1 if column else 1  # output features before it, input after
        make = {"dtype": base.weight.dtype, "device": base.weight.device}
        self.a = nn.Parameter(torch.empty(rank, *base.weight.shape[cut:], **make))
        self.b = nn.Parameter(torch.zeros(*base.weight.shape[:cut], rank, **make))
        partial = base.sequence_parallel or not base.communicate
        whole, split = (self.a, self.b) if column else (self.b, self.a)
        shared = partial and group_size(base.group) > 1
        shard_param(whole, PartitionSpec(), partial_grad=(base.axis,) if shared else ())
        shard_param(split, sharding_of(base.weight).spec)  # which has the split dim in that place
        mark_matrix(self.a, MatrixSpec(in_dims=self.a.dim() - 1))
        mark_matrix(self.b, MatrixSpec())
        if self.a.device.type != "meta":
            self._draw()

    def _draw(self) -> None:
        """Fill this rank's part of A."""
        dim, group = split_dim(self.a), self.base.group
        columns = self.a[0].numel() * (1 if dim is None else group_size(group))
        bound = 1 / math.sqrt(columns)  # PEFT's: Kaiming uniform with a = sqrt(5)
        index = _global_index(self.a.shape, dim, group, self.a.device)
        with torch.no_grad():
            uniform = random_uniform(self._key, index, dtype=torch.float64)
            self.a.copy_(uniform.mul_(2 * bound).sub_(bound))

    def set_step(self, step: int) -> None:
        """Choose the mask of dropout; see `set_lora_step`."""
        key = hash_key(self._key, "dropout", step)
        if self._mask_key is None or self._mask_key.device != self.a.device:
            self._mask_key = torch.tensor(key, device=self.a.device)
        else:
            self._mask_key.fill_(key)

    def _drop(self, x: Tensor) -> Tensor:
        """Drop elements of the adapter's input by their index in the input of all ranks."""
        if self._mask_key is None:
            raise RuntimeError(
                "dropout of an adapter needs the number of the micro-batch: call "
                "set_lora_step(model, number) before each forward in training"
            )
        dim = split_dim(self.a)
        if dim is not None:  # the features are split: x ends in the dims of A after the first
            dim += x.dim() - self.a.dim()
        elif self.base.sequence_parallel and isinstance(self.base, ColumnParallelLinear):
            dim = SEQUENCE_DIM
        index = _global_index(x.shape, dim, self.base.group, x.device)
        keep = random_uniform(self._mask_key, index) >= self.dropout
        return x * keep.to(x.dtype).div_(1 - self.dropout)

    @property
    def scale(self) -> float:
        """The factor of the product."""
        return self.alpha / self.rank

    def forward(self, x: Tensor) -> Tensor:
        """Apply base and adapter."""
        y = self.base(x)
        if self.merged:
            return y
        drops = self.training and self.dropout > 0
        return y + self.scale * self._adapt(self._drop(x) if drops else x)

    def _adapt(self, x: Tensor) -> Tensor:
        group, sequence = self.base.group, self.base.sequence_parallel
        a = self.a.flatten(1)
        b = self.b.flatten(0, -2)
        if isinstance(self.base, ColumnParallelLinear):
            thin = nn.functional.linear(x, a)
            if sequence:
                thin = all_gather(thin, group, dim=SEQUENCE_DIM)
            elif self.base.communicate:
                thin = copy_to_group(thin, group)
            return nn.functional.linear(thin, b).unflatten(-1, self.b.shape[:-1])
        thin = nn.functional.linear(x.flatten(1 - self.a.dim()), a)
        if sequence:
            thin = reduce_scatter(thin, group, dim=SEQUENCE_DIM)
        else:
            thin = reduce_from_group(thin, group)
        return nn.functional.linear(thin, b)

    def delta(self) -> Tensor:
        """Return the adapter's contribution to this rank's part of the weight.

        Shape:
            As the base's weight.
        """
        product = self.b.flatten(0, -2) @ self.a.flatten(1)
        return (self.scale * product).view(self.base.weight.shape)

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapter to the base's weight; forward then costs as much as the base.

        `state_dict` remembers that. To save only parameters, unmerge first.
        """
        if not self.merged:
            self.base.weight.add_(self.delta())
            self.merged = True

    @torch.no_grad()
    def unmerge(self) -> None:
        """Subtract the adapter from the base's weight again, up to rounding."""
        if self.merged:
            self.base.weight.sub_(self.delta())
            self.merged = False

    def get_extra_state(self) -> Tensor:
        """Return whether the weight holds the adapter, for `state_dict`."""
        return torch.tensor(self.merged)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the result of `get_extra_state`."""
        self.merged = bool(state)


def add_lora(
    module: nn.Module,
    rank: int,
    *,
    alpha: float | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    matches: Callable[[str], bool] = lambda name: True,
) -> list[str]:
    """Freeze `module` and put adapters on its parallel linear layers.

    Existing adapters stay as they are, so several calls can give different layers different
    adapters. A layer that the module holds under several names gets one adapter, under all of them.

    Args:
        module: The module, changed in place.
        rank: Rank of each adapter.
        alpha: Each adapter is scaled by alpha / rank.
        dropout: Probability of dropping an element of an adapter's input. `set_lora_step` chooses
            the mask.
        seed: Seed of the adapters' values and masks, which also depend on the layer's name.
        matches: Returns whether the layer of a dotted name gets an adapter.

    Returns:
        The names of the layers that got an adapter, the first name for each.

    Raises:
        TypeError: `module` is no module, or is itself a linear layer, which cannot be replaced in
            place.
        ValueError: No layer without an adapter matches.
    """
    check_type("module", module, nn.Module)
    if isinstance(module, ParallelLinear | LoraLinear):
        raise TypeError(
            f"add_lora replaces layers inside a module, and this {type(module).__name__} is one "
            "itself: use LoraLinear(layer, rank), or wrap it, for example in nn.Sequential"
        )
    adapters = [each for each in module.modules() if isinstance(each, LoraLinear)]
    taken = {id(each) for adapter in adapters for each in adapter.modules()}
    names: dict[ParallelLinear, list[str]] = {}
    for name, layer in module.named_modules(remove_duplicate=False):
        if isinstance(layer, ParallelLinear) and id(layer) not in taken:
            names.setdefault(layer, []).append(name)
    found = {layer: known for layer, known in names.items() if any(map(matches, known))}
    if not found:
        raise ValueError(
            "no ColumnParallelLinear or RowParallelLinear of the module matches that has no "
            "adapter yet"
        )
    kept = {id(param) for adapter in adapters for param in adapter.parameters()}
    for param in module.parameters():
        if id(param) not in kept:
            param.requires_grad = False
    for layer, known in found.items():
        adapter = LoraLinear(layer, rank, alpha=alpha, dropout=dropout, seed=seed, name=known[0])
        for name in known:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, adapter)
    return [known[0] for known in found.values()]


def set_lora_step(module: nn.Module, step: int) -> None:
    """Choose the masks of the adapters' dropout: one step always has the same masks.

    Call it before each forward in training, with a number that no other micro-batch has, on any
    rank: the ranks of a tensor-parallel group give the same number, and ranks with other samples or
    other parts of a sequence give other ones. If layers are recomputed and the backwards of several
    micro-batches are pending, call it with their numbers before these backwards too.

    Args:
        module: A module with adapters.
        step: Number of the micro-batch.
    """
    for layer in module.modules():
        if isinstance(layer, LoraLinear):
            layer.set_step(step)


def _global_index(
    shape: Sequence[int], dim: int | None, group: Group, device: torch.device
) -> Tensor:
    """Return the row-major index of each element of this rank's part in the whole tensor."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for i, size in enumerate(shape):
        ranks, own = (group_size(group), group_rank(group)) if i == dim else (1, 0)
        index = index[..., None] * (size * ranks) + torch.arange(
            own * size, (own + 1) * size, device=device
        )
    return index
