"""Files of valid form that would give wrong numbers or take all memory."""

import json
import struct
import time

import pytest
import torch
from family_row import ROWS
from mt_files import FileError
from mt_hf import ExchangeError, describe, from_pretrained, open_pretrained, save_pretrained
from mt_hf.commands.cli import main
from safetensors.torch import load_file, save_file

LLAMA = next(row for row in ROWS if row.name == "llama")
NORM = "model.layers.1.input_layernorm.weight"
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    LLAMA.build(0).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def spoil(folder, name, value):
    tensors = load_file(folder / ONE)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, folder / ONE, metadata={"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [NORM, "model.embed_tokens.weight"])
def test_weights_that_are_not_finite_are_named_with_their_file(folder, name, value):
    spoil(folder, name, value)
    with pytest.raises(ExchangeError, match=f"{ONE}: tensor {name} has 1 of .* not finite"):
        from_pretrained(folder)
    assert open_pretrained(folder).config  # no weight was read


@pytest.mark.parametrize("multiple", ["1", "128"])
def test_an_import_names_them_and_leaves_nothing(folder, tmp_path, capsys, multiple):
    spoil(folder, "model.embed_tokens.weight", float("nan"))
    with pytest.raises(SystemExit) as caught:
        main(["import", str(folder), str(tmp_path / "run"), "--vocab-multiple", multiple])
    assert caught.value.code == 1
    assert f"{ONE}: tensor model.embed_tokens.weight has 1 of" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_weights_that_a_narrow_dtype_does_not_hold_are_refused(folder):
    spoil(folder, NORM, 1e30)
    assert from_pretrained(folder, dtype=torch.bfloat16)
    with pytest.raises(ExchangeError, match=f"{NORM} has 1 .* not finite in float16"):
        from_pretrained(folder, dtype=torch.float16)


def twice(path, key):
    """Write a JSON object of a file again with one of its keys a second time."""
    given = json.loads(path.read_text())
    text = json.dumps(given)
    path.write_text(f'{text[:-1]}, "{key}": {json.dumps(given[key])}}}')


def test_a_key_that_is_there_twice_is_refused(folder, tmp_path):
    save_pretrained(from_pretrained(folder), tmp_path / "several", file_size=9000)
    twice(tmp_path / "several" / INDEX, "weight_map")
    with pytest.raises(FileError, match=r"weight_map.* twice"):
        from_pretrained(tmp_path / "several")
    content = (folder / ONE).read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    text = json.dumps(header)[:-1] + f', "{NORM}": {json.dumps(header[NORM])}}}'
    new = struct.pack("<Q", len(text)) + text.encode() + content[8 + size :]
    (folder / ONE).write_bytes(new)
    with pytest.raises(FileError, match=rf"{NORM}.* twice"):
        from_pretrained(folder)
    twice(folder / "config.json", "num_hidden_layers")
    with pytest.raises(FileError, match=r"num_hidden_layers.* twice"):
        describe(folder)


def of_empty_tensors():
    entry = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    return b"{" + b",".join(b'"tensor.%022d":%b' % (i, entry) for i in range(700_000)) + b"}"


def of_numbers():
    return b'{"a":{"dtype":"F32","shape":[' + b"0," * 30_000_000 + b'0],"data_offsets":[0,0]}}'


@pytest.mark.parametrize("made", [of_empty_tensors, of_numbers])
def test_an_endless_header_is_refused_before_it_is_parsed(folder, monkeypatch, made):
    header = made()
    assert len(header) > 55_000_000
    (folder / ONE).write_bytes(struct.pack("<Q", len(header)) + header)
    (folder / INDEX).unlink(missing_ok=True)
    del header

    def parsed(content, *, name, constant=None):
        raise AssertionError(f"{name} was parsed")

    monkeypatch.setattr("mt_files.safetensors.parse_json", parsed)
    start = time.process_time()
    with pytest.raises(ExchangeError, match=f"{ONE}: describes far more tensors"):
        open_pretrained(folder)
    assert time.process_time() - start < 3


def test_an_endless_index_is_refused_before_it_is_parsed(folder, monkeypatch):
    (folder / ONE).unlink()
    names = ",".join(f'"tensor.{index}": "a.safetensors"' for index in range(300_000))
    (folder / INDEX).write_text(f'{{"weight_map": {{{names}}}}}')
    monkeypatch.setattr("mt_files.safetensors.parse_json", None)
    with pytest.raises(ExchangeError, match=f"{INDEX}: describes far more tensors"):
        open_pretrained(folder)
