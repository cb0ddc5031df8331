"""The `mt-infer` command."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

if TYPE_CHECKING:
    from mt_parallel_state import DistributedEnv

    from mt_infer.loading import Run
    from mt_infer.sampling import Sampling


@dataclass(kw_only=True)
class Generate:
    """Continue a prompt with the newest checkpoint of a run; prints the continuation alone."""

    run: tyro.conf.Positional[Path]
    """The --out folder of an mt-train run."""
    prompt: str
    """The text to continue."""
    max_tokens: int = 128
    """Stop after this many tokens."""
    greedy: bool = False
    """Always take the likeliest token (temperature 0)."""
    temperature: float = 1.0
    """Divides the logits."""
    top_k: int | None = None
    """Keep the k likeliest tokens."""
    top_p: float | None = None
    """Keep the likeliest tokens that together reach this probability."""
    seed: int = 0
    """The same seed gives the same text."""
    dtype: Literal["fp64", "fp32", "bf16"] | None = None
    """Arithmetic; by default fp32 on a CPU and bf16 on a GPU."""
    nproc: int = 1
    """Tensor-parallel processes to start; under torchrun or srun leave it out."""


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and generate; exits with its status."""
    sys.exit(_main(sys.argv[1:] if arguments is None else arguments))


def _main(arguments: list[str]) -> int:
    command = _parse(arguments)
    try:
        return _run(command, arguments)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        from mt_infer.errors import explain

        explained = explain(error)
        if explained is None:
            raise
        code, message = explained
        sys.stderr.write(f"mt-infer: {message}\n")
        return code


def _run(command: Generate, arguments: list[str]) -> int:
    from mt_parallel_state import detect_env, launch, must_launch

    env = detect_env()
    run, sampling = _check(command, env)
    if must_launch(command.nproc, env):
        return launch("mt_infer", arguments, command.nproc)
    text = _generate(command, env, run, sampling)
    if env.rank == 0:
        _print(text)
    return 0


def _check(command: Generate, env: DistributedEnv) -> tuple[Run, Sampling]:
    """Find every mistake that shows before weights are read, so that one process reports it."""
    from mt_model import validate_split
    from mt_parallel_state import must_launch

    from mt_infer.generation import encode_prompt
    from mt_infer.loading import open_run
    from mt_infer.sampling import Sampling

    if command.max_tokens < 1:
        raise ValueError(f"--max-tokens {command.max_tokens}: use 1 or more")
    must_launch(command.nproc, env)
    sampling = Sampling(
        temperature=0.0 if command.greedy else command.temperature,
        top_k=command.top_k,
        top_p=command.top_p,
        seed=command.seed,
    )
    run = open_run(command.run)
    processes = max(command.nproc, env.world_size)
    try:
        validate_split(run.config, processes)
    except ValueError as error:
        raise ValueError(f"{processes} processes can't share this model: {error}") from error
    encode_prompt(command.prompt, run.tokenizer, run.config.max_sequence_length)
    return run, sampling


def _print(text: str) -> None:
    """Write to stdout, whatever its encoding; a reader that left early is no error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as error:
        # What is still in the buffer would fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            error.filename = "standard output"
            raise


def _generate(command: Generate, env: DistributedEnv, run: Run, sampling: Sampling) -> str:
    from mt_parallel_state import ParallelLayout, ParallelState, joined

    from mt_infer.loading import load_weights

    layout = ParallelLayout(tp=env.world_size)
    with joined(env) as device, ParallelState(layout, rank=env.rank, device=device) as state:
        generator = load_weights(run, state, dtype=command.dtype)
        return generator.generate(command.prompt, max_tokens=command.max_tokens, sampling=sampling)


def _parse(arguments: list[str]) -> Generate:
    return tyro.extras.subcommand_cli_from_dict(
        {"generate": Generate}, prog="mt-infer", args=arguments
    )
