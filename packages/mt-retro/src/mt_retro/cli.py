"""The `mt-retro` command: build databases, find neighbours, look at them and check them."""

from __future__ import annotations

from collections.abc import Sequence

from mt_files import run_command

from mt_retro.commands.build import Build
from mt_retro.commands.peek import Peek
from mt_retro.commands.query import Query
from mt_retro.commands.verify import Verify

COMMANDS = {"build": Build, "query": Query, "peek": Peek, "verify": Verify}
KEPT = "what is done is kept, and the same command goes on"


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `mt-retro`; see `run_command` for how it ends."""
    run_command(
        "mt-retro", COMMANDS, arguments, description=__doc__, errors=(IndexError,), kept=KEPT
    )
