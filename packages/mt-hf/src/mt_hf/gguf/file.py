"""Writing of a GGUF file, tensor by tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from mt_files import require, writing
from torch import Tensor

from mt_hf.family.error import ExchangeError
from mt_hf.gguf.metadata import context_length, metadata_of
from mt_hf.gguf.tensors import architecture_of, parts_of, rope_factors
from mt_hf.gguf.vocabulary import vocabulary_fields
from mt_hf.writing.source import Source, open_source

if TYPE_CHECKING:
    from mt_tokenizer import Tokenizer

GGUFType: TypeAlias = Literal["f32", "bf16", "f16", "q8_0"]
_FILE_TYPES: Mapping[str, str] = {
    "f32": "ALL_F32",
    "bf16": "MOSTLY_BF16",
    "f16": "MOSTLY_F16",
    "q8_0": "MOSTLY_Q8_0",
}
_ROPE_FACTORS, _ROUTER = "rope_freqs.weight", ".ffn_gate_inp.weight"
_LARGEST: Mapping[str, float] = {"F16": 65504.0, "Q8_0": 127 * 65504.0}


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """How a model's text becomes tokens, how a conversation is written, and where a text ends.

    Attributes:
        tokenizer: The tokenizer.
        ends: Tokens that end a text; none for the tokenizer's own.
        begins: Name of the token that begins a text, for a sentencepiece tokenizer.
        template: The chat template; None without one.
        splitting: llama.cpp's name of the rule by which text is split; None to find it.
    """

    tokenizer: Tokenizer
    ends: Collection[int] = ()
    begins: str | None = None
    template: str | None = None
    splitting: str | None = None


@dataclass(frozen=True, kw_only=True)
class GGUFReport:
    """What a file has.

    Attributes:
        architecture: llama.cpp's name of the architecture.
        num_tensors: Number of tensors.
        context_length: Longest sequence for which llama.cpp computes the model.
        is_split_alike: Whether llama.cpp splits text by the tokenizer's rule; else by one like it,
            which makes other tokens of some texts.
    """

    architecture: str
    num_tensors: int
    context_length: int
    is_split_alike: bool


def export_gguf(
    source: Source,
    path: str | Path,
    text: TextFormat,
    *,
    kind: GGUFType = "bf16",
    ema: bool = False,
) -> GGUFReport:
    """Write a model as a GGUF file, which llama.cpp and engines built on it read.

    Tensors are read, changed and written one at a time. Vectors and the router of experts are fp32;
    with `q8_0`, so are tensors whose rows are no multiple of 32. Rows of the vocabulary without a
    token are left out. The file appears when it is whole.

    Args:
        source: A run folder or its checkpoint, or a checked folder of Hugging Face.
        path: The file to make; it must not exist.
        text: The tokenizer and what belongs to it.
        kind: Format of matrices: `f32`, `bf16`, `f16`, or `q8_0`, 8 bits with an fp16 scale for 32
            weights.
        ema: Whether to write the moving average of a run's weights.

    Returns:
        What the file has.

    Raises:
        ExchangeError: The family has no mapping, llama.cpp would compute another model or make
            other tokens, a value is too large for the format, or the path exists.
        CheckpointError: The checkpoint is damaged.
        FileError: A file can't be read or written.
        MissingExtraError: `gguf` is not installed.
    """
    gguf = require("gguf", "writing a GGUF file")
    path = Path(path)
    if path.is_symlink() or path.exists():
        raise ExchangeError(f"{path} exists; name a file that does not")
    with open_source(source, ema=ema) as tensors:
        config, architecture = tensors.config, architecture_of(tensors.family)
        rows = text.tokenizer.vocab_size  # an engine would draw the padding's tokens
        vocabulary, is_split_alike = vocabulary_fields(
            text.tokenizer,
            rows=rows,
            ends=text.ends,
            begins=text.begins,
            splitting=text.splitting,
        )
        fields: dict[str, Any] = {
            "general.type": "model",
            "general.name": path.stem,
            "general.file_type": int(gguf.LlamaFileType[_FILE_TYPES[kind]]),
            "general.quantization_version": gguf.GGML_QUANT_VERSION,
            **metadata_of(tensors),
            f"{architecture}.vocab_size": rows,
            **vocabulary,
        }
        if text.template is not None:
            fields["tokenizer.chat_template"] = text.template
        parts, factors = parts_of(tensors, rows), rope_factors(config)
        shapes = {name: part.shape for name, part in parts.items()}
        if factors is not None:
            shapes[_ROPE_FACTORS] = tuple(factors.shape)

        kinds = {name: _kind(gguf, kind, name, shape) for name, shape in shapes.items()}

        def values() -> Iterator[Tensor]:
            for part in parts.values():
                yield part.read(tensors)
            if factors is not None:
                yield factors

        path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path) as file:
            writer = _writer(gguf, architecture, fields)
            for name, shape in shapes.items():
                size = _size(gguf, shape, kinds[name])
                writer.add_tensor_info(name, shape, None, size, kinds[name])
            # The library itself opens a path, and this file has no name yet.
            writer.fout, writer.state = [file], gguf.gguf_writer.WriterState.EMPTY
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for (name, kind), each in zip(kinds.items(), values(), strict=True):
                writer.write_tensor_data(_encoded(gguf, name, each, kind))
            writer.flush()
    length = context_length(config, architecture)
    return GGUFReport(
        architecture=architecture,
        num_tensors=len(shapes),
        context_length=length,
        is_split_alike=is_split_alike,
    )


def _writer(gguf: Any, architecture: str, fields: Mapping[str, Any]) -> Any:
    """Return a writer with fields."""
    writer = gguf.GGUFWriter(None, architecture)
    kinds = gguf.GGUFValueType
    # llama.cpp reads unsigned integers; the library would write signed ones.
    own = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}
    for name, value in fields.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, own[type(value)])
    return writer


def _kind(gguf: Any, kind: GGUFType, name: str, shape: tuple[int, ...]) -> Any:
    """Return the format of a tensor."""
    kinds = gguf.GGMLQuantizationType
    whole = len(shape) == 1 or name.endswith(_ROUTER)
    if whole or (kind == "q8_0" and shape[-1] % gguf.GGML_QUANT_SIZES[kinds.Q8_0][0]):
        return kinds.F32
    return kinds[kind.upper()]


def _size(gguf: Any, shape: tuple[int, ...], kind: Any) -> int:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return prod(shape) // block * size


def _encoded(gguf: Any, name: str, values: Tensor, kind: Any) -> Any:
    """Return the bytes of a tensor in a format."""
    largest = _LARGEST.get(kind.name)
    if largest is not None and values.numel() and float(values.abs().max()) > largest:
        raise ExchangeError(
            f"{name} has values beyond {largest:g}, the largest of {kind.name.lower()}; use f32 or "
            "bf16"
        )
    return gguf.quants.quantize(values.contiguous().numpy(), kind)
