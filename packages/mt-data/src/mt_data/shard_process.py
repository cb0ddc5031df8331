"""The child process of `Shards.building`, which builds shards while the parent reads them."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from mt_files import UserError, parse_json
from mt_tokenizer import load_tokenizer

from mt_data.shards import build_shards, note_failure, plan_from

_NICE = 5


def main() -> None:
    """Read a task from standard input, and exit as soon as standard input ends."""
    content = sys.stdin.buffer.readline()
    threading.Thread(target=_end_with_input, daemon=True).start()
    task = parse_json(content, name="the task")
    assert isinstance(task, dict), "a task is an object"  # noqa: S101
    os.nice(_NICE)  # the step that is computed goes first
    folder = Path(task["folder"])
    try:
        tokenizer = load_tokenizer(task["tokenizer"], eod=task["eod"])
        build_shards(plan_from(task["plan"]), folder, tokenizer)
    except (UserError, OSError) as error:
        note_failure(folder, str(error))
        sys.exit(1)


def _end_with_input() -> None:
    while sys.stdin.buffer.read(1):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
