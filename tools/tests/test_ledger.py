"""The ledger says what pytest's own JUnit file says."""

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from ledger import main, merged

TODAY = datetime.now(UTC).date().isoformat()
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
    assert f"| `test_suite.py::test_kills` | 2 | 0 | 1 | 0 | {TODAY} |" in text
    assert f"| `test_suite.py::test_plain` | 1 | 0 | 0 | 0 | {TODAY} |" in text
    assert "| case | point | seconds | |\n|---|---|---|---|\n" in text
    assert "| 1 | step 1 | 0.5 | passed |" in text
    assert "4 cases, 0 failed" in capsys.readouterr().out


def test_a_failure_is_counted_and_is_the_exit_status(tmp_path):
    status, text = written(tmp_path, "0")
    assert status == 1
    assert f"| `test_suite.py::test_plain` | 0 | 1 | 0 | 0 | {TODAY} |" in text


TABLE = "# Title\n\nby hand\n\n| test | passed | day |\n|---|---|---|---|---|---|\n"


def test_a_part_comes_into_the_ledger_beside_the_rows_that_are_there():
    had = [
        "| `packages/a/t.py::one` | 1 |",
        "| `packages/a/t.py::two` | 1 |",
        "| `b/t.py::one` | 1 |",
    ]
    lists = "\n## two\n\n| 1 |\n\n## kept\n\n| a |\n| b |\n"
    came = [
        "| `packages/a/t.py::two` | 2 |",
        "| `packages/a/t.py::new` | 2 |",
        "| `c/t.py::one` | 2 |",
    ]
    new = "".join(f"{each}\n" for each in came) + "\n## new\n\n| 2 |\n"
    text = merged(TABLE + "".join(f"{each}\n" for each in had) + lists, TABLE + new)
    rows = [had[0], came[0], came[1], had[2], came[2]]
    expected = "\n## kept\n\n| a |\n| b |\n\n## new\n\n| 2 |\n"
    assert text == TABLE + "".join(f"{each}\n" for each in rows) + expected
    assert merged(text, TABLE + new) == text
