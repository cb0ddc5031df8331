"""Every interpreter that finds this on its path looks for a plan of when to kill a build.

The plan is the file that KILL_PLAN names: a part's number, or `c` for the whole; which of the files
that are created and renamed for it comes last; seconds after that; and the process of the build.
"""

import os
import re
import signal
import sys
import threading
from pathlib import Path

TEMPORARY = re.compile(r"/\.(\w+)\.[\w.]+\.tmp-[0-9a-f]+$")
count = 0


def look(event, arguments):
    global count
    if event == "shutil.rmtree":  # of the parts, when the whole is there
        name = "c"
    elif event == "os.rename" or (event == "open" and arguments[2] & os.O_CREAT):
        found = TEMPORARY.search(str(arguments[0]))
        name = found and found[1]
    else:
        return
    plan = Path(os.environ["KILL_PLAN"])
    if not name or not plan.exists():
        return
    wanted, number, delay, build = plan.read_text().split()
    count += name == wanted
    if name == wanted and count == int(number):
        if float(delay):
            threading.Timer(float(delay), kill, [int(build)]).start()
        else:
            kill(int(build))


def kill(build):
    for process in (build, os.getpid()):
        os.kill(process, signal.SIGKILL)


sys.addaudithook(look)
