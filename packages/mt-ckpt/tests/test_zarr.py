import json
import pickle
import pickletools
import subprocess
import sys

import numpy as np
import pytest
import torch
import zarr
from mt_ckpt import TensorShard, load_checkpoint, save_checkpoint
from zarr.codecs import BytesCodec, Crc32cCodec

BITS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}


def bits(tensor):
    """Return a tensor as it is stored: floats that Zarr lacks are integers."""
    return tensor.view(BITS.get(tensor.dtype, tensor.dtype))


READER = """
import json, sys, warnings
warnings.simplefilter("error")
import zarr
group = zarr.open_group(sys.argv[1])
arrays = {}
for name, node in group.members(max_depth=None):
    if isinstance(node, zarr.Array):
        arrays[name] = [list(node.shape), str(node.dtype), node[...].tolist()]
assert not {"mt_ckpt", "torch"} & set(sys.modules)
print(json.dumps({"arrays": arrays, "step": group.attrs["mt.step"],
                  "one": group["model/layers.0.w"].shape}))
"""


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{prefix}/layers.{layer}.w": torch.randn(6, 4, generator=generator)
        for prefix in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")
        for layer in range(2)
    }
    tensors["model/head.weight"] = torch.full((5, 3), -1.1).bfloat16()
    tensors["model/narrow"] = (-torch.arange(1.0, 16)).reshape(5, 3).to(torch.float8_e4m3fn)
    tensors["step"] = torch.tensor(12)
    tensors["double"] = torch.randn(3, dtype=torch.float64, generator=generator)
    tensors["empty"] = torch.zeros(0, 3)
    tensors["mask"] = torch.tensor([True, False])
    return tensors


@pytest.fixture
def checkpoint(tmp_path, tensors):
    shards = []
    for name, tensor in tensors.items():
        halves = tensor.tensor_split(2) if tensor.dim() and len(tensor) > 3 else [tensor]
        row = 0
        for half in halves:
            offsets = (row,) + (0,) * (tensor.dim() - 1) if tensor.dim() else ()
            shards.append(TensorShard(name, half, global_shape=tensor.shape, offsets=offsets))
            row += len(half) if half.dim() else 0
    return save_checkpoint(tmp_path, 20, shards, {"a": 1})


def test_stock_zarr_finds_every_array_with_its_values(checkpoint, tensors):
    out = subprocess.run(
        [sys.executable, "-c", READER, checkpoint], capture_output=True, text=True, check=True
    )
    found = json.loads(out.stdout)
    stored = {n: bits(t) for n, t in tensors.items()}
    assert found["step"] == 20
    assert found["one"] == [6, 4]
    assert found["arrays"] == {
        name: [list(t.shape), str(t.dtype).removeprefix("torch."), t.tolist()]
        for name, t in stored.items()
    }


def test_arrays_are_those_that_zarr_python_would_write(checkpoint, tensors, tmp_path):
    for name, tensor in tensors.items():
        found = zarr.open_array(checkpoint / name, mode="r")
        values = bits(tensor).numpy()
        oracle = zarr.create_array(
            tmp_path / "oracle" / name,
            shape=values.shape,
            chunks=found.chunks,
            dtype=values.dtype,
            serializer=BytesCodec(endian="little"),
            compressors=[Crc32cCodec()],
            chunk_key_encoding={"name": "default", "separator": "."},
            fill_value=0,
            attributes={"mt.dtype": str(tensor.dtype).removeprefix("torch.")},
            config={"write_empty_chunks": True},
        )
        oracle[...] = values
        ours = {p.name: p.read_bytes() for p in (checkpoint / name).iterdir()}
        theirs = {p.name: p.read_bytes() for p in (tmp_path / "oracle" / name).iterdir()}
        assert json.loads(ours.pop("zarr.json")) == json.loads(theirs.pop("zarr.json"))
        assert ours == theirs, name


def test_zarr_finds_the_arrays_without_consolidated_metadata_too(checkpoint, tensors):
    group = zarr.open_group(checkpoint, mode="r", use_consolidated=False)
    for name, tensor in tensors.items():
        assert group[name].shape == tuple(tensor.shape)
    assert group["model/head.weight"].attrs["mt.dtype"] == "bfloat16"
    assert np.array_equal(group["double"][...], tensors["double"].numpy())
    # Consolidated or not, every node's document is the same.
    root = json.loads((checkpoint / "zarr.json").read_text())
    for name, node in root["consolidated_metadata"]["metadata"].items():
        assert json.loads((checkpoint / name / "zarr.json").read_text()) == node


def test_subgroups_list_their_arrays_from_the_consolidated_metadata(checkpoint):
    group = zarr.open_group(checkpoint, mode="r")
    assert sorted(group.array_keys()) == ["double", "empty", "mask", "step"]
    assert sorted(group["optimizer"].group_keys()) == ["exp_avg", "exp_avg_sq"]
    assert sorted(group["optimizer/exp_avg"].array_keys()) == ["layers.0.w", "layers.1.w"]


def test_no_file_holds_a_pickle(checkpoint):
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    assert len(files) > 20
    for path in files:
        content = path.read_bytes()
        # Pickles from protocol 2 on start with PROTO, zip archives of torch.save with PK.
        assert not content.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK"))
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the disassembler says
            list(pickletools.genops(content))


def test_saving_and_loading_never_pickle(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("something pickles")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    path = save_checkpoint(tmp_path, 1, [TensorShard("w", torch.ones(2))], {})
    load_checkpoint(path, [TensorShard("w", torch.zeros(2))])
