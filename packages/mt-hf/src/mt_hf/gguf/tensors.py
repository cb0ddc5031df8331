"""A model's tensors by the names that llama.cpp gives them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from mt_files import require
from mt_model import (
    AttentionConfig,
    Llama3Scaling,
    ModelConfig,
    Rotary,
)
from torch import Tensor

from mt_hf.family.decoder import first_mixer
from mt_hf.family.error import ExchangeError
from mt_hf.writing.source import NamedTensors

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "llama",
        "mistral": "llama",
        "mixtral": "llama",
        "qwen2": "qwen2",
        "qwen3": "qwen3",
        "gemma2": "gemma2",
        "gemma3_text": "gemma3",
    }
)
GEMMAS = ("gemma2", "gemma3")
_VOCABULARY = ("token_embd.weight", "output.weight")
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A tensor of a GGUF file.

    Attributes:
        sources: Tensors of the folder of Hugging Face; several are stacked.
        shape: Shape of the tensor.
        change: Function of the stacked values; None leaves them.
    """

    sources: Sequence[str]
    shape: tuple[int, ...]
    change: Callable[[Tensor], Tensor] | None = None

    def read(self, tensors: NamedTensors) -> Tensor:
        """Return the values in fp32."""
        read = [tensors.read(name) for name in self.sources]
        values = torch.stack(read) if len(self.shape) > read[0].dim() else read[0]
        return values if self.change is None else self.change(values)


def architecture_of(family: str) -> str:
    """Return llama.cpp's name of a family's architecture.

    Raises:
        ExchangeError: The family has no mapping.
    """
    if family not in ARCHITECTURES:
        raise ExchangeError(
            f"the family {family} has no mapping to GGUF; those of "
            f"{', '.join(ARCHITECTURES)} have one"
        )
    return ARCHITECTURES[family]


def parts_of(tensors: NamedTensors, rows: int) -> dict[str, Part]:
    """Return the tensors of the file by name, in the order of the folder.

    Args:
        tensors: The model's tensors.
        rows: Number of rows of the embedding and the head; further ones are for no token.

    Raises:
        ExchangeError: The architecture has no name for a tensor.
    """
    gguf = require("gguf", "a GGUF file")
    architecture = architecture_of(tensors.family)
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, tensors.config.num_layers)
    sources: dict[str, list[str]] = {}
    for source in tensors.shapes:
        name = names.get_name(_EXPERT.sub(".experts.", source), try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ExchangeError(
                f"llama.cpp's architecture {architecture} has no tensor for {source}, so the model "
                "can't be a GGUF file"
            )
        sources.setdefault(name, []).append(source)
    mixer, parts = first_mixer(tensors.config), {}
    for name, each in sources.items():
        shape = tensors.shapes[each[0]]
        stacked = (len(each), *shape) if _EXPERT.search(each[0]) else shape
        change = _change(architecture, name, mixer)
        if name in _VOCABULARY:
            stacked, change = (rows, *shape[1:]), lambda values: values[:rows]
        parts[name] = Part(sources=sorted(each, key=_expert), shape=stacked, change=change)
    return parts


def _expert(source: str) -> int:
    found = _EXPERT.search(source)
    return 0 if found is None else int(re.findall(r"\d+", found[0])[0])


def _change(
    architecture: str, name: str, mixer: AttentionConfig
) -> Callable[[Tensor], Tensor] | None:
    """Return the change of a tensor's values, if the architecture stores others."""
    if architecture in GEMMAS and name.endswith("norm.weight"):
        return lambda values: values + 1
    if architecture == "llama" and ".attn_q." in name:
        return lambda values: _neighbours(values, mixer.num_heads)
    if architecture == "llama" and ".attn_k." in name:
        return lambda values: _neighbours(values, mixer.num_kv_heads)
    return None


def _neighbours(values: Tensor, heads: int) -> Tensor:
    """Put the two channels of each pair that turns beside each other, in each head."""
    halves = values.view(heads, 2, -1, *values.shape[1:])
    return halves.transpose(1, 2).reshape(values.shape)


def rope_factors(config: ModelConfig) -> Tensor | None:
    """Return the divisors of the angles of Llama 3's scaling, `rope_freqs.weight`."""
    mixer = first_mixer(config)
    rope = mixer.rope
    if rope is None or not isinstance(rope.scaling, Llama3Scaling):
        return None
    length = config.max_sequence_length
    plain = Rotary(replace(rope, scaling=None), mixer.head_dim).angles(length)
    scaled = Rotary(rope, mixer.head_dim).angles(length)
    return (torch.tensor(plain, dtype=torch.float64) / torch.tensor(scaled)).float()
