"""Low-rank adapters on parallel linear layers (Hu et al. 2021, arXiv 2106.09685)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mt_files import check_type
from mt_parallel_state import (
    MatrixSpec,
    PartitionSpec,
    group_rank,
    group_size,
    hash_key,
    mark_matrix,
    random_uniform,
    shard_param,
    sharding_of,
)
from torch import Tensor, nn

from mt_tensor_parallel.arguments import check_number, check_volume
from mt_tensor_parallel.gemm import SEQUENCE_DIM
from mt_tensor_parallel.linear import GemmLayer

NAME = "lora"  # of the submodule


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Settings of adapters.

    Attributes:
        rank: Rank of each product.
        alpha: Products are scaled by alpha / rank; `rank` by default.
        dropout: Probability of dropping an element of an adapter's input in training.
        seed: Seed of A and of the masks.

    Raises:
        ValueError: `rank` or `dropout` is out of range.
        TypeError: A setting has the wrong type.
    """

    rank: int
    alpha: float | None = None
    dropout: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_type("rank", self.rank, int)
        if self.alpha is not None:
            check_number(self.alpha, "alpha")
        if self.rank < 1 or not 0 <= self.dropout < 1:
            raise ValueError(
                f"rank={self.rank} must be at least 1 and dropout={self.dropout} in [0, 1)"
            )


