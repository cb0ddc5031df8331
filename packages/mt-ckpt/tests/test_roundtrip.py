import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mt_ckpt import (
    CheckpointError,
    TensorShard,
    inspect_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    param_shards,
    save_checkpoint,
    verify_checkpoint,
)
from mt_parallel_state import ParallelLayout

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def save_and_load(root, tensor):
    path = save_checkpoint(root, 1, [TensorShard("a/t", tensor)], {})
    loaded = torch.empty_like(tensor)
    load_checkpoint(path, [TensorShard("a/t", loaded)])
    return loaded


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (1,), (3, 4), (2, 1, 5)], ids=str)
def test_every_dtype_and_shape_comes_back(tmp_path, dtype, shape):
    tensor = (torch.arange(math.prod(shape)).reshape(shape) * 37 - 11).to(dtype)
    assert torch.equal(save_and_load(tmp_path, tensor).double(), tensor.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern_comes_back_nan_payloads_included(tmp_path, dtype):
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    assert torch.equal(save_and_load(tmp_path, bits.view(dtype)).view(torch.int16), bits)


def test_float_bits_come_back(tmp_path):
    special = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, -0.0, 5e-324])
    assert torch.equal(
        save_and_load(tmp_path, special).view(torch.int32), special.view(torch.int32)
    )


def test_parameters_and_strided_tensors_are_saved_and_filled_in_place(tmp_path):
    param = torch.nn.Parameter(torch.randn(4, 6))
    path = save_checkpoint(tmp_path, 1, [TensorShard("p", param), TensorShard("t", param.t())], {})
    other = torch.nn.Parameter(torch.zeros(4, 6))
    strided = torch.zeros(12, 4)[::2]
    load_checkpoint(path, [TensorShard("p", other), TensorShard("t", strided)])
    assert torch.equal(other, param)
    assert torch.equal(strided, param.t())
    assert other.requires_grad
    assert other.grad_fn is None


def test_metadata_comes_back_and_is_readable_alone(tmp_path):
    metadata = {"step": 3, "rng": [1, 2, [None, True]], "lr": 1e-300, "text": 'é"\n', "empty": {}}
    path = save_checkpoint(tmp_path, 3, [], metadata)
    assert inspect_checkpoint(path).metadata == metadata
    assert load_checkpoint(path, []) == metadata


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"a": {1: 2}}, r"metadata\['a'\]: key 1 is not a string"),
        ({"a": [1, float("nan")]}, r"metadata\['a'\]\[1\]: nan is not a JSON number"),
        ({"a": torch.tensor(1)}, r"metadata\['a'\]: a Tensor is not a JSON value"),
        ([], "metadata must be a dict, not list"),
    ],
)
def test_metadata_that_json_would_change_is_refused(tmp_path, metadata, text):
    with pytest.raises(CheckpointError, match=text):
        save_checkpoint(tmp_path, 1, [], metadata)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [-1, True, 1.0, 10**18])
def test_a_bad_step_is_refused(tmp_path, step):
    with pytest.raises(CheckpointError, match="step must be an int from 0"):
        save_checkpoint(tmp_path, step, [], {})


@pytest.mark.parametrize("keep", [0, -1, True])
def test_a_bad_keep_is_refused(tmp_path, keep):
    with pytest.raises(CheckpointError, match="keep must be None or an int of at least 1"):
        save_checkpoint(tmp_path, 1, [], {}, keep=keep)


@pytest.mark.parametrize(
    "name", ["", "/a", "a//b", "a/../b", ".", "a b", "__a", "a/zarr.json", "mt-manifest.json", "ä"]
)
def test_a_name_that_is_not_safe_on_disk_is_refused(name):
    with pytest.raises(ValueError, match=r"is not allowed. A name is parts joined by '/'"):
        TensorShard(name, torch.zeros(1))


@pytest.mark.parametrize(
    ("shape", "offsets"), [((4,), (3,)), ((4,), (-1,)), ((4, 1), (0, 0)), ((4,), (0, 0))]
)
def test_a_box_outside_its_array_is_refused(shape, offsets):
    with pytest.raises(ValueError, match="does not lie within the global shape"):
        TensorShard("a", torch.zeros(2), global_shape=shape, offsets=offsets)


def test_a_tensor_without_dense_storable_values_is_refused():
    with pytest.raises(
        ValueError, match=r"dtype torch.complex64 cannot be stored; use one of float64"
    ):
        TensorShard("a", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(
        ValueError, match="needs dense values, and the tensor is on the meta device"
    ):
        TensorShard("a", torch.zeros(2, device="meta"))


def test_an_array_below_an_array_is_refused(tmp_path):
    shards = [TensorShard("a", torch.zeros(1)), TensorShard("a/b", torch.zeros(1))]
    with pytest.raises(CheckpointError, match="'a' is an array, and other arrays are below it"):
        save_checkpoint(tmp_path, 1, shards, {})


def test_a_cast_is_made_only_when_asked_for(tmp_path):
    values = torch.randn(8)
    path = save_checkpoint(tmp_path, 1, [TensorShard("w", values)], {})
    wanted = torch.zeros(8, dtype=torch.bfloat16)
    with pytest.raises(
        CheckpointError, match=r"w: saved as float32, wanted as bfloat16 .cast=True"
    ):
        load_checkpoint(path, [TensorShard("w", wanted)])
    load_checkpoint(path, [TensorShard("w", wanted)], cast=True)
    assert torch.equal(wanted, values.bfloat16())
    integers = TensorShard("w", torch.zeros(8, dtype=torch.int64))
    with pytest.raises(CheckpointError, match="w: saved as float32, wanted as int64\n"):
        load_checkpoint(path, [integers], cast=True)


def test_loading_lists_everything_that_does_not_fit(tmp_path):
    names = ["model/qkv.weight", "model/proj.weight", "model/norm.weight", "optimizer/m"]
    path = save_checkpoint(
        tmp_path, 1, [TensorShard(name, torch.zeros(4, 2)) for name in names], {}
    )
    shards = [
        TensorShard("model/qkv.weigth", torch.zeros(4, 2)),
        TensorShard("model/proj.weight", torch.zeros(2, 2), global_shape=(8, 2)),
        TensorShard("model/norm.weight", torch.zeros(4, 2, dtype=torch.float64)),
    ]
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, shards, ignore=["optimizer/"])
    lines = str(caught.value).splitlines()
    assert lines[1:5] == [
        "  model/qkv.weigth: not in the checkpoint; did you mean 'model/qkv.weight'?",
        "  model/qkv.weight: in the checkpoint, but not requested",
        "  model/norm.weight: saved as float32, wanted as float64 (cast=True converts)",
        "  model/proj.weight: saved shape (4, 2), wanted (8, 2)",
    ]
    assert "ignore=(" in lines[5]
    assert caught.value.tensor == "model/qkv.weigth"
    assert torch.equal(shards[1].tensor, torch.zeros(2, 2))


