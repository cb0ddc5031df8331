"""Damaged or malicious folders of models, given to the commands that load them."""

from __future__ import annotations

import json
import math
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from checkpoints import mutate
from world import Result, Row, World, call, demand, expect, infer, replace_with, train

ONE = "model.safetensors"
RECIPES = ("int8", "fp8", "int4-rtn")
FLOATS = {"F32": ("<f", 4), "F16": ("<e", 2)}
PATTERNS = (
    "re:(([a-z0-9_.])+)+$!",
    "re:(a|a)*$",
    "re:(.*)*x",
    "re:" + "(" * 40 + "a" + ")" * 40,
    "re:a{1,100}{1,100}",
    "re:(?=x)",
    r"re:(a)\1",
    "re:[",
    "re:" + "x" * 600,
    "re:" + "(.*.*)?" * 40,
)


def _whole(world: World) -> Path:
    """Return a folder with the weights of the run, which is made once."""

    def make(folder: Path) -> None:
        from mt_hf.commands.cli import main

        expect(call(main, ["export", str(world.run), str(folder)]), [0])
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(_quantised(world, "int8") / name, folder)

    return world.once("whole", make)


def _quantised(world: World, recipe: str) -> Path:
    def make(folder: Path) -> None:
        expect(infer(["quantize", str(world.run), str(folder), "--recipe", recipe]), [0])

    return world.once(recipe, make)


def _copy(world: World, rng: random.Random, scratch: Path, *, quantised: bool | None) -> Path:
    """Copy one of the two kinds of folders, or either of them for None."""
    if quantised is None:
        quantised = rng.random() < 0.5
    source = _quantised(world, rng.choice(RECIPES)) if quantised else _whole(world)
    return Path(shutil.copytree(source, scratch / "model"))


def _generate(folder: Path | str, rng: random.Random) -> Result:
    greedy = rng.choice([(), ("--greedy",)])
    return infer(["generate", str(folder), "--prompt", "old", "--max-tokens", "2", *greedy])


def _load(folder: Path | str, rng: random.Random, scratch: Path) -> Result:
    """Let one of the commands that load a folder read it."""
    from mt_hf.commands.cli import main

    which = rng.choice(["generate", "generate", "import", "verify"])
    if which == "generate":
        return _generate(folder, rng)
    rest = [str(scratch / "out")] if which == "import" else []
    result = call(main, [which, str(folder), *rest])
    is_left = which == "import" and result.code and (scratch / "out").exists()
    demand(not is_left, "a refused import left its folder")
    return result


def _read(path: Path) -> tuple[dict[str, Any], bytearray]:
    """Return the header and the values of a safetensors file."""
    content = path.read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8:end]), bytearray(content[end:])


def _write(path: Path, header: str, values: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + values)


