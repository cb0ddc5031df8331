"""Sessions run side by side in lanes, and what each took is written down."""

import json
import sys

from lanes import Job, in_order, main, read_known, run

SLEEP = [sys.executable, "-c"]


def overlap(a, b) -> bool:
    return a.start < b.start + b.seconds and b.start < a.start + a.seconds


def test_two_jobs_run_at_once_and_one_of_two_lanes_alone():
    wide, *narrow = (
        Job(name=f"import time; time.sleep(0.4) # {number}", lanes=lanes)
        for number, lanes in enumerate((2, 1, 1))
    )
    done = {each.name: each for each in run([narrow[0], wide, narrow[1]], SLEEP)}
    one, both, other = (done[job.name] for job in (narrow[0], wide, narrow[1]))
    assert not overlap(one, both)
    assert not overlap(other, both)
    done = {each.name: each for each in run([wide, *narrow], SLEEP)}
    assert overlap(done[narrow[0].name], done[narrow[1].name])


def test_output_is_whole_and_failure_and_cpu_time_are_seen(capfd):
    busy = "sum(range(10**7)); print('busy')"
    passed, failed = sorted(
        run([Job(name=busy), Job(name="raise SystemExit('why')")], SLEEP),
        key=lambda each: not each.passed,
    )
    assert passed.passed
    assert passed.cpu > 0.05
    assert not failed.passed
    assert {"busy", "why"} <= set(capfd.readouterr().out.split())


def test_a_session_is_told_how_many_lanes_it_has(capfd):
    shown = "import os; print(os.environ['MT_LANES'])"
    run([Job(name=shown, lanes=2)], SLEEP)
    assert capfd.readouterr().out == "2\n"


def test_longest_first_and_what_is_not_known_before_them():
    jobs = [Job(name="short"), Job(name="new"), Job(name="long"), Job(name="wide", lanes=2)]
    order = in_order(jobs, {"short": 1, "long": 9, "wide": 3})
    assert [job.name for job in order] == ["wide", "new", "long", "short"]


def test_command_writes_durations_that_order_the_next_run(tmp_path, capsys):
    out, seen = tmp_path / "reports" / "lanes.json", []

    def runner(jobs):
        seen.append([job.name for job in jobs])
        return run([Job(name="pass")], SLEEP)

    assert main(["--out", str(out), "a", "b:2"], runner) == 0
    assert seen == [["b", "a"]]
    assert json.loads(out.read_text())[0]["passed"]
    assert read_known([tmp_path / "none.json", out]).keys() == {"pass"}
    assert capsys.readouterr().out.endswith("1 sessions, 0 failed\n")
