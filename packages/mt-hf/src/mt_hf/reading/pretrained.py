"""A folder of Hugging Face transformers, checked before any weight is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from mt_model import DTYPES, VOCABULARY, ModelConfig, Sizes, StackConfig, saved_tensors
from mt_parallel_state import ParallelState, offsets_of
from torch import Tensor, nn

from mt_hf.family.error import ExchangeError
from mt_hf.family.family import Family
from mt_hf.family.link import Link, Range, check_links, common, inside
from mt_hf.reading.description import Description, read_description
from mt_hf.reading.files import CONFIG
from mt_hf.reading.finite import check_finite
from mt_hf.reading.mxfp4 import METHOD, with_experts
from mt_hf.reading.tensors import MAX_TENSORS, StoredTensor, open_tensors

_SHOWN = 5  # tensors in a message
_PARTS = 8  # tensors of a quantised layer, at most
_IGNORED = 1 << 12


@dataclass(frozen=True, kw_only=True)
class Pretrained(Description):
    """A checked folder of Hugging Face, before any weight is read.

    Attributes:
        tensors: The linked tensors, by name.
        links: Links from tensors to the model's parameters, by parameter.
        shapes: Shapes of the model's parameters and saved buffers.
        kv_scales: Scales of keys and values by name, if config.json has a `kv_cache_scheme`.
    """

    tensors: Mapping[str, StoredTensor]
    links: Mapping[str, Sequence[Link]]
    shapes: Mapping[str, Sizes]
    kv_scales: Mapping[str, StoredTensor] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of most elements."""
        sizes: Counter[torch.dtype] = Counter()
        for tensor in self.tensors.values():
            sizes[tensor.dtype] += prod(tensor.shape)
        return sizes.most_common(1)[0][0]

    @torch.no_grad()
    def fill(self, name: str, into: Tensor, offsets: Sequence[int] | None = None) -> None:
        """Copy a box of a parameter's values into a tensor of any dtype.

        Only the pages of the files with the box are read. Values that are not finite are refused.

        Args:
            name: Name of the parameter in the whole model.
            into: Tensor of the box.
            offsets: First index of the box in the whole parameter; None for the start.

        Raises:
            ExchangeError: A value is not finite; the message names tensor and file.
        """
        starts = (0,) * into.dim() if offsets is None else offsets
        own = tuple((start, start + n) for start, n in zip(starts, into.shape, strict=True))
        shape = self.shapes[name]
        rows = self.config.rows_of(name)
        if rows is not None:
            into[max(0, rows - own[0][0]) :] = 0
        for link in self.links[name]:
            area = link.area(shape)
            shared = common(own, area)
            if shared is not None:
                stored = self.tensors[link.source]
                window = link.window(stored.map(), shape)
                box = into[inside(shared, own)].copy_(window[inside(shared, area)])
                check_finite(box, stored)

    def padded(self, vocab_multiple: int) -> Pretrained:
        """Return the same model with its vocabulary padded to a multiple; see `ModelConfig`.

        A model without a vocabulary is returned unchanged.
        """
        if not isinstance(self.config, ModelConfig):
            return self
        config = replace(self.config, vocab_multiple=vocab_multiple)
        links, shapes = linked(self.family, config)
        return replace(self, config=config, links=by_target(links, shapes), shapes=shapes)

    def with_length(self, max_sequence_length: int | None) -> Pretrained:
        """Return the same model for sequences of up to a number of tokens; None for the folder's.

        Raises:
            ExchangeError: The model has a trained vector for each position.
        """
        config = self.config
        if max_sequence_length is None or not isinstance(config, ModelConfig):
            return self
        if config.positions == "learned":
            raise ExchangeError(
                f"{self.folder}: max_sequence_length can't be {max_sequence_length}: the model has "
                f"{config.max_sequence_length} trained positions; leave it out"
            )
        return replace(self, config=replace(config, max_sequence_length=max_sequence_length))

    def initializer(self, state: ParallelState) -> Callable[[str, nn.Parameter], None]:
        """Return a function that fills one parameter at a time of a model on the meta device.

        Pass it to `mt_data_parallel.shard` as `init`; see `mt_model.initializer`. Fill buffers
        (`mt_model.saved_buffers`), which are whole on each rank, with `fill`.
        """

        def fill(name: str, param: nn.Parameter) -> None:
            self.fill(name, param, offsets_of(param, state.layout, state.rank))

        return fill


