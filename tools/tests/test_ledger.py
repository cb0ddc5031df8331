"""The ledger says what pytest's own JUnit file says."""

import os
import subprocess
import sys
from pathlib import Path

from ledger import main

OUR_SETTINGS = Path(__file__).parents[2] / "pyproject.toml"

SUITE = """\
import pytest

@pytest.mark.parametrize("seed", [0, 1, 2])
def test_kills(seed, record_property):
    record_property("point", f"step {seed}")
    record_property("seconds", 0.5)
    if seed == 2:
        pytest.skip("not here")

def test_plain():
    assert WRONG
"""


def written(tmp_path, wrong: str) -> tuple[int, str]:
    (tmp_path / "test_suite.py").write_text(SUITE.replace("WRONG", wrong))
    command = [sys.executable, "-m", "pytest", "-q", "--junitxml", "r.xml"]
    command += ["--config-file", str(OUR_SETTINGS), "--rootdir", ".", "test_suite.py"]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins take seconds to import
    subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, env=alone)
    status = main([str(tmp_path / "r.xml"), "--out", str(tmp_path / "out.md")])
    return status, (tmp_path / "out.md").read_text()


def test_every_case_is_counted_and_its_properties_listed(tmp_path, capsys):
    status, text = written(tmp_path, "1")
    assert status == 0
    assert "| `test_suite.py::test_kills` | 2 | 0 | 1 | 0 |" in text
    assert "| `test_suite.py::test_plain` | 1 | 0 | 0 | 0 |" in text
    assert "| case | point | seconds | |\n|---|---|---|---|\n" in text
    assert "| 1 | step 1 | 0.5 | passed |" in text
    assert "4 cases, 0 failed" in capsys.readouterr().out


def test_a_failure_is_counted_and_is_the_exit_status(tmp_path):
    status, text = written(tmp_path, "0")
    assert status == 1
    assert "| `test_suite.py::test_plain` | 0 | 1 | 0 | 0 |" in text
