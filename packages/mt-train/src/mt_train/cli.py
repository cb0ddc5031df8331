"""The `mt-train` command: quickstart, run, config, memory, profile, keys."""

from __future__ import annotations

import io
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from mt_files import UserError, did_you_mean, import_failure, object_url, quick_imports, shorten

from mt_train.config.document import COMMAND_LINE
from mt_train.problem import ConfigError

if TYPE_CHECKING:
    from mt_parallel_state import DistributedEnv

    from mt_train.config.loading import LoadedConfig
    from mt_train.session.run import Outcome

_BAD_CONFIG = 2
_DOWNLOAD = "--download"
_STOPPED = os.EX_TEMPFAIL  # 75: the same command continues


_Overrides = Annotated[tyro.conf.Positional[list[str]], tyro.conf.arg(metavar="KEY=VALUE")]


@dataclass(kw_only=True)
class _OfFile:
    config: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CONFIG")]
    """The run's YAML file."""
    overrides: _Overrides = field(default_factory=list)
    """Changes such as parallel.tp=2 training.steps=100, anywhere on the line."""
    download: bool = False
    """Download models of the Hugging Face hub that are not in its local cache."""

    def load(self) -> LoadedConfig:
        """Read and check the file with its changes."""
        from mt_train.config.loading import load_config

        return load_config(self.config, self.overrides, download=self.download)


@dataclass(kw_only=True)
class Run(_OfFile):
    """Train from a YAML file; the same command continues an interrupted run.

    Runs alone, on `--nproc` local processes, or as one rank under torchrun or srun. The config.yaml
    of a run folder continues that run.
    """

    out: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Run folder; by default runs/<name of the YAML file>."""
    nproc: int = 1
    """Local processes to start."""


@dataclass(kw_only=True)
class Config(_OfFile):
    """Print the resolved YAML: every default and the model filled in, overrides applied."""


@dataclass(kw_only=True)
class Memory(_OfFile):
    """Print the memory that each rank needs, for several plans of recomputation, without a run."""


@dataclass(kw_only=True)
class Profile:
    """Print the time of a training.profile trace's steps, by section and by operator."""

    trace: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """The trace, such as runs/my/profile/rank_0_steps_10_to_12.json."""


@dataclass(kw_only=True)
class Keys:
    """Explain every key of the YAML: type, default and meaning."""

    names: Annotated[tyro.conf.Positional[list[str]], tyro.conf.arg(metavar="NAME")] = field(
        default_factory=list
    )
    """Sections or keys to explain, such as optimizer or data.glob; by default all."""


@dataclass(kw_only=True)
class Quickstart:
    """Train a small GPT on Python's own source code in a few minutes, with no download."""

    overrides: _Overrides = field(default_factory=list)
    """Changes such as data.max_files=100, anywhere on the line."""
    steps: int | None = None
    """Train exactly this many steps instead of for a fixed time."""
    out: Annotated[str, tyro.conf.arg(metavar="DIR")] = "runs/quickstart"
    """Run folder."""
    nproc: int = 1
    """Local processes to start (data parallel)."""


_COMMANDS = {
    "quickstart": Quickstart,
    "run": Run,
    "config": Config,
    "memory": Memory,
    "profile": Profile,
    "keys": Keys,
}
_Command = Run | Config | Memory | Profile | Keys | Quickstart


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and run one command; exits with its status."""
    sys.exit(_main(sys.argv[1:] if arguments is None else arguments))


def _main(arguments: list[str]) -> int:
    # OpenMP threads that spin while they wait make a step up to ten times slower as soon as
    # another program wants one of the cores. Read when torch loads, so it is set before.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _open_streams()
    try:
        return _answer(_parse(arguments), arguments)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return _BAD_CONFIG
    except BrokenPipeError:  # `| head` has what it wanted
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end
        return 1
    except Exception as error:
        text = _explained(error)
        if text is None:
            raise
        sys.stderr.write(f"mt-train: {text}\n")
        return 1


def _explained(error: Exception) -> str | None:
    """Return the message of an error that a user can solve, or None for a bug."""
    if (refused := import_failure(error, "torch")) is not None:
        return refused
    if isinstance(error, UserError | ImportError | OSError):
        return str(error)
    from mt_parallel_state import is_out_of_memory

    hint = "The device is out of memory: lower training.micro_batch_size, or raise parallel.tp or "
    return f"{error}\n{hint}parallel.pp" if is_out_of_memory(error) else None


def _answer(command: _Command, arguments: list[str]) -> int:
    if isinstance(command, Run):
        return _run(command, arguments)
    if isinstance(command, Quickstart):
        return _quickstart(command, arguments)
    texts = {Config: _config, Memory: _memory, Profile: _profile, Keys: _keys}
    sys.stdout.write(texts[type(command)](command))  # pyright: ignore[reportArgumentType]
    sys.stdout.flush()
    return 0


def _open_streams() -> None:
    """Make messages in any encoding, or to a closed stream, no error."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell (`>&-`)
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _parse(arguments: list[str]) -> _Command:
    first = arguments[0] if arguments else ""
    if first == "--version":
        sys.stdout.write(f"mt-train {version('mt-train')}\n")
        sys.stdout.flush()
        raise SystemExit(0)
    if first and not first.startswith("-") and first not in _COMMANDS:
        is_file = first.endswith((".yaml", ".yml"))
        hint = f"Did you mean run {first}?" if is_file else did_you_mean(first, _COMMANDS)
        raise ConfigError.of(COMMAND_LINE, f"{shorten(first)} is no command. {hint}")
    return tyro.extras.subcommand_cli_from_dict(
        _COMMANDS,
        prog="mt-train",
        description="Train transformer models: one YAML from a laptop to a cluster. "
        "`--version` prints the version.",
        args=_options_last(arguments),
    )


