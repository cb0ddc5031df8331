"""What `launch` starts for each rank: `python rank_process.py PID MODULE ARGS`.

It ties the rank's life to the launcher's, then becomes `python -P -m MODULE ARGS`: a file that
lies in the working directory is never imported. It is run as a file, not as a module of this
package, so that it starts before torch is imported.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def _die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies; elsewhere do nothing."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os._exit(128 + signal.SIGKILL)


def main() -> None:
    """Run the module named on the command line as `__main__`."""
    _die_with_parent(int(sys.argv[1]))
    module = sys.argv[2]
    if not sys.flags.safe_path:
        del sys.path[0]  # this file's folder, where -m would put the working directory
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
