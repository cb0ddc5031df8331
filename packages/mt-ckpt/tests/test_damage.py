import hashlib
import json
import os
import random
import re
import shutil

import pytest
import torch
from mt_ckpt import (
    CheckpointError,
    TensorShard,
    inspect_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from mt_ckpt.digest import digest_of
from mt_ckpt.disk import Disk


def make_tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "model/layers.0.w": torch.randn(4, 6, generator=generator),
        "model/head": torch.randn(5, generator=generator).bfloat16(),
        "optimizer/exp_avg/layers.0.w": torch.randn(4, 6, generator=generator),
        "rng": torch.arange(3, dtype=torch.uint8) + seed,
        "step": torch.tensor(seed),
    }


def make_shards(tensors):
    """Every tensor as one box, matrices as two."""
    shards = []
    for name, tensor in tensors.items():
        if tensor.dim() < 2:
            shards.append(TensorShard(name, tensor))
            continue
        for half in (0, 1):
            rows = tensor[half * 2 : half * 2 + 2]
            shards.append(
                TensorShard(name, rows, global_shape=tuple(tensor.shape), offsets=(half * 2, 0))
            )
    return shards


@pytest.fixture
def checkpoint(tmp_path):
    root = tmp_path / "checkpoints"
    return save_checkpoint(root, 20, make_shards(make_tensors()), {"seed": 0})


def load_all(path):
    tensors = {name: torch.zeros_like(tensor) for name, tensor in make_tensors().items()}
    load_checkpoint(path, [TensorShard(name, tensor) for name, tensor in tensors.items()])
    return tensors


def files_of(path):
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def tensor_of(name):
    return next((n for n in make_tensors() if name.startswith(f"{n}/")), None)


def assert_both_name(path, name):
    """Loading and verifying both blame the file, and the tensor where there is one."""
    with pytest.raises(CheckpointError) as caught:
        load_all(path)
    assert caught.value.file == name, str(caught.value)
    assert name in str(caught.value)
    assert caught.value.tensor == tensor_of(name)
    if caught.value.tensor:
        assert repr(caught.value.tensor) in str(caught.value)
    problems = verify_checkpoint(path)
    assert [(p.file, p.tensor) for p in problems] == [(name, tensor_of(name))]
    assert name in str(problems[0])


def flip(file, position, bit):
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.write_bytes(data)


def positions(path):
    return [(name, i) for name in files_of(path) for i in range((path / name).stat().st_size)]


def check_flip(path, name, position, bit):
    original = (path / name).read_bytes()
    flip(path / name, position, bit)
    assert_both_name(path, name)
    (path / name).write_bytes(original)


def test_a_flipped_bit_anywhere_names_its_file_and_tensor(checkpoint):
    rng = random.Random(0)
    names = files_of(checkpoint)
    sample = [(n, rng.randrange((checkpoint / n).stat().st_size)) for n in names * 3]
    sample += rng.sample(positions(checkpoint), 150 - len(sample))
    for name, position in sample:
        check_flip(checkpoint, name, position, rng.randrange(8))
    assert len({name for name, _ in sample}) == len(names) > 15
    load_all(checkpoint)


@pytest.mark.campaign
def test_every_flipped_bit_names_its_file_and_tensor(checkpoint):
    for name, position in positions(checkpoint):
        for bit in range(8):
            check_flip(checkpoint, name, position, bit)


