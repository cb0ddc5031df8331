import budget
import pytest
from budget import main

SUITE = (
    '<testsuites><testsuite time="{total}">'
    '<testcase classname="packages.mt-x.tests.test_a" name="test_slow[2]" time="{slow}"/>'
    '<testcase classname="packages.mt-x.tests.test_a" name="test_quick" time="0.1"/>'
    "</testsuite></testsuites>"
)


def write(folder, name, total, slow):
    path = folder / f"{name}.xml"
    path.write_text(SUITE.format(total=total, slow=slow))
    return str(path)


def test_sessions_and_slowest_tests_are_listed_slowest_first(tmp_path, capsys):
    files = [write(tmp_path, "mt-a", 5, 2), write(tmp_path, "mt-b", 50, 40)]
    assert main(files) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["     50  mt-b", "      5  mt-a"]
    assert lines[5] == "   40.0  packages/mt-x/tests/test_a.py::test_slow[2]"


def test_a_session_above_its_limit_fails_and_is_named(tmp_path, capsys):
    files = [write(tmp_path, "mt-a", 100, 2), write(tmp_path, "mt-b", 100, 2)]
    assert main([*files, "--limit", "90", "--limit", "mt-b=110"]) == 1
    out = capsys.readouterr().out
    assert "over budget: mt-a: 100 s of at most 90" in out
    assert "over budget: mt-b" not in out


def test_only_ten_tests_are_listed(tmp_path, capsys):
    files = [write(tmp_path, f"mt-{n}", n, n) for n in range(12)]
    assert main(files) == 0
    assert capsys.readouterr().out.count("::") == 10


def test_limits_grow_with_the_slowness_of_the_machine_and_do_not_shrink(tmp_path, capsys):
    file = write(tmp_path, "mt-a", 100, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "PROBE", "import time; time.sleep(0.3)")
        patch.setattr(budget, "PROBE_SECONDS", 0.1)
        assert main([file, "--limit", "90", "--calibrate"]) == 0
        patch.setattr(budget, "PROBE_SECONDS", 1000.0)
        assert main([file, "--limit", "90", "--calibrate"]) == 1
    assert "over budget: mt-a: 100 s of at most 90" in capsys.readouterr().out


def test_a_probe_that_fails_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "PROBE", "raise SystemExit(3)")
    with pytest.raises(SystemExit, match="probe"):
        main([write(tmp_path, "mt-a", 1, 1), "--calibrate"])