class LoraAdapter(nn.Module):
    """A trained product of two thin matrices beside a frozen linear layer.

    `y = layer(x) + (alpha / rank) B A x`. The adapter is the layer's submodule `lora`, and the
    layer and its parameters keep their names. A and B are split like the layer's inputs and
    outputs; `low_rank` names the collectives. B starts at zero, so the layer starts unchanged. A
    matrix that is whole on each rank has a partial sum as its gradient if the ranks have different
    tokens or features of the layer; its sharding record says so (`partial_grad`).

    With `parts`, each matrix of a fused weight gets its own A, as if the matrix were a layer;
    without `parts` the matrices share one A.

    A depends on the seed, the layer's name and the global index of the element alone. The mask of
    dropout depends on those and on the step that `set_lora_step` gives, or on the numbers of
    `tokens`, so that every layout and every recomputation draws the same mask, without
    communication. A state dict says whether the adapter is merged into the layer's weight.

    Args:
        layer: The layer, whose parameters become frozen.
        options: Rank, scale and dropout.
        name: The layer's name in the model; equal layers need different names to draw different
            values.
        parts: Indices of the fused matrices that get an adapter each, for a weight whose
            `MatrixSpec` has parts; None for one adapter of the whole weight.

    Attributes:
        a: [rank, *in], or [parts, rank, *in]; after the experts' dim for a layer of experts.
        matrix: Record of the layer's weight.
        b: [*out, rank], with the rows of the given parts; after the experts' dim likewise.
        tokens: Candidates for the global numbers of the next forward's tokens, for dropout: all
            tokens of this rank, or the tokens of its part of the sequence; the first candidate that
            fits the input is used. None to use `set_lora_step`. Shape [B, S] each.

    Raises:
        ValueError: The layer has an adapter, or takes no dropout.
        TypeError: `layer` is no parallel linear layer.
    """

    def __init__(
        self,
        layer: GemmLayer,
        options: LoraOptions,
        *,
        name: str = "",
        parts: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        check_type("layer", layer, GemmLayer)
        if adapter_of(layer) is not None:
            raise ValueError(f"the layer {name!r} has an adapter already; add_lora leaves it out")
        if options.dropout and layer.lead_dims:
            raise ValueError(
                f"dropout={options.dropout}: an adapter of experts ({name or 'the layer'}) takes "
                "no dropout, as a row does not know its token; use dropout 0 or leave experts out"
            )
        layer.requires_grad_(requires_grad=False)
        self.rank, self.dropout, self.merged = options.rank, options.dropout, False
        self.alpha = float(options.rank if options.alpha is None else options.alpha)
        self.parts, self.tokens = parts, None
        self._layer = (layer,)  # a tuple, as it is no submodule
        self._key = hash_key("lora", options.seed, name)
        # A tensor, so that a compiled or captured step reads the key of each replay.
        self._mask_key: Tensor | None = None
        self._make()
        layer.add_module(NAME, self)
        layer.register_forward_hook(self._add, with_kwargs=True)
        if self.a.device.type != "meta":
            self._draw()

    tokens: Sequence[Tensor] | None

    def _make(self) -> None:
        """Make A and B, with their sharding records."""
        weight, lead = self.layer.weight, self.layer.lead_dims
        record = sharding_of(weight)
        check_volume((self.rank, weight.shape.numel()), "an adapter")
        self.matrix = MatrixSpec() if record.matrix is None else record.matrix
        cut = weight.dim() - self.matrix.in_dims
        dims = (*record.spec.dims, *(None,) * (weight.dim() - len(record.spec.dims)))
        outs, count = list(weight.shape[:cut]), list[int]()
        sizes = [self.matrix.parts[part] for part in self.parts or ()]
        if self.parts is not None and self.matrix.part_dim is not None:
            outs[self.matrix.part_dim], count = sum(sizes), [len(sizes)]
        make: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        shape = (*weight.shape[:lead], *count, self.rank, *weight.shape[cut:])
        a = nn.Parameter(torch.empty(shape, **make))
        b = nn.Parameter(torch.zeros(*outs, self.rank, **make))
        spec_a = (*dims[:lead], *(None,) * (len(count) + 1), *dims[cut:])
        self.splits_inputs = any(dims[cut:])
        # What is whole beside a split weight gets the part of its gradient that this rank computes.
        sums = {self.layer.axis} if self.layer.has_partial_sums else set[str]()
        for param, spec, is_split in (
            (a, spec_a, self.splits_inputs),
            (b, (*dims[:cut], None), any(dims[lead:cut])),
        ):
            partial = {*record.partial_grad, *(() if is_split else sums)}
            how: dict[str, Any] = {"partial_grad": tuple(sorted(partial))}
            shard_param(param, PartitionSpec(*spec), is_copy=record.is_copy, **how)
        self.a, self.b = a, b
        if lead:
            return
        parts = {"part_dim": 0, "parts": (1,) * len(sizes)} if count else {}
        mark_matrix(a, MatrixSpec(in_dims=self.matrix.in_dims, **parts))
        parts = {"part_dim": self.matrix.part_dim, "parts": tuple(sizes)} if count else {}
        mark_matrix(b, MatrixSpec(**parts))

    @property
    def layer(self) -> GemmLayer:
        """The layer."""
        return self._layer[0]

    @property
    def scale(self) -> float:
        """The factor of the product."""
        return self.alpha / self.rank

    @property
    def bound(self) -> float:
        """The largest magnitude of an initial value of A, as in PEFT: 1 / sqrt(inputs)."""
        return 1 / math.sqrt(math.prod(size * ranks for size, ranks, _ in self._inputs()))

    def _inputs(self) -> list[tuple[int, int, int]]:
        """Return this rank's size of each input dim, the ranks that split it and its index."""
        first, sizes = self.b.dim() - 1, self.a.shape[self.a.dim() - self.matrix.in_dims :]
        return [(size, *self.layer.ranks_of(dim)) for dim, size in enumerate(sizes, first)]

    def _draw(self) -> None:
        """Fill this rank's part of A."""
        first = [(n, *self.layer.ranks_of(i)) for i, n in enumerate(self.a.shape[: self._lead])]
        middle = [(n, 1, 0) for n in self.a.shape[self._lead : self.a.dim() - self.matrix.in_dims]]
        index = _global_index([*first, *middle, *self._inputs()], self.a.device)
        with torch.no_grad():
            uniform = random_uniform(self._key, index, dtype=torch.float64)
            self.a.copy_(uniform.mul_(2 * self.bound).sub_(self.bound))

    @property
    def _lead(self) -> int:
        return self.layer.lead_dims

    def set_step(self, step: int) -> None:
        """Choose the mask of dropout; see `set_lora_step`."""
        key = hash_key(self._key, "dropout", step)
        if self._mask_key is None or self._mask_key.device != self.a.device:
            self._mask_key = torch.tensor(key, device=self.a.device)
        else:
            self._mask_key.fill_(key)

    def _drop(self, x: Tensor) -> Tensor:
        """Drop elements of the adapter's input by their index in the input of all ranks."""
        features = self._inputs()
        if self.tokens is not None:
            tokens = next(each for each in self.tokens if each.shape == x.shape[: each.dim()])
            tokens = tokens.reshape(*tokens.shape, *(1,) * len(features))
            width = math.prod(size * ranks for size, ranks, _ in features)
            index = tokens * width + _global_index(features, x.device)
            key: int | Tensor = hash_key(self._key, "dropout")
        elif self._mask_key is None:
            raise RuntimeError(
                "dropout of an adapter needs the number of the micro-batch: call "
                "set_lora_step(model, number) before each forward in training"
            )
        else:
            before = [(size, 1, 0) for size in x.shape[: x.dim() - len(features)]]
            if self.takes_sequence_shards:
                group = self.layer.group
                size = before[SEQUENCE_DIM][0]
                before[SEQUENCE_DIM] = (size, group_size(group), group_rank(group))
            index, key = _global_index([*before, *features], x.device), self._mask_key
        keep = random_uniform(key, index) >= self.dropout
        return x * keep.to(x.dtype).div_(1 - self.dropout)

    @property
    def takes_sequence_shards(self) -> bool:
        """Whether the layer's input is this rank's part of the sequence."""
        return self.layer.sequence_parallel and not self.splits_inputs

    def _add(
        self, layer: nn.Module, given: tuple[Any, ...], settings: dict[str, Any], y: Tensor
    ) -> Tensor | None:
        """Return the layer's output with the adapter's, as a forward hook does."""
        del layer
        if self.merged:
            return None
        x, *rest = given
        if self.training and self.dropout > 0:
            x = self._drop(x)
        lead = self._lead
        parts = lora_parts(self.a, self.b, self.matrix, self.parts)
        stacked = self.a.flatten(self.a.dim() - self.matrix.in_dims).flatten(lead, -2)
        bs = [b.flatten(lead, -2) for _, _, b in parts]
        found = self.layer.low_rank((x, *rest, *settings.values()), stacked, bs)
        outs = [
            (part, b.shape[lead:-1], own) for (part, _, b), own in zip(parts, found, strict=True)
        ]
        pieces = {part: own.view(*own.shape[:-1], *sizes) for part, sizes, own in outs}
        total = _joined(pieces, self.matrix, at=found[0].dim() - 1)
        return y + self.scale * total.view_as(y)

    def delta(self) -> Tensor:
        """Return the adapter's contribution to this rank's part of the weight.

        Shape:
            As the layer's weight.
        """
        given = self.a, self.b, self.matrix, self.parts
        return lora_delta(*given, scale=self.scale, lead=self._lead)

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapter to the layer's weight; forward then costs as much as the layer.

        `state_dict` remembers that. To save only parameters, unmerge first.

        Raises:
            ValueError: The weight is stored as codes, which hold no sums.
        """
        if not self.layer.weight.is_floating_point():
            raise ValueError(
                "the layer's weight is stored as codes, which hold no sums; merge the adapter into "
                "a model with the dequantised weights"
            )
        if not self.merged:
            self.layer.weight.add_(self.delta())
            self.merged = True

    @torch.no_grad()
    def unmerge(self) -> None:
        """Subtract the adapter from the layer's weight again, up to rounding."""
        if self.merged:
            self.layer.weight.sub_(self.delta())
            self.merged = False

    def get_extra_state(self) -> Tensor:
        """Return whether the weight holds the adapter, for `state_dict`."""
        return torch.tensor(self.merged)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the result of `get_extra_state`."""
        self.merged = bool(state)

    def extra_repr(self) -> str:
        """Return rank, scale and dropout, for `repr`."""
        return f"rank={self.rank}, alpha={self.alpha:g}, dropout={self.dropout:g}"


def lora_parts(
    a: Tensor, b: Tensor, matrix: MatrixSpec, parts: Sequence[int] | None
) -> list[tuple[int, Tensor, Tensor]]:
    """Return the index, A and B of each part of an adapter; an adapter without parts is part 0.

    Args:
        a: A of the adapter.
        b: B of the adapter.
        matrix: Record of the layer's weight.
        parts: Indices of the fused matrices with separate adapters; None if all share one.

    Shape:
        a, b: As in `LoraAdapter`. Returns A [rank, *in] and B [*out, rank], with the experts' dim
        in front for a layer of experts.
    """
    if parts is None or matrix.part_dim is None:
        return [(0, a, b)]
    pieces = b.split([matrix.parts[part] for part in parts], matrix.part_dim)
    return list(zip(parts, a.unbind(0), pieces, strict=True))


def lora_delta(
    a: Tensor,
    b: Tensor,
    matrix: MatrixSpec,
    parts: Sequence[int] | None,
    *,
    scale: float,
    lead: int = 0,
) -> Tensor:
    """Return the product that an adapter adds to the layer's weight.

    Args:
        a: A of the adapter, as in `lora_parts` like `b`, `matrix` and `parts`.
        b: B of the adapter.
        matrix: Record of the layer's weight.
        parts: Parts with an adapter.
        scale: Factor of the product.
        lead: Number of dims in front of the outputs: 1 for a layer of experts.
    """
    pieces: dict[int, Tensor] = {}
    for part, own, other in lora_parts(a, b, matrix, parts):
        ins = own.shape[own.dim() - matrix.in_dims :]
        product = other.flatten(lead, -2) @ own.flatten(lead + 1)
        pieces[part] = (scale * product).view(*other.shape[:-1], *ins)
    return _joined(pieces, matrix if parts is not None else MatrixSpec(), at=0)


def _joined(pieces: dict[int, Tensor], matrix: MatrixSpec, *, at: int) -> Tensor:
    """Join parts along their dim, with zeros for parts without an adapter."""
    first = next(iter(pieces.values()))
    if matrix.part_dim is None or len(matrix.parts) == len(pieces) == 1:
        return first
    if len(pieces) == 1 and first.shape[at + matrix.part_dim] == sum(matrix.parts):
        return first  # one adapter of all parts
    dim, joined = at + matrix.part_dim, list[Tensor]()
    for part, size in enumerate(matrix.parts):
        shape = (*first.shape[:dim], size, *first.shape[dim + 1 :])
        joined.append(pieces[part] if part in pieces else first.new_zeros(shape))
    return torch.cat(joined, dim)


def adapter_of(layer: nn.Module) -> LoraAdapter | None:
    """Return the adapter of a layer; None if it has none."""
    found = getattr(layer, NAME, None)
    return found if isinstance(found, LoraAdapter) else None


def adapters(module: nn.Module) -> Iterator[tuple[str, LoraAdapter]]:
    """Yield the adapters inside a module with the names of their layers."""
    for name, each in module.named_modules():
        if isinstance(each, LoraAdapter):
            yield name.rpartition(".")[0], each


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
    adapters. A layer that the module holds under several names gets one adapter.

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
        TypeError: `module` is no module.
        ValueError: No layer without an adapter matches.
    """
    check_type("module", module, nn.Module)
    options = LoraOptions(rank=rank, alpha=alpha, dropout=dropout, seed=seed)
    names: dict[GemmLayer, list[str]] = {}
    for name, layer in module.named_modules(remove_duplicate=False):
        if isinstance(layer, GemmLayer) and adapter_of(layer) is None:
            names.setdefault(layer, []).append(name)
    found = {layer: known for layer, known in names.items() if any(map(matches, known))}
    if not found:
        raise ValueError(
            "no ColumnParallelLinear, RowParallelLinear or layer of experts of the module matches "
            "that has no adapter yet"
        )
    freeze_around_lora(module)
    for layer, known in found.items():
        LoraAdapter(layer, options, name=known[0])
    return [known[0] for known in found.values()]


def freeze_around_lora(module: nn.Module) -> None:
    """Freeze all parameters of a module except those of its adapters."""
    kept = {id(param) for _, adapter in adapters(module) for param in adapter.parameters()}
    for param in module.parameters():
        if id(param) not in kept:
            param.requires_grad = False


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
    for _, adapter in adapters(module):
        adapter.set_step(step)


def _global_index(sizes: Sequence[tuple[int, int, int]], device: torch.device) -> Tensor:
    """Return the row-major index of each element of this rank's part in the whole tensor.

    Args:
        sizes: For each dim this rank's size, the number of ranks that split it and this rank's
            index.
        device: Device of the index.
    """
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, ranks, own in sizes:
        places = torch.arange(own * size, (own + 1) * size, device=device)
        index = index[..., None] * (size * ranks) + places
    return index
