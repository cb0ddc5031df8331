"""Low-rank adapters on the linear layers of a stage."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TypeAlias

from mt_files import did_you_mean, shorten
from mt_parallel_state import MatrixSpec, sharding_of
from mt_tensor_parallel import GemmLayer, LoraAdapter, LoraOptions, freeze_around_lora
from torch import nn

from mt_model.block.initial import Uniform, start_from
from mt_model.stack.lora_config import LoraConfig

Parts: TypeAlias = tuple[int, ...] | None
_SHOWN = 8


def add_adapters(stage: nn.Module, config: LoraConfig, *, seed: int) -> None:
    """Put adapters on the layers of a stage that a config names, and freeze everything else.

    Args:
        stage: The stage, on the meta device; it may have none of the layers.
        config: The adapters.
        seed: Seed of the masks of dropout.
    """
    options = LoraOptions(rank=config.rank, alpha=config.alpha, dropout=config.dropout, seed=seed)
    for name, parts in adapted_layers(stage, config).items():
        layer = stage.get_submodule(name)
        assert isinstance(layer, GemmLayer), "only these are found"  # noqa: S101
        adapter = LoraAdapter(layer, options, name=name, parts=parts)
        start_from(adapter.a, Uniform(low=-adapter.bound, high=adapter.bound))
        start_from(adapter.b, "zeros")
    freeze_around_lora(stage)


def adapted_layers(stage: nn.Module, config: LoraConfig) -> dict[str, Parts]:
    """Return the layers that get adapters by name, with the parts of fused ones."""
    found: dict[str, Parts] = {}
    for name, matrix in _candidates(stage).items():
        names = [name, *(f"{name}.{part}" for part in matrix.part_names)]
        hits = [_is_named(each, config) for each in names]
        parts = tuple(i for i, hit in enumerate(hits[1:]) if hit or hits[0])
        if any(hits):
            found[name] = parts or None
    return found


def unknown_layers(model: nn.Module, config: LoraConfig) -> dict[int, str]:
    """Return the patterns of a config without a layer, with similar names, by pattern index.

    Args:
        model: The whole model.
        config: The adapters.
    """
    names: list[str] = []
    for name, matrix in _candidates(model).items():
        names += [name, *(f"{name}.{part}" for part in matrix.part_names)]
    found: dict[int, str] = {}
    for index, pattern in enumerate(config.layers or ()):
        if not any(fnmatchcase(name, pattern) for name in names):
            ends = sorted({"*." + name.split(".", 2)[-1] for name in names})
            hint = did_you_mean(pattern, ends) or did_you_mean(pattern, names)
            hint = hint or f"There are {', '.join(ends[:_SHOWN])}"
            found[index] = f"{shorten(pattern)} is the name of no linear layer of a block. {hint}"
    return found


def _candidates(stage: nn.Module) -> dict[str, MatrixSpec]:
    found: dict[str, MatrixSpec] = {}
    for name, layer in stage.named_modules():
        if isinstance(layer, GemmLayer) and name.startswith("layers."):
            found[name] = sharding_of(layer.weight).matrix or MatrixSpec()
    return found


def _is_named(name: str, config: LoraConfig) -> bool:
    if config.layers is None:
        return ".experts." not in name
    return any(fnmatchcase(name, pattern) for pattern in config.layers)
