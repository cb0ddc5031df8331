"""Low-rank adapters on parallel linear layers (Hu et al. 2021, arXiv 2106.09685)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from mt_parallel_state import PartitionSpec, shard_param, sharding_of
from torch import Tensor, nn

from mt_tensor_parallel.collectives import (
    all_gather,
    copy_to_group,
    gather_from_group,
    group_rank,
    group_size,
    reduce_from_group,
    reduce_scatter,
)
from mt_tensor_parallel.functional import SEQUENCE_DIM
from mt_tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["LoraLinear", "add_lora", "lora_state", "save_lora"]

ParallelLinear = ColumnParallelLinear | RowParallelLinear


class LoraLinear(nn.Module):
    """A frozen parallel linear layer plus a trained product of two thin matrices.

    ``y = base(x) + (alpha / rank) B A x``. For a column-parallel base A is whole on every rank and
    B is split like the base's output; for a row-parallel base A is split like the base's input and
    B is whole. B starts at zero, so the layer starts as its base. What travels is ``A x``: rank
    numbers a token. Under sequence parallelism the gradient of the whole matrix is a partial sum
    over the sequence shards, which its sharding record says (``partial_grad``).

    Args:
        base: The layer; its parameters are frozen.
        rank: Of the product.
        alpha: Its scale is alpha / rank; ``rank`` by default.
        dropout: Of the adapter's input, while training.

    Shape:
        As of the base.

    Raises:
        ValueError: ``rank`` or ``dropout`` is out of range, or the base gathers its output, skips
            its bias or does not communicate.
    """

    def __init__(
        self, base: ParallelLinear, rank: int, *, alpha: float | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if rank < 1 or not 0 <= dropout < 1:
            raise ValueError(f"rank={rank} must be at least 1 and dropout={dropout} in [0, 1)")
        plain = base.communicate and not base.skip_bias_add
        if not plain or (isinstance(base, ColumnParallelLinear) and base.gather_output):
            raise ValueError(
                "LoRA needs a base with communicate=True, skip_bias_add=False, gather_output=False"
            )
        self.base = base.requires_grad_(requires_grad=False)
        self.rank, self.alpha = rank, float(rank if alpha is None else alpha)
        self.dropout = nn.Dropout(dropout)
        self.merged = False
        column = isinstance(base, ColumnParallelLinear)
        dims = base.weight.shape
        self._in = dims[-1:] if column else dims[1:]
        self._out = dims[:-1] if column else dims[:1]
        make = {"dtype": base.weight.dtype, "device": base.weight.device}
        self.a = nn.Parameter(torch.empty(rank, *self._in, **make))
        self.b = nn.Parameter(torch.zeros(*self._out, rank, **make))
        self._record(column=column)
        if self.a.device.type != "meta":
            self._draw()

    def _record(self, *, column: bool) -> None:
        dims = sharding_of(self.base.weight).spec.dims
        dims = (*dims, *(None,) * (self.base.weight.dim() - len(dims)))
        sequence = self.base.sequence_parallel and group_size(self.base.group) > 1
        partial = (self.base.axis,) if sequence else ()
        whole, split = (self.a, self.b) if column else (self.b, self.a)
        shard_param(whole, PartitionSpec(), partial_grad=partial)
        shard_param(split, PartitionSpec(*dims[:-1]) if column else PartitionSpec(None, *dims[1:]))

    def _draw(self) -> None:
        """Draws the whole A from the default generator and keeps this rank's part."""
        spec = sharding_of(self.a).spec
        group, shape = self.base.group, list(self.a.shape)
        dim = next((i for i, axes in enumerate(spec.dims) if axes), None)
        if dim is not None:
            shape[dim] *= group_size(group)
        bound = 1 / math.sqrt(math.prod(shape[1:]))  # PEFT's: Kaiming uniform with a = sqrt(5)
        whole = torch.empty(shape, dtype=torch.float64).uniform_(-bound, bound)
        if dim is not None:
            whole = whole.chunk(group_size(group), dim)[group_rank(group)]
        with torch.no_grad():
            self.a.copy_(whole)

    @property
    def scale(self) -> float:
        """What the product is multiplied by."""
        return self.alpha / self.rank

    def forward(self, x: Tensor) -> Tensor:
        """Applies base and adapter."""
        y = self.base(x)
        return y if self.merged else y + self.scale * self._adapt(self.dropout(x))

    def _adapt(self, x: Tensor) -> Tensor:
        group, sequence = self.base.group, self.base.sequence_parallel
        a = self.a.flatten(1)
        b = self.b.flatten(0, -2)
        if isinstance(self.base, ColumnParallelLinear):
            thin = nn.functional.linear(x, a)
            gather = all_gather(thin, group, dim=SEQUENCE_DIM) if sequence else None
            thin = copy_to_group(thin, group) if gather is None else gather
            y = nn.functional.linear(thin, b)
            return y.unflatten(-1, self._out) if len(self._out) > 1 else y
        flat = x.flatten(-len(self._in)) if len(self._in) > 1 else x
        thin = nn.functional.linear(flat, a)
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
        """Adds the adapter into the base's weight; forward then costs what the base costs."""
        if not self.merged:
            self.base.weight.add_(self.delta())
            self.merged = True

    @torch.no_grad()
    def unmerge(self) -> None:
        """Takes it out again, up to rounding."""
        if self.merged:
            self.base.weight.sub_(self.delta())
            self.merged = False


