"""How commands end: with one message, and a status that scripts can read."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
from mt_files import UserError, run_command, say


class OwnError(UserError):
    exit_status = 1


ERRORS = {
    "solvable": UserError("the disk is on fire; put it out"),
    "own": OwnError("not finite"),
    "file": FileNotFoundError(2, "No such file or directory", "a.txt"),
    "memory": MemoryError(),
    "stopped": KeyboardInterrupt(),
    "bug": ZeroDivisionError("a bug"),
}


@dataclass(frozen=True, kw_only=True)
class Fail:
    """Fail.

    Attributes:
        kind: The kind of failure.
    """

    kind: str

    def run(self) -> int:
        if self.kind.isdigit():
            say("done ü")
            return int(self.kind)
        raise ERRORS[self.kind]


def end_of(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        run_command("mt-files", {"fail": Fail}, arguments, description="Fails.")
    return caught.value.code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        ("fail 0", 0, "done ü\n", ""),
        ("fail 3", 3, "done ü\n", ""),
        ("fail solvable", 2, "", "mt-files: the disk is on fire; put it out\n"),
        ("fail own", 1, "", "mt-files: not finite\n"),
        ("fail file", 2, "", "mt-files: a.txt: No such file or directory\n"),
        ("fail memory", 2, "", "mt-files: there is not enough memory\n"),
        ("fail stopped", 130, "", "mt-files: interrupted; nothing was written\n"),
        ("fial", 2, "", "mt-files: there is no command 'fial'. Did you mean fail?\n"),
    ],
)
def test_each_end_has_its_status_and_one_message(capsys, arguments, code, out, err):
    assert end_of(capsys, *arguments.split()) == (code, out, err)


def test_version_is_said(capsys):
    code, out, _ = end_of(capsys, "--version")
    assert code == 0
    assert out.startswith("mt-files 0.")


def test_a_bug_shows_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run_command("mt-files", {"fail": Fail}, ["fail", "bug"], description=None)


def test_a_package_that_is_missing_is_named(capsys):
    with pytest.raises(SystemExit):
        run_command("mt-files", {"fail": Fail}, ["fail", "0"], description=None, needs=["mt_nix"])
    assert "the mt-files command needs mt-nix" in capsys.readouterr().err


@pytest.mark.parametrize(("redirect", "code"), [(">&-", 0), ("| true", 141)])
def test_an_output_without_a_reader_is_no_error(redirect, code):
    program = (
        "from dataclasses import dataclass; import time; from mt_files import run_command, say\n"
        "@dataclass\nclass Write:\n"
        "    def run(self):\n        [say('x' * 99) for _ in range(9999)]\n"
        "run_command('mt-files', {'write': Write}, ['write'], description=None)"
    )
    shell = f'set -o pipefail; "{sys.executable}" -c "$0" {redirect}'
    done = subprocess.run(["bash", "-c", shell, program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")