def open_pretrained(folder: str | Path, *, download: bool = False) -> Pretrained:
    """Check a folder: its config.json, and that its tensors cover the model exactly once.

    Args:
        folder: A folder with config.json and safetensors files, from transformers'
            `save_pretrained` or the Hugging Face hub; or an id of the hub, see `find_folder`.
        download: Whether to download a model of the hub that is not in the cache.

    Raises:
        ExchangeError: The architecture or a field is unknown; tensors are missing, unexpected or
            of a wrong shape; a file is damaged. The message names file and tensor.
        FileError: A file can't be read.
    """
    described = read_description(folder, download=download)
    links, shapes = linked(described.family, described.config)
    sources = {link.source for link in links}
    found = _unwrapped(described.family, _opened(described, _most(described, len(sources))))
    found = _renamed(described, found, sources)
    scales = _kv_scales(described, found)
    found = {name: tensor for name, tensor in found.items() if name not in scales}
    return Pretrained(
        folder=described.folder,
        family=described.family,
        config=described.config,
        given=described.given,
        tensors=_matched(described, links, found),
        links=by_target(links, shapes),
        shapes=shapes,
        kv_scales=scales,
    )


def _kv_scales(
    described: Description, found: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return the tensors with scales of keys and values."""
    told = described.given.get("quantization_config")
    if not isinstance(told, Mapping):
        return {}
    if told.get("kv_cache_scheme") is None and told.get("quant_method") != "modelopt":
        return {}
    from mt_quant import KV_LEAVES  # only for a quantised folder

    return {n: tensor for n, tensor in found.items() if n.rpartition(".")[2] in KV_LEAVES}


def _most(described: Description, sources: int) -> int:
    """Return the largest number of tensors that a folder of a model may have.

    A quantised layer has several tensors, arrays of all experts may be stored one by one, and some
    tensors are ignored.
    """
    config = described.config
    experts = [getattr(layer.feed_forward, "num_experts", 1) for layer in config.layers]
    return min(MAX_TENSORS, _PARTS * (sources + 3 * sum(experts)) + _IGNORED)


def _opened(described: Description, most: int) -> Mapping[str, StoredTensor]:
    """Return the tensors of a folder; quantised ones give dequantised values."""
    tensors = open_tensors(described.folder, most)
    quantization = described.given.get("quantization_config")
    if quantization is None:
        return tensors
    dtype = stored_dtype(described.given) or torch.bfloat16
    if isinstance(quantization, Mapping) and quantization.get("quant_method") == METHOD:
        return with_experts(tensors, dtype)
    from mt_hf.reading.low_bit import layout_of, with_layers  # brings mt-quant

    layout = layout_of(described.given, described.folder / CONFIG)
    return tensors if layout is None else with_layers(tensors, layout, dtype)


def stored_dtype(given: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype that a config.json names, if any."""
    named = given.get("dtype") or given.get("torch_dtype")
    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    return known.get(named) if isinstance(named, str) else None


def linked(family: Family, config: StackConfig) -> tuple[list[Link], dict[str, Sizes]]:
    """Return the links of a model, checked, and the shapes of its parameters and buffers."""
    if isinstance(config, ModelConfig):  # folders have no tensors of training-only modules
        config = replace(config, mtp=None)
    model = config.build(device="meta")
    shapes = {name: tuple(tensor.shape) for name, tensor in saved_tensors(model)}
    links, padding = [], {}
    tokens: dict[int, Range] = {}
    if isinstance(config, ModelConfig) and config.vocab_rows > config.vocab_size:
        rows = (config.vocab_size, config.vocab_rows)
        padding = {
            name: (rows, *((0, size) for size in shapes[name][1:]))
            for name in VOCABULARY
            if name in shapes
        }
        tokens = {0: (0, config.vocab_size)}
    for link in family.links(config):
        box = {**tokens, **link.box} if link.target in padding else link.box
        links.append(replace(link, box=box))
    check_links(links, shapes, family=family.name, padding=padding)
    return links, shapes


def by_target(links: Iterable[Link], shapes: Mapping[str, Sizes]) -> dict[str, list[Link]]:
    """Return the links of each parameter."""
    found: dict[str, list[Link]] = {name: [] for name in shapes}
    for link in links:
        found[link.target].append(link)
    return found


def by_source(family: Family, config: StackConfig, links: Iterable[Link]) -> dict[str, list[Link]]:
    """Return the links of each tensor to write; a copy has the links of the tensor it repeats."""
    found: dict[str, list[Link]] = {}
    for link in links:
        found.setdefault(link.source, []).append(link)
    return found | {copy: found[of] for copy, of in family.repeats(config).items()}


def _unwrapped(family: Family, found: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """Return the tensors without the family's prefix, if all names have it."""
    if not family.wrapper or not all(name.startswith(family.wrapper) for name in found):
        return found
    return {name.removeprefix(family.wrapper): tensor for name, tensor in found.items()}


def _renamed(
    described: Description, found: Mapping[str, StoredTensor], known: Collection[str]
) -> Mapping[str, StoredTensor]:
    """Return the tensors by the names of links, with names of other versions replaced."""
    names: dict[str, StoredTensor] = {}
    for name, tensor in found.items():
        own = name
        for beginning, ours in described.family.renames:
            if own not in known and own.startswith(beginning):
                own = ours + own.removeprefix(beginning)
        for ending, ours in described.family.endings.items():
            if own not in known and own.endswith(ending):
                own = own.removesuffix(ending) + ours
        if own in names:
            first = names[own].name
            raise ExchangeError(
                f"{described.folder}: tensors {first} and {name} are both {own} of the "
                f"{described.family.name} model; remove one of them"
            )
        names[own] = tensor
    return names


def _matched(
    described: Description, links: Sequence[Link], found: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return the linked tensors; missing, unexpected and different tensors are errors."""
    folder, family = described.folder, described.family
    shapes = {link.source: link.shape for link in links}
    copies = {copy: of for copy, of in family.copies if copy not in shapes}
    lines = [f"tensor {name} is missing" for name in shapes if name not in found]
    for name, tensor in found.items():
        if name in shapes:
            if tensor.shape != shapes[name]:
                lines.append(
                    f"{tensor.path.name}: tensor {name} has the shape {list(tensor.shape)}, and "
                    f"{list(shapes[name])} is needed"
                )
            elif tensor.dtype not in DTYPES.values():
                lines.append(
                    f"{tensor.path.name}: tensor {name} is {tensor.dtype}, and one of "
                    f"{', '.join(map(str, DTYPES.values()))} is needed"
                )
        elif name in copies and copies[name] in found:
            if not _equal(tensor, found[copies[name]]):
                lines.append(
                    f"{tensor.path.name}: tensor {name} differs from {copies[name]}, of which it "
                    f"is a copy; where {CONFIG} ties a head that is not, set tie_word_embeddings "
                    "to false there"
                )
        elif not family.ignores(name):
            lines.append(f"{tensor.path.name}: tensor {name} is not expected")
    if lines:
        more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        raise ExchangeError(
            f"{folder}: the tensors are not those of the {family.name} model that its {CONFIG} "
            "describes:\n  " + "\n  ".join(lines[:_SHOWN]) + more
        )
    return {name: found[name] for name in shapes}


def _equal(first: StoredTensor, second: StoredTensor) -> bool:
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return torch.equal(first.map().view(torch.uint8), second.map().view(torch.uint8))
