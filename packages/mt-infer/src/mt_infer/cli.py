"""The `mt-infer` command."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from mt_files import did_you_mean, quick_imports, shorten

if TYPE_CHECKING:
    from mt_parallel_state import DistributedEnv

    from mt_infer.generation import Completion, Generator
    from mt_infer.loading import Run
    from mt_infer.sampling import Sampling

_BAD_COMMAND = 2
_MAX_MESSAGE = 2000
_MAX_PROMPT_BYTES = 1 << 24
_MAX_ARGUMENT_BYTES = 100_000  # Linux takes 128 KiB
_ONE_THREAD_PARAMETERS = 1 << 22


@dataclass(kw_only=True)
class Generate:
    """Continue a prompt with a checkpoint of a run; prints the continuation alone."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """The --out folder of an mt-train run."""
    prompt: str
    """The text to continue; - reads it from standard input."""
    step: int | None = None
    """The checkpoint of this step; by default the latest."""
    ema: bool = False
    """Use the average of the weights over the steps, where training kept one (optimizer.ema)."""
    max_tokens: int = 128
    """Stop after this many tokens, or where the model's context ends."""
    greedy: bool = False
    """Always take the likeliest token (temperature 0)."""
    temperature: float | None = None
    """Divides the logits; by default 1."""
    top_k: int | None = None
    """Keep the k likeliest tokens."""
    top_p: float | None = None
    """Keep the likeliest tokens that together reach this probability."""
    seed: int = 0
    """The same seed gives the same text."""
    dtype: Literal["fp64", "fp32", "bf16", "fp16"] | None = None
    """Arithmetic; by default fp32 on a CPU and bf16 on a GPU."""
    kernels: Literal["auto", "fused", "reference"] = "auto"
    """What computes norms, gates, rope and attention: what was measured to be fastest, mt-fusions'
    kernels, or plain forms."""
    nproc: int | None = None
    """Processes to start, which share the model; by default --pp. Under torchrun or srun leave it
    out."""
    cuda_graphs: bool = False
    """Replay a CUDA graph for each token; on a CPU run what it would, checked."""
    pp: int = 1
    """Pipeline stages, each with a part of the layers; several processes share one."""
    ep: int = 1
    """Parts to which the experts of each layer are dealt: divides the processes of a stage, which
    split each expert among those that have the same part."""


