"""An adapter of Hugging Face PEFT as the adapters of a model in training, which go on from it."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
from mt_files import shorten
from mt_model import LoraConfig, StackConfig
from mt_tensor_parallel import LoraAdapter, adapters, lora_parts
from torch import Tensor

from mt_hf.family.error import ExchangeError
from mt_hf.family.link import Link, inside
from mt_hf.reading.lora import (
    PARAMETERS,
    LoraFields,
    experts_module,
    matrix_index,
    peft_name,
    sources_of,
    stored_pairs,
)
from mt_hf.reading.pretrained import by_target, linked
from mt_hf.reading.registry import find_family

Pair = tuple[Tensor, Tensor]
_SHOWN = 3


def read_adapter(
    folder: str | Path, config: StackConfig, lora: LoraConfig, *, family: str | None = None
) -> dict[str, Tensor]:
    """Read the matrices of a PEFT folder, to go on with the training of its adapters.

    It is the inverse of `export_adapter`: each matrix of a fused layer has its own A.

    Args:
        folder: Folder with adapter_config.json and adapter_model.safetensors.
        config: Config of the model.
        lora: The model's adapters, with the rank and layers of the folder; a different `alpha` is
            compensated in B.
        family: Name of the model's family; by default the first with such a model.

    Returns:
        A and B of each adapter by their names in the whole model, such as
        `layers.0.mixer.qkv.lora.a`, in fp32 or wider.

    Raises:
        ExchangeError: The folder has other layers or ranks than the model, or content that
            `read_lora` does not read, except adapters of experts (`target_parameters`).
        FileError: A file can't be read.
    """
    known, _ = find_family(config, family)
    links, shapes = linked(known, config)
    of_layer = by_target(links, shapes)
    given, fields = stored_pairs(Path(folder), experts=True)
    found, used = dict[str, Tensor](), set[str]()
    for layer, adapter in adapters(config.build(device="meta", lora=lora)):
        if adapter.layer.lead_dims:
            module = experts_module(known, of_layer[f"{layer}.weight"][0].source)
            name = _expert_name(module, layer, fields)
            if name not in given:
                raise _missing(layer)
            pair = _of_experts(adapter, *given[name], f"{folder}: {name}")
            own_a, own_b = pair[0], pair[1] * (fields.scale(name, adapter.rank) / adapter.scale)
            found |= {f"{layer}.lora.a": own_a, f"{layer}.lora.b": own_b}
            used.add(name)
            continue
        own: dict[str, Pair] = {}
        for link in of_layer[f"{layer}.weight"]:
            name = peft_name(known, link.source)
            if name not in given:
                continue
            a, b = given[name]
            _check_rank(a.shape[0], adapter, f"{folder}: {name}")
            own[link.source] = a, b * (fields.scale(name, a.shape[0]) / adapter.scale)
        (own_a, own_b), sources = _placed(layer, adapter, shapes[f"{layer}.weight"], of_layer, own)
        found |= {f"{layer}.lora.a": own_a, f"{layer}.lora.b": own_b}
        used |= {peft_name(known, source) for source in sources}
    if left := sorted(given.keys() - used):
        text = f"has adapters of {', '.join(map(shorten, left[:_SHOWN]))}, which the model has not"
        raise ExchangeError(f"{folder}: {text}; name their layers in lora.layers")
    return found


def _check_rank(rank: int, adapter: LoraAdapter, where: str) -> None:
    if rank != adapter.rank:
        text = f"has rank {rank}, and lora.rank is {adapter.rank}; use the same"
        raise ExchangeError(f"{where} {text}")


def _missing(layer: str) -> ExchangeError:
    return ExchangeError(
        f"the folder has no adapter of {layer}, or of a part of it; name in lora.layers those that "
        "it has"
    )


def _expert_name(module: str | None, layer: str, fields: LoraFields) -> str:
    """Return the name in PEFT of the adapter of a layer of experts; empty for none.

    PEFT wraps a module once for each of its parameters, the first one innermost.
    """
    wrapped = [name for name in PARAMETERS.values() if fields.targets(f"{module}.{name}")]
    wanted = PARAMETERS[layer.rpartition(".")[2]]
    if module is None or wanted not in wrapped:
        return ""
    return module + ".base_layer" * (len(wrapped) - 1 - wrapped.index(wanted))


def _of_experts(adapter: LoraAdapter, a: Tensor, b: Tensor, where: str) -> Pair:
    """Return A and B of a layer of experts from PEFT's two matrices, which all experts share.

    Shape:
        a: [experts * rank, in]. b: [out, rank * experts]. Returns A and B in the shapes of
        `LoraAdapter`.
    """
    experts, rank, *_ = adapter.a.shape
    _check_rank(len(a) // experts, adapter, where)
    sizes = (
        (experts * rank, adapter.a[0, 0].numel()),
        (adapter.b[0, ..., 0].numel(), rank * experts),
    )
    if (tuple(a.shape), tuple(b.shape)) != sizes:
        text = f"has lora_A {list(a.shape)} and lora_B {list(b.shape)}, and {experts} experts need "
        raise ExchangeError(f"{where} {text}{list(sizes[0])} and {list(sizes[1])}")
    of_each = b.view(len(b), rank, experts).permute(2, 0, 1)
    return a.view(adapter.a.shape), of_each.reshape(adapter.b.shape)


def _placed(
    layer: str,
    adapter: LoraAdapter,
    shape: tuple[int, ...],
    links: Mapping[str, list[Link]],
    pairs: Mapping[str, Pair],
) -> tuple[Pair, set[str]]:
    """Return A and B of an adapter from pairs by the linked tensors, and the tensors it has."""
    used = set[str]()
    dtype = next((a.dtype for a, _ in pairs.values()), torch.float32)
    found_a, found_b = (torch.zeros(x.shape, dtype=dtype) for x in (adapter.a, adapter.b))
    matrix, cut = adapter.matrix, len(shape) - adapter.matrix.in_dims
    rows = matrix_index(shape[:cut])
    parts = [rows]
    if adapter.parts is not None and matrix.part_dim is not None:
        parts = list(rows.split(matrix.parts, matrix.part_dim))
    for part, own_a, own_b in lora_parts(found_a, found_b, matrix, adapter.parts):
        a = own_a.new_zeros(own_a.shape[0], prod(shape[cut:]))
        b = own_b.flatten(0, -2).clone()
        filled = torch.zeros(len(b), dtype=torch.bool)
        for link in links[f"{layer}.weight"]:
            whole, outs, ins = sources_of(link, shape, cut)
            box = inside(link.area(shape), tuple((0, size) for size in shape))
            place = torch.full((prod(shape[:cut]),), -1)
            place[matrix_index(shape[:cut])[box[:cut]].flatten()] = outs
            here = place[parts[part].flatten()]
            if not (here >= 0).any() or link.source not in pairs:
                continue
            given_a, given_b = pairs[link.source]
            if (given_b.shape[0], given_a.shape[1]) != whole:
                sizes = f"lora_A {list(given_a.shape)} and lora_B {list(given_b.shape)}"
                raise ExchangeError(f"{link.source} has {sizes}, and the layer {list(whole)}")
            columns = matrix_index(shape[cut:])[box[cut:]].flatten()
            placed = torch.zeros_like(a)
            placed[:, columns] = given_a[:, ins]
            if filled.any() and not torch.equal(a, placed):
                raise ExchangeError(f"{layer} is one matrix here, and has two adapters there")
            a, filled = placed, filled | (here >= 0)
            b[here >= 0] = given_b[here[here >= 0]]
            used.add(link.source)
        if not filled.all():
            raise _missing(layer)
        own_a.copy_(a.view(own_a.shape))
        own_b.copy_(b.view(own_b.shape))
    return (found_a, found_b), used
