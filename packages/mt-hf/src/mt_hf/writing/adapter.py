"""The adapters of a run as files of Hugging Face PEFT, for the model in transformers.

It needs mt-ckpt, from the extra `mt-hf[cli]`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from mt_files import write_file
from mt_model import StackConfig
from mt_tensor_parallel import LoraAdapter, lora_parts
from torch import Tensor

from mt_hf.family.error import ExchangeError
from mt_hf.family.family import Family
from mt_hf.family.link import Link, inside
from mt_hf.reading.adapted import AdaptedWeights, open_adapted
from mt_hf.reading.description import read_description
from mt_hf.reading.lora import (
    CONFIG,
    PARAMETERS,
    WEIGHTS,
    experts_module,
    join_pair,
    matrix_index,
    peft_name,
    sources_of,
)
from mt_hf.reading.pretrained import by_target, linked
from mt_hf.reading.registry import find_family
from mt_hf.writing.checkpoint import source_of
from mt_hf.writing.files import check_free, new_folder

_PREFIX = "base_model.model."


def export_adapter(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    family: str | None = None,
    ema: bool = False,
    base: str | None = None,
) -> None:
    """Write the adapters of a run as adapter_model.safetensors and adapter_config.json of PEFT.

    PEFT puts them on the base in transformers, and `read_lora` on a model of ours. Each matrix of a
    fused layer is a layer there. Adapters of experts are of the arrays of all experts that
    transformers 5 has (`target_parameters`).

    Args:
        checkpoint: A run folder, its folder of checkpoints, or a step directory.
        folder: The folder to make; it must not exist, or be empty.
        family: Name of the family; by default the base's family, or the first with such a model.
        ema: Whether to write the moving average of the adapters.
        base: Name of the base in adapter_config.json; by default the folder of the run's base.

    Raises:
        ExchangeError: The run has no adapters, or its model is of no known family, or transformers
            has no place for an adapter; or `folder` exists. Nothing was written.
        CheckpointError: The checkpoint is damaged.
        FileError: A file can't be read or written.
    """
    from mt_ckpt import SavedModel, open_arrays
    from safetensors.torch import save

    check_free(Path(folder))
    source, run = source_of(Path(checkpoint))
    if family is None and run.hugging_face.is_dir():
        family = read_description(run.hugging_face).family.name
    with open_arrays(source) as arrays:
        saved = arrays.manifest.metadata_as(SavedModel)
        if saved.adapters is None:
            raise ExchangeError(f"{arrays.path} has no adapters; train with lora, or export it all")
        config = StackConfig.from_dict(saved.model)
        found, _ = find_family(config, family)
        with open_adapted(arrays, saved, ema=ema) as adapted:
            written = _Written(found, config, adapted)
            for name in adapted.adapters:
                written.add(name)
    plain = written.config(base or saved.adapters.base)
    with new_folder(Path(folder)) as made:
        write_file(made / WEIGHTS, save(written.tensors(), metadata={"format": "pt"}))
        write_file(made / CONFIG, json.dumps(plain, indent=2) + "\n")


@dataclass
class _Written:
    """The content of a written adapter folder.

    Attributes:
        family: The model's family.
        model: Config of the model.
        adapted: The adapters.
        pairs: A and B of each layer in transformers; those that share A are one pair.
        experts: Adapters of experts, by the module of the experts and its parameter.
    """

    family: Family
    model: StackConfig
    adapted: AdaptedWeights
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    experts: dict[str, dict[str, tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        links, shapes = linked(self.family, self.model)
        self._links: Mapping[str, list[Link]] = by_target(links, shapes)

    @property
    def _any(self) -> LoraAdapter:
        return next(iter(self.adapted.adapters.values()))

    def add(self, layer: str) -> None:
        """Add the adapter of one of our layers."""
        adapter, (a, b) = self.adapted.adapters[layer], self.adapted.matrices(layer)
        if adapter.layer.lead_dims:
            self._add_experts(layer, a, b)
            return
        shape, matrix = self.adapted.shapes[f"{layer}.weight"], adapter.matrix
        cut = len(shape) - matrix.in_dims
        rows = matrix_index(shape[:cut])
        parts = [rows]
        if adapter.parts is not None and matrix.part_dim is not None:
            parts = list(rows.split(matrix.parts, matrix.part_dim))
        for part, own, other in lora_parts(a, b, matrix, adapter.parts):
            for link in self._links[f"{layer}.weight"]:
                matrices = own.flatten(1), other.flatten(0, -2)
                self._add_part(link, shape, cut, parts[part].flatten(), matrices)

    def _add_part(
        self,
        link: Link,
        shape: tuple[int, ...],
        cut: int,
        rows: Tensor,
        matrices: tuple[Tensor, Tensor],
    ) -> None:
        """Add the rows of a part that belong to a linked layer, if there are any."""
        whole, outs, ins = sources_of(link, shape, cut)
        box = inside(link.area(shape), tuple((0, size) for size in shape))
        place = torch.full((prod(shape[:cut]),), -1)
        place[matrix_index(shape[:cut])[box[:cut]].flatten()] = outs
        own, (a, b) = place[rows], matrices
        if not (own >= 0).any():
            return
        columns = matrix_index(shape[cut:])[box[cut:]].flatten()
        placed_a, placed_b = a.new_zeros(a.shape[0], whole[1]), b.new_zeros(whole[0], b.shape[1])
        placed_a[:, ins] = a[:, columns]
        placed_b[own[own >= 0]] = b[own >= 0]
        name = peft_name(self.family, link.source)
        join_pair(self.pairs.setdefault(name, []), placed_a, placed_b)

    def _add_experts(self, layer: str, a: Tensor, b: Tensor) -> None:
        link = self._links[f"{layer}.weight"][0]
        module = experts_module(self.family, link.source)
        if module is None:
            raise ExchangeError(
                f"the adapter of {layer} has no place in PEFT for a {self.family.name} model; "
                "export merged weights"
            )
        pair = a.flatten(0, 1), b.flatten(1, -2).permute(1, 2, 0).flatten(1)
        self.experts.setdefault(module, {})[PARAMETERS[layer.rpartition(".")[2]]] = pair

    def _joined(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {
            name: (torch.cat([a for a, _ in own]), torch.cat([b for _, b in own], 1))
            for name, own in self.pairs.items()
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return all matrices by their names in PEFT."""
        named = self._joined()
        for module, own in self.experts.items():
            order = [own[name] for name in PARAMETERS.values() if name in own]
            for depth, pair in enumerate(reversed(order)):  # the last one is the outermost
                named[module + ".base_layer" * depth] = pair
        found: dict[str, Tensor] = {}
        for name, (a, b) in named.items():
            found[f"{_PREFIX}{name}.lora_A.weight"] = a.contiguous().clone()
            found[f"{_PREFIX}{name}.lora_B.weight"] = b.contiguous().clone()
        return found

    def config(self, base: str) -> dict[str, Any]:
        """Return the fields of adapter_config.json."""
        ranks = {name: a.shape[0] for name, (a, _) in self._joined().items()}
        usual = self._any.rank if self.experts else Counter(ranks.values()).most_common(1)[0][0]
        scale = self._any.scale
        others = {name: rank for name, rank in ranks.items() if rank != usual}
        parameters = [f"{module}.{name}" for module, own in self.experts.items() for name in own]
        return {
            "peft_type": "LORA",
            "base_model_name_or_path": base,
            "r": usual,
            "lora_alpha": scale * usual,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "target_modules": sorted(ranks),
            "target_parameters": sorted(parameters) or None,
            "rank_pattern": others,
            "alpha_pattern": {name: scale * rank for name, rank in others.items()},
            "task_type": "CAUSAL_LM",
        }
