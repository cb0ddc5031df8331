"""Small arrays share stored objects: packs, which are zips that hold a Zarr group."""

import hashlib
import io
import json
import zipfile

import numpy as np
import pytest
import torch
import zarr
from mt_ckpt import (
    CheckpointError,
    TensorShard,
    inspect_checkpoint,
    load_checkpoint,
    open_arrays,
    save_checkpoint,
    verify_checkpoint,
)
from mt_ckpt.command.difference import Diff
from mt_ckpt.digest import digest_of
from mt_ckpt.grid import Box
from mt_ckpt.ranks import Ranks
from mt_ckpt.stored.gathering import Gathering
from mt_ckpt.stored.packing import PACK_BYTES, PACK_NODES, Pack, plan_packs
from zarr.storage import ZipStore

PACK = "__packs/00001.zip"  # of the group `model`; the arrays without a group come first


@pytest.fixture
def always(monkeypatch):
    """Pack even a few small arrays."""
    monkeypatch.setattr("mt_ckpt.stored.packing.MIN_ARRAYS", 0)


def make_tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "model/layers.0.w": torch.randn(4, 6, generator=generator),
        "model/head": torch.randn(5, generator=generator).bfloat16(),
        "model/narrow": torch.randn(5, generator=generator).to(torch.float8_e4m3fn),
        "optimizer/exp_avg/layers.0.w": torch.randn(4, 6, generator=generator),
        "optimizer/large": torch.randn(2**17, generator=generator),
        "step": torch.tensor(seed),
        "empty": torch.zeros(0, 3),
    }


def save(root, step=20, seed=0):
    shards = []
    for name, tensor in make_tensors(seed).items():
        if tensor.dim() < 2 or not len(tensor):
            shards.append(TensorShard(name, tensor))
            continue
        for half in (0, 1):
            rows = tensor[half * 2 : half * 2 + 2]
            shards.append(TensorShard(name, rows, global_shape=tensor.shape, offsets=(half * 2, 0)))
    return save_checkpoint(root, step, shards, {"seed": seed})


def load_all(path, **options):
    tensors = {name: torch.zeros_like(tensor) for name, tensor in make_tensors().items()}
    shards = [TensorShard(name, tensor) for name, tensor in tensors.items()]
    load_checkpoint(path, shards, **options)
    return tensors


def bits(tensor):
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.dtype.itemsize])


def packs_of(path):
    return {
        spec.pack: path / spec.pack
        for spec in inspect_checkpoint(path).arrays.values()
        if spec.pack
    }


def test_small_arrays_share_packs_by_group_and_come_back_bit_for_bit(tmp_path, always):
    path = save(tmp_path)
    assert verify_checkpoint(path) == []
    where = {name: spec.pack for name, spec in inspect_checkpoint(path).arrays.items()}
    assert where["optimizer/large"] is where["empty"] is None
    assert where["model/head"] == where["model/layers.0.w"] == PACK
    assert len({where["model/head"], where["optimizer/exp_avg/layers.0.w"], where["step"]}) == 3
    for name, tensor in load_all(path).items():
        assert torch.equal(bits(tensor), bits(make_tensors()[name])), name
    part = torch.zeros(2, 3, dtype=torch.float64)
    box = TensorShard("model/layers.0.w", part, global_shape=(4, 6), offsets=(1, 2))
    load_checkpoint(path, [box], ignore=("",), cast=True)
    assert torch.equal(part.float(), make_tensors()["model/layers.0.w"][1:3, 2:5])
    with open_arrays(path) as arrays:
        for name, tensor in make_tensors().items():
            found = torch.zeros_like(tensor)
            arrays.fill(TensorShard(name, found))
            assert torch.equal(bits(found), bits(tensor))


def test_few_small_arrays_are_files_that_one_group_shows(tmp_path):
    path = save(tmp_path)
    assert not packs_of(path)
    assert not (path / "__packs").exists()
    assert "mt.packs" not in zarr.open_group(path, mode="r").attrs


def test_stock_zarr_reads_each_pack(tmp_path, always):
    path = save(tmp_path)
    root = zarr.open_group(path, mode="r")
    assert root.attrs["mt.packs"] == sorted(packs_of(path))
    found = {}
    for name in root.attrs["mt.packs"]:
        with ZipStore(path / name, mode="r") as store:
            for consolidated in (True, False):
                group = zarr.open_group(store, mode="r", use_consolidated=consolidated)
                assert group.attrs["mt.step"] == 20
                members = dict(group.members(max_depth=None)).items()
                found |= {n: a[...] for n, a in members if isinstance(a, zarr.Array)}
    wanted = make_tensors()
    assert set(found) == set(wanted) - {"optimizer/large", "empty"}
    for name, array in found.items():
        dtype = wanted[name].dtype
        view = torch.from_numpy(np.asarray(array)).view(dtype)
        assert torch.equal(bits(view), bits(wanted[name])), name


