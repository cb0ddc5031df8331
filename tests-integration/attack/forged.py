"""Folders as Megatron-core writes them, with a lie or damage in them; and damage of any file.

They are built of the classes that their writer uses, so that the lie is the only fault.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import pickletools
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from world import files_of, replace_with

SIZES = (0, 1, 2, 3, 7, 2**20, 2**31, 2**32 + 1, 2**40, 2**61, 2**62 - 1, 2**63, -1, -(2**40))
ODD = (*SIZES, None, True, 0.5, "8", "x" * 5000, [], {}, [2**40] * 3, "../../x", 10**400)
NAMES = ("", ".", "..", "../x", "../../etc/x", "/etc/passwd", "a/../../b", "\0", "a\0b", "\ud800")
PATHS = (
    *NAMES,
    "x" * 5000,
    ".metadata",
    "common.pt",
    "link",
    "sub/../../out",
    "/dev/zero",
    "a/" * 900,
)
TENSOR_NAMES = (*NAMES, "x" * 300_000, "a/" * 50_000, "model//x", "decoder", "é" * 300, "zarr.json")


def spoil_file(path: Path, rng: random.Random, scratch: Path) -> str:
    """Damage a file, or put something else there; return how."""
    content = path.read_bytes()
    hows = ["flip", "flip", "flips", "cut", "longer", "empty", "gone", "part", "swap", "huge"]
    how = rng.choice([*hows, "fifo", "folder", "device", "secret", "link"])
    if how in ("fifo", "folder", "device", "secret", "link"):
        replace_with(path, how, scratch)
        return how
    damaged = bytearray(content)
    if how in ("flip", "flips") and content:
        for _ in range(1 if how == "flip" else rng.randrange(2, 40)):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del damaged[rng.randrange(len(damaged) or 1) :]
    elif how == "longer":
        damaged += rng.randbytes(rng.choice((1, 9, 5000)))
    elif how == "empty":
        damaged.clear()
    elif how == "part" and content:
        at, size = rng.randrange(len(content)), rng.choice((1, 8, 512))
        damaged[at : at + size] = rng.randbytes(size)
    elif how == "swap":
        other = rng.choice(files_of(path.parent))
        damaged[:] = other.read_bytes()
        other.write_bytes(content)
    path.write_bytes(damaged)
    if how == "huge":
        os.truncate(path, 2**40)
    elif how == "gone":
        path.unlink()
    return how


class Payload:
    """An object whose pickle calls a function."""

    def __init__(self, call: Callable[..., Any], *arguments: object) -> None:
        self.parts = (call, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.parts


def payload(rng: random.Random) -> Payload:
    """Return what would leave a folder `ran`, or be heard."""
    import torch

    return rng.choice(
        (
            Payload(exec, "import os; os.mkdir('ran')"),
            Payload(eval, "__import__('os').mkdir('ran')"),
            Payload(os.mkdir, "ran"),
            Payload(os.system, "mkdir ran"),
            Payload(open, "ran", "w"),
            Payload(__import__, "antigravity"),
            Payload(torch.load, "common.pt"),
            Payload(torch.hub.load, "a/b", "c"),
            Payload(torch.storage._load_from_bytes, b"x"),
        )
    )


@dataclass(kw_only=True)
class Piece:
    """A box of a tensor, where it is said to be, and the archive that holds it."""

    offsets: tuple[Any, ...]
    sizes: tuple[Any, ...]
    path: Any = "__0_0.distcp"
    shift: int = 0
    longer: int = 0
    archive: bytes = b""


@dataclass(kw_only=True)
class Lies:
    """What a forged description says of a tensor."""

    name: Any
    shape: tuple[Any, ...]
    dtype: Any
    pieces: list[Any]


def tensors() -> dict[str, Any]:
    """Return the tensors of a GPTModel of one layer, by Megatron's names."""
    import torch

    torch.manual_seed(0)
    layer = "decoder.layers.{}.weight"
    shapes = {
        "embedding.word_embeddings.weight": (8, 4),
        "decoder.final_layernorm.weight": (4,),
        layer.format("input_layernorm"): (1, 4),
        layer.format("self_attention.linear_qkv"): (1, 12, 4),
        layer.format("self_attention.linear_proj"): (1, 4, 4),
        layer.format("pre_mlp_layernorm"): (1, 4),
        layer.format("mlp.linear_fc1"): (1, 16, 4),
        layer.format("mlp.linear_fc2"): (1, 4, 8),
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


ARGUMENTS = {
    "num_layers": 1,
    "hidden_size": 4,
    "num_attention_heads": 2,
    "ffn_hidden_size": 8,
    "max_position_embeddings": 16,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
}

FURTHER_ARGUMENTS = ("num_experts", "kv_channels", "moe_layer_freq", "num_query_groups")


def archive(value: object) -> bytes:
    """Return what torch.save writes."""
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def described(names: list[str], found: dict[str, Any]) -> list[Lies]:
    """Return the truth of tensors, of which those with two dims are in two pieces."""
    told = []
    for name in names:
        tensor, dim = found[name], 0 if len(found[name]) > 1 else found[name].dim() - 1
        row, pieces = 0, []
        for part in tensor.tensor_split(2, dim):
            offsets = tuple(row if each == dim else 0 for each in range(tensor.dim()))
            content = archive(part.clone())
            pieces.append(Piece(offsets=offsets, sizes=tuple(part.shape), archive=content))
            row += part.shape[dim]
        told.append(Lies(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, pieces=pieces))
    return told


def write_torch_dist(
    folder: Path, told: list[Lies], common: object, *, more: object = None
) -> None:
    """Write a folder that says this, with the classes of DCP."""
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    folder.mkdir()
    entries: dict[Any, Any] = {}
    places: dict[Any, Any] = {}
    data = bytearray()
    for each in told:
        properties = dcp.TensorProperties(dtype=each.dtype)
        chunks = [
            dcp.ChunkStorageMetadata(offsets=_size(piece.offsets), sizes=_size(piece.sizes))
            for piece in each.pieces
        ]
        entries[each.name] = dcp.TensorStorageMetadata(
            properties=properties, size=_size(each.shape), chunks=chunks
        )
        for number, piece in enumerate(each.pieces):
            sizes = [n if isinstance(n, int) and n < 2**62 else 0 for n in piece.offsets]
            index = dcp.MetadataIndex(each.name, sizes, number)
            start, length = len(data) + piece.shift, len(piece.archive) + piece.longer
            places[index] = _StorageInfo(piece.path, start, length)
            data += piece.archive
    described = dcp.Metadata(state_dict_metadata=entries, planner_data=more, storage_data=places)
    (folder / "__0_0.distcp").write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (folder / ".metadata").write_bytes(pickle.dumps(described, protocol=4))
    (folder / "common.pt").write_bytes(archive(common))
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(config))


