"""The `mt-infer` command line: it finds the command, binds its options and runs it."""

from __future__ import annotations

import contextlib
import io
import sys
from importlib.metadata import version
from typing import Protocol

import tyro
from mt_files import did_you_mean, import_failure, shorten

from mt_infer.commands.bench import Bench
from mt_infer.commands.chat import Chat
from mt_infer.commands.embed import Embed
from mt_infer.commands.export import Export
from mt_infer.commands.flags import flag_of, options_of
from mt_infer.commands.generate import Generate
from mt_infer.commands.quantize import Quantize
from mt_infer.commands.replay import Replay
from mt_infer.commands.serve import Serve
from mt_infer.console import bounded, check_printable, open_streams, print_text, say

_COMMANDS = {
    "generate": Generate,
    "chat": Chat,
    "serve": Serve,
    "bench": Bench,
    "replay": Replay,
    "quantize": Quantize,
    "export": Export,
    "embed": Embed,
}


class _Command(Protocol):
    def run_command(self) -> int: ...


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line, run the command and exit with its status."""
    sys.exit(_main(sys.argv[1:] if arguments is None else arguments))


def _main(arguments: list[str]) -> int:
    has_stdout = open_streams()
    try:
        if arguments[:1] == ["--version"]:
            print_text(f"mt-infer {version('mt-infer')}")
            return 0
        command = _parse(arguments)
        check_printable(has_stdout=has_stdout)
        return command.run_command()
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if (refused := import_failure(error, "torch")) is not None:
            say(refused)
            return 1
        from mt_infer.errors import explain

        explained = explain(error)
        if explained is None:
            raise
        code, message = explained
        say(message)
        return code


def _parse(arguments: list[str]) -> _Command:
    first = arguments[0] if arguments else ""
    if first and not first.startswith("-") and first not in _COMMANDS:
        raise ValueError(f"{shorten(first)} is no command. {did_you_mean(first, _COMMANDS)}")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.extras.subcommand_cli_from_dict(
                _COMMANDS,
                prog="mt-infer",
                description="Generate text from a trained model, and store it in low precision or "
                "for other engines. `--version` prints the version.",
                args=_joined_values(arguments),
            )
    finally:
        sys.stderr.write(bounded(said.getvalue()))


def _joined_values(arguments: list[str]) -> list[str]:
    """Join each option with its value, which may begin with a dash; refuse unknown options."""
    if not arguments or arguments[0] not in _COMMANDS:
        return arguments
    names, switches = options_of(_COMMANDS[arguments[0]])
    flags = {flag_of(f"{no}{name}") for name in switches for no in ("", "no_")}
    known = {*map(flag_of, names), *flags, "--help"}
    words, rest = [], iter(arguments)
    for word in rest:
        name, equals, _ = word.partition("=")
        name = name.replace("_", "-")
        if word == "--" or word in ("-h", "--help"):
            return arguments
        if not word.startswith("--"):
            was_switch = words and f"{words[-1]}-file" in known
            if was_switch and word.endswith(".json"):  # --chat FILE.json is --chat-file=FILE.json
                words[-1] += f"-file={word}"
            else:
                words.append(word)
        elif name not in known:
            raise ValueError(f"{shorten(name)} is no option. {did_you_mean(name, sorted(known))}")
        elif equals or name in flags:
            words.append(word)
        else:
            value = next(rest, None)
            words.append(name if value is None else f"{name}={value}")
    return words