def _spoil(
    folder: Path, rng: random.Random, values: tuple[float, ...], wanted: Callable[[str], bool]
) -> str:
    """Set one element of a tensor, and return the tensor's name."""
    header, content = _read(folder / ONE)
    names = [n for n in header if wanted(n) and header[n].get("dtype") in FLOATS]
    name = rng.choice(sorted(names))
    form, size = FLOATS[header[name]["dtype"]]
    start, stop = header[name]["data_offsets"]
    at = start + size * rng.randrange((stop - start) // size)
    content[at : at + size] = struct.pack(form, rng.choice(values))
    _write(folder / ONE, json.dumps(header), content)
    return name


def not_finite(world: World, rng: random.Random, scratch: Path) -> None:
    """Put a value that is not finite into a tensor: every command names it and its file."""
    folder = _copy(world, rng, scratch, quantised=None)
    values = (math.nan, math.inf, -math.inf)
    name = _spoil(folder, rng, values, lambda name: name != "__metadata__")
    result = _load(folder, rng, scratch)
    expect(result, [1, 2], named=ONE)
    layer = name.rpartition(".")[0]  # of a quantised layer any of its tensors may be named
    demand(layer in result.errors, f"{name} is not named: {result.errors[-500:]}")


def odd_scales(world: World, rng: random.Random, scratch: Path) -> None:
    """Give a quantised layer a scale that no writer makes, or one of another shape."""
    folder = _copy(world, rng, scratch, quantised=True)
    if rng.random() < 0.5:
        name = _spoil(folder, rng, (-1.0, 3e38), lambda name: name.endswith("scale"))
    else:
        header, content = _read(folder / ONE)
        name = rng.choice(sorted(name for name in header if name.endswith("weight_scale")))
        entry = header[name]
        (start, stop), size = entry["data_offsets"], math.prod(entry["shape"])
        kept = start + (stop - start) // size
        for other in header.values():
            if other.get("data_offsets", [0])[0] >= stop:
                other["data_offsets"] = [each - (stop - kept) for each in other["data_offsets"]]
        entry |= {"shape": rng.choice([[1], [1, 1], []]), "data_offsets": [start, kept]}
        _write(folder / ONE, json.dumps(header), content[:kept] + content[stop:])
    result = _load(folder, rng, scratch)
    expect(result, [1, 2])
    layer = name.rpartition(".")[0]
    demand(layer in result.errors, f"{name} is not named: {result.errors[-500:]}")


def forged_scheme(world: World, rng: random.Random, scratch: Path) -> None:
    """Exchange a value of how a folder is quantised: loaded, or refused in a few words."""
    folder = _copy(world, rng, scratch, quantised=True)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    scheme = config["quantization_config"]
    if rng.random() < 0.3:
        group = scheme["config_groups"]["group_0"]
        where = rng.choice([scheme["ignore"], group["targets"]])
        where += rng.choices(PATTERNS, k=rng.choice([1, 1, 5, 2000]))
    elif rng.random() < 0.5:
        weights = scheme["config_groups"]["group_0"]["weights"]
        weights[rng.choice(["group_size", "strategy", "num_bits", "type", "symmetric"])] = (
            rng.choice(["channel", "tensor", "group", "int", "float", 1, 8, 16, 32, 7, True, None])
        )
    else:
        config["quantization_config"] = mutate(scheme, rng)
    path.write_text(json.dumps(config))
    expect(_load(folder, rng, scratch))


def _mappings(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every mapping of a JSON value that is not empty."""
    if isinstance(value, dict) and value:
        yield value
    for each in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from _mappings(each)


def _twice(value: Any, rng: random.Random) -> str:
    """Return a JSON value in which some object has a key twice."""
    chosen = rng.choice(list(_mappings(value)))
    key = rng.choice(list(chosen))
    chosen["\0"] = chosen[key] if rng.random() < 0.5 else None
    return json.dumps(value).replace(json.dumps("\0"), json.dumps(key))


def key_twice(world: World, rng: random.Random, scratch: Path) -> None:
    """Write a key a second time, of which readers take the one or the other: refused."""
    folder = _copy(world, rng, scratch, quantised=None)
    path = folder / rng.choice(
        [ONE, "config.json", "tokenizer_config.json", "generation_config.json"]
    )
    if path.name == ONE:
        header, content = _read(path)
        _write(path, _twice(header, rng), content)
    else:
        given = json.loads(path.read_text()) if path.exists() else {"eos_token_id": 0}
        path.write_text(_twice(given, rng))
    expect(_generate(folder, rng), [1, 2], named="twice")


def huge_header(world: World, rng: random.Random, scratch: Path) -> None:
    """Describe hundreds of thousands of tensors, or as many numbers or levels, in a header."""
    folder = _copy(world, rng, scratch, quantised=False)
    count = rng.choice([300_000, 700_000])
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = rng.choice(
        [
            lambda: "{" + ",".join(f'"tensor.{i:022}":{entry}' for i in range(count)) + "}",
            lambda: (
                '{"a":{"dtype":"F32","shape":[' + "0," * 40 * count + '0],"data_offsets":[0,0]}}'
            ),
            lambda: '{"a":' + "[" * count + "]" * count + "}",
            lambda: '{"__metadata__":{' + ",".join(f'"{i}":"x"' for i in range(count)) + "}}",
            lambda: '{"a":"' + "x" * 80 * count + '"}',
            lambda: '{"a":' + "9" * 40 * count + "}",
        ]
    )()
    _write(folder / ONE, header, b"")
    expect(_load(folder, rng, scratch), [1, 2], named=ONE)


def no_folder(world: World, rng: random.Random, scratch: Path) -> None:
    """Name a model of the hub that is not there, or whose cache was tampered with."""
    from huggingface_hub import constants

    name = rng.choice(
        [
            *("Qwen/Qwen3-0.6B", "a/b", "../..", "a/..", "-a/b", "a/b/c", "hub://a/b", "é/b"),
            *("x" * 5000, "x" * 96 + "/b", "a/b\n", "https://huggingface.co/a/b", "a/b@main", ""),
        ]
    )
    is_whole = False
    own = scratch / "cache" / f"models--{name.replace('/', '--')}"
    if rng.random() < 0.6 and len(name) < 99 and "\n" not in name:
        reference = own / "refs" / "main"
        reference.parent.mkdir(parents=True)
        how = rng.choice(["text", "text", "fifo", "folder", "device", "secret"])
        text = ["../../../..", "x" * 40, "\0", "", "/", "f" * 10**6, str(world.folder)]
        reference.write_text(rng.choice(text))
        is_whole = reference.read_text() == "x" * 40 and name in ("Qwen/Qwen3-0.6B", "a/b")
        if how != "text":
            replace_with(reference, how, scratch)
        linked = rng.random() < 0.5
        is_whole &= how == "text" and linked
        if linked:
            (own / "snapshots").mkdir()
            (own / "snapshots" / ("x" * 40)).symlink_to(_whole(world))
    with mock.patch.object(constants, "HF_HUB_CACHE", str(scratch / "cache")):
        if rng.random() < 0.3:
            key = rng.choice(["model.from", "distillation.teacher"])
            result = train(["config", str(world.config), f"{key}={name or 'null'}"])
            expect(result, [0, 2])
        else:
            result = _load(name, rng, scratch)
            expect(result, [0] if is_whole else [1, 2])
    demand(len(result.errors) < 6500, f"a long message: {result.errors[:500]}")
    demand("root:" not in result.errors, f"content of another file: {result.errors[:500]}")


def odd_teacher(world: World, rng: random.Random, scratch: Path) -> None:
    """Teach by a folder without a teacher, or with other tokens: refused by the key's name."""
    how = rng.choice(["other", "other", "whole", "spoilt", "bare", "file", "gone", "fifo"])
    teacher = scratch / "teacher"
    if how == "other":
        teacher = world.once("other-words", lambda out: _other_words(world, out))
    elif how == "file":
        teacher.write_text("no folder")
    elif how == "fifo":
        replace_with(teacher, "fifo", scratch)
    elif how != "gone":
        shutil.copytree(_whole(world), teacher)
    if how == "spoilt":
        _spoil(teacher, rng, (math.nan, math.inf), lambda name: name != "__metadata__")
    if how == "bare":
        for path in teacher.glob("tokenizer*"):
            path.unlink()
    more = ("training.steps=1", f"distillation.teacher={teacher}", "checkpoint.every=null")
    result = train(world.train(scratch / "run", *more))
    if how in ("whole", "bare"):
        expect(result, [0])
    else:
        expect(result, [1, 2], named="distillation.teacher" if how != "spoilt" else ONE)


def _other_words(world: World, out: Path) -> None:
    """Train on texts of other words, with as many tokens."""
    texts = out.with_name("other-texts")
    texts.mkdir()
    for path in (world.folder / "texts").iterdir():
        (texts / path.name).write_text(path.read_text().replace("e", "o").replace("r", "m"))
    more = ("training.steps=1", f"data.corpus={texts}", "checkpoint.every=null")
    expect(train(world.train(out, *more)), [0])


ROWS = [
    Row(name="weights that are not finite", attack=not_finite, cases=60),
    Row(name="scales of quantised layers odd", attack=odd_scales, cases=60),
    Row(name="quantised folders forged", attack=forged_scheme, cases=100),
    Row(name="JSON with a key twice", attack=key_twice, cases=40),
    Row(name="safetensors headers that are huge", attack=huge_header, cases=8, seconds=20),
    Row(name="models of the hub that are not there", attack=no_folder, cases=60, seconds=20),
    Row(name="teachers that are none", attack=odd_teacher, cases=20, seconds=90),
]