_COMMANDS = {"generate": Generate}
_SWITCHES = ("greedy", "ema", "cuda_graphs")
_FLAGS = tuple(f"--{no}{name}".replace("_", "-") for name in _SWITCHES for no in ("", "no-"))


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and generate; exits with its status."""
    sys.exit(_main(sys.argv[1:] if arguments is None else arguments))


def _main(arguments: list[str]) -> int:
    has_stdout = _open_streams()
    try:
        if arguments[:1] == ["--version"]:
            _print(f"mt-infer {version('mt-infer')}")
            return 0
        command = _parse(arguments)
        return _run(command, can_print=has_stdout)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        from mt_infer.errors import explain

        explained = explain(error)
        if explained is None:
            raise
        code, message = explained
        _say(message)
        return code


def _open_streams() -> bool:
    """Replace streams that the shell closed (`>&-`); tell whether standard output was open."""
    has_stdout = sys.stdout is not None
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - to the end
    return has_stdout


def _say(message: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"mt-infer: {_bounded(message)}\n")


def _keep_quiet(_: str) -> None:
    """Leave it to another rank, which is the same in this."""


def _bounded(text: str) -> str:
    """Cut a message that quotes something very long."""
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."


def _run(command: Generate, *, can_print: bool) -> int:
    with quick_imports():
        from mt_parallel_state import detect_env, launch, must_launch

        from mt_infer.loading import open_run

    if not can_print:
        raise OSError("standard output is closed, so nothing can be printed; open or redirect it")
    env = detect_env()
    with contextlib.ExitStack() as stack:
        with _told_once(env):
            sampling = _check_options(command, env)
            run = stack.enter_context(open_run(command.run, command.step))
            _check_run(command, env, run)
        if must_launch(command.nproc or 1, env):
            return launch("mt_infer", _as_arguments(command, run.step), command.nproc or 1)
        completion = _generate(command, env, run, sampling)
    if env.rank == 0:
        _print(completion.text)
        if completion.end == "context":
            limit, new = run.config.max_sequence_length, completion.num_tokens
            _say(f"the model's context of {limit} tokens is full after {new} new tokens")
    return 0


@contextlib.contextmanager
def _told_once(env: DistributedEnv) -> Iterator[None]:
    """Let one rank of each node say what all of them find, before the launcher ends the others."""
    try:
        yield
    except Exception:
        if env.local_rank > 0:
            time.sleep(1)
            sys.exit(1)
        raise


def _check_options(command: Generate, env: DistributedEnv) -> Sampling:
    """Find every mistake that shows in the command itself; replaces the prompt `-` by its text."""
    from mt_parallel_state import must_launch

    from mt_infer.sampling import Sampling

    if command.max_tokens < 1:
        raise ValueError(f"--max-tokens {command.max_tokens}: use 1 or more")
    if command.greedy and command.temperature not in (None, 0.0):
        raise ValueError(
            f"--greedy and --temperature {command.temperature} contradict each other: leave one out"
        )
    if command.pp < 1:
        raise ValueError(f"--pp {command.pp}: use 1 or more")
    if command.nproc is None:
        command.nproc = command.pp if env.world_size == 1 else 1
    launches = must_launch(command.nproc, env)
    if max(command.nproc, env.world_size) % command.pp:
        raise ValueError(
            f"--pp {command.pp} does not divide {max(command.nproc, env.world_size)} processes; "
            "start a multiple of it"
        )
    shared = max(command.nproc, env.world_size) // command.pp
    if command.ep < 1 or shared % command.ep:
        raise ValueError(
            f"--ep {command.ep} does not divide the {shared} processes that share a stage; start "
            "a multiple of it"
        )
    temperature = 1.0 if command.temperature is None else command.temperature
    sampling = Sampling(
        temperature=0.0 if command.greedy else temperature,
        top_k=command.top_k,
        top_p=command.top_p,
        seed=command.seed,
    )
    if command.prompt == "-":
        command.prompt = _read_prompt(env)
    if launches and len(os.fsencode(command.prompt)) > _MAX_ARGUMENT_BYTES:
        raise ValueError(
            f"a prompt of more than {_MAX_ARGUMENT_BYTES} bytes can't be passed to the processes "
            "of --nproc; leave --nproc out, or start them with torchrun"
        )
    return sampling


def _read_prompt(env: DistributedEnv) -> str:
    if env.world_size > 1:
        raise ValueError(
            f"--prompt - under {env.launcher}: its processes can't share standard input; give the "
            "text itself"
        )
    content = sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1)
    if len(content) > _MAX_PROMPT_BYTES:
        raise ValueError(f"standard input has more than {_MAX_PROMPT_BYTES} bytes; shorten it")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"standard input is not UTF-8: {error.reason}, byte {error.start}"
        ) from error


def _check_run(command: Generate, env: DistributedEnv, run: Run) -> None:
    """Find every mistake that shows before weights are read, so that one process reports it."""
    from mt_model import validate_split

    from mt_infer.generation import encode_prompt
    from mt_infer.loading import check_ema

    if command.ema:
        check_ema(run)
    processes = max(command.nproc or 1, env.world_size)
    try:
        validate_split(run.config, processes // command.pp)
        etp = processes // command.pp // command.ep
        run.config.check_experts(ep=command.ep, etp=etp)
    except ValueError as error:
        raise ValueError(f"{processes} processes can't share this model: {error}") from error
    if command.pp > run.config.num_layers:
        raise ValueError(
            f"--pp {command.pp}: the model has {run.config.num_layers} layers to share"
        )
    encode_prompt(command.prompt, run.tokenizer, run.config)


def _as_arguments(command: Generate, step: int) -> list[str]:
    """The command line of a rank: the step is chosen, and the prompt read."""
    command.step = step
    options = [
        f"--{field.name.replace('_', '-')}={value}"
        for field in fields(command)
        if field.name not in ("run", *_SWITCHES)
        and (value := getattr(command, field.name)) is not None
    ]
    switches = [f"--{name.replace('_', '-')}" for name in _SWITCHES if getattr(command, name)]
    return ["generate", *options, *switches, "--", str(command.run)]


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


def _generate(command: Generate, env: DistributedEnv, run: Run, sampling: Sampling) -> Completion:
    from mt_parallel_state import ParallelLayout, ParallelState, joined

    from mt_infer.loading import load_weights, same_run

    tp = env.world_size // command.pp
    layout = ParallelLayout(tp=tp, pp=command.pp, ep=command.ep, etp=tp // command.ep)
    with joined(env) as device, ParallelState(layout, rank=env.rank, device=device) as state:
        with same_run(run, state) as agreed:
            generator = load_weights(
                agreed, state, dtype=command.dtype, ema=command.ema, kernels=command.kernels
            )
        if command.cuda_graphs:
            told = _say if env.local_rank == 0 else _keep_quiet
            generator = replace(generator, cuda_graphs=True, on_eager=told)
        _use_threads(generator)
        return generator.complete(command.prompt, max_tokens=command.max_tokens, sampling=sampling)


def _use_threads(generator: Generator) -> None:
    """Give a small model one thread: the threads of its tiny products wait for each other.

    On two busy cores a second thread made the quickstart's tokens twenty times slower, and on idle
    ones no faster.
    """
    import torch

    if sum(param.numel() for param in generator.model.parameters()) <= _ONE_THREAD_PARAMETERS:
        torch.set_num_threads(1)


def _parse(arguments: list[str]) -> Generate:
    first = arguments[0] if arguments else ""
    if first and not first.startswith("-") and first not in _COMMANDS:
        raise ValueError(f"{shorten(first)} is no command. {did_you_mean(first, _COMMANDS)}")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.extras.subcommand_cli_from_dict(
                _COMMANDS,
                prog="mt-infer",
                description="Generate text from a trained run. `--version` prints the version.",
                args=_joined_values(arguments),
            )
    finally:
        sys.stderr.write(_bounded(said.getvalue()))


def _joined_values(arguments: list[str]) -> list[str]:
    """Join each option and its value, which may begin with a dash; refuse unknown options."""
    known = {f"--{field.name.replace('_', '-')}" for field in fields(Generate)} - {"--run"}
    known |= {*_FLAGS, "--help"}
    words, rest = [], iter(arguments)
    for word in rest:
        name, equals, _ = word.partition("=")
        name = name.replace("_", "-")
        if word == "--" or word in ("-h", "--help"):
            return arguments
        if not word.startswith("--"):
            words.append(word)
        elif name not in known:
            raise ValueError(f"{shorten(name)} is no option. {did_you_mean(name, sorted(known))}")
        elif equals or name in _FLAGS:
            words.append(word)
        else:
            value = next(rest, None)
            words.append(name if value is None else f"{name}={value}")
    return words
