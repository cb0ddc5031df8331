"""The `mt-data` command: build and inspect token datasets."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from mt_files import MissingExtraError, UserError, require, shorten

from mt_data.commands.build import Build
from mt_data.commands.console import say
from mt_data.commands.inspect import Peek, Stats
from mt_data.error import DataError

USAGE_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
COMMANDS = {"build": Build, "peek": Peek, "stats": Stats}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `mt-data`; exits with 2 and one message on an error.

    Ctrl-C ends it with 130 and leaves nothing behind; a closed output pipe ends it quietly.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The rest of the buffer has no reader; without this Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(BROKEN_PIPE) from None
    except KeyboardInterrupt:
        say("mt-data: interrupted; nothing was written", stream=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except (UserError, MissingExtraError, OSError, IndexError, MemoryError) as error:
        say(f"mt-data: {_sentence(error)}", stream=sys.stderr)
        raise SystemExit(USAGE_ERROR) from None


def _run(arguments: list[str]) -> None:
    if arguments == ["--version"]:
        say(f"mt-data {version('mt-data')}")
        return
    command = arguments[0] if arguments else ""
    if command and not command.startswith("-") and command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else f"; choose one of {', '.join(COMMANDS)}"
        raise DataError(f"there is no command {shorten(command)}{hint}")
    tyro = require("tyro", "the mt-data command")
    parsed = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="mt-data",
        description=__doc__,
        args=arguments,
        config=(tyro.conf.PositionalRequiredArgs, tyro.conf.FlagCreatePairsOff),
    )
    parsed.run()


def _sentence(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "there is not enough memory"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)
