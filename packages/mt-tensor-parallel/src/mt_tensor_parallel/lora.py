"""Low-rank adapters on parallel linear layers (Hu et al. 2021, arXiv 2106.09685)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from mt_files import check_type, write_file
from mt_parallel_state import (
    Group,
    MatrixSpec,
    PartitionSpec,
    all_gather,
    copy_to_group,
    gather_from_group,
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
Export = Callable[[str, Tensor, Tensor], Mapping[str, tuple[Tensor, Tensor]]]
_PREFIX = "base_model.model."


class LoraLinear(nn.Module):
    """A frozen parallel linear layer plus a trained product of two thin matrices.

    `y = base(x) + (alpha / rank) B A x`. For a column-parallel base A is whole on every rank and
    B is split like the base's output; for a row-parallel base A is split like the base's input and
    B is whole. B starts at zero, so the layer starts as its base. What travels is `A x`: rank
    numbers a token. Under sequence parallelism the gradient of the whole matrix is a partial sum
    over the sequence shards, which its sharding record says (`partial_grad`); for a column-parallel
    base with `communicate=False` it is one over the ranks' features.

    A depends on `seed`, `name` and the global index of the element alone, never on the group or
    a generator. So does the dropout's mask, together with one number that each call in training
    draws from the default generator of the input's device: calls differ, and recomputation, which
    puts the generator back, draws the same mask again. The group's first rank draws for all
    (broadcast of 8 bytes), so ranks may be seeded as they like. Ranks that hold other samples or
    other parts of a sequence need other seeds, as with torch's own dropout.

    A state dict says whether the adapter is merged into the base's weight.

    Args:
        base: The layer; its parameters are frozen.
        rank: Of the product.
        alpha: Its scale is alpha / rank; `rank` by default.
        dropout: Of the adapter's input, while training.
        seed: Of A and of the masks.
        name: Of the layer in the model; equal layers need different ones to draw different values.

    Shape:
        As of the base.

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

    def _drop(self, x: Tensor) -> Tensor:
        """Drop elements of the adapter's input by their place in the input of all ranks."""
        group, dim = self.base.group, split_dim(self.a)
        if dim is not None:  # the features are split: x ends in the dims of A after the first
            dim += x.dim() - self.a.dim()
        elif self.base.sequence_parallel and isinstance(self.base, ColumnParallelLinear):
            dim = SEQUENCE_DIM
        call = torch.randint(1 << 62, (), device=x.device)
        if group_size(group) > 1:
            dist.broadcast(call, group_src=0, group=group)
        index = _global_index(x.shape, dim, group, x.device).add_(call)
        keep = random_uniform(hash_key(self._key, "dropout"), index) >= self.dropout
        return x * keep.to(x.dtype).div_(1 - self.dropout)

    @property
    def scale(self) -> float:
        """What the product is multiplied by."""
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
        """What the adapter adds to this rank's part of the weight.

        Shape:
            That of the base's weight.
        """
        product = self.b.flatten(0, -2) @ self.a.flatten(1)
        return (self.scale * product).view(self.base.weight.shape)

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapter into the base's weight; forward then costs what the base costs.

        `state_dict` remembers it. What saves parameters alone should do so unmerged.
        """
        if not self.merged:
            self.base.weight.add_(self.delta())
            self.merged = True

    @torch.no_grad()
    def unmerge(self) -> None:
        """Take it out again, up to rounding."""
        if self.merged:
            self.base.weight.sub_(self.delta())
            self.merged = False

    def get_extra_state(self) -> Tensor:
        """Whether the weight holds the adapter, for `state_dict`."""
        return torch.tensor(self.merged)

    def set_extra_state(self, state: Tensor) -> None:
        """Take over what `get_extra_state` gave."""
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

    Adapters that are there already stay as they are, so different layers can get different ones by
    several calls. A layer that the module holds under several names gets one adapter, under all.

    Args:
        module: Changed in place.
        rank: Of each adapter.
        alpha: Its scale is alpha / rank.
        dropout: Of each adapter's input.
        seed: Of the adapters' values and masks, which also depend on the layer's name.
        matches: Which layers, by their dotted name.

    Returns:
        The names of the layers that got one, the first for each.

    Raises:
        TypeError: `module` is no module, or is itself such a layer, which cannot be replaced in
            place.
        ValueError: No layer matches that has no adapter yet.
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


@torch.no_grad()
def lora_state(module: nn.Module, *, export: Export | None = None) -> dict[str, Tensor]:
    """All adapters with whole matrices, under the names that Hugging Face PEFT gives them.

    Every rank of the layers' groups calls it and gets the same: `base_model.model.<layer>.lora_A.
    weight` [rank, in] and `lora_B.weight` [out, rank].

    Args:
        module: With adapters.
        export: Takes a layer's name, A [rank, *in] and B [*out, rank], and returns the layers of
            another model that they stand for, each with its own A and B. A fused layer becomes
            several: all have its A, and each has its rows of B. `None` keeps name and matrices.
    """
    state: dict[str, Tensor] = {}
    for name, layer in module.named_modules():
        if not isinstance(layer, LoraLinear):
            continue
        pair = _whole(layer.a, layer.base.group), _whole(layer.b, layer.base.group)
        for target, (a, b) in ({name: pair} if export is None else export(name, *pair)).items():
            state[f"{_PREFIX}{target}.lora_A.weight"] = _copy(a.reshape(layer.rank, -1))
            state[f"{_PREFIX}{target}.lora_B.weight"] = _copy(b.reshape(-1, layer.rank))
    return state


def save_lora(
    module: nn.Module,
    folder: str | os.PathLike[str],
    *,
    base_model: str,
    target_modules: Iterable[str] | None = None,
    export: Export | None = None,
    write: bool = True,
) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json` as PEFT reads them.

    Args:
        module: With adapters of one rank and alpha.
        folder: Made if missing.
        base_model: Name or path of the base model, for PEFT.
        target_modules: The layers that PEFT puts adapters on. By default the exported ones: by
            their last names if all layers of those names have adapters, else by their full ones.
        export: From this module's layers to those of the base model, as for `lora_state`;
            `mt_hf.export_lora` is one.
        write: Whether this rank writes; all ranks of the layers' groups call.

    Raises:
        ModuleNotFoundError: safetensors is not installed.
        ValueError: There is no adapter, or adapters differ in rank, alpha or dropout.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, LoraLinear)]
    kinds = {(layer.rank, layer.alpha, layer.dropout) for layer in layers}
    if len(kinds) != 1:
        what = "no adapter" if not kinds else f"adapters of {len(kinds)} kinds"
        raise ValueError(f"the module has {what}; PEFT's files hold one (rank, alpha, dropout)")
    state = lora_state(module, export=export)
    if not write:
        return
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise ModuleNotFoundError(
            "saving adapters needs: pip install 'mt-tensor-parallel[peft]'"
        ) from error
    ((rank, alpha, dropout),) = kinds
    targets = _target_modules(module, state) if target_modules is None else set(target_modules)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(targets),
        "task_type": "CAUSAL_LM",
    }
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    write_file(path / "adapter_model.safetensors", save(state, metadata={"format": "pt"}))
    write_file(path / "adapter_config.json", json.dumps(config, indent=2) + "\n")


