"""Traces of a run's steps, and their tables."""

from __future__ import annotations

import json
import sys

import pytest
from mt_train import ConfigError
from mt_train.cli import main

SECTIONS = ("data", "forward", "backward", "gradients", "agreement", "optimizer")


def test_a_run_writes_a_trace_and_the_command_prints_its_sections_and_operators(
    tiny, tmp_path, capsys, losses
) -> None:
    tiny.run(tmp_path / "plain")
    tiny.run(tmp_path / "run", "training.profile={steps: [2, 3]}")
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    trace = tmp_path / "run" / "profile" / "rank_0_steps_2_to_3.json"
    events = json.loads(trace.read_text())["traceEvents"]
    named = [e["name"] for e in events if e.get("cat") == "user_annotation"]
    assert [named.count(name) for name in ("step", *SECTIONS)] == [2, 2, 4, 4, 2, 2, 2]
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["profile", str(trace)])
    assert ended.value.code == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    by_name = {row[0]: row for row in rows}
    assert by_name["2"][1] == "steps,"
    assert [by_name[name][1] for name in SECTIONS] == ["1", "2", "2", "1", "1", "1"]
    assert float(by_name["aten::mm"][1]) > 0
    shares = [
        float(row[-1].rstrip("%")) for row in rows if row[0] in (*SECTIONS, "messages", "the")
    ]
    assert sum(shares) == pytest.approx(100, abs=0.5)


def test_a_run_that_ends_within_the_steps_of_its_profile_writes_them(tiny, tmp_path) -> None:
    def stop(name: str) -> None:
        if name == "train.update" and (seen.append(name) or len(seen) == 3):
            raise RuntimeError("enough")

    seen: list[str] = []
    with pytest.raises(RuntimeError, match="enough"):
        tiny.run(tmp_path / "run", "training.profile={steps: [2, 4]}", on_event=stop)
    assert (tmp_path / "run" / "profile" / "rank_0_steps_2_to_4.json").stat().st_size > 0


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ("{steps: [3, 2]}", "steps"),
        ("{steps: [0, 2]}", "steps"),
        ("{steps: [1, 200]}", "steps"),
        ("{steps: [4, 5]}", "steps"),
        ("{steps: [1, 2], ranks: [0, 0]}", "ranks"),
        ("{steps: [1, 2], ranks: [1]}", "ranks"),
    ],
)
def test_a_profile_of_no_step_or_rank_is_refused(value, field, tiny, tmp_path) -> None:
    with pytest.raises(ConfigError, match=rf"training\.profile.*{field}"):
        tiny.run(tmp_path / "run", f"training.profile={value}")


def test_a_file_that_is_no_trace_is_refused(tmp_path, capsys) -> None:
    for number, content in enumerate(("[]", "{}", "{", '{"traceEvents": []}')):
        file = tmp_path / f"{number}.json"
        file.write_text(content)
        with pytest.raises(SystemExit) as ended:
            main(["profile", str(file)])
        assert ended.value.code == 1
        message = capsys.readouterr().err
        assert file.name in message
        assert message.count("\n") == 1
    assert "torch" in sys.modules  # of this process, not of the command