def _size(values: tuple[Any, ...]) -> Any:
    import torch

    try:
        return torch.Size(values)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return values


def lie(told: list[Lies], rng: random.Random) -> None:
    """Exchange one thing that a description says."""
    each = rng.choice(told)
    if each.pieces:
        piece = rng.choice(each.pieces)
        with contextlib.suppress(RuntimeError, TypeError, IndexError, ValueError, OverflowError):
            rng.choice((_lie_of_sizes, _lie_of_content))(told, each, piece, rng)


def _lie_of_sizes(told: list[Lies], each: Lies, piece: Piece, rng: random.Random) -> None:
    how = rng.randrange(7)
    if how == 0:
        each.shape = _changed(each.shape, rng)
    elif how == 1:
        piece.offsets = _changed(piece.offsets, rng)
    elif how == 2:
        piece.sizes = _changed(piece.sizes, rng)
    elif how == 3:
        piece.shift = rng.choice(SIZES)
    elif how == 4:
        piece.longer = rng.choice(SIZES)
    elif how == 5:  # a large tensor of many pieces with the same few bytes
        rows = 2 ** rng.choice((4, 8, 8, 12))
        each.shape = (rows, *each.shape[1:])
        each.pieces = [
            Piece(offsets=(row, *piece.offsets[1:]), sizes=(1, *piece.sizes[1:]))
            for row in range(rows)
        ]
    else:
        each.shape = piece.offsets = piece.sizes = (1,) * rng.choice((30, 70, 3000))


def _lie_of_content(told: list[Lies], each: Lies, piece: Piece, rng: random.Random) -> None:
    import torch

    how = rng.randrange(7)
    if how == 0:
        each.name = rng.choice(TENSOR_NAMES)
    elif how == 1:
        piece.path = rng.choice((*PATHS, *ODD))
    elif how == 2:
        each.dtype = rng.choice((torch.int8, torch.float64, torch.complex64, torch.quint8, "x", 3))
    elif how == 3:
        each.pieces *= rng.choice((0, 2, 3, 30, 30, 3000))
    elif how == 4:
        piece.archive = rng.choice(odd_archives(piece, rng))
    elif how == 5:
        piece.archive = archive(payload(rng))
    else:
        other = rng.choice(rng.choice(told).pieces)
        piece.archive, other.archive = other.archive, piece.archive


def odd_archives(piece: Piece, rng: random.Random) -> list[bytes]:
    """Return archives of something else than a tensor of this shape."""
    import torch

    shape = tuple(piece.sizes)
    small = torch.zeros(1)
    huge = torch.zeros(1).expand(2 ** rng.randrange(20, 40))
    return [
        archive(small.expand(shape)),
        archive(torch.zeros(shape).t() if len(shape) == 2 else torch.zeros(shape)),
        archive(huge),
        archive({"a": small}),
        archive(torch.zeros(shape).to_sparse()),
        archive(torch.nn.Parameter(torch.zeros(shape))),
        archive(torch.zeros(shape, dtype=torch.bfloat16)),
        archive(nested(rng)),
        rng.randbytes(1000),
        b"",
    ]


