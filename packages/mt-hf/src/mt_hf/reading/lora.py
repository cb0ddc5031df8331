"""Adapters of Hugging Face PEFT as adapters of our layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from mt_files import Checks, bind, read_json, shorten
from mt_model import Sizes, Stack, StackConfig
from mt_parallel_state import sharding_of
from torch import Tensor

from mt_hf.family.error import ExchangeError
from mt_hf.family.family import Family
from mt_hf.family.link import Link, inside
from mt_hf.reading.files import MAX_JSON, root_of
from mt_hf.reading.pretrained import Pretrained, linked
from mt_hf.reading.registry import find_family
from mt_hf.reading.tensors import tensors_in

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MOST = 1 << 17  # tensors of an adapter
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_EXPERTS = re.compile(r"(.+)\.(?:mlp|block_sparse_moe)\.experts\.\d+\..+")
# Parameters of transformers' layers of experts, in the order in which PEFT wraps them.
PARAMETERS = MappingProxyType({"up": "gate_up_proj", "down": "down_proj"})
_REGEX = re.compile(r"[*+?()\[\]{}|\\^$]")
# Fields that say how the adapter was made, or which layers have one, as the tensors do.
_IGNORED = frozenset([
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "target_modules", "exclude_modules", "lora_dropout", "fan_in_fan_out",
    "layers_to_transform", "layers_pattern", "megatron_core", "megatron_config", "eva_config",
    "qalora_group_size", "runtime_config",
])  # fmt: skip
# Starts of these kinds change the base model's weights too.
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, kw_only=True)
class LoraFields:
    """Fields of adapter_config.json that change numbers.

    Attributes:
        r: Rank of the adapters.
        lora_alpha: Their products are scaled by `lora_alpha / r`.
        use_rslora: Whether they are scaled by `lora_alpha / sqrt(r)` instead.
        rank_pattern: Other ranks of layers, by the end of their names.
        alpha_pattern: Other values of `lora_alpha`, likewise.
        peft_type: Kind of the adapter.
        bias: Which biases are trained too.
        init_lora_weights: How the matrices started.
        target_parameters: Ends of the names of parameters with adapters, of all experts of a layer.
    """

    r: int = 8
    lora_alpha: float = 8.0
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    peft_type: str = "LORA"
    bias: str = "none"
    init_lora_weights: bool | str | None = True
    target_parameters: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "r")
        for name, only in {"peft_type": "LORA", "bias": "none"}.items():
            if getattr(self, name) != only:
                checks.add(name, f"{shorten(getattr(self, name))} is not read, only {only}")
        if self.init_lora_weights not in _STARTS:
            checks.add(
                "init_lora_weights",
                f"{shorten(self.init_lora_weights)} changes the base model's weights; convert the "
                "adapter with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)",
            )
        for name in ("rank_pattern", "alpha_pattern"):
            for key in getattr(self, name):
                if _REGEX.search(key):
                    checks.add(name, f"{shorten(key)} is a regular expression; name the layers")
        checks.done()

    def scale(self, name: str, rank: int) -> float:
        """Return the factor of a layer's product.

        Raises:
            ExchangeError: Its matrices have another rank.
        """
        wanted = _by_name(self.rank_pattern, name, self.r)
        if rank != wanted:
            raise ExchangeError(f"{CONFIG}: the rank of {name} is {wanted}, and lora_A has {rank}")
        alpha = _by_name(self.alpha_pattern, name, self.lora_alpha)
        return alpha / (rank**0.5 if self.use_rslora else rank)

    def targets(self, parameter: str) -> bool:
        """Return whether a parameter has an adapter of its own."""
        return any(f".{parameter}".endswith(f".{end}") for end in self.target_parameters or ())


def read_lora(
    source: str | Path | Mapping[str, Tensor], model: Stack[Any], *, alpha: float | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Read a LoRA adapter of Hugging Face PEFT for a model's layers.

    It is the inverse of `mt_tensor_parallel.save_lora` with `export_lora`, for every family. Where
    our model fuses several layers, their adapters become one adapter. Its rank is the sum of their
    ranks; adapters that share A count once.

    Args:
        source: A folder with adapter_config.json and adapter_model.safetensors; or tensors by their
            names in PEFT, for example from `mt_tensor_parallel.lora_state`. The names contain the
            layers' names in transformers, or in our model.
        model: The model, or a stage of it, with `origin` if it was read from a folder.
        alpha: Products of given tensors are scaled by alpha / rank; by 1 if None.

    Returns:
        A and B of each adapted layer of the whole model, with the scale in B.

    Shape:
        A: [rank, in]; B: [out, rank], with all dims of each side of our weight in one.

    Raises:
        ExchangeError: A field or a tensor is not supported, or no layer of the model fits it; the
            message names it.
        FileError: A file can't be read.
    """
    if isinstance(source, Mapping):
        pairs = _pairs(source)
        scale: Callable[[str, int], float] = lambda _, rank: 1 if alpha is None else alpha / rank  # noqa: E731
    elif alpha is not None:
        raise ExchangeError(f"alpha={alpha} is for tensors; a folder says it in its {CONFIG}")
    else:
        pairs, fields = stored_pairs(Path(source))
        scale = fields.scale
    names = _Names(model)
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, (a, b) in pairs.items():
        factor = scale(name, a.shape[0])
        b = b * factor
        if not (a.isfinite().all() and b.isfinite().all()):
            raise ExchangeError(f"{name}: lora_A, or lora_B times {factor}, is not finite")
        for layer, own in names.parts(name, a, b):
            join_pair(found.setdefault(layer, []), *own)
    return {
        layer: (torch.cat([a for a, _ in own]), torch.cat([b for _, b in own], dim=1))
        for layer, own in found.items()
    }


