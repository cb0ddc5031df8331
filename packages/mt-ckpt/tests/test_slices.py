"""Chunks of large arrays have slices, which are read and checked alone."""

import hashlib
import json
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mt_ckpt import (
    CheckpointError,
    TensorShard,
    inspect_checkpoint,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from mt_ckpt.digest import crc32c, digest_of
from mt_ckpt.grid import plan_slice
from mt_ckpt.stored import content


@pytest.fixture
def small(monkeypatch):
    """Arrays from 256 bytes on have slices of 64."""
    for name, value in {"SLICED_BYTES": 256, "SLICE_BYTES": 64, "MIN_SLICE_BYTES": 16}.items():
        monkeypatch.setattr(f"mt_ckpt.grid.{name}", value)


def shards(name, tensor, *, dim=0, parts=1):
    found, start = [], 0
    for part in tensor.chunk(parts, dim):
        offsets = tuple(start if d == dim else 0 for d in range(tensor.dim()))
        found.append(TensorShard(name, part, global_shape=tuple(tensor.shape), offsets=offsets))
        start += part.shape[dim]
    return found


def values(*shape, dtype=torch.float32):
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 251).to(torch.float32).reshape(shape).to(dtype)


def bits(tensor):
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.dtype.itemsize])


def chunks_of(path, name="w"):
    return sorted(file for file in (path / name).iterdir() if file.name.startswith("c."))


@pytest.mark.parametrize(
    ("shape", "itemsize", "expected"),
    [
        ((2048, 2047), 4, None),
        ((2048, 2048), 4, (512, 512)),
        ((8192, 1024), 2, (2048, 256)),
        ((50304, 4096), 2, (786, 512)),
        ((50257, 4096), 2, (967, 512)),
        ((2, 11008, 4096), 2, (1, 688, 512)),
        ((8, 6, 128, 4096), 4, (2, 3, 32, 1024)),
        ((2**23,), 2, (2**19,)),
        ((2**22 + 1,), 8, (104858,)),
        ((3,) * 14, 4, (1,) * 3 + (3,) * 11),
    ],
    ids=str,
)
def test_a_slice_is_a_function_of_the_array(shape, itemsize, expected):
    assert plan_slice(shape, itemsize) == expected


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((2048, 2048), torch.float32), ((50304, 200), torch.bfloat16)], ids=str
)
def test_a_half_or_a_quarter_of_any_dim_reads_little_more_than_its_bytes(
    tmp_path, shape, dtype, parts
):
    tensor = values(*shape, dtype=dtype)
    path = save_checkpoint(tmp_path, 1, shards("w", tensor, parts=parts), {})
    fill, read = content._fill, []

    def counted(stream, block):
        read.append(block.size)
        fill(stream, block)

    with mock.patch.object(content, "_fill", counted):
        for dim in (0, 1):
            for tp in (2, 4):
                for wanted in shards("w", torch.zeros_like(tensor), dim=dim, parts=tp):
                    read.clear()
                    load_checkpoint(path, [wanted])
                    rank = wanted.offsets[dim] * tp // shape[dim]
                    assert torch.equal(bits(wanted.tensor), bits(tensor.chunk(tp, dim)[rank]))
                    assert sum(read) <= 1.1 * wanted.tensor.nbytes, (dim, tp, rank)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    assert size <= 1.02 * tensor.nbytes


