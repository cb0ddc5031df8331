"""Low-rank adapters of a model in generation, of which each request of a pass may have one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from mt_tensor_parallel import Gemm, LowRankPlace, TorchGemm, low_rank
from torch import Tensor, nn

from mt_model.attend.slots import Slots
from mt_model.attention.mla import LatentAttention
from mt_model.kernels.gemm import InvariantGemm

if TYPE_CHECKING:
    from mt_quant import LinearShape

    from mt_model.language.decoder import GPT

_RANK_MULTIPLE = 8  # products of other widths sum in another order when there are few rows


class AdapterBank:
    """Low-rank adapters (LoRA) of a model's linear layers, quantised ones too.

    In a pass with `Slots.adapters`, `B A x` is added to the outputs of the tokens of each request
    with an adapter. The tokens of an adapter have products of their own, so neither other adapters
    nor tokens without one change their numbers; with invariant kernels the number of tokens changes
    no bit either. Layers and parameters keep their names.

    For a layer that splits its outputs, a rank holds its rows of B. For one that splits its inputs,
    it holds its columns of A, and an all-reduce sums `A x`.

    Args:
        model: The decoder, or one stage of it; its passes read this bank from now on.

    Raises:
        ValueError: The model has an encoder.
    """

    def __init__(self, model: GPT) -> None:
        if model.config.encoder_layers:
            raise ValueError("adapters of requests are for decoders, and the model has an encoder")
        self._model = model
        self._products: Gemm = InvariantGemm() if model.shard.kernels.is_invariant else TorchGemm()
        # A CPU multiplies a few rows of fp32 in a third of bf16's time.
        device, dtype = model.shard.device, model.shard.dtype
        if device.type == "cpu" and dtype.itemsize < 4:
            dtype = torch.float32
        self._place: dict[str, Any] = {"device": device, "dtype": dtype}
        self._layers: dict[str, _AdaptedLayer] = {}
        self._numbers: set[int] = set()
        self.tokens: dict[int, Tensor | None] = {}
        model.adapters = self

    @torch.no_grad()
    def add(self, number: int, matrices: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Hold one more adapter.

        Args:
            number: What `Slots.adapters` calls it, 1 or more.
            matrices: A and B of each layer by its name in the whole model, for all ranks. Layers of
                other pipeline stages are left out.

        Shape:
            A: [rank, in]; B: [out, rank], with all dims of each side in one.

        Raises:
            ValueError: The number is taken, or a layer is unknown, has other sizes, or takes no
                adapter.
        """
        if number < 1 or number in self._numbers:
            raise ValueError(f"number={number}: use one from 1 on that no held adapter has")
        own = [name for name in matrices if self._is_own(name)]
        made = {name: self._layer(name) for name in own}
        parts = {name: self._part(name, made[name].shape, *matrices[name]) for name in own}
        self._numbers.add(number)
        for name, part in parts.items():
            if name not in self._layers:
                self._layers[name] = made[name]
                made[name].hook()
            self._layers[name].parts[number] = part

    def remove(self, number: int) -> None:
        """Drop an adapter's matrices; no pass may name it any more."""
        self._numbers.remove(number)
        for name, layer in list(self._layers.items()):
            layer.parts.pop(number, None)
            if not layer.parts:
                layer.unhook()
                del self._layers[name]

    def begin(self, slots: Slots | None) -> None:
        """Read which tokens of a pass have which adapter.

        Raises:
            ValueError: An adapter is not held.
        """
        self.tokens = {}
        if slots is None or slots.adapters is None:
            return
        found: dict[int, list[int]] = defaultdict(list)
        starts = slots.starts.tolist()
        for row, number in enumerate(slots.adapters.tolist()):
            if number and number not in self._numbers:
                raise ValueError(f"slots.adapters[{row}] is {number}, and no adapter has it")
            found[number] += range(starts[row], starts[row + 1])
        device = slots.places.device
        self.tokens = {
            number: None if len(found) == 1 else torch.tensor(places, device=device)
            for number, places in found.items()
            if number and places
        }

    def _is_own(self, name: str) -> bool:
        """Return whether the layer belongs to this stage, or is of no layer at all."""
        kind, _, rest = name.partition(".")
        index = rest.partition(".")[0]
        if kind != "layers" or not index.isdecimal():
            raise ValueError(f"an adapter of {name}: only linear layers of layers.N take adapters")
        elsewhere = int(index) < self._model.config.num_layers
        return int(index) in self._model.layer_range or not elsewhere

    def _layer(self, name: str) -> _AdaptedLayer:
        """Return a layer that takes adapters, as it is or for the first time."""
        if name in self._layers:
            return self._layers[name]
        modules = dict(self._model.named_modules())
        layer, owner = modules.get(name), modules.get(name.rpartition(".")[0])
        if ".experts." in name:
            raise ValueError(f"an adapter of {name}: experts take no adapters for each request")
        if isinstance(owner, LatentAttention) and layer is owner.key_value:
            raise ValueError(
                f"an adapter of {name}: generation multiplies queries by this weight, so it takes "
                "no adapters for each request; merge the adapter into the model"
            )
        shape = None if layer is None else _shape_of(layer)
        if layer is None or shape is None:
            raise ValueError(f"an adapter of {name}: the model has no linear layer of that name")
        return _AdaptedLayer(layer=layer, shape=shape, bank=self, products=self._products)

    def _part(self, name: str, shape: LinearShape, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's part of an adapter, with zeros up to a rank that products like."""
        whole = (shape.whole_rows, shape.whole_columns)
        fits = a.dim() == b.dim() == 2 and a.shape[0] == b.shape[1]
        if not fits or (b.shape[0], a.shape[1]) != whole:
            raise ValueError(
                f"an adapter of {name} has A {list(a.shape)} and B {list(b.shape)}, and the layer "
                f"needs [rank, {whole[1]}] and [{whole[0]}, rank]"
            )
        rows, columns = shape.own(a.device)
        a = a if columns is None else a.index_select(1, columns)
        b = b if rows is None else b.index_select(0, rows)
        missing = -a.shape[0] % _RANK_MULTIPLE
        a, b = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))
        return a.to(**self._place).contiguous(), b.to(**self._place).contiguous()


