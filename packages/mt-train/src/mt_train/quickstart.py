"""The quickstart: a small GPT on the Python standard library's own source code."""

from __future__ import annotations

import bz2
import json
import lzma
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path

import torch
from mt_files import divisors, write_file
from mt_parallel_state import DistributedEnv

from mt_train.config.document import COMMAND_LINE
from mt_train.config.limits import listed
from mt_train.config.loading import LoadedConfig, load_config
from mt_train.data.corpus import split_corpus
from mt_train.data.shards import plan_of
from mt_train.problem import ConfigError
from mt_train.session.run import Outcome, run
from mt_train.training.hardware import bf16_speedup

_BATCH, _WARMUP = 8, 20  # global_batch_size and warmup of quickstart.yaml
# Factor over the fp32 speed; at 1 a step of this model takes a fourth longer, at 2.2 half as long.
_FAST_BF16 = 1.5
_PROMPT = "class Queue:\n    def __init__(self"
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "SLURM_", "PET_", "GROUP_")


def load_quickstart(
    steps: int | None, nproc: int = 1, overrides: Sequence[str] = ()
) -> LoadedConfig:
    """Load the packaged quickstart.yaml.

    Args:
        steps: Replaces its time budget.
        nproc: Data-parallel processes, which share the batch.
        overrides: Further changes, such as `data.max_files=100`.

    Raises:
        ConfigError: The processes can't share the batch.
    """
    if _BATCH % nproc:
        text = f"{nproc} processes cannot share {_BATCH} samples; use {listed(divisors(_BATCH))}"
        raise ConfigError.of(COMMAND_LINE, text, "--nproc")
    dtype = "bf16" if _has_fast_bf16() else "fp32"
    changes = [f"training.micro_batch_size={_BATCH // nproc}", f"training.dtype={dtype}"]
    if steps is not None:
        changes += [f"training.steps={steps}", "training.time_budget=null"]
        changes += [f"optimizer.warmup={min(_WARMUP, max(steps, 0) // 2)}"]
    with as_file(files("mt_train") / "quickstart.yaml") as path:
        return load_config(path, [*changes, *overrides])


def _has_fast_bf16() -> bool:
    """Return whether a step in bf16 is faster than in fp32 on this machine.

    Other operations are slower in bf16, so matrix products need to be clearly faster.
    """
    return torch.cuda.is_available() or bf16_speedup() > _FAST_BF16


def quickstart(loaded: LoadedConfig, env: DistributedEnv, out: Path) -> Outcome:
    """Train, compare with lzma and bz2, generate a sample, and suggest the next commands."""
    outcome = run(loaded, env, out)
    final = outcome.evaluation
    if final is None or env.rank != 0:
        return outcome
    plan = plan_of(loaded)
    _, read = split_corpus(loaded) if plan is None else plan.split(0)
    held_out = b"".join(document.text.encode() for document in read())
    bits = {
        "mt": final["bits_per_byte"],
        "lzma": 8 * len(lzma.compress(held_out, preset=9 | lzma.PRESET_EXTREME)) / len(held_out),
        "bz2": 8 * len(bz2.compress(held_out, 9)) / len(held_out),
    }
    summary = {"step": final["step"], "held_out_bytes": len(held_out), "bits_per_byte": bits}
    write_file(out / "summary.json", json.dumps(summary, indent=2) + "\n")
    say = sys.stdout.write
    say(f"\nheld-out bits per byte ({len(held_out):,} bytes, lower is better)\n")
    for name, value in sorted(bits.items(), key=lambda item: item[1]):
        say(f"  {name:5s} {value:.3f}\n")
    sample = _generate(out)
    if sample is not None:
        say(f"\na sample, prompted with {_PROMPT.strip()!r}\n\n{_PROMPT}{sample}\n")
    say(f"\nloss curve   {out / 'loss.png'}\ncheckpoint   {out / 'checkpoints'}\n\nNext, try\n")
    uv = ["uv", "run"] if "UV" in os.environ else []
    for command in next_commands(out):
        say(f"  {shlex.join([*uv, *command])}\n")
    return outcome


def next_commands(out: Path) -> list[list[str]]:
    """Return commands to try next with the run in `out`."""
    run, config = str(out), str(out / "config.yaml")
    shorter = ["training.steps=200", "training.time_budget=null", "parallel.tp=2"]
    return [
        ["mt-infer", "generate", run, "--prompt", "class Stack:", "--max-tokens", "100"],
        ["mt-train", "run", config, *shorter, "--nproc", "2", "--out", f"{run}-tp2"],
        ["mt-train", "config", config],
    ]


def _generate(out: Path) -> str | None:
    """Generate with mt-infer if it is installed; apps do not import each other."""
    command = shutil.which("mt-infer", path=str(Path(sys.executable).parent)) or shutil.which(
        "mt-infer"
    )
    if command is None:
        return None
    options = ["--prompt", _PROMPT, "--max-tokens", "120", "--temperature", "0.7", "--seed", "1"]
    # The sample is one process's work; with our launcher's variables it would wait for the others.
    alone = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER)}
    result = subprocess.run(  # noqa: S603 - our own command with fixed arguments
        [command, "generate", str(out), *options],
        capture_output=True,
        text=True,
        check=False,
        env=alone,
        timeout=300,
    )
    if result.returncode != 0:
        sys.stderr.write(result.stderr)
        return None
    return result.stdout
