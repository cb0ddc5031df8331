"""Adapters as files that Hugging Face PEFT reads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from mt_files import write_file
from mt_parallel_state import Group, gather_from_group
from torch import Tensor, nn

from mt_tensor_parallel.linear import linears
from mt_tensor_parallel.lora import adapter_of, adapters
from mt_tensor_parallel.shards import split_dim

Export = Callable[[str, Tensor, Tensor], Mapping[str, tuple[Tensor, Tensor]]]
_PREFIX = "base_model.model."


@torch.no_grad()
def lora_state(module: nn.Module, *, export: Export | None = None) -> dict[str, Tensor]:
    """Return all adapters with whole matrices, under their names in Hugging Face PEFT.

    The names are `base_model.model.<layer>.lora_A.weight` [rank, in] and `lora_B.weight`
    [out, rank]. Every rank of the layers' groups calls it and gets the same result.

    Args:
        module: A module with adapters.
        export: Takes a layer's name, A [rank, *in] and B [*out, rank], and returns the equivalent
            layers of another model, each with its own A and B. A fused layer becomes several
            layers: all have its A, and each has its rows of B. `None` keeps name and matrices.

    Raises:
        ValueError: An adapter is of parts or experts.
    """
    state: dict[str, Tensor] = {}
    for name, own in adapters(module):
        if own.parts is not None or own.layer.lead_dims:
            raise ValueError(
                f"the adapter of {name} is of parts or experts, which PEFT knows by the layers of "
                "another model: use mt_hf.export_adapter for a checkpoint"
            )
        pair = _whole(own.a, own.layer.group), _whole(own.b, own.layer.group)
        for target, (a, b) in ({name: pair} if export is None else export(name, *pair)).items():
            state[f"{_PREFIX}{target}.lora_A.weight"] = _copy(a.reshape(own.rank, -1))
            state[f"{_PREFIX}{target}.lora_B.weight"] = _copy(b.reshape(-1, own.rank))
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
        module: A module whose adapters have one rank and alpha.
        folder: The folder, made if missing.
        base_model: Name or path of the base model, for PEFT.
        target_modules: Names of the layers that PEFT puts adapters on. By default the exported
            layers: by their last names if all layers with those names have adapters, else by their
            full names.
        export: Maps this module's layers to the base model's, as for `lora_state`, for example
            `mt_hf.export_lora`.
        write: Whether this rank writes; all ranks of the layers' groups call.

    Raises:
        ModuleNotFoundError: safetensors is not installed.
        ValueError: There is no adapter, or adapters differ in rank, alpha or dropout.
    """
    kinds = {(own.rank, own.alpha, own.dropout) for _, own in adapters(module)}
    if len(kinds) != 1:
        what = "no adapter" if not kinds else f"adapters of {len(kinds)} kinds"
        raise ValueError(f"the module has {what}; PEFT's files hold one (rank, alpha, dropout)")
    state = lora_state(module, export=export)
    if not write:
        return
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise ModuleNotFoundError("saving adapters needs: pip install safetensors numpy") from error
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
    adapted = {_leaf(name) for name, _ in adapters(module)}
    plain = {_leaf(name) for name, layer in linears(module) if adapter_of(layer) is None}
    return exported if plain & adapted else {_leaf(name) for name in exported}


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _whole(param: nn.Parameter, group: Group) -> Tensor:
    dim = split_dim(param)
    return param.detach() if dim is None else gather_from_group(param.detach(), group, dim=dim)


def _copy(matrix: Tensor) -> Tensor:
    """Return a copy for safetensors: contiguous, and no tensor twice (layers may share A)."""
    return matrix.cpu().clone(memory_format=torch.contiguous_format)
