"""Every family refuses a folder with one wrong place: one message, nothing written."""

import dataclasses
import json
import shutil
import struct

import pytest
import torch
from family_row import ROWS, WITH_ENCODER
from image_row import ROWS as IMAGE_ROWS
from llava_row import ROW as LLAVA_ROW
from mt_hf import (
    from_pretrained,
    known_families,
    open_pretrained,
    read_description,
    save_pretrained,
)
from mt_hf.commands.cli import main
from mt_testing import sample
from safetensors.torch import load_file, save_file

ROW_OF = {row.name: row for row in (*IMAGE_ROWS, *WITH_ENCODER, LLAVA_ROW, *ROWS)}
FAMILIES = sorted(known_families())
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """By family a folder of one file, and one of several with an index."""
    made = {}

    def make(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            ROW_OF[name].build(0).save_pretrained(folder / "one")
            size = (folder / "one" / ONE).stat().st_size // 3
            save_pretrained(from_pretrained(folder / "one"), folder / "several", file_size=size)
            made[name] = folder
        return made[name]

    return make


def tensors_of(folder):
    """The tensors that the model needs, the larger ones first, so that two are of one file."""
    found = open_pretrained(folder).tensors
    return sorted(found, key=lambda name: (-len(found[name].shape), name))


def change_tensors(folder, change, name=ONE):
    tensors = load_file(folder / name)
    change(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name)


def missing(folder):
    name = tensors_of(folder)[1]
    change_tensors(folder, lambda tensors: tensors.pop(name))
    return [f"tensor {name} is missing", str(folder)]


def extra(folder):
    change_tensors(folder, lambda tensors: tensors.update(surprise=torch.zeros(3)))
    return [f"{ONE}: tensor surprise is not expected", str(folder)]


def misshapen(folder):
    name = tensors_of(folder)[0]
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name][..., :-1]}))
    return [f"{ONE}: tensor {name} has the shape", str(folder)]


def of_integers(folder):
    name = tensors_of(folder)[0]
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name].long()}))
    return [f"{ONE}: tensor {name} is torch.int64", str(folder)]


def cut(folder):
    path = folder / ONE
    path.write_bytes(path.read_bytes()[:-5])
    return [str(path), "it was not copied whole"]


def garbage(folder):
    path = folder / ONE
    content = bytearray(path.read_bytes())
    content[8:24] = b"\xff" * 16
    path.write_bytes(content)
    return [str(path)]


def endless_header(folder):
    path = folder / ONE
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])
    return [str(path), "is no complete safetensors file"]


def overlap(folder):
    path = folder / ONE
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    places = {name: each for name, each in header.items() if name != "__metadata__"}
    second = sorted(places, key=lambda name: places[name]["data_offsets"])[1]
    start, end = places[second]["data_offsets"]
    places[second]["data_offsets"] = [start - 4, end - 4]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
    return [str(path), f"tensor {second} of", "the file is damaged"]


def change_config(folder, change):
    path = folder / "config.json"
    given = json.loads(path.read_text())
    change(given)
    path.write_text(json.dumps(given))
    return str(path)


def unknown_architecture(folder):
    path = change_config(folder, lambda given: given.update(architectures=["NoSuchModel"]))
    return [f"{path}: the architecture 'NoSuchModel' is not known"]


def unknown_type(folder):
    def change(given):
        del given["architectures"]
        given["model_type"] = "no_such_model"

    return [f"{change_config(folder, change)}: the model_type 'no_such_model' is not known"]


def unknown_field(folder):
    path = change_config(folder, lambda given: given.update(is_causal=2.5))
    return [path, "is_causal: 2.5: transformers reads this field"]


def endless_layers(folder):
    """But where they are a list in the file, and so none without an end."""
    names = ("num_hidden_layers", "n_layer", "num_layers")

    found = []

    def change(given):
        part = given.get("text_config", given)
        found.extend(name for name in names if name in part)
        part.update(dict.fromkeys(found, 10**12))

    path = change_config(folder, change)
    return [path, f"{found[0]}: 1000000000000 is too large"] if found else None


def unknown_rope(folder):
    """Wherever it stands; families with none have no field for it."""
    found = []

    def spoil(value):
        if isinstance(value, dict):
            if "rope_type" in value:
                value["rope_type"] = "spiral"
                found.append(value)
            for each in value.values():
                spoil(each)

    path = change_config(folder, spoil)
    if found:
        return [path, "'spiral'"]
    fields = read_description(folder).family.fields
    assert not any("rope" in item.name for item in dataclasses.fields(fields))
    return None


def shards(folder):
    return sorted(path.name for path in folder.glob("*.safetensors"))


def lost_shard(folder):
    name = shards(folder)[1]
    (folder / name).unlink()
    return [name]


def twice(folder):
    first, second = shards(folder)[:2]
    name, tensor = next(iter(load_file(folder / first).items()))
    change_tensors(folder, lambda tensors: tensors.update({name: tensor}), second)
    return [str(folder / INDEX), f"tensor {name} is in {second}, and the index says {first}"]


def not_in_index(folder):
    index = json.loads((folder / INDEX).read_text())
    name = tensors_of(folder)[0]
    del index["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(index))
    return [str(folder), name]


def only_in_index(folder):
    index = json.loads((folder / INDEX).read_text())
    first = shards(folder)[0]
    index["weight_map"]["surprise"] = first
    (folder / INDEX).write_text(json.dumps(index))
    return [f"{folder / first}: lacks tensor surprise"]


IN_ONE = (missing, extra, misshapen, of_integers, cut, garbage, endless_header, overlap)
IN_ONE += (unknown_architecture, unknown_type, unknown_field, unknown_rope, endless_layers)
IN_SEVERAL = (lost_shard, twice, not_in_index, only_in_index)


def _name(value):
    return getattr(value, "__name__", value)


# Of each seven CI runs one, other damages for each family, and the campaign all.
CASES = [(family, damage) for family in FAMILIES for damage in (*IN_ONE, *IN_SEVERAL)]


@pytest.mark.parametrize(("family", "damage"), sample(CASES, every=7), ids=_name)
def test_it_is_named_and_nothing_is_written(originals, tmp_path, capsys, family, damage):
    kind = "several" if damage in IN_SEVERAL else "one"
    folder = shutil.copytree(originals(family) / kind, tmp_path / "folder")
    says = damage(folder)
    if says is None:
        return
    capsys.readouterr()  # bars of transformers
    with pytest.raises(SystemExit) as caught:
        main(["import", str(folder), str(tmp_path / "out")])
    assert caught.value.code == 2
    told = capsys.readouterr()
    assert told.err.startswith("mt-hf: ")
    assert all(each in told.err for each in says), told.err
    assert len(told.err) < 2000
    assert not told.out
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("family", sample(((family,) for family in FAMILIES), every=4))
def test_undamaged_folders_are_imported(originals, tmp_path, family):
    for kind in ("one", "several"):
        with pytest.raises(SystemExit) as caught:
            main(["import", str(originals(family) / kind), str(tmp_path / kind)])
        assert caught.value.code == 0
