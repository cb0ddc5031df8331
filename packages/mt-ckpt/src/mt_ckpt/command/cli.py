"""The `mt-ckpt` command: look at checkpoints, check, compare, remove, average and convert them."""

from __future__ import annotations

from collections.abc import Sequence

from mt_files import run_command

from mt_ckpt.command.difference import Diff
from mt_ckpt.command.inspection import Inspect, Verify
from mt_ckpt.command.merging import Merge
from mt_ckpt.command.pruning import Prune

COMMANDS = {
    "inspect": Inspect,
    "verify": Verify,
    "diff": Diff,
    "prune": Prune,
    "merge": Merge,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `mt-ckpt`; see `run_command` for how it ends."""
    kept = "checkpoints are complete or not there"
    run_command("mt-ckpt", COMMANDS, arguments, description=__doc__, kept=kept)
