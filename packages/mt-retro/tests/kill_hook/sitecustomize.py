"""A hook for every interpreter with this folder on its path: kill a command at a planned moment.

KILL_PLAN names a file with a folder, a number, seconds, and the process of the command. All
processes together count the files that they create, rename and remove in the folder, as bytes of a
file beside the plan; the process that reaches the number kills the command and itself, after the
seconds.
"""

import os
import signal
import sys
import threading
from pathlib import Path

CHANGES = ("os.mkdir", "os.remove", "os.rename", "shutil.rmtree")


def look(event, arguments):
    if event not in CHANGES and not (event == "open" and arguments[2] & os.O_CREAT):
        return
    plan = Path(os.environ["KILL_PLAN"])
    if not plan.exists():
        return
    folder, number, seconds, command = plan.read_text().split()
    if not str(arguments[0]).startswith(folder):
        return
    descriptor = os.open(plan.with_suffix(".count"), os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, b".")
    if os.fstat(descriptor).st_size >= int(number):
        if float(seconds):
            threading.Timer(float(seconds), kill, [int(command)]).start()
        else:
            kill(int(command))
    os.close(descriptor)


def kill(command):
    for process in (command, os.getpid()):
        os.kill(process, signal.SIGKILL)


sys.addaudithook(look)
