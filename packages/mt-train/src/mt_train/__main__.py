"""The `mt-train` command; the launcher starts ranks by `python -m mt_train`."""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType


def main() -> None:
    """Run the command; until a run listens itself, a signal ends the process at once.

    An exception instead would be a traceback where it comes while modules are imported, and some
    modules go on without what they were importing.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    from mt_train.cli import main as command

    command()


def _end(number: int, frame: FrameType | None) -> None:
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):  # the terminal may be what is gone
            os.write(2, b"mt-train: stopped by a signal before anything was done\n")
    starts = sys.argv[1:2] in (["run"], ["quickstart"])
    os._exit(os.EX_TEMPFAIL if starts else 128 + number)


if __name__ == "__main__":
    main()
