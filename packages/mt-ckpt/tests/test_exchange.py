"""Other formats: exports load elsewhere with equal values, and imports run no code."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from mt_ckpt import TensorShard, inspect_checkpoint, load_checkpoint, save_checkpoint
from mt_ckpt.command.cli import main
from mt_ckpt.exchange import dcp as dcp_files
from mt_ckpt.exchange import foreign
from safetensors import safe_open
from safetensors.torch import load_file, save_file

GOLDEN = Path(__file__).parent / "golden"
TENSORS = {
    "model/layers.0.weight": torch.randn(6, 4),
    "model/layers.0.norm": torch.randn(5).bfloat16(),
    "model/half": torch.randn(3, 2).half(),
    "optimizer/exp_avg/layers.0.weight": torch.randn(6, 4, dtype=torch.float64),
    "count": torch.tensor(7),
    "flags": torch.tensor([True, False, True]),
    "empty": torch.empty(0, 3),
}


def exit_code(*arguments) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(each) for each in arguments])
    return caught.value.code


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    arrays = inspect_checkpoint(path).arrays
    made = {n: torch.empty(s.shape, dtype=getattr(torch, s.dtype)) for n, s in arrays.items()}
    load_checkpoint(path, [TensorShard(name, tensor) for name, tensor in made.items()])
    return made


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert sorted(got) == sorted(wanted)
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


@pytest.fixture
def saved(tmp_path):
    shards = [TensorShard(name, tensor) for name, tensor in TENSORS.items()]
    save_checkpoint(tmp_path / "run/checkpoints", 4, shards, {})
    return tmp_path / "run"


@pytest.mark.parametrize("file_bytes", [5_000_000_000, 100])
def test_safetensors_go_round(saved, tmp_path, file_bytes):
    out = tmp_path / "out"
    assert exit_code("export", saved, out, "--file-bytes", file_bytes) == 0
    files = sorted(out.glob("*.safetensors"))
    assert (
        (len(files) > 1) == (out / "model.safetensors.index.json").exists() == (file_bytes == 100)
    )
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert_same(found, TENSORS)
    with safe_open(files[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert exit_code("import", out, tmp_path / "back", "--from", "safetensors", "--step", 4) == 0
    assert_same(tensors_of(tmp_path / "back"), TENSORS)
    assert exit_code("diff", saved, tmp_path / "back") == 0


def test_a_group_is_written_without_its_name_and_read_into_one(saved, tmp_path):
    assert exit_code("export", saved, tmp_path / "out", "--prefix", "model") == 0
    found = load_file(tmp_path / "out/model.safetensors")
    assert sorted(found) == ["half", "layers.0.norm", "layers.0.weight"]
    file = tmp_path / "out/model.safetensors"
    assert exit_code("import", file, tmp_path / "back", "--prefix", "model") == 0
    back = tensors_of(tmp_path / "back")
    assert_same(back, {n: t for n, t in TENSORS.items() if n.startswith("model/")})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_loads_what_is_exported(saved, tmp_path):
    assert exit_code("export", saved, tmp_path / "out", "--to", "dcp") == 0
    got = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    dcp.load(got, checkpoint_id=tmp_path / "out", no_dist=True)
    assert_same(got, TENSORS)


def sharded_state(folder: Path, action: str) -> dict[str, torch.Tensor]:
    """Save or load a model with FSDP2 and its moments over all ranks; return whole tensors."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    parameters, moments = get_state_dict(model, optimizer)
    of_state = {f"{n}.{k}": t for n, each in moments["state"].items() for k, t in each.items()}
    tensors = {**{f"model.{n}": t for n, t in parameters.items()}, **of_state}
    assert sum(isinstance(tensor, DTensor) for tensor in tensors.values()) == 9
    if action == "load":
        for tensor in tensors.values():
            tensor.zero_()
        dcp.load(tensors, checkpoint_id=folder)
    else:
        dcp.save(tensors | {"note": "of no tensor"}, checkpoint_id=folder)
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}


def test_dcp_of_two_ranks_goes_round(tmp_path, ranks):
    wanted, _ = ranks(2, sharded_state, tmp_path / "theirs", "save")
    assert len(list((tmp_path / "theirs").glob("*.distcp"))) == 2
    assert exit_code("import", tmp_path / "theirs", tmp_path / "ours", "--from", "dcp") == 0
    assert_same(tensors_of(tmp_path / "ours"), wanted)
    assert exit_code("export", tmp_path / "ours", tmp_path / "back", "--to", "dcp") == 0
    for found in ranks(2, sharded_state, tmp_path / "back", "load"):
        assert_same(found, wanted)