def stored_pairs(
    folder: Path, *, experts: bool = False
) -> tuple[dict[str, tuple[Tensor, Tensor]], LoraFields]:
    """Return A and B of each layer of a PEFT folder, in fp32 or wider, and its fields.

    Args:
        folder: The folder.
        experts: Whether adapters of all experts of a layer are read.

    Raises:
        ExchangeError: A field or a tensor is not supported.
        FileError: A file can't be read.
    """
    stored, fields = _stored(folder), _fields(folder)
    if fields.target_parameters and not experts:
        raise ExchangeError(
            f"{folder / CONFIG}: is no adapter that mt reads:\n  target_parameters: "
            f"{shorten(fields.target_parameters)} is not supported; merge the adapter into the "
            "model with PEFT"
        )
    return _pairs(stored), fields


def peft_name(family: Family, source: str) -> str:
    """Return the name in PEFT of the layer of a stored tensor."""
    name = source.removesuffix(".weight")
    for beginning, ours in family.renames:
        if name.startswith(ours):
            return beginning + name.removeprefix(ours)
    return f"{family.wrapper}{name}"


def experts_module(family: Family, source: str) -> str | None:
    """Return the name in PEFT of the module of all experts, from a stored tensor of one of them."""
    match = _EXPERTS.fullmatch(source)
    return None if match is None else f"{family.wrapper}{match[1]}.mlp.experts"


def _fields(folder: Path) -> LoraFields:
    path = folder / CONFIG
    given = read_json(path, limit=MAX_JSON, within=root_of(folder))
    if not isinstance(given, dict):
        raise ExchangeError(f"{path}: is no mapping of fields; restore it")
    own = LoraFields.__dataclass_fields__
    bound = bind(LoraFields, {name: value for name, value in given.items() if name in own})
    problems = [str(problem) for problem in bound.problems]
    problems += [
        f"{name}: {shorten(value)} is not supported; merge the adapter into the model with PEFT"
        for name, value in given.items()
        if name not in own and name not in _IGNORED and value
    ]
    if problems or bound.value is None:
        raise ExchangeError(f"{path}: is no adapter that mt reads:\n  " + "\n  ".join(problems))
    return bound.value


def _stored(folder: Path) -> dict[str, Tensor]:
    if not (folder / WEIGHTS).exists():
        raise ExchangeError(
            f"{folder} has no {WEIGHTS}; give the folder of PEFT's save_pretrained with safetensors"
        )
    return {stored.name: stored.map() for stored in tensors_in(folder, WEIGHTS, _MOST)}


