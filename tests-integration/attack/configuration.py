"""Random, huge or hostile configurations."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import yaml
from world import Row, World, demand, expect, replace_with, train

HUGE = ("10**6", "10**9", "10**12", "10**17", "10**18-1", "10**30", "999999999999999989")
SIZES = (
    "model.hidden_size",
    "model.num_layers",
    "model.num_heads",
    "model.ffn_size",
    "model.vocab_size",
    "model.max_sequence_length",
    "data.vocab_size",
    "training.steps",
    "training.global_batch_size",
    "training.micro_batch_size",
    "training.sequence_length",
    "evaluation.micro_batch_size",
    "evaluation.max_windows",
    "evaluation.every",
    "parallel.tp",
    "parallel.pp",
    "parallel.cp",
    "parallel.dp",
    "pipeline.chunks",
    "checkpoint.every",
    "checkpoint.keep",
    "optimizer.warmup",
)
ODD = (
    "-1",
    "0",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "null",
    "''",
    "[]",
    "{}",
    "true",
    "x" * 3000,
    "é\\0",
)
ABSURD = (
    "1e18",
    "-1e18",
    "1e300",
    "-1e300",
    "1e39",
    "1e-300",
    "-0.0",
    "-1",
    "0",
    "2",
    "0.5",
    "nan",
)
ABSURD += (
    "inf",
    "null",
    "true",
    "x",
    "''",
    "[]",
    "{}",
    "[1e300]",
    "[-1, x]",
    "{x: 1e300}",
    "9" * 41,
)
# What a key needs to have a meaning: one of these runs, and mappings with keys of their own.
BASES = (
    (),
    ("model.moe={num_experts: 4, top_k: 2}",),
    ("training.dtype=bf16", "precision.recipe=delayed", "precision.history=2"),
    ("training.dtype=bf16", "optimizer.masters=remainder", "optimizer.offload=1"),
    ("training.dtype=fp16", "optimizer.loss_scale=dynamic"),
    ("optimizer.name=soap", "optimizer.ema=0.9", "optimizer.qk_clip={threshold: 1}"),
    ("optimizer.name=muon", "training.recompute=full", "optimizer.schedule=wsd"),
    ("quantization.recipe=int8",),
    ("model.dropout=0.1", "data.packing=documents", "model.rope={theta: 1e4}"),
)
MAPPINGS = {
    "model.moe": (
        "capacity_factor",
        "top_k",
        "num_experts",
        "aux_loss",
        "jitter",
        "sinkhorn",
        "scale",
        "num_groups",
        "ffn_size",
        "shared_size",
        "bias_rate",
        "router_z_loss",
        "clamp",
        "latent_size",
    ),
    "model.rope": ("theta", "fraction", "scaling"),
    "optimizer.qk_clip": ("threshold", "alpha"),
    "training.profile": ("steps", "ranks"),
    "data.spans": ("fraction", "length"),
}
# Where a run is valid and only long, or writes where it is told to.
NOT_RUN = (
    "training.steps",
    "training.time_budget",
    "evaluation",
    "checkpoint",
    "export",
    "logging",
)
TEXT = "[]{}:,#&*!|>%@`'\"\\ \n\t-?0aé\0\x85"


def huge_value(world: World, rng: random.Random, scratch: Path) -> None:
    """Set one size to something huge or odd; `config` and a run answer at once."""
    value = rng.choice([*HUGE, *ODD])
    value = str(eval(value)) if value.startswith("10**") else value
    override = f"{rng.choice(SIZES)}={value}"
    expect(train(["config", str(world.config), override]), [0, 2])
    # A run that is valid and only long is left out: it is not what is tried here.
    if not override.startswith(("training.steps", "evaluation", "checkpoint", "optimizer")):
        short = ("training.steps=1", "checkpoint.every=1", "evaluation.max_windows=1")
        expect(train(world.train(scratch / "run", *short, override)))


def random_yaml(world: World, rng: random.Random, scratch: Path) -> None:
    """Change the YAML file at random places."""
    text = world.config.read_text()
    for _ in range(rng.choice([1, 2, 5, 20])):
        at = rng.randrange(len(text))
        to = at + rng.choice([0, 0, 1, 1, 9])
        text = text[:at] + "".join(rng.choices(TEXT, k=rng.choice([0, 1, 1, 3]))) + text[to:]
    path = scratch / "run.yaml"
    path.write_text(text)
    expect(train(["config", str(path)]), [0, 2])


def hostile_yaml(world: World, rng: random.Random, scratch: Path) -> None:
    """Write a configuration that attacks its reader."""
    text = rng.choice(
        [
            "\n".join(f"key{n}: 1" for n in range(60_000)),
            "model:\n" + "\n".join(f"  key{n}: 1" for n in range(60_000)),
            "data: {train: [" + "1," * 500_000 + "1]}",
            "data: " + "[" * 5000,
            "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
            "model: {hidden_size: " + "9" * 100_000 + "}",
            "model: {hidden_size: 1e30}",
            f"data: {{corpus: {'x' * 5000}}}",
            f"data: {{corpus: '{'x/' * 5000}'}}",
            "data: {corpus: /dev/zero}",
            "data: {corpus: 'a\\0b'}",
            "!!python/object/apply:os.system ['true']",
            "? [complex, key]\n: 1",
            "model: {}\nmodel: {}",
            "\ufeff" + world.config.read_text(),
            "%YAML 9.9\n---\n{}",
            "",
            "- 1",
            "text",
        ]
    )
    path = scratch / "run.yaml"
    path.write_text(text)
    expect(train(["config", str(path)]), [0, 2])
    expect(train(["run", str(path), "--out", str(scratch / "run"), "training.steps=1"]), [0, 1, 2])


def odd_path(world: World, rng: random.Random, scratch: Path) -> None:
    """Name a path as configuration or run folder that is neither file nor folder."""
    config = rng.choice(
        ["/dev/zero", "/dev/null", str(scratch), "missing.yaml", "", "x" * 5000, "\udcff"]
    )
    expect(train(["config", config]), [2])
    out = rng.choice(["", "/dev/null", "/dev/null/x", str(world.config), "x" * 5000, "/proc/x"])
    expect(train([*world.train(Path("unused"))[:2], "--out", out]), [1, 2])


def absurd_value(world: World, rng: random.Random, scratch: Path) -> None:
    """Set any key to something absurd, where its feature is used: a run of a step answers."""
    from mt_train.keys import sections

    keys = [key.name for section in sections() for key in section.keys]
    nested = [f"{name}.{key}" for name, its in MAPPINGS.items() for key in its]
    key = rng.choice(rng.choice([keys, keys, nested]))
    given = [*rng.choice(BASES), f"{key}={rng.choice(ABSURD)}"]
    first = key.partition(".")[0] + "." + key.split(".")[1] if "." in key else key
    if key.count(".") > 1 and not any(each.startswith(first) for each in given[:-1]):
        start = {"model.moe": "{num_experts: 4}", "optimizer.qk_clip": "{threshold: 1}"}
        given.insert(0, f"{first}={start.get(first, '{}')}")
    result = train(["config", str(world.config), *given])
    expect(result, [0, 2])
    if result.code == 0 and not key.startswith(NOT_RUN):
        short = ("training.steps=1", "checkpoint.every=null", "evaluation.max_windows=1")
        expect(train(world.train(scratch / "run", *given, *short)))


def path_beside(world: World, rng: random.Random, scratch: Path) -> None:
    """Name a path relative to the YAML file: found from anywhere, or refused by its key."""
    there = scratch / "there"
    there.mkdir()
    key, right = rng.choice(
        [
            ("data.corpus", world.folder / "texts"),
            ("data.tokenizer", world.run / "tokenizer.json"),
            ("checkpoint.load", world.run),
            ("distillation.teacher", world.run),
            ("quantization.config", None),
            ("plugins", None),
            ("optimizer.offload_dir", None),
        ]
    )
    name, how = "its own é", rng.choice(["right", "right", "gone", "fifo", "device", "other"])
    path = there / name
    if how == "right":
        _put_right(path, key, right)
    elif how == "other":  # a file for a folder, or a folder for a file
        wants_folder = "dir" in key or (right is not None and right.is_dir())
        path.write_text("\0[") if wants_folder else path.mkdir()
    elif how != "gone":
        replace_with(path, how, scratch)
    config = yaml.safe_load(world.config.read_text())
    section, _, field = key.partition(".")
    config.setdefault(section, {})
    if field:
        config[section][field] = name
    else:
        config[section] = [name]
    if field == "offload_dir":
        config[section]["offload"] = 1
    (there / "run.yaml").write_text(yaml.safe_dump(config, allow_unicode=True))
    os.chdir(rng.choice([scratch, "/", there]))
    short = ("training.steps=7", "checkpoint.every=null")  # one more than the run to load has
    command = ["run", str(there / "run.yaml"), "--out", str(scratch / "run"), *short]
    result = train(command)
    if how == "right":
        expect(result, [0])
        saved = (scratch / "run" / "config.yaml").read_text()
        demand(str(path) in str(yaml.safe_load(saved)), saved)
    else:
        expect(result, [1, 2])
        demand(key in result.errors or name in result.errors, f"not named: {result.errors}")


def _put_right(path: Path, key: str, right: Path | None) -> None:
    if right is not None:
        (shutil.copytree if right.is_dir() else shutil.copy)(right, path)
    elif key == "quantization.config":
        path.write_text("rules: [{weight: {type: int8}}]")
    elif key == "plugins":
        path.write_text("")
    else:
        path.mkdir()


ROWS = [
    Row(
        name="configuration values huge or odd", attack=huge_value, cases=120, sample=3, seconds=120
    ),
    Row(
        name="configuration files changed at random",
        attack=random_yaml,
        cases=150,
        sample=3,
        seconds=20,
    ),
    Row(
        name="configuration files made to hurt", attack=hostile_yaml, cases=40, sample=2, seconds=40
    ),
    Row(name="paths that are no files", attack=odd_path, cases=20, sample=1, seconds=20),
    Row(name="any key with an absurd value", attack=absurd_value, cases=240, sample=3, seconds=60),
    Row(name="paths beside the YAML file", attack=path_beside, cases=40, seconds=90),
]