def test_a_checkpoint_of_megatron_core_is_read(tmp_path):
    source, out = GOLDEN / "megatron/iter_0000007", tmp_path / "out"
    command = ("import", source, out, "--from", "megatron-torch_dist", "--prefix", "model")
    assert exit_code(*command) == 0
    manifest = inspect_checkpoint(out)
    assert manifest.step == 7
    args = manifest.metadata["megatron-torch_dist"]["args"]
    assert (args["num_layers"], args["params_dtype"]) == (2, "torch.float32")
    found = {n.removeprefix("model/"): t for n, t in tensors_of(out).items()}
    used = set()
    for name, weight in load_file(GOLDEN / "megatron/weights.safetensors").items():
        head, layer, rest = name.partition("layers.")
        number, _, rest = rest.partition(".")
        stored = _stored_names(f"{head}{layer}{rest}" if layer else name)
        stored = next(each for each in stored if each in found)
        got = found[stored][int(number)] if layer else found[stored]
        assert torch.equal(got, weight), name
        used.add(stored)
    assert used == set(found)


def _stored_names(name: str) -> list[str]:
    """Return how Megatron may store a weight: a norm before a linear layer is a part of that."""
    fused = {
        "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    }
    return [name, *(name.replace(norm, linear) for norm, linear in fused.items() if norm in name)]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_many_pieces_of_dcp_take_one_open_of_their_file_and_few_pickles(tmp_path, monkeypatch):
    tensors = {f"layers.{i}.w": torch.full((3 + i % 2,), float(i)) for i in range(500)}
    dcp.save(tensors, checkpoint_id=tmp_path)
    calls: list[str] = []

    def counted(name, call):
        def counting(*args, **options):
            calls.append(name)
            return call(*args, **options)

        return counting

    monkeypatch.setattr(dcp_files, "read_pickle", counted("pickle", dcp_files.read_pickle))
    monkeypatch.setattr(foreign, "open_file", counted("open", foreign.open_file))
    found = dcp_files.open_dcp(tmp_path)
    assert_same({name: found.read(name) for name in found.tensors}, tensors)
    assert sorted(calls) == ["open", "pickle", "pickle", "pickle"]  # .metadata, and two shapes


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("has_checksums", [True, False])
def test_a_flipped_bit_of_a_tensor_is_named_where_torch_wrote_checksums(
    tmp_path, capsys, has_checksums
):
    folder, tensor = tmp_path / "dcp", torch.full((4, 6), 1.25)
    torch.serialization.set_crc32_options(has_checksums)
    try:
        dcp.save({"weight": tensor}, checkpoint_id=folder)
    finally:
        torch.serialization.set_crc32_options(True)
    assert exit_code("import", folder, tmp_path / "whole", "--from", "dcp") == 0
    assert_same(tensors_of(tmp_path / "whole"), {"weight": tensor})
    path = folder / "__0_0.distcp"
    size = path.stat().st_size
    os.truncate(path, 1 << 40)  # more than the memory, in a mapping of the whole file
    assert exit_code("import", folder, tmp_path / "large", "--from", "dcp") == 0
    os.truncate(path, size)
    content = bytearray(path.read_bytes())
    content[content.index(tensor.numpy().tobytes()) + 40] ^= 4
    path.write_bytes(content)
    code = exit_code("import", folder, tmp_path / "out", "--from", "dcp")
    assert code == (2 if has_checksums else 0)
    assert ("__0_0.distcp: 96 bytes at" in capsys.readouterr().err) == has_checksums


class Forged:
    """An object whose pickle calls a function."""

    def __init__(self, call, *arguments):
        self.parts = (call, arguments)

    def __reduce__(self):
        return self.parts


_AUDITED: list[tuple[str, tuple]] | None = None


def _hear(event, arguments):
    if _AUDITED is not None:
        _AUDITED.append((event, arguments))


sys.addaudithook(_hear)


def forge_tensor(folder: Path, call: Forged) -> None:
    """Put an archive of `torch.save` where a tensor is, behind bytes that a reader skips."""
    content = pickle.loads((folder / ".metadata").read_bytes())
    places = {index.fqn: info for index, info in content.storage_data.items()}
    place = places["embedding.word_embeddings.weight"]
    buffer = io.BytesIO()
    torch.save(call, buffer)
    forged = buffer.getvalue()
    with (folder / place.relative_path).open("r+b") as file:
        file.seek(place.offset)
        file.write(bytes(place.length - len(forged)) + forged)


@pytest.mark.parametrize(
    "call",
    [
        Forged(exec, "import os; os.mkdir('ran')"),
        Forged(eval, "__import__('os').mkdir('ran')"),
        Forged(getattr(sys.modules["os"], "system"), "mkdir ran"),  # noqa: B009
        Forged(__import__, "antigravity"),
        Forged(torch.load, "x"),
    ],
    ids=["exec", "eval", "system", "import", "torch"],
)
@pytest.mark.parametrize("kind", ["metadata", "tensor", "common"])
def test_a_forged_pickle_is_refused_and_nothing_of_it_runs(
    tmp_path, monkeypatch, capsys, kind, call
):
    global _AUDITED
    folder = Path(shutil.copytree(GOLDEN / "megatron/iter_0000007", tmp_path / "forged"))
    if kind == "metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(call))
    elif kind == "common":
        torch.save({"args": call}, folder / "common.pt")
    else:
        forge_tensor(folder, call)
    monkeypatch.chdir(tmp_path)
    _AUDITED = heard = []
    try:
        code = exit_code("import", folder, "out", "--from", "megatron-torch_dist")
    finally:
        _AUDITED = None
    assert code == 2
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()
    names = {event for event, _ in heard}
    assert not names & {"pickle.find_class", "os.system", "os.exec", "subprocess.Popen"}
    assert "antigravity" not in sys.modules
    assert "nothing of it was run" in capsys.readouterr().err


def many_values(pair) -> object:
    """Return a value of few bytes that holds 2**60 values."""
    value = "x"
    for _ in range(60):
        value = pair(value)
    return value


def tensor_at(folder: Path, change) -> None:
    """Change what `.metadata` says of the first two places, or of all."""
    content = pickle.loads((folder / ".metadata").read_bytes())
    change(content)
    (folder / ".metadata").write_bytes(pickle.dumps(content))


def forge_index(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"\x80\x04Nr\xff\xff\xff\xff.")  # 64 GiB for C's reader


def forge_key(folder: Path) -> None:
    key = pickle.dumps(many_values(lambda value: (value, value)), 2)[2:-1]
    (folder / ".metadata").write_bytes(b"\x80\x02}" + key + b"Ns.")


def forge_arguments(folder: Path) -> None:
    value = many_values(lambda value: {"a": value, "b": value})
    torch.save({"args": argparse.Namespace(hidden_size=value)}, folder / "common.pt")


def forge_length(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"\x80\x04" + b"}" * (1 << 21) + b".")


def forge_places(folder: Path) -> None:
    def same(content):
        for info in content.storage_data.values():
            info.offset = 0

    tensor_at(folder, same)


def forge_strides(folder: Path) -> None:
    forge_tensor(folder, torch.zeros(1).expand(1 << 40))


@pytest.mark.parametrize(
    ("forge", "says"),
    [
        (forge_index, "it is no Metadata"),
        (forge_key, "a key is no plain value"),
        (forge_arguments, "args: it holds more than"),
        (forge_length, "bytes; at most"),
        (forge_places, "overlap"),
        (forge_strides, "elements that overlap"),
    ],
)
def test_few_bytes_that_ask_for_much_are_refused_at_once(tmp_path, capsys, forge, says):
    folder = Path(shutil.copytree(GOLDEN / "megatron/iter_0000007", tmp_path / "forged"))
    forge(folder)
    assert exit_code("import", folder, tmp_path / "out", "--from", "megatron-torch_dist") == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("place", range(0, 8000, 397))
def test_a_damaged_description_is_an_error_of_one_kind(tmp_path, place, capsys):
    folder = Path(shutil.copytree(GOLDEN / "megatron/iter_0000007", tmp_path / "damaged"))
    content = bytearray((folder / ".metadata").read_bytes())
    content[place % len(content)] ^= 1 << (place % 8)
    (folder / ".metadata").write_bytes(content)
    code = exit_code("import", folder, tmp_path / "out", "--from", "megatron-torch_dist")
    assert code in (0, 2)  # a bit of a name that nobody reads may differ


def test_files_that_end_early_or_lead_out_are_refused(tmp_path, capsys):
    folder = Path(shutil.copytree(GOLDEN / "megatron/iter_0000007", tmp_path / "short"))
    path = sorted(folder.glob("*.distcp"))[0]
    path.write_bytes(path.read_bytes()[:-2000])
    command = ("import", folder, tmp_path / "out", "--from", "megatron-torch_dist")
    assert exit_code(*command) == 2
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert exit_code(*command) == 2
    assert "leads out of" in capsys.readouterr().err
    for name, says in ((GOLDEN, "has no metadata.json"), (tmp_path / "no", "has no metadata.json")):
        assert exit_code("import", name, tmp_path / "out", "--from", "megatron-torch_dist") == 2
        assert says in capsys.readouterr().err


def test_names_that_can_be_no_array_are_changed_or_refused(tmp_path, capsys):
    save_file({"a:b": torch.ones(1), "c d": torch.ones(2)}, tmp_path / "model.safetensors")
    assert exit_code("import", tmp_path, tmp_path / "out") == 0
    assert sorted(tensors_of(tmp_path / "out")) == ["a_b", "c_d"]
    save_file({"a:b": torch.ones(1), "a b": torch.ones(2)}, tmp_path / "model.safetensors")
    assert exit_code("import", tmp_path, tmp_path / "two") == 2
    assert "would both be the array a_b" in capsys.readouterr().err