def test_a_truncated_or_longer_file_is_named(checkpoint):
    for name in files_of(checkpoint):
        original = (checkpoint / name).read_bytes()
        for damaged in (b"", original[:-1], original[: len(original) // 2], original + b"\0"):
            (checkpoint / name).write_bytes(damaged)
            assert_both_name(checkpoint, name)
        (checkpoint / name).write_bytes(original)
    load_all(checkpoint)


def test_a_truncated_file_is_named_even_where_nobody_reads_it(checkpoint):
    name = next(name for name in files_of(checkpoint) if "/c" in name)
    (checkpoint / name).write_bytes((checkpoint / name).read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="the manifest says") as caught:
        load_checkpoint(checkpoint, [], ignore=("",))
    assert caught.value.file == name


def test_a_missing_file_is_named(checkpoint):
    for name in files_of(checkpoint):
        original = (checkpoint / name).read_bytes()
        (checkpoint / name).unlink()
        assert_both_name(checkpoint, name)
        (checkpoint / name).write_bytes(original)


def test_an_extra_file_is_named(checkpoint):
    for name in ["junk", "model/layers.0.w/c.7.0", "model/.hidden", "optimizer/new/zarr.json"]:
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).write_bytes(b"x")
        assert_both_name(checkpoint, name)
        (checkpoint / name).unlink()


def test_swapped_chunks_are_both_named(checkpoint):
    first, second = (checkpoint / f"model/layers.0.w/c.{i}.0" for i in (0, 1))
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    assert [p.file for p in verify_checkpoint(checkpoint)] == [
        "model/layers.0.w/c.0.0",
        "model/layers.0.w/c.1.0",
    ]
    with pytest.raises(
        CheckpointError, match=r"model/layers.0.w/c.0.0 \(tensor 'model/layers.0.w'"
    ):
        load_all(checkpoint)


def test_a_file_of_another_step_is_named(checkpoint):
    other = save_checkpoint(checkpoint.parent, 30, make_shards(make_tensors(1)), {"seed": 1})
    for name in ["model/head/c.0", "zarr.json"]:
        original = (checkpoint / name).read_bytes()
        shutil.copy(other / name, checkpoint / name)
        assert_both_name(checkpoint, name)
        (checkpoint / name).write_bytes(original)
    shutil.copy(other / "mt-manifest.json", checkpoint / "mt-manifest.json")
    assert len(verify_checkpoint(checkpoint)) >= 5
    with pytest.raises(CheckpointError, match="is damaged"):
        load_all(checkpoint)


def test_a_symbolic_link_is_refused_wherever_it_leads(checkpoint, tmp_path):
    for name in files_of(checkpoint):
        target = tmp_path / "elsewhere"
        (checkpoint / name).rename(target)
        (checkpoint / name).symlink_to(target)
        assert_both_name(checkpoint, name)
        (checkpoint / name).unlink()
        target.rename(checkpoint / name)
    (checkpoint / "model").rename(tmp_path / "model")
    (checkpoint / "model").symlink_to(tmp_path / "model")
    with pytest.raises(CheckpointError, match="model: is a symbolic link"):
        load_all(checkpoint)


def test_something_that_is_no_file_is_refused(checkpoint):
    os.mkfifo(checkpoint / "model/pipe")
    with pytest.raises(CheckpointError, match="model/pipe: is not a plain file"):
        load_all(checkpoint)


def test_all_problems_are_listed(checkpoint):
    (checkpoint / "step/c").unlink()
    (checkpoint / "junk").touch()
    with pytest.raises(CheckpointError) as caught:
        load_all(checkpoint)
    assert "step/c (tensor 'step'): is missing" in str(caught.value)
    assert "junk: is not in the manifest" in str(caught.value)
    assert "Load another step, or restore the files" in str(caught.value)


def forge(checkpoint, change):
    """Rewrite the manifest with a right seal, as an attacker would."""
    path = checkpoint / "mt-manifest.json"
    body = json.loads(path.read_text())
    del body["sha256"]
    text = change(body)
    if not isinstance(text, str):
        text = json.dumps(body, indent=0)
    rest = text.removeprefix("{\n").encode()
    seal = hashlib.sha256(rest).hexdigest()
    path.write_bytes(b'{"sha256": "' + seal.encode() + b'",\n' + rest)


def set_in(*keys_and_value):
    *keys, last, value = keys_and_value

    def change(body):
        for key in keys:
            body = body[key]
        body[last] = value

    return change


HASH = "xxh3-128:" + "0" * 32


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            set_in("format_version", 99),
            r"written in format version 99 by mt-ckpt 0.1.0; this is "
            r"mt-ckpt 0.1.0, which reads format versions up to 4",
        ),
        (set_in("format_version", 0), "format_version is 0; versions start at 1"),
        (set_in("format_version", -5), "format_version is -5; versions start at 1"),
        (set_in("step", -1), "step is -1; a step is 0 to"),
        (set_in("metadata", "elapsed", float("nan")), "is not valid JSON: NaN is no JSON number"),
        (set_in("format", "other"), "format is 'other', not 'mt-ckpt'"),
        (set_in("format_version", True), "'format_version' must be a JSON int, not True"),
        (set_in("files", "../../etc/passwd", [1, HASH]), "path '../../etc/passwd' leads out"),
        (set_in("files", "/etc/passwd", [1, HASH]), "path '/etc/passwd' leads out"),
        (set_in("files", "a/./b", [1, HASH]), "path 'a/./b' leads out"),
        (set_in("files", "a\\b", [1, HASH]), "leads out"),
        (set_in("files", "extra", [1, HASH]), "the arrays have 16 files, but 17 are recorded"),
        (set_in("files", "step/c", [-1, HASH]), "the record of 'step/c' must be .size, digest."),
        (set_in("files", "step/c", [12, "XY"]), "the record of 'step/c' must be .size, digest."),
        (set_in("files", "step/c", [12, "md5:" + "0" * 32]), "must be .size, digest."),
        (set_in("files", "step/c", [13, HASH]), "step/c: a chunk has 12 bytes"),
        (set_in("files", []), "'files' must be a JSON dict"),
        (
            set_in("arrays", "rng", "shape", [2**59]),
            "the arrays have .* files, but 16 are recorded",
        ),
        (set_in("arrays", "rng", "shape", [2**70]), "are not sizes"),
        (set_in("arrays", "rng", "shape", [-3]), "are not sizes"),
        (
            set_in("arrays", "rng", "shape", "x"),
            "the record of 'rng' must be shape and dtype, with chunks or with pack and offset",
        ),
        (set_in("arrays", "rng", "chunks", [0]), "do not fit the shape"),
        (set_in("arrays", "rng", "chunks", [3, 3]), "do not fit the shape"),
        (set_in("arrays", "rng", "chunks", [2**59]), r"chunks .* are larger than the shape \(3,\)"),
        (set_in("arrays", "rng", "dtype", "object"), "dtype 'object' is not one of float64"),
        (set_in("arrays", "rng", "more", 1), "the record of 'rng' must be"),
        (
            set_in("arrays", "../x", {"shape": [0], "dtype": "int8", "chunks": [1]}),
            "is not allowed",
        ),
        (lambda body: "{\n" + '"a": ' * 1 + "[" * 100_000, "is not valid JSON"),
        (lambda body: '{\n"step": 1, "step": 2}', "is not valid JSON: a key occurs twice"),
        (lambda body: "{\n1}", "is not valid JSON"),
    ],
)
def test_a_forged_manifest_is_refused(checkpoint, change, text):
    forge(checkpoint, change)
    with pytest.raises(CheckpointError, match=text) as caught:
        load_all(checkpoint)
    assert caught.value.file == "mt-manifest.json"
    assert str(checkpoint / "mt-manifest.json") in str(caught.value)
    assert [p.file for p in verify_checkpoint(checkpoint)] == ["mt-manifest.json"]


