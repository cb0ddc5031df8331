"""What all commands have in common: how they are found, what they print, and how they end."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NoReturn, Protocol

from mt_files.error import UserError
from mt_files.field import did_you_mean, shorten
from mt_files.later import MissingExtraError, import_failure, require

_INTERRUPTED, _BROKEN_PIPE = 130, 141


class Command(Protocol):
    """A subcommand: a dataclass whose fields are its arguments."""

    def run(self) -> int | None:
        """Run the command, and return its exit status; None is 0."""
        ...


def run_command(
    program: str,
    commands: Mapping[str, type[Command]],
    arguments: Sequence[str] | None = None,
    *,
    description: str | None,
    errors: tuple[type[Exception], ...] = (),
    needs: Sequence[str] = (),
    kept: str = "nothing was written",
) -> NoReturn:
    """Parse a command line with tyro, run the subcommand, and exit with its status.

    An error that the user can solve prints one line on standard error, and its `exit_status` (2 for
    most) ends the process. Ctrl-C gives 130, and a reader of the output that goes away 141.

    Args:
        program: Name of the command and of its distribution.
        commands: The subcommands by name.
        arguments: Words after the program's name; by default, the process's own.
        description: First paragraph of the help.
        errors: Further kinds of errors that the user can solve.
        needs: Modules of the workspace that an extra of the program brings.
        kept: State of the files after Ctrl-C, for its message.
    """
    arguments, out = list(sys.argv[1:] if arguments is None else arguments), sys.stdout
    try:
        _check_words(program, commands, arguments, needs)
        code = _run(program, commands, arguments, description)
        if out is not None:
            out.flush()
    except BrokenPipeError:
        if out is not None:  # its buffer has no reader; else Python would complain at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        raise SystemExit(_BROKEN_PIPE) from None
    except KeyboardInterrupt:
        say(f"{program}: interrupted; {kept}", stream=sys.stderr)
        raise SystemExit(_INTERRUPTED) from None
    except (UserError, MissingExtraError, OSError, MemoryError, *errors) as error:
        text = import_failure(error, "torch") or _sentence(error)
        say(f"{program}: {text}", stream=sys.stderr)
        raise SystemExit(getattr(error, "exit_status", UserError.exit_status)) from None
    raise SystemExit(code)


def say(text: str, *, stream: Any = None) -> None:
    """Write a line to standard output, or another stream, with unprintable characters escaped.

    A stream that the shell has closed takes nothing.
    """
    stream = sys.stdout if stream is None else stream
    if stream is None:
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def _check_words(
    program: str, commands: Mapping[str, type[Command]], words: Sequence[str], needs: Sequence[str]
) -> None:
    first = words[0] if words else ""
    if first and not first.startswith("-") and first not in commands:
        raise UserError(f"there is no command {shorten(first)}. {did_you_mean(first, commands)}")
    for name in needs:
        if find_spec(name) is None:
            package = name.replace("_", "-")
            text = "in a clone of the repository, uv sync installs it"
            raise UserError(f"the {program} command needs {package}: {text}")


def _run(
    program: str,
    commands: Mapping[str, type[Command]],
    arguments: list[str],
    description: str | None,
) -> int:
    if arguments == ["--version"]:
        say(f"{program} {version(program)}")
        return 0
    tyro = require("tyro", f"the {program} command")
    parsed: Command = tyro.extras.subcommand_cli_from_dict(
        dict(commands),
        prog=program,
        description=description,
        args=arguments,
        config=(tyro.conf.PositionalRequiredArgs, tyro.conf.FlagCreatePairsOff),
    )
    return parsed.run() or 0


def _sentence(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "there is not enough memory"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)