KINDS = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize(("dim", "parts"), [(0, 1), (0, 2), (1, 4)])
def test_stock_zarr_and_tensorstore_read_slices(tmp_path, small, dtype, dim, parts):
    import tensorstore

    tensors = {"model/w": values(12, 40, 2, dtype=dtype), "odd": values(129, 33, dtype=dtype)}
    given = [s for n, t in tensors.items() for s in shards(n, t, dim=dim, parts=parts)]
    path = save_checkpoint(tmp_path, 3, given, {})
    specs = inspect_checkpoint(path).arrays
    assert specs["model/w"].slices is not None
    for consolidated in (True, False):
        group = zarr.open_group(path, mode="r", use_consolidated=consolidated)
        for name, tensor in tensors.items():
            array, stored = group[name], bits(tensor)
            assert (array.shards or array.chunks) == specs[name].chunks
            found = torch.from_numpy(np.asarray(array[...])).view(dtype)
            assert torch.equal(bits(found), stored)
            part = torch.from_numpy(np.ascontiguousarray(array[3:9, 5:21])).view(dtype)
            assert torch.equal(bits(part), stored[3:9, 5:21])
    for name, tensor in tensors.items():
        where = {"driver": "file", "path": str(path / name)}
        array = tensorstore.open({"driver": "zarr3", "kvstore": where}).result()
        found = torch.from_numpy(np.array(array.read().result())).view(dtype)
        assert torch.equal(bits(found), bits(tensor))
    assert verify_checkpoint(path) == []


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_box_reads_back_from_slices(tmp_path_factory, small, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=3)))
    tensor = values(*shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    given = shards("w", tensor, dim=dim, parts=data.draw(st.integers(1, 4)))
    path = save_checkpoint(tmp_path_factory.mktemp("root"), 1, given, {})
    starts = [data.draw(st.integers(0, n)) for n in shape]
    ends = [data.draw(st.integers(o, n)) for o, n in zip(starts, shape, strict=True)]
    place = tuple(map(slice, starts, ends))
    wanted = TensorShard(
        "w", torch.full_like(tensor[place], -1), global_shape=shape, offsets=tuple(starts)
    )
    load_checkpoint(path, [wanted])
    assert torch.equal(wanted.tensor, tensor[place])
    assert verify_checkpoint(path) == []


def test_a_damaged_slice_is_named_by_whoever_reads_it(tmp_path, small):
    tensor = values(16, 16)
    path = save_checkpoint(tmp_path, 1, shards("w", tensor), {})
    (chunk,) = chunks_of(path)
    spec, original = inspect_checkpoint(path).arrays["w"], chunk.read_bytes()
    for number in range(spec.num_slices):
        for position in (0, spec.slice_bytes - 1):
            data = bytearray(original)
            data[number * spec.slice_bytes + position] ^= 8
            chunk.write_bytes(data)
            (problem,) = verify_checkpoint(path)
            assert (problem.file, problem.tensor) == ("w/c.0.0", "w")
            with pytest.raises(CheckpointError, match="its content has changed"):
                load_checkpoint(path, [TensorShard("w", torch.zeros(16, 16))])
            for quarter, wanted in enumerate(shards("w", torch.zeros(16, 16), parts=4)):
                if quarter != number // 4:
                    load_checkpoint(path, [wanted])
                    continue
                with pytest.raises(CheckpointError, match="the crc32c of a slice dif") as caught:
                    load_checkpoint(path, [wanted])
                assert (caught.value.file, caught.value.tensor) == ("w/c.0.0", "w")
    chunk.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    assert [problem.file for problem in verify_checkpoint(path)] == ["w/c.0.0"]


def test_a_slice_of_another_step_is_refused(tmp_path, small):
    first = save_checkpoint(tmp_path, 1, shards("w", values(16, 16)), {})
    second = save_checkpoint(tmp_path, 2, shards("w", values(16, 16) + 1), {})
    shutil.copy(chunks_of(first)[0], chunks_of(second)[0])
    part = TensorShard("w", torch.zeros(4, 16), global_shape=(16, 16), offsets=(0, 0))
    with pytest.raises(CheckpointError, match="the crc32c of a slice differs"):
        load_checkpoint(second, [part])


def reseal(path, change):
    """Change the manifest's body, with a right seal."""
    file = path / "mt-manifest.json"
    body = json.loads(file.read_text())
    del body["sha256"]
    change(body)
    rest = json.dumps(body, indent=0).removeprefix("{\n").encode()
    seal = hashlib.sha256(rest).hexdigest().encode()
    file.write_bytes(b'{"sha256": "' + seal + b'",\n' + rest)


def test_a_sealed_index_with_other_places_is_named(tmp_path, small):
    path = save_checkpoint(tmp_path, 1, shards("w", values(16, 16)), {})
    (chunk,) = chunks_of(path)
    spec, data = inspect_checkpoint(path).arrays["w"], chunk.read_bytes()
    places = np.frombuffer(spec.slice_index(), "<u8").reshape(-1, 2)[::-1].tobytes()
    index = places + crc32c(np.frombuffer(places, np.uint8)).tobytes()
    chunk.write_bytes(data[: -len(index)] + index)
    record = [len(data), digest_of(chunk.read_bytes())]
    reseal(path, lambda body: body["files"]["w/c.0.0"].__setitem__(slice(2), record))
    (problem,) = verify_checkpoint(path)
    assert problem.reason == "its index gives other places than its slices have"


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        ("slices", [3, 16], "do not divide the chunks"),
        ("slices", [4], "do not fit the chunks"),
        ("slices", [0, 4], "do not fit the chunks"),
        ("slices", ["4", 4], "do not fit the chunks"),
        ("slices", [16, 16], "can't have slices"),
        ("slices", [8, 8], "a chunk has"),
        ("slices", None, "must be shape and dtype"),
        ("chunks", [2**40, 16], "can't have slices"),
        ("chunks", [32, 16], "larger than the shape"),
        ("sums", "00" * 4, "a chunk has 16 slices"),
        ("sums", "zz" * 64, "the record of"),
        ("sums", 7, "the record of"),
    ],
)
def test_a_forged_slice_is_refused(tmp_path, small, place, value, text):
    path = save_checkpoint(tmp_path, 1, shards("w", values(16, 16)), {})

    def forge(body):
        if place == "sums":
            body["files"]["w/c.0.0"][2] = value
        else:
            body["arrays"]["w"][place] = value

    reseal(path, forge)
    with pytest.raises(CheckpointError, match=text):
        load_checkpoint(path, [TensorShard("w", torch.zeros(16, 16))])