def test_forging_without_a_change_loads(checkpoint):
    forge(checkpoint, lambda body: None)
    load_all(checkpoint)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"step_00000020",
        b"step_00000021\n",
        b"step_20\n",
        b"../x\n",
        b"\xff" * 64,
        b"step_00000020\n\n",
    ],
)
def test_a_garbled_latest_says_what_to_do(checkpoint, content):
    root = checkpoint.parent
    (root / "latest").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        latest_checkpoint(root)
    assert caught.value.file == "latest"
    assert re.search(
        r"latest: its content .* names no checkpoint in .* \(there: step_00000020\). Write the "
        r"name of one of them and a newline into it, or delete it to resume from the newest",
        str(caught.value),
    )
    with pytest.raises(CheckpointError, match="names no checkpoint"):
        save_checkpoint(root, 30, [], {})


def test_a_latest_that_is_too_long_is_not_read(checkpoint):
    (checkpoint.parent / "latest").write_bytes(b"\xff" * 1000)
    with pytest.raises(CheckpointError, match=r"has 1000 bytes; at most 64 .* Write the name of"):
        latest_checkpoint(checkpoint.parent)


def test_a_latest_that_leads_out_shows_nothing_of_what_it_leads_to(checkpoint, tmp_path):
    (tmp_path / "secret").write_text("password")
    latest = checkpoint.parent / "latest"
    latest.unlink()
    latest.symlink_to(tmp_path / "secret")
    for call in (
        latest_checkpoint,
        inspect_checkpoint,
        lambda root: save_checkpoint(root, 30, [], {}),
    ):
        with pytest.raises(CheckpointError, match="latest: leads out of") as caught:
            call(checkpoint.parent)
        assert "password" not in str(caught.value)
        assert caught.value.file == "latest"