def add_lora(
    module: nn.Module,
    rank: int,
    *,
    alpha: float | None = None,
    dropout: float = 0.0,
    matches: Callable[[str], bool] = lambda name: True,
) -> list[str]:
    """Freezes ``module`` and puts adapters on its parallel linear layers.

    Args:
        module: Changed in place.
        rank: Of each adapter.
        alpha: Its scale is alpha / rank.
        dropout: Of each adapter's input.
        matches: Which layers, by their dotted name.

    Returns:
        The names of the layers that got one.

    Raises:
        ValueError: No layer matches.
    """
    module.requires_grad_(requires_grad=False)
    found = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, ParallelLinear) and matches(name)
    ]
    if not found:
        raise ValueError("no ColumnParallelLinear or RowParallelLinear of the module matches")
    for name in found:
        owner, _, leaf = name.rpartition(".")
        layer = LoraLinear(module.get_submodule(name), rank, alpha=alpha, dropout=dropout)  # type: ignore[arg-type]
        setattr(module.get_submodule(owner), leaf, layer)
    return found


@torch.no_grad()
def lora_state(module: nn.Module) -> dict[str, Tensor]:
    """All adapters with whole matrices, under the names that Hugging Face PEFT gives them.

    Every rank of the layers' groups calls it and gets the same: ``base_model.model.<layer>.lora_A.
    weight`` [rank, in] and ``lora_B.weight`` [out, rank].
    """
    state: dict[str, Tensor] = {}
    for name, layer in module.named_modules():
        if not isinstance(layer, LoraLinear):
            continue
        for part, param in (("lora_A", layer.a), ("lora_B", layer.b)):
            dims = sharding_of(param).spec.dims
            dim = next((i for i, axes in enumerate(dims) if axes), None)
            whole = param.detach()
            if dim is not None:
                whole = gather_from_group(whole, layer.base.group, dim=dim)
            shape = (layer.rank, -1) if part == "lora_A" else (-1, layer.rank)
            key = f"base_model.model.{name}.{part}.weight"
            state[key] = whole.reshape(shape).contiguous().cpu()
    return state


def save_lora(
    module: nn.Module,
    folder: str | os.PathLike[str],
    *,
    base_model: str,
    target_modules: Iterable[str],
    write: bool = True,
) -> None:
    """Writes ``adapter_model.safetensors`` and ``adapter_config.json`` as PEFT reads them.

    Args:
        module: With adapters of one rank and alpha.
        folder: Made if missing.
        base_model: Name or path of the base model, for PEFT.
        target_modules: What PEFT calls the layers, e.g. ``["qkv", "out"]``.
        write: Whether this rank writes; all ranks of the layers' groups call.

    Raises:
        ModuleNotFoundError: safetensors is not installed.
        ValueError: There is no adapter, or adapters differ in rank, alpha or dropout.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, LoraLinear)]
    kinds = {(layer.rank, layer.alpha, layer.dropout.p) for layer in layers}
    if len(kinds) != 1:
        what = "no adapter" if not kinds else f"adapters of {len(kinds)} kinds"
        raise ValueError(f"the module has {what}; PEFT's files hold one (rank, alpha, dropout)")
    state = lora_state(module)
    if not write:
        return
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ModuleNotFoundError(
            "saving adapters needs: pip install 'mt-tensor-parallel[peft]'"
        ) from error
    ((rank, alpha, dropout),) = kinds
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(target_modules),
        "task_type": "CAUSAL_LM",
    }
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    save_file(state, str(path / "adapter_model.safetensors"), metadata={"format": "pt"})
    (path / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