def _target_modules(module: nn.Module, state: Iterable[str]) -> set[str]:
    exported = {key.removeprefix(_PREFIX).rpartition(".lora_")[0] for key in state}
    named = [(_leaf(name), layer) for name, layer in module.named_modules()]
    plain = {leaf for leaf, layer in named if isinstance(layer, ParallelLinear)}
    adapted = {leaf for leaf, layer in named if isinstance(layer, LoraLinear)}
    return exported if plain & adapted else {_leaf(name) for name in exported}


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _whole(param: nn.Parameter, group: Group) -> Tensor:
    dim = split_dim(param)
    return param.detach() if dim is None else gather_from_group(param.detach(), group, dim=dim)


def _copy(matrix: Tensor) -> Tensor:
    """A copy as safetensors wants it: contiguous, and no tensor twice (parts may share A)."""
    return matrix.cpu().clone(memory_format=torch.contiguous_format)


def _global_index(
    shape: Sequence[int], dim: int | None, group: Group, device: torch.device
) -> Tensor:
    """Row-major index, in a tensor split equally in `dim`, of each element of this part."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for i, size in enumerate(shape):
        ranks, own = (group_size(group), group_rank(group)) if i == dim else (1, 0)
        index = index[..., None] * (size * ranks) + torch.arange(
            own * size, (own + 1) * size, device=device
        )
    return index
