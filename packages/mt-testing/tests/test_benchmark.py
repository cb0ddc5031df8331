import json
import time

import pytest
from mt_testing import environment, ratios, shown, take_turns, write_report


def test_every_way_runs_in_every_round_and_none_is_always_first_or_behind_another() -> None:
    calls: list[str] = []
    ways = {name: lambda name=name: calls.append(name) for name in "abc"}
    rounds = take_turns(ways, 4, repeats=2)
    assert [set(each) for each in rounds] == [set("abc")] * 4
    assert "".join(calls) == "abc" + "aabbcc" + "bbaacc" + "ccaabb" + "ccbbaa"


def test_a_device_is_waited_for_after_each_call() -> None:
    calls: list[str] = []
    ways = {name: lambda name=name: calls.append(name) for name in "ab"}
    rounds = take_turns(ways, 1, repeats=2, wait=lambda: (calls.append("."), time.sleep(0.01)))
    assert "".join(calls) == "a.b." + "a.a.b.b."
    assert all(wall >= 0.02 for wall, _ in rounds[0].values())


def test_ratios_are_made_within_rounds() -> None:
    rounds = [{"a": (2.0 * k, 9.0), "b": (1.0 * k, 3.0)} for k in (1, 10, 100)]
    found = ratios(rounds, "a", "b")
    assert found == {"wall": [2.0, 2.0, 2.0], "cpu": [3.0, 3.0, 3.0]}
    assert shown(found["cpu"]) == "3.00 (3.00 to 3.00)"


def test_the_clock_counts_sleep_and_the_processors_do_not() -> None:
    def spin() -> None:
        end = time.process_time() + 0.02
        while time.process_time() < end:
            pass

    rounds = take_turns({"sleep": lambda: time.sleep(0.02), "spin": spin}, 3)
    assert all(wall >= 0.02 for each in rounds for wall, _ in each.values())
    assert ratios(rounds, "sleep", "spin")["cpu"][1] < 0.5


def test_no_round_begins_after_its_seconds_but_three_always_do() -> None:
    assert len(take_turns({"a": lambda: time.sleep(0.01)}, 1000, seconds=0.0)) == 3
    assert len(take_turns({"a": lambda: None}, 5, seconds=0.0)) == 3
    assert len(take_turns({"a": lambda: None}, 5)) == 5


def test_nothing_to_time_is_refused() -> None:
    with pytest.raises(ValueError, match="0 ways, 1 rounds of 1 calls: there is nothing to time"):
        take_turns({}, 1)


def test_a_report_says_where_it_was_measured(tmp_path) -> None:
    path = tmp_path / "report.json"
    write_report(path, {**environment("torch"), "results": {"a": 1.5}})
    report = json.loads(path.read_text())
    assert report["results"] == {"a": 1.5}
    assert {"date", "command", "machine", "python", "torch"} <= set(report)
    write_report(None, {"results": object()})