def _pairs(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B of each layer."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, x in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or x.dim() != 2 or not x.is_floating_point():
            raise ExchangeError(
                f"tensor {name} {list(x.shape)} is no lora_A or lora_B matrix of a linear layer; "
                "DoRA, embeddings, biases and modules_to_save are not supported"
            )
        found.setdefault(match[1], {})[match[2]] = x.detach()
    for name, both in found.items():
        fits = len(both) == 2 and both["A"].shape[0] == both["B"].shape[1] > 0
        if not fits:
            shapes = {f"lora_{side}": list(x.shape) for side, x in both.items()}
            raise ExchangeError(f"{name} needs lora_A [rank, in] and lora_B [out, rank]: {shapes}")
    if not found:
        raise ExchangeError("the adapter has no tensor; give lora_A and lora_B of each layer")
    wide = {name: {side: _wide(x) for side, x in both.items()} for name, both in found.items()}
    return {name: (both["A"], both["B"]) for name, both in wide.items()}


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < 4 else x


class _Names:
    """What the names of an adapter's layers mean in a model.

    Args:
        model: The model.
    """

    def __init__(self, model: Stack[Any]) -> None:
        config, origin = model.config, model.origin
        self._params = dict(config.build(device="meta").named_parameters())
        self._renames: Sequence[tuple[str, str]] = ()
        self._links: dict[str, list[Link]] = {}
        for link in self._linked(config, origin):
            self._links.setdefault(link.source, []).append(link)

    def _linked(self, config: StackConfig, origin: object | None) -> list[Link]:
        if isinstance(origin, Pretrained):
            self._renames = origin.family.renames
            return [link for links in origin.links.values() for link in links]
        try:
            family, _ = find_family(config)
        except ExchangeError:  # a model of no family has our names alone
            return []
        return linked(family, config)[0]

    def parts(self, name: str, a: Tensor, b: Tensor) -> list[tuple[str, tuple[Tensor, Tensor]]]:
        """Return A and B of our layers that do what an adapter of a named layer does."""
        for beginning, ours in self._renames:
            if f"{name}.weight" not in self._links and name.startswith(beginning):
                name = ours + name.removeprefix(beginning)
        links = self._links.get(f"{name}.weight", [])
        if f"{name}.weight" in self._params:
            layers, pairs = [name], [(a, b)]
        else:
            layers = [link.target.removesuffix(".weight") for link in links]
            pairs = [self._placed(link, a, b) for link in links if len(link.shape) == 2]
        dense = all(each.startswith("layers.") and ".experts." not in each for each in layers)
        if not layers or not dense or len(pairs) < len(layers):
            raise ExchangeError(
                f"the adapter has a layer {name}, which is no dense linear layer of the model; "
                "adapters of embeddings, heads and experts are not supported"
            )
        return list(zip(layers, pairs, strict=True))

    def _placed(self, link: Link, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return A and B for our weight, which has the rows and columns of a link elsewhere."""
        target = self._params[link.target]
        matrix, shape = sharding_of(target).matrix, tuple(target.shape)
        if matrix is None:
            raise ExchangeError(f"{link.source} is no matrix of a linear layer")
        cut = len(shape) - matrix.in_dims
        whole, rows, columns = sources_of(link, shape, cut)
        if (b.shape[0], a.shape[1]) != whole:
            raise ExchangeError(
                f"{link.source} has {whole[0]} outputs and {whole[1]} inputs, and its adapter has "
                f"lora_A {list(a.shape)} and lora_B {list(b.shape)}"
            )
        box = inside(link.area(shape), tuple((0, size) for size in shape))
        own_rows, own_columns = (
            matrix_index(shape[:cut])[box[:cut]],
            matrix_index(shape[cut:])[box[cut:]],
        )
        placed_a = a.new_zeros(a.shape[0], prod(shape[cut:]))
        placed_a[:, own_columns.flatten()] = a[:, columns]
        placed_b = b.new_zeros(prod(shape[:cut]), b.shape[1])
        placed_b[own_rows.flatten()] = b[rows]
        return placed_a, placed_b


def sources_of(link: Link, shape: Sizes, cut: int) -> tuple[Sizes, Tensor, Tensor]:
    """Return a linked layer's sizes, the outputs that our box has, and the inputs."""
    firsts = torch.arange(link.shape[0])[:, None].expand(link.shape)
    seconds = torch.arange(link.shape[1]).expand(link.shape)
    windows, whole = [link.window(index, shape) for index in (firsts, seconds)], link.shape
    if not _is_constant(windows[1], range(cut)):  # the folder stores [in, out]
        windows, whole = windows[::-1], whole[::-1]
    outs, ins = windows
    if not (_is_constant(ins, range(cut)) and _is_constant(outs, range(cut, len(shape)))):
        raise ExchangeError(f"{link.source} mixes outputs and inputs, so it takes no adapter")
    return whole, outs[(..., *(0,) * (len(shape) - cut))].flatten(), ins[(0,) * cut].flatten()


def _is_constant(index: Tensor, dims: range) -> bool:
    return all(index.shape[dim] == 1 or index.stride(dim) == 0 for dim in dims)


def matrix_index(shape: Sizes) -> Tensor:
    """Return the row-major index of each element of a shape."""
    return torch.arange(prod(shape)).view(shape)


def join_pair(known: list[tuple[Tensor, Tensor]], a: Tensor, b: Tensor) -> None:
    """Add a pair to a layer's pairs; if one has the same A, add B to the B of that pair."""
    for own, other in known:
        if own.shape == a.shape and torch.equal(own, a):
            other += b
            return
    known.append((a, b))


def _by_name(pattern: Mapping[str, Any], name: str, usual: Any) -> Any:
    """Return the value of the first key that a name ends with."""
    return next((v for k, v in pattern.items() if f".{name}".endswith(f".{k}")), usual)