def _options_last(arguments: list[str]) -> list[str]:
    """Move options after the words; all except --download take a value. Help stays first."""
    words: list[str] = []
    options: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument in ("-h", "--help") or argument.startswith("--tyro-"):
            return arguments
        if not argument.startswith("--"):
            words.append(argument)
            continue
        options.append(argument)
        if "=" not in argument and argument not in (_DOWNLOAD, "--no-download"):
            options += itertools.islice(rest, 1)
    return words + options


def _config(command: Config) -> str:
    from mt_train.config.loading import to_yaml

    return to_yaml(command.load().resolved())


def _memory(command: Memory) -> str:
    from mt_train.memory import count, table

    loaded = command.load()
    return table(loaded, count(loaded))


def _profile(command: Profile) -> str:
    from mt_train.reporting.trace import profile_tables

    return profile_tables(command.trace)


def _keys(command: Keys) -> str:
    from mt_train.keys import explain

    return explain(command.names)


def _place(nproc: int) -> tuple[DistributedEnv, bool]:
    """Return this process's place, and whether it has local ranks to start."""
    from mt_parallel_state import detect_env, must_launch

    try:
        env = detect_env()
    except ValueError as error:
        raise ConfigError.of("environment", str(error)) from error
    try:
        return env, must_launch(nproc, env)
    except ValueError as error:
        raise ConfigError.of(COMMAND_LINE, str(error)) from error


def _folder(out: str) -> Path:
    """Check the name of a run folder."""
    if not out.strip():
        text = f"{out!r} is no folder; name one, such as runs/my"
        raise ConfigError.of(COMMAND_LINE, text, "--out")
    if (url := object_url(out)) is not None:
        text = f"{url} is in an object store; name a local folder, and the store for its "
        text += f"checkpoints alone: checkpoint.dir={url}/checkpoints"
        raise ConfigError.of(COMMAND_LINE, text, "--out")
    return Path(out)


def _run_folder(config: Path) -> Path:
    """Return the default folder of a run."""
    parent = config.parent
    if config.name == "config.yaml" and (
        (parent / "metrics.jsonl").exists() or (parent / "checkpoints").is_dir()
    ):
        return parent
    return Path("runs") / config.stem


def _as_rank(work: Callable[[], Outcome], env: DistributedEnv) -> int:
    """Do a rank's work; one rank of each node reports an error that all ranks have.

    Launchers end all ranks as soon as one has ended, so the silent ranks end a second later.
    """
    from mt_train.data.corpus import OtherRankError
    from mt_train.session.saved import ResumeError
    from mt_train.training.trainer import NonFiniteLossError

    try:
        outcome = work()
    except (OtherRankError, ConfigError, ResumeError, NonFiniteLossError) as error:
        if env.local_rank == 0 and not isinstance(error, OtherRankError):
            raise
        time.sleep(1)
        is_config = isinstance(error, ConfigError) or getattr(error, "is_config", False)
        return _BAD_CONFIG if is_config else 1
    return _STOPPED if outcome.stopped else 0


def _run(command: Run, arguments: list[str]) -> int:
    loaded = command.load()
    out = _run_folder(command.config) if command.out is None else _folder(command.out)
    with quick_imports():
        env, launches = _place(command.nproc)
    if launches:  # what is downloaded is in the cache now
        given = [each for each in arguments if each != _DOWNLOAD]
        return _launch(loaded, given, command.nproc)
    from mt_train.session.run import run

    return _as_rank(lambda: run(loaded, env, out), env)


def _quickstart(command: Quickstart, arguments: list[str]) -> int:
    from mt_train.quickstart import load_quickstart, quickstart

    out = _folder(command.out)
    with quick_imports():
        env, launches = _place(command.nproc)
    nproc = max(command.nproc, env.world_size)
    loaded = load_quickstart(command.steps, nproc, command.overrides)
    if launches:
        return _launch(loaded, arguments, command.nproc)
    return _as_rank(lambda: quickstart(loaded, env, out), env)


def _launch(loaded: LoadedConfig, arguments: list[str], nproc: int) -> int:
    from mt_parallel_state import launch

    loaded.check_world(nproc)
    code = launch("mt_train", arguments, nproc)
    # Ranks that a signal met before they could listen.
    by_signal = {128 + number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    return _STOPPED if code in by_signal else code