def test_tensorstore_reads_each_pack(tmp_path, always):
    import tensorstore

    path = save(tmp_path)
    for name, spec in inspect_checkpoint(path).arrays.items():
        if spec.pack is None:
            continue
        kvstore = {"driver": "zip", "base": f"file://{path / spec.pack}", "path": f"{name}/"}
        array = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}).result()
        values = torch.from_numpy(np.array(array.read().result()))
        assert torch.equal(
            bits(values.view(make_tensors()[name].dtype)), bits(make_tensors()[name])
        )


def test_equal_arrays_make_equal_packs(tmp_path, always):
    first, second = save(tmp_path / "a"), save(tmp_path / "b")
    for name in packs_of(first):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    assert Diff(a=first, b=second).run() == 0
    assert Diff(a=first, b=save(tmp_path / "c", seed=1)).run() == 1


def test_a_damaged_pack_names_its_file_and_the_array(tmp_path, always):
    path = save(tmp_path)
    original = (path / PACK).read_bytes()
    specs = {n: s for n, s in inspect_checkpoint(path).arrays.items() if s.pack == PACK}
    places = {spec.offset + spec.chunk_bytes // 2: name for name, spec in specs.items()}
    places |= {0: None, 700: None, len(original) - 1: None}
    for position, tensor in places.items():
        data = bytearray(original)
        data[position] ^= 4
        (path / PACK).write_bytes(data)
        (problem,) = verify_checkpoint(path)
        assert (problem.file, problem.tensor) == (PACK, tensor)
        with pytest.raises(CheckpointError, match="its content has changed") as caught:
            load_all(path)
        assert (caught.value.file, caught.value.tensor) == (PACK, tensor)
    other = save(tmp_path / "other", seed=1)
    for damaged in (b"", original[:-1], original + b"\0", (other / PACK).read_bytes(), None):
        (path / PACK).unlink()
        if damaged is not None:
            (path / PACK).write_bytes(damaged)
        assert [problem.file for problem in verify_checkpoint(path)] == [PACK]
        with pytest.raises(CheckpointError) as caught:
            load_all(path)
        assert caught.value.file == PACK
        (path / PACK).write_bytes(original)
    load_all(path)


def reseal(path, change):
    """Change the manifest's body, with a right seal."""
    file = path / "mt-manifest.json"
    body = json.loads(file.read_text())
    del body["sha256"]
    change(body)
    rest = json.dumps(body, indent=0).removeprefix("{\n").encode()

    seal = hashlib.sha256(rest).hexdigest().encode()
    file.write_bytes(b'{"sha256": "' + seal + b'",\n' + rest)


def replace_pack(path, content):
    (path / PACK).write_bytes(content)
    reseal(path, lambda body: body["files"].update({PACK: [len(content), digest_of(content)]}))


def rezip(path, change, **options):
    """Write a pack again by zipfile, with changed entries."""
    with zipfile.ZipFile(path / PACK) as pack:
        entries = [(info.filename, pack.read(info)) for info in pack.infolist()]
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", **options) as pack:
        for name, content in change(entries):
            info = zipfile.ZipInfo(name)
            info.compress_type = pack.compression
            pack.writestr(info, content)
    replace_pack(path, stream.getvalue())


def test_a_zip_of_another_program_with_the_same_content_is_sound(tmp_path, always):
    path = save(tmp_path)
    before = (path / PACK).read_bytes()
    rezip(path, lambda entries: entries)
    assert (path / PACK).read_bytes() != before
    assert verify_checkpoint(path) == []
    load_all(path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda entries: entries[:-1], "either the zip or the manifest lacks it"),
        (lambda entries: [*entries, ("more", b"")], "more: either the zip or"),
        (
            lambda entries: [(n, c.replace(b'"shape": [5]', b'"shape": [4]')) for n, c in entries],
            "contradicts the manifest in",
        ),
        (lambda entries: [*entries[:-1], (entries[-1][0], b"x" * 9)], "the zip has other values"),
    ],
)
def test_a_sealed_zip_that_contradicts_the_manifest_is_named(tmp_path, always, change, text):
    path = save(tmp_path)
    original = (path / PACK).read_bytes()
    rezip(path, change)
    # The chunks stay where the manifest has them: a reader of ours sees the old values.
    content = original + (path / PACK).read_bytes()
    replace_pack(path, content)
    (problem,) = verify_checkpoint(path)
    assert problem.file == PACK
    assert text in problem.reason