@pytest.mark.parametrize("name", ["latest", "mt-manifest.json", "step/c", "zarr.json"])
def test_a_fifo_in_place_of_a_file_is_an_error_and_no_wait(checkpoint, name):
    file = (checkpoint.parent if name == "latest" else checkpoint) / name
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match=r"is a FIFO|is not a plain file"):
        load_all(checkpoint.parent)
    assert verify_checkpoint(checkpoint.parent)
    if name == "mt-manifest.json":
        assert [problem.file for problem in verify_checkpoint(checkpoint)] == [name]


def test_a_step_under_the_name_of_another_is_named(checkpoint):
    other = checkpoint.rename(checkpoint.with_name("step_00000048"))
    (checkpoint.parent / "latest").write_text("step_00000048\n")
    text = "the directory is named step_00000048; rename it"
    for call in (latest_checkpoint, inspect_checkpoint, load_all):
        with pytest.raises(CheckpointError, match=text):
            call(checkpoint.parent)
    assert [text in problem.reason for problem in verify_checkpoint(other)] == [True]
    copy = shutil.copytree(other, checkpoint.with_name("best"))
    assert verify_checkpoint(copy) == []


def test_a_chunk_larger_than_its_array_is_not_read(checkpoint):
    """A sparse file costs nothing to make, and memory to read."""
    huge = 3 * 2**30
    with (checkpoint / "rng/c.0").open("r+b") as file:
        file.truncate(huge + 4)

    def change(body):
        body["arrays"]["rng"]["chunks"] = [huge]
        body["files"]["rng/c.0"] = [huge + 4, HASH]

    forge(checkpoint, change)
    with pytest.raises(CheckpointError, match=r"chunks .* are larger than the shape \(3,\)"):
        load_all(checkpoint)


def test_a_flipped_bit_in_latest_is_an_error(checkpoint):
    latest = checkpoint.parent / "latest"
    original = latest.read_bytes()
    for position in range(len(original)):
        flip(latest, position, position % 8)
        with pytest.raises(CheckpointError, match="names no checkpoint"):
            latest_checkpoint(checkpoint.parent)
        latest.write_bytes(original)
    assert latest_checkpoint(checkpoint.parent) == checkpoint


def reseal(checkpoint, name, content):
    """Replace a file, and its record in the manifest, which is sealed again."""
    (checkpoint / name).write_bytes(content)
    record = [len(content), digest_of(content)]
    forge(checkpoint, set_in("files", name, record))


def contradictions():
    """Return pairs of a place and a change of the document of `model/layers.0.w`."""
    return {
        "shape[0]": set_in("shape", [2, 6]),
        "data_type": set_in("data_type", "int32"),
        "chunk_grid.configuration.chunk_shape": set_in(
            "chunk_grid", "configuration", "chunk_shape", [4, 6]
        ),
        "codecs": set_in("codecs", [{"name": "bytes", "configuration": {"endian": "big"}}]),
        "fill_value": set_in("fill_value", 1.0),
        "chunk_key_encoding.configuration.separator": set_in(
            "chunk_key_encoding", "configuration", "separator", "/"
        ),
        "attributes.mt.dtype": set_in("attributes", "mt.dtype", "bfloat16"),
        "node_type": set_in("node_type", "group"),
        "dimension_names": set_in("dimension_names", ["a", "b"]),
    }


@pytest.mark.parametrize("place", contradictions())
@pytest.mark.parametrize("name", ["model/layers.0.w/zarr.json", "zarr.json"])
def test_a_sealed_document_that_contradicts_the_manifest_is_named(checkpoint, name, place):
    body = json.loads((checkpoint / name).read_text())
    node = body
    if name == "zarr.json":
        node = body["consolidated_metadata"]["metadata"]["model/layers.0.w"]
    contradictions()[place](node)
    reseal(checkpoint, name, json.dumps(body).encode())
    (problem,) = verify_checkpoint(checkpoint)
    assert (problem.file, problem.tensor) == (name, tensor_of(name))
    assert "contradicts the manifest in" in problem.reason
    assert place.partition("[")[0] in problem.reason


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "is not valid JSON"),
        (b"[" * 4000, "is nested too deeply"),
        (b"7", "contradicts the manifest in its kind"),
    ],
)
def test_a_sealed_document_that_is_none_is_named(checkpoint, content, text):
    reseal(checkpoint, "step/zarr.json", content)
    (problem,) = verify_checkpoint(checkpoint)
    assert (problem.file, problem.tensor) == ("step/zarr.json", "step")
    assert text in problem.reason