def test_a_part_can_be_loaded_alone(tmp_path):
    shards = [TensorShard(name, torch.ones(2)) for name in ("model/w", "optimizer/w")]
    path = save_checkpoint(tmp_path, 1, shards, {})
    with pytest.raises(CheckpointError, match="optimizer/w: in the checkpoint, but not requested"):
        load_checkpoint(path, shards[:1])
    wanted = torch.zeros(2)
    load_checkpoint(path, [TensorShard("model/w", wanted)], ignore=("optimizer/",))
    assert torch.equal(wanted, torch.ones(2))


def test_a_directory_that_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere: no such checkpoint directory"):
        load_checkpoint(tmp_path / "nowhere", [])
    with pytest.raises(CheckpointError, match="has no committed checkpoint"):
        inspect_checkpoint(tmp_path)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "zarr.json").touch()
    with pytest.raises(
        CheckpointError, match=r"mt-manifest.json: missing, so .* is not a complete"
    ):
        inspect_checkpoint(tmp_path / "copy")
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "nowhere") is None


def test_the_manifest_records_versions_and_every_file(tmp_path):
    path = save_checkpoint(tmp_path, 7, [TensorShard("m/w", torch.zeros(2))], {})
    manifest = json.loads((path / "mt-manifest.json").read_text())
    assert manifest["step"] == 7
    assert manifest["format_version"] == 3
    assert sorted(manifest["versions"]) == ["mt-ckpt", "numpy", "torch", "zarr"]
    files = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
    assert set(manifest["files"]) == files - {"mt-manifest.json"}
    assert verify_checkpoint(path) == []


def test_import_is_light():
    code = (
        "import torch, time, sys; before = set(sys.modules); start = time.perf_counter();"
        "import mt_ckpt; print(time.perf_counter() - start, len(set(sys.modules) - before),"
        "[m for m in ('zarr', 'google_crc32c') if m in set(sys.modules) - before])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, modules, heavy = out.stdout.split(maxsplit=2)
    assert int(modules) < 60
    assert heavy.strip() == "[]"
    assert float(seconds) < 0.5  # 0.15 s on a quiet machine


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda path: TensorShard(5, torch.ones(1)), "name must be a str, got 5"),
        (lambda path: TensorShard("w", None), "w: tensor must be a Tensor, got None"),
        (lambda path: TensorShard("w", torch.ones(2), global_shape=2), "global_shape must be int"),
        (lambda path: TensorShard("w", torch.ones(2), offsets=(0.5,)), "offsets must be integers"),
        (
            lambda path: param_shards([("w", None)], ParallelLayout(), 0, prefix="m"),
            "'w' must be a",
        ),
        (
            lambda path: param_shards([], None, 0, prefix="m"),
            "layout must be a ParallelLayout, got",
        ),
        (
            lambda path: save_checkpoint(path, 1, [None], {}),
            "shards must be a TensorShard, got None",
        ),
        (lambda path: save_checkpoint(path, 1, [], {}, group=-1), "group must be a ProcessGroup"),
        (lambda path: load_checkpoint(path, [], group=-1), "group must be a ProcessGroup, got -1"),
        (lambda path: load_checkpoint(path, [torch.ones(1)]), "shards must be a TensorShard, got"),
        (lambda path: load_checkpoint(path, [], ignore=(1,)), "ignore must be name prefixes, not"),
        (lambda path: inspect_checkpoint(None), "not NoneType|not 'NoneType'"),
    ],
)
def test_an_argument_of_another_type_is_named(tmp_path, call, text):
    save_checkpoint(tmp_path, 0, [], {})
    with pytest.raises((TypeError, CheckpointError), match=text):
        call(tmp_path)


def added(call):
    """Return by how much a call raises the most memory that this process has had, in bytes."""

    def most():
        (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(line) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # the most is what there is now
    before = most()
    call()
    return most() - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_a_save_takes_a_block_a_thread_and_a_load_less(tmp_path):
    tensors = {f"plain{i}": torch.randn(1024, 1024) for i in range(16)}
    tensors["sliced"] = torch.randn(4096, 2048)  # 96 MiB in all
    shards = [TensorShard(name, tensor) for name, tensor in tensors.items()]
    save_checkpoint(tmp_path, 1, shards[:1], {})  # imports what a save needs
    noise = 4 * 2**20
    assert added(lambda: save_checkpoint(tmp_path, 2, shards, {})) < 8 * 2**20 + noise
    assert added(lambda: load_checkpoint(tmp_path, shards)) < 4 * 2**20 + noise
