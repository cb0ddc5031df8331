"""A folder of finished layers, from which an interrupted quantisation continues."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from mt_files import FileError, parse_json, read_bytes, remove_temporaries, to_plain, write_file
from mt_parallel_state import group_rank, group_size
from torch import Tensor

from mt_quant.error import QuantizationError
from mt_quant.layers.shape import LinearShape
from mt_quant.rules.rule import Decision

_VERSION = "mt-quant layer 1"
_SAMPLES = 1 << 16
_MAX_HEADER = 1 << 20


class LayerFolder:
    """One safetensors file for each finished layer and rank, with a record of its origin.

    A file is complete or absent. It is reused if the rule, the sizes and a sample of the weight's
    bytes are unchanged; calibration data is not compared.

    Args:
        path: Path of the folder, created if it is missing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        remove_temporaries(self.path)

    def save(
        self, name: str, tensors: Mapping[str, Tensor], made_of: Mapping[str, str], at: LinearShape
    ) -> None:
        """Write a finished layer.

        Raises:
            FileError: The file can't be written.
        """
        from safetensors.torch import save  # only folders need it

        whole = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
        write_file(self._file(name, at), save(whole, {"version": _VERSION, **made_of}))

    def load(
        self, name: str, made_of: Mapping[str, str], at: LinearShape
    ) -> dict[str, Tensor] | None:
        """Return the tensors of a finished layer; None if there is no file.

        Raises:
            FileError: The file can't be read, or is damaged.
            QuantizationError: It was made from another rule or weight.
        """
        path = self._file(name, at)
        if not path.exists():
            return None
        most = 8 * at.rows * at.columns + _MAX_HEADER  # as if it were fp64
        content = read_bytes(path, limit=most, within=self.path)
        found = _metadata(content, path)
        expected = {"version": _VERSION, **made_of}
        for key, value in expected.items():
            if found.get(key) != value:
                raise QuantizationError(
                    f"{path} was made with another {key} ({str(found.get(key))[:200]}, now "
                    f"{value[:200]}); use an empty folder, or remove the file"
                )
        return _tensors(content, path)

    def _file(self, name: str, at: LinearShape) -> Path:
        part = f"-{group_rank(at.group)}of{group_size(at.group)}" if at.split else ""
        return self.path / f"{quote(name, safe='') or 'root'}{part}.safetensors"


def origin_of(weight: Tensor, decision: Decision, shape: LinearShape) -> dict[str, str]:
    """Return a layer's origin as text: its rule, its sizes and a hash of sampled bytes."""
    values = weight.detach().reshape(-1)
    sample = values[:: max(1, values.numel() // _SAMPLES)].contiguous().cpu()
    plain: dict[str, Any] = to_plain(decision)
    del plain["rule"]  # the index of the rule does not matter
    return {
        "decision": json.dumps(plain, sort_keys=True),
        "shape": json.dumps(shape.describe(), sort_keys=True),
        "weight": hashlib.sha256(sample.view(torch.uint8).numpy().tobytes()).hexdigest(),
    }


def _metadata(content: bytes, path: Path) -> dict[str, Any]:
    size = int.from_bytes(content[:8], "little") if len(content) >= 8 else math.inf
    if size > min(_MAX_HEADER, len(content) - 8):
        raise FileError(path, "is no complete safetensors file; remove it to make it again")
    header = parse_json(content[8 : 8 + int(size)], name=path)
    found = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(found, dict):
        raise FileError(path, "has no record of its origin; remove it to make it again")
    return found


def _tensors(content: bytes, path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(content)
    except SafetensorError as error:
        raise FileError(path, f"is damaged ({error}); remove it to make it again") from error