def test_a_sealed_chunk_with_a_wrong_crc32c_is_named(checkpoint):
    name = "model/layers.0.w/c.1.0"
    data = bytearray((checkpoint / name).read_bytes())
    data[-1] ^= 1
    reseal(checkpoint, name, bytes(data))
    assert_both_name(checkpoint, name)
    assert "crc32c is not that of its values" in verify_checkpoint(checkpoint)[0].reason


def test_a_chunk_that_claims_more_than_a_save_writes_is_not_read(checkpoint):
    """The file is sparse: nothing on disk, and a terabyte in memory."""
    claim = 2**38
    os.truncate(checkpoint / "rng/c.0", claim + 4)

    def change(body):
        body["arrays"]["rng"] = {"shape": [claim], "dtype": "uint8", "chunks": [claim]}
        body["files"]["rng/c.0"] = [claim + 4, HASH]

    forge(checkpoint, change)
    (problem,) = verify_checkpoint(checkpoint)
    assert "chunks (274877906944,) have 274877906944 bytes, more than 67108864" in problem.reason


def test_a_document_that_claims_more_than_a_save_writes_is_not_read(checkpoint):
    for name in ("zarr.json", "model/zarr.json"):
        claim = 2**38
        os.truncate(checkpoint / name, claim)
        forge(checkpoint, set_in("files", name, [claim, HASH]))
        with pytest.raises(CheckpointError, match=rf"{name}: a document of Zarr has at most \d+"):
            load_all(checkpoint)


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ("_MAX_VALUES", r"has about \d+ values; at most 100 are read"),
        ("MAX_BYTES", r"has \d+ bytes; at most 100 are read"),
    ],
)
def test_a_manifest_that_no_reader_would_take_is_not_written(tmp_path, monkeypatch, limit, text):
    save_checkpoint(tmp_path, 1, [], {})
    monkeypatch.setattr(f"mt_ckpt.value.{limit}", 100)
    with pytest.raises(CheckpointError, match=text):
        save_checkpoint(tmp_path, 2, [], {"a": [[]] * 100})
    assert [path.name for path in tmp_path.glob("*step*")] == ["step_00000001"]


def test_a_manifest_of_many_values_is_not_parsed(checkpoint):
    rest = b'"a": [' + b"[]," * 2**22 + b"0]}\n"
    seal = hashlib.sha256(rest).hexdigest().encode()
    (checkpoint / "mt-manifest.json").write_bytes(b'{"sha256": "' + seal + b'",\n' + rest)
    with pytest.raises(CheckpointError, match=r"has about \d+ values; at most 4194304 are read"):
        load_all(checkpoint)


def test_metadata_within_itself_or_too_deep_is_refused(tmp_path, checkpoint):
    deep: list = []
    for _ in range(300):
        deep = [deep]
    within: dict = {}
    within["again"] = within
    for metadata in ({"deep": deep}, within):
        with pytest.raises(CheckpointError, match="nested deeper than 256, or within itself"):
            save_checkpoint(tmp_path / "root", 1, [], metadata)
    forge(checkpoint, set_in("metadata", {"deep": deep}))
    with pytest.raises(CheckpointError, match="nested deeper than 256"):
        load_all(checkpoint)


def test_a_tensor_that_changes_while_it_is_written_leaves_a_sound_checkpoint(tmp_path, monkeypatch):
    tensor = torch.arange(1000.0)
    real = Disk.write

    def write(disk, descriptor, data):
        tensor.add_(1)
        return real(disk, descriptor, data[:100])

    monkeypatch.setattr(Disk, "write", write)
    path = save_checkpoint(tmp_path, 1, [TensorShard("w", tensor)], {})
    assert tensor[0] > 40
    assert verify_checkpoint(path) == []
