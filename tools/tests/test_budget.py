import json

import pytest
from budget import main

SUITE = (
    '<testsuites><testsuite time="{total}">'
    '<testcase classname="packages.mt-x.tests.test_a" name="test_slow[2]" time="{slow}"/>'
    '<testcase classname="packages.mt-x.tests.test_a" name="test_quick" time="1"/>'
    "</testsuite></testsuites>"
)


def done(name, start, seconds, lanes=1):
    return {"name": name, "lanes": lanes, "start": start, "seconds": seconds, "cpu": 5.0}


@pytest.fixture
def files(tmp_path):
    """Two sessions side by side, and then one that takes both lanes; two of them have tests."""
    sessions = [done("tests(mt-a)", 0, 20), done("lint", 0, 10), done("integration", 20, 30, 2)]
    (tmp_path / "lanes.json").write_text(json.dumps(sessions))
    (tmp_path / "mt-a.xml").write_text(SUITE.format(total=15, slow=9))
    (tmp_path / "integration.xml").write_text(SUITE.format(total=25, slow=39))
    return [str(tmp_path / "lanes.json"), str(tmp_path)]


def test_time_is_divided_into_set_up_collection_tests_and_idle_lanes(files, tmp_path, capsys):
    out = tmp_path / "budget.json"
    assert main([*files, "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    rows = {
        row["name"]: (row["seconds"], row["setup"], row["collection"], row["tests"])
        for row in written["sessions"]
    }
    assert rows == {
        "tests(mt-a)": (20, 5, 5, 10),
        "lint": (10, 10, 0, 0),
        "integration": (60, 10, 10, 40),
    }
    assert (written["wall"], written["idle"], written["cpu"]) == (50, 10, 15)
    assert "lanes idle for 10 s" in capsys.readouterr().out


def test_sessions_and_tests_are_listed_slowest_first(files, capsys):
    assert main(files) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[1:5]] == [
        "integration",
        "tests(mt-a)",
        "lint",
        "all",
    ]
    assert "   39.0  packages/mt-x/tests/test_a.py::test_slow[2]" in lines


def test_a_check_above_its_limit_fails(files, capsys):
    assert main([*files, "--limit", "49"]) == 1
    assert "over budget" in capsys.readouterr().out
    assert main([*files, "--limit", "51"]) == 0


def test_limit_grows_with_the_slowness_of_the_machine(files):
    assert main([*files, "--limit", "40", "--slowness", "1.3"]) == 0
    assert main([*files, "--limit", "40", "--slowness", "1.2"]) == 1
