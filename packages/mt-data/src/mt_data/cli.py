"""The `mt-data` command: build and inspect token datasets."""

from __future__ import annotations

from collections.abc import Sequence

from mt_files import run_command

from mt_data.commands.build import Build
from mt_data.commands.check import Check
from mt_data.commands.inspect import Peek, Stats
from mt_data.commands.parts import Merge

COMMANDS = {"build": Build, "check": Check, "merge": Merge, "peek": Peek, "stats": Stats}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `mt-data`; see `run_command` for how it ends."""
    run_command("mt-data", COMMANDS, arguments, description=__doc__, errors=(IndexError,))