def _changed(sizes: tuple[Any, ...], rng: random.Random) -> tuple[Any, ...]:
    found = list(sizes)
    how = rng.randrange(4)
    if how == 0:
        return rng.choice(((), (2**40,) * 3, (0, 2**61), (1,) * 100, tuple(ODD[:3])))
    if how == 1:
        return (*sizes, rng.choice(ODD))
    if found:
        found[rng.randrange(len(found))] = rng.choice(SIZES if how == 2 else ODD)
    return tuple(found)


def nested(rng: random.Random) -> object:
    """Return a deeply nested value, or a small one that expands to very many values."""
    depth = rng.choice((20, 60, 400))
    kind = rng.randrange(4)
    value: Any = "x"
    for _ in range(depth):
        if kind == 0:
            value = [value]
        elif kind == 1:
            value = [value, value]
        elif kind == 2:
            value = (value, value)
        else:
            value = {"a": value, "b": value}
    return value


_SPLICED = (
    *(b"}", b"]", b")", b"(", b"2", b"0", b"1", b"R", b"b", b"s", b"u", b"a", b"e", b"t", b"o"),
    *(b"\x81", b"\x82\x01", b"\x85", b"\x86", b"\x87", b"\x8f", b"\x90", b"\x91", b"\x92", b"\x93"),
    *(b"\x94", b"Q", b".", b"N", b"h\x00", b"h\x05", b"K\x00", b"J\xff\xff\xff\xff", b"P1\n"),
    *(b"r\xff\xff\xff\x7f", b"\x8d" + b"\xff" * 8, b"\x8a\xff" + b"\x7f" * 255, b"F1e999\n"),
    *(b"I" + b"9" * 3000 + b"\n", b"cos\nsystem\n", b"cbuiltins\neval\n", b"ctorch\nSize\n"),
    *(b"ctorch._utils\n_rebuild_parameter\n", b"ctorch.serialization\n_get_layout\n"),
)


def splice(content: bytes, rng: random.Random) -> bytes:
    """Remove, repeat, exchange or insert operations of a pickle."""
    try:
        places = [at or 0 for _, _, at in pickletools.genops(content)]
    except Exception:
        places = list(range(len(content)))
    for _ in range(rng.choice((1, 1, 2, 5))):
        first = rng.choice(places or [0])
        second = first + rng.randrange(40)
        part = content[first:second]
        new = rng.choice((b"", part * 2, part * 300, *[rng.choice(_SPLICED) for _ in range(6)]))
        content = content[:first] + new + content[second if rng.random() < 0.5 else first :]
    return content


def forge_torch_dist(folder: Path, rng: random.Random, names: list[str]) -> None:
    """Write a folder in which something is a lie, or damaged.

    Args:
        folder: The folder, which is new.
        rng: Draws the fault.
        names: The tensors that it has.
    """
    told = described(names, tensors())
    common: Any = run_arguments()
    more: Any = None
    how = rng.choice(("lie", "lie", "lie", "lies", "args", "nest", "payload", "splice", "file"))
    if how == "lie":
        lie(told, rng)
    elif how == "lies":
        for each in rng.choices(told, k=3):
            lie([each], rng)
    elif how == "args":
        common["iteration"] = rng.choice(ODD)
        for name in (rng.choice(list(ARGUMENTS)), rng.choice(FURTHER_ARGUMENTS)):
            setattr(common["args"], name, rng.choice(ODD))
    elif how == "nest":
        more, common = rng.choice(((nested(rng), common), (None, nested(rng))))
    elif how == "payload":
        common["args"].extra, more = rng.choice(((payload(rng), None), (None, payload(rng))))
    write_torch_dist(folder, told, common, more=more)
    if how == "nest":
        _nest(folder, rng)
    elif how == "splice":
        path = folder / ".metadata"
        path.write_bytes(splice(path.read_bytes(), rng))
    elif how == "file":
        spoil_file(rng.choice(files_of(folder)), rng, folder.parent)


def _nest(folder: Path, rng: random.Random) -> None:
    """Put a deep value into the arguments, or make it a key, whose hash takes forever."""
    value = nested(rng)
    if rng.random() < 0.5:
        common = run_arguments()
        common["args"].hidden_size = value
        (folder / "common.pt").write_bytes(archive(common))
    else:
        (folder / ".metadata").write_bytes(b"\x80\x02}" + pickle.dumps(value, 2)[2:-1] + b"Ns.")


def run_arguments() -> dict[str, Any]:
    """Return what Megatron-LM saves beside tensors."""
    return {"args": argparse.Namespace(**ARGUMENTS), "iteration": 7}
