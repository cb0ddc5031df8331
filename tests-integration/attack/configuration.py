"""Configurations that are random, huge or hostile."""

from __future__ import annotations

import random
from pathlib import Path

from world import Row, World, expect, train

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
    """Write a configuration that is made to hurt the reader."""
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
    """Name a configuration or run folder that is no file or folder."""
    config = rng.choice(
        ["/dev/zero", "/dev/null", str(scratch), "missing.yaml", "", "x" * 5000, "\udcff"]
    )
    expect(train(["config", config]), [2])
    out = rng.choice(["", "/dev/null", "/dev/null/x", str(world.config), "x" * 5000, "/proc/x"])
    expect(train([*world.train(Path("unused"))[:2], "--out", out]), [1, 2])


ROWS = [
    Row(
        name="configuration values huge or odd", attack=huge_value, cases=200, sample=3, seconds=120
    ),
    Row(
        name="configuration files changed at random",
        attack=random_yaml,
        cases=250,
        sample=3,
        seconds=20,
    ),
    Row(
        name="configuration files made to hurt", attack=hostile_yaml, cases=40, sample=2, seconds=40
    ),
    Row(name="paths that are no files", attack=odd_path, cases=20, sample=1, seconds=20),
]
