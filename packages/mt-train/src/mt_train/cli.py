"""The `mt-train` command: quickstart, run, config."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from mt_train.document import COMMAND_LINE
from mt_train.problem import ConfigError, Problem

if TYPE_CHECKING:
    from mt_parallel_state import DistributedEnv

_BAD_CONFIG = 2


@dataclass(kw_only=True)
class Run:
    """Train from a YAML file; the same command continues an interrupted run.

    Runs alone, on `--nproc` local processes, or as one rank under torchrun or srun.
    """

    config: tyro.conf.Positional[Path]
    """The run's YAML file."""
    overrides: tyro.conf.Positional[list[str]] = field(default_factory=list)
    """Changes as section.key=value, e.g. parallel.tp=2 training.steps=100."""
    out: Path | None = None
    """Run folder; by default runs/<name of the YAML file>."""
    nproc: int = 1
    """Local processes to start."""


@dataclass(kw_only=True)
class Config:
    """Print the resolved YAML: every default filled in, overrides applied."""

    config: tyro.conf.Positional[Path]
    """The run's YAML file."""
    overrides: tyro.conf.Positional[list[str]] = field(default_factory=list)
    """Changes as section.key=value."""


@dataclass(kw_only=True)
class Quickstart:
    """Train a small GPT on Python's own source code in a few minutes, with no download."""

    steps: int | None = None
    """Train exactly this many steps instead of for a fixed time."""
    out: Path = Path("runs/quickstart")
    """Run folder."""
    nproc: int = 1
    """Local processes to start (data parallel)."""


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and run one command; exits with its status."""
    sys.exit(_main(sys.argv[1:] if arguments is None else arguments))


def _main(arguments: list[str]) -> int:
    # OpenMP threads that spin while they wait make a step up to ten times slower as soon as
    # another program wants one of the cores. Read when torch loads, so it is set before.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    command = _parse(arguments)
    try:
        if isinstance(command, Config):
            return _print_config(command)
        if isinstance(command, Quickstart):
            return _quickstart(command, arguments)
        return _run(command, arguments)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return _BAD_CONFIG
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        from mt_train.errors import USER_ERRORS, is_out_of_memory

        if isinstance(error, USER_ERRORS):
            sys.stderr.write(f"mt-train: {error}\n")
            return 1
        if is_out_of_memory(error):
            sys.stderr.write(
                f"mt-train: {error}\nThe device is out of memory: lower "
                "training.micro_batch_size, or raise parallel.tp or parallel.pp\n"
            )
            return 1
        raise


def _parse(arguments: list[str]) -> Run | Config | Quickstart:
    commands = (
        Annotated[Quickstart, tyro.conf.subcommand("quickstart")]
        | Annotated[Run, tyro.conf.subcommand("run")]
        | Annotated[Config, tyro.conf.subcommand("config")]
    )
    return tyro.cli(
        tyro.conf.OmitSubcommandPrefixes[commands],  # type: ignore[arg-type]
        prog="mt-train",
        args=arguments,
    )


def _print_config(command: Config) -> int:
    from mt_train.loading import load_config, to_yaml

    sys.stdout.write(to_yaml(load_config(command.config, command.overrides).config))
    return 0


def _env(nproc: int) -> DistributedEnv:
    """This process's place, from --nproc and the launcher's variables."""
    from mt_parallel_state import detect_env

    if nproc < 1:
        raise _nproc_error(f"{nproc} is too small; use 1 or more")
    try:
        env = detect_env()
    except ValueError as error:
        raise ConfigError([Problem(where="environment", path="", text=str(error))]) from error
    if env.world_size > 1 and nproc not in (1, env.world_size):
        raise _nproc_error(
            f"{nproc}, but a launcher has started {env.world_size} processes; leave --nproc out"
        )
    return env


def _nproc_error(text: str) -> ConfigError:
    return ConfigError([Problem(where=COMMAND_LINE, path="--nproc", text=text)])


def _as_rank(work: Callable[[], object], env: DistributedEnv) -> int:
    """Do a rank's work; what fails alike on every rank is said by one of each node.

    Launchers end all ranks as soon as one is gone, so the quiet ones leave a second later.
    """
    from mt_train.corpus import OtherRankError
    from mt_train.errors import ALIKE_ERRORS

    try:
        work()
    except (OtherRankError, *ALIKE_ERRORS) as error:
        if env.local_rank == 0 and not isinstance(error, OtherRankError):
            raise
        time.sleep(1)
        is_config = isinstance(error, ConfigError) or getattr(error, "is_config", False)
        return _BAD_CONFIG if is_config else 1
    return 0


def _run(command: Run, arguments: list[str]) -> int:
    from mt_parallel_state import launch

    from mt_train.loading import load_config

    loaded = load_config(command.config, command.overrides)
    env = _env(command.nproc)
    if command.nproc > 1 and env.world_size == 1:
        loaded.check_world(command.nproc)
        return launch("mt_train", arguments, command.nproc)
    out = command.out or Path("runs") / command.config.stem
    from mt_train.session import run

    return _as_rank(lambda: run(loaded, env, out), env)


def _quickstart(command: Quickstart, arguments: list[str]) -> int:
    from mt_parallel_state import launch

    from mt_train.quickstart import load_quickstart, quickstart

    env = _env(command.nproc)
    loaded = load_quickstart(command.steps, max(command.nproc, env.world_size))
    if command.nproc > 1 and env.world_size == 1:
        loaded.check_world(command.nproc)
        return launch("mt_train", arguments, command.nproc)
    return _as_rank(lambda: quickstart(loaded, env, command.out), env)
