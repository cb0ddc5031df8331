"""Damaged or malicious folders of Hugging Face, with models and with adapters."""

from __future__ import annotations

import json
import random
from pathlib import Path

from checkpoints import mutate
from world import (
    MESSAGE_BYTES,
    Result,
    Row,
    World,
    call,
    demand,
    expect,
    files_of,
    flip_bit,
    replace_with,
)


def _folder(scratch: Path) -> Path:
    """Write a small model, in several files with an index."""
    from mt_hf import save_pretrained
    from mt_model import GPT, gpt

    sizes = {"vocab_size": 40, "hidden_size": 16, "num_layers": 2, "num_heads": 2}
    save_pretrained(GPT(gpt(**sizes, max_sequence_length=32)), scratch / "model", file_size=4000)
    return scratch / "model"


def _import(folder: Path, scratch: Path) -> Result:
    """Import it, and demand that nothing is left where it was refused."""
    from mt_hf.commands.cli import main

    before = sorted(scratch.iterdir())
    result = call(main, ["import", str(folder), str(scratch / "out")])
    expect(result, [0, 2])
    if result.code:
        left = [str(path) for path in sorted(scratch.iterdir()) if path not in before]
        demand(not left, f"left behind: {left}")
    return result


def damaged_folder(world: World, rng: random.Random, scratch: Path) -> None:
    """Damage a file of a folder: refused by its name, or what changed is a value of a weight."""
    folder = _folder(scratch)
    path = rng.choice(files_of(folder))
    how = rng.choice(["flip", "flip", "cut", "longer", "gone", "fifo", "folder", "device"])
    is_index = path.name.endswith("index.json")
    if how == "flip":
        flip_bit(path, rng)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])
    elif how == "longer":
        path.write_bytes(path.read_bytes() + rng.randbytes(9))
    elif how == "gone":
        path.unlink()
    else:
        replace_with(path, how, scratch)
    result = _import(folder, scratch)
    demand(result.code or how == "flip", f"{path.name} with {how} was imported")
    named = is_index or path.name in result.errors or how == "flip"
    demand(not result.code or named, f"{path.name} is not named: {result.errors[-500:]}")


def forged_folder(world: World, rng: random.Random, scratch: Path) -> None:
    """Exchange a value of config.json or of the index: imported, or refused in a few words."""
    folder = _folder(scratch)
    path = folder / rng.choice(["config.json", "config.json", "model.safetensors.index.json"])
    path.write_text(json.dumps(mutate(json.loads(path.read_text()), rng)))
    _import(folder, scratch)


def adapter(world: World, rng: random.Random, scratch: Path) -> None:
    """Damage a file of an adapter, or exchange a value of its config: read, or refused in words."""
    from mt_files import UserError
    from mt_hf import export_lora, read_lora
    from mt_model import GPT, gpt
    from mt_tensor_parallel import add_lora, save_lora

    sizes = {"vocab_size": 40, "hidden_size": 16, "num_layers": 2, "num_heads": 2}
    model, folder = GPT(gpt(**sizes, max_sequence_length=32)), scratch / "adapter"
    plain = GPT(model.config)
    add_lora(model, 2)
    save_lora(model, folder, base_model="", export=export_lora)
    path = rng.choice(files_of(folder))
    how = rng.choice(["flip", "flip", "cut", "gone", "fifo", "device", "forged", "forged"])
    config = folder / "adapter_config.json"
    if how == "forged":
        config.write_text(json.dumps(mutate(json.loads(config.read_text()), rng)))
    elif how == "flip":
        flip_bit(path, rng)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])
    elif how == "gone":
        path.unlink()
    else:
        replace_with(path, how, scratch)
    try:
        found = read_lora(folder, plain)
    except (UserError, ValueError, OSError) as error:
        demand(len(str(error)) <= MESSAGE_BYTES, f"{len(str(error))} bytes of message")
        return
    demand(how in ("flip", "forged"), f"{path.name} with {how} was read")
    demand(len(found) == 8, f"{len(found)} layers")


def hostile_image(world: World, rng: random.Random, scratch: Path) -> None:
    """Damage an image, or forge what makes pixel values of it: refused in words, or read."""
    from mt_data import DataError
    from mt_files import FileError, SchemaError
    from mt_multimodal import read_image_preprocessing
    from PIL import Image

    path, kind = scratch / "image", rng.choice(["PNG", "JPEG", "WEBP", "GIF", "BMP"])
    image = Image.effect_noise((rng.randint(1, 40), rng.randint(1, 40)), 50)
    image.convert(rng.choice(["RGB", "L"])).save(path, kind)
    given = {"size": {"shortest_edge": 8}, "crop_size": 8, "do_center_crop": True}
    given |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "resample": 3}
    if rng.random() < 0.5:
        mutate(given, rng)
    else:
        for _ in range(rng.choice([1, 1, 5])):
            flip_bit(path, rng)
        path.write_bytes(path.read_bytes()[: rng.randint(0, 2 * path.stat().st_size)])
    (scratch / "preprocessor_config.json").write_text(json.dumps(given))
    try:
        preprocessing = read_image_preprocessing(scratch)
        found = None if preprocessing is None else preprocessing.pixels(path)
    except (DataError, FileError, SchemaError) as error:
        demand(len(str(error)) < MESSAGE_BYTES, "a long message")
        return
    demand(found is None or found.shape[0] == 3, "no pixel values")


ROWS = [
    Row(name="images damaged, and preprocessing forged", attack=hostile_image, cases=200, sample=2),
    Row(name="adapters of PEFT damaged or forged", attack=adapter, cases=100),
    Row(name="folders of Hugging Face damaged", attack=damaged_folder, cases=100),
    Row(name="folders of Hugging Face forged", attack=forged_folder, cases=100),
]
