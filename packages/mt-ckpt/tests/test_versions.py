"""Checkpoints of each released format version stay readable."""

import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from mt_ckpt import (
    TensorShard,
    inspect_checkpoint,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)

GOLDEN = Path(__file__).parent / "golden"
_SPEC = importlib.util.spec_from_file_location("make_version", GOLDEN / "make_version.py")
make_version = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(make_version)
VERSIONS = sorted(path.name for path in GOLDEN.glob("version_*"))


def bits(tensor):
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.dtype.itemsize])


@pytest.mark.parametrize("version", VERSIONS)
def test_a_checkpoint_of_each_version_is_sound_and_loads_bit_for_bit(version, tmp_path):
    root = shutil.copytree(GOLDEN / version, tmp_path / version)
    wanted = make_version.golden_arrays(int(version.split("_")[1]))
    assert verify_checkpoint(root) == []
    manifest = inspect_checkpoint(root)
    assert {name: (spec.shape, spec.dtype) for name, spec in manifest.arrays.items()} == {
        name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in wanted.items()
    }
    found = {name: torch.full_like(tensor, 1) for name, tensor in wanted.items()}
    metadata = load_checkpoint(root, [TensorShard(name, t) for name, t in found.items()])
    assert metadata == make_version.METADATA
    for name, tensor in wanted.items():
        assert torch.equal(bits(found[name]), bits(tensor)), name


def test_a_damaged_chunk_of_version_1_is_named(tmp_path):
    root = shutil.copytree(GOLDEN / "version_1", tmp_path / "root")
    chunk = root / "step_00000020/kinds/bfloat16/c.0.0"
    data = bytearray(chunk.read_bytes())
    data[3] ^= 1
    chunk.write_bytes(data)
    (problem,) = verify_checkpoint(root)
    assert (problem.file, problem.tensor) == ("kinds/bfloat16/c.0.0", "kinds/bfloat16")
    assert "sha256" in problem.reason


def test_a_bfloat16_or_a_float8_takes_as_many_bytes_as_it_has(tmp_path):
    for step, dtype in enumerate((torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)):
        tensor = torch.zeros(1000, 1000).to(dtype)
        path = save_checkpoint(tmp_path, step, [TensorShard("model/w", tensor)], {})
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        assert size <= 1.02 * tensor.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_way_from_stock_zarr_to_the_values_is_a_view(tmp_path, dtype):
    count = 2 ** (8 * dtype.itemsize)
    integers = {1: torch.uint8, 2: torch.uint16}[dtype.itemsize]
    tensor = torch.arange(count).to(integers).view(dtype)
    path = save_checkpoint(tmp_path, 1, [TensorShard("w", tensor)], {})
    array = zarr.open_group(path, mode="r")["w"]
    view = torch.from_numpy(array[...]).view(getattr(torch, array.attrs["mt.dtype"]))
    assert torch.equal(bits(view), bits(tensor))
    if dtype == torch.bfloat16:  # without torch: the upper half of a float32
        values = (array[...].astype(np.uint32) << 16).view(np.float32)
        assert np.array_equal(values, tensor.float().numpy(), equal_nan=True)