@dataclass(kw_only=True)
class _AdaptedLayer:
    """A linear layer whose outputs get the products of adapters.

    Attributes:
        layer: The layer.
        shape: Its sizes and its split.
        bank: The bank, which knows the tokens of a pass.
        products: Strategy of the products.
        parts: A and B of each adapter, this rank's.
    """

    layer: nn.Module
    shape: LinearShape
    bank: AdapterBank
    products: Gemm
    parts: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def hook(self) -> None:
        """Have the layer call this one."""
        self._handle = self.layer.register_forward_hook(self._add)

    def unhook(self) -> None:
        """Leave the layer as it was."""
        self._handle.remove()

    def _add(self, layer: nn.Module, given: tuple[Tensor, ...], y: Tensor) -> None:
        del layer
        for number, tokens in self.bank.tokens.items():
            if number in self.parts:
                self._add_one(given[0][0], y[0], tokens, *self.parts[number])

    def _add_one(self, x: Tensor, y: Tensor, tokens: Tensor | None, a: Tensor, b: Tensor) -> None:
        """Add an adapter's products to the outputs of its tokens, in place.

        Shape:
            x: [T, *in]; y: [T, *out]; tokens: [N]; a: [rank, in]; b: [out, rank].
        """
        own = (x if tokens is None else x.index_select(0, tokens)).flatten(1)
        place = LowRankPlace(
            split=self.shape.split, group=self.shape.group, communicate=self.shape.communicate
        )
        (found,) = low_rank(own.to(a.dtype), a, [b], place, multiply=self.products.forward)
        found = found.view(-1, *self.shape.outputs).to(y.dtype)
        if tokens is None:
            y.add_(found)
        else:
            y.index_add_(0, tokens, found)


def _shape_of(layer: nn.Module) -> LinearShape | None:
    """Return a linear layer's sizes; None for another module."""
    from mt_quant import LinearShape, QuantizedLinear  # only adapters and quantisation need it

    return layer.shape if isinstance(layer, QuantizedLinear) else LinearShape.of(layer)