def test_a_sealed_chunk_in_a_pack_with_a_wrong_crc32c_is_named(tmp_path, always):
    path = save(tmp_path)
    spec = inspect_checkpoint(path).arrays["model/head"]
    data = bytearray((path / PACK).read_bytes())
    data[spec.offset] ^= 1
    replace_pack(path, bytes(data))
    (problem,) = verify_checkpoint(path)
    assert (problem.file, problem.tensor) == (PACK, "model/head")
    with pytest.raises(CheckpointError, match="crc32c is not that of its values"):
        load_all(path)


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"offset": -1}, "its chunk lies outside of"),
        ({"offset": 2**40}, "its chunk lies outside of"),
        ({"offset": True}, "must be shape and dtype"),
        ({"pack": "__packs/../x.zip"}, "is no pack"),
        ({"pack": "model"}, "is no pack"),
        ({"pack": "__packs/00009.zip"}, "files, but|no array has it"),
        ({"shape": [2**30]}, "bytes, more than"),
        ({"chunks": [5]}, "must be shape and dtype, with chunks or with pack and offset"),
    ],
)
def test_a_forged_place_in_a_pack_is_refused(tmp_path, always, record, text):
    path = save(tmp_path)
    reseal(path, lambda body: body["arrays"]["model/head"].update(record))
    with pytest.raises(CheckpointError, match=text) as caught:
        load_all(path)
    assert caught.value.file == "mt-manifest.json"


def test_a_pack_that_claims_more_than_a_save_writes_is_not_read(tmp_path, always):
    path = save(tmp_path)
    with (path / PACK).open("r+b") as file:
        file.truncate(2**38)
    reseal(path, lambda body: body["files"][PACK].__setitem__(0, 2**38))
    with pytest.raises(CheckpointError, match=r"a pack of these arrays has at most \d+ bytes"):
        load_all(path)


def test_a_rank_that_cannot_read_its_tensors_still_sends(monkeypatch):
    pack = Pack(file=PACK, rank=1, boxes={"w": [Box(offsets=(0,), shape=(4,), rank=0)]})
    shards = [TensorShard("w", torch.ones(4))]
    gathering = Gathering([pack], {"w": ((4,), "float32")}, shards, rank=0)
    sent = []

    class Recorder(Ranks):
        def exchange(self, outgoing, sizes):
            sent.append({rank: data.tobytes() for rank, data in outgoing.items()})
            return {}

    def fail(tensor):
        raise RuntimeError("the device is lost")

    assert gathering.moves
    gathering.exchange(Recorder(None))
    monkeypatch.setattr("mt_ckpt.stored.gathering.to_stored", fail)
    with pytest.raises(RuntimeError, match="the device is lost"):
        gathering.exchange(Recorder(None))
    assert sent == [{1: torch.ones(4).numpy().tobytes()}, {1: bytes(16)}]


def test_a_pack_has_bounded_bytes_and_nodes():
    box = [Box(offsets=(0,), shape=(65536,))]
    sizes = {f"m/p{number}": 2**18 for number in range(400)}
    packs = plan_packs(sizes, dict.fromkeys(sizes, 0), dict.fromkeys(sizes, box))
    assert max(len(pack.boxes) for pack in packs) == PACK_BYTES // 2**18
    sizes = {f"a{number}/b/c": 4 for number in range(PACK_NODES // 2)}
    packs = plan_packs(sizes, dict.fromkeys(sizes, 0), dict.fromkeys(sizes, box))
    assert all(len(pack.boxes) * 3 <= PACK_NODES for pack in packs)


def test_many_small_arrays_make_few_files(tmp_path):
    tensors = {f"model/p{number}": torch.full((3,), number) for number in range(2000)}
    path = save_checkpoint(tmp_path, 1, [TensorShard(n, t) for n, t in tensors.items()], {})
    assert sum(file.is_file() for file in path.rglob("*")) == 3
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_checkpoint(path, [TensorShard(n, t) for n, t in found.items()])
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert verify_checkpoint(path) == []
