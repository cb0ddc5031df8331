"""The `mt-ckpt` command: look at checkpoints, check, compare, remove, average and convert them."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from mt_files import run_command

from mt_ckpt.command.difference import Diff
from mt_ckpt.command.exchanging import Export, Import
from mt_ckpt.command.inspection import Inspect, Verify
from mt_ckpt.command.merging import Merge
from mt_ckpt.command.pruning import Prune

_FROM = re.compile(r"^--from(=|$)")
COMMANDS = {
    "inspect": Inspect,
    "verify": Verify,
    "diff": Diff,
    "prune": Prune,
    "merge": Merge,
    "export": Export,
    "import": Import,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `mt-ckpt`; see `run_command` for how it ends."""
    kept = "checkpoints are complete or not there"
    words = list(sys.argv[1:] if arguments is None else arguments)
    # `from` is no name of a field in Python.
    words = [_FROM.sub(r"--source\1", word) for word in words]
    run_command("mt-ckpt", COMMANDS, words, description=__doc__, kept=kept)
