"""Stand-ins of programs behave as the programs, without their imports."""

import os
import signal
import subprocess
import sys
import time

import pytest


@pytest.fixture(scope="module")
def programs(ranks):
    with ranks.programs("colorsys") as found:
        yield found


def said(*command, **options):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    return done.returncode, done.stdout, done.stderr


def test_a_program_has_what_it_is_given_and_finds_its_imports_done(programs, tmp_path):
    code = (
        "import os, sys; print(sys.argv, os.getcwd(), os.environ['X'], sys.stdin.read());"
        "print('torch' in sys.modules, 'colorsys' in sys.modules); sys.exit(3)"
    )
    environ = {**os.environ, "X": "given"}
    found = said(programs.python, "-c", code, "a", cwd=tmp_path, env=environ, input="text")
    assert found == (3, f"['-c', 'a'] {tmp_path} given text\nTrue True\n", "")


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("raise ValueError('bad')", 1, "ValueError: bad"),
        ("raise SystemExit('why')", 1, "why"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import atexit; atexit.register(print, 'late'); raise SystemExit(256 + 4)", 4, ""),
    ],
    ids=["raises", "exits", "killed", "code"],
)
def test_a_program_ends_as_an_interpreter_does(programs, code, status, words):
    real, standing_in = (said(python, "-c", code) for python in (sys.executable, programs.python))
    assert standing_in[:2] == real[:2]
    assert standing_in[0] == status
    assert words in standing_in[2]


def test_files_and_modules_find_their_neighbours_and_nothing_of_the_tests(programs, tmp_path):
    (tmp_path / "own.py").write_text("import near; print(__name__, __file__, near.here)")
    (tmp_path / "near.py").write_text("here = 'here'")
    file = tmp_path / "own.py"
    assert said(programs.python, file) == (0, f"__main__ {file} here\n", "")
    assert said(programs.python, "-m", "own", cwd=tmp_path) == (0, f"__main__ {file} here\n", "")
    assert "No module named own" in said(programs.python, "-P", "-m", "own", cwd=tmp_path)[2]
    assert said(programs.python, "--version")[1].startswith("Python 3")
    shown = said(programs.python, "-c", "import sys; print(sys.path[1:])")[1]
    assert shown == said(sys.executable, "-c", "import sys; print(sys.path[1:])")[1]


def test_a_signal_reaches_the_program_and_it_ends_with_its_stand_in(programs, tmp_path):
    waits = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    for number, status in ((signal.SIGTERM, 9), (signal.SIGKILL, -signal.SIGKILL)):
        command = [str(programs.python), "-c", waits]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            pid = int(process.stdout.readline())
            process.send_signal(number)
        assert process.returncode == status
        deadline = time.monotonic() + 10
        while is_running(pid):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_interpreters_that_a_program_starts_are_forks_of_it_too(programs, tmp_path):
    file = tmp_path / "parent.py"
    file.write_text(
        "import multiprocessing, os, subprocess, sys, tempfile\n"
        "folder = tempfile.TemporaryDirectory()\n"
        "def body(queue):\n"
        "    queue.put(('colorsys' in sys.modules, os.getppid()))\n"
        "if __name__ == '__main__':\n"
        "    code = 'import os, sys; print(\"colorsys\" in sys.modules, os.getppid())'\n"
        "    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)\n"
        "    assert done.stdout.split() == ['True', str(os.getpid())], done\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    process = context.Process(target=body, args=(queue,))\n"
        "    process.start()\n"
        "    assert queue.get(timeout=30) == (True, os.getpid())\n"
        "    process.join()\n"
        "    assert process.exitcode == 0\n"
        "    assert os.path.isdir(folder.name)\n"
    )
    assert said(programs.python, file) == (0, "", "")


@pytest.mark.parametrize("closed", ["", " >&-", " 2>&-", " <&-"])
def test_a_stream_that_is_closed_is_none(programs, closed, tmp_path):
    out = tmp_path / "out"
    streams = "(sys.stdin, sys.stdout, sys.stderr)"
    code = f"import sys; open({str(out)!r}, 'w').write(str([x is None for x in {streams}]))"
    for python in (sys.executable, programs.python):
        subprocess.run(["bash", "-c", f'{python} -c "{code}"{closed}'], check=True, input=b"")
        found = out.read_text()
        assert found.count("True") == (closed != "")
