"""Drawings show every action where it ran, and the command makes them."""

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from mt_schedule import (
    SCHEDULES,
    Action,
    Op,
    Panel,
    Schedule,
    Span,
    draw_svg,
    draw_text,
    make_schedule,
    simulate,
)
from mt_schedule.cli import main

SVG = "{http://www.w3.org/2000/svg}"
DRAWINGS = Path(__file__).parents[3] / "docs" / "mt-schedule"


def panel(name: str, *sizes: int, **options) -> Panel:
    schedule = make_schedule(name, *sizes)
    return Panel.of(schedule, simulate(schedule), **options)


def boxes(text: str) -> dict[str, ET.Element]:
    """The boxes of actions by their tool tips."""
    root = ET.fromstring(text)
    return {rect[0].text: rect for rect in root.iter(f"{SVG}rect") if len(rect)}


def test_svg_has_a_box_for_every_action_where_it_ran():
    drawn = boxes(draw_svg(panel("1f1b", 2, 3), width=480))
    # rank 0: F0 F1 B0 F2 B1 B2, rank 1: F0 B0 F1 B1 F2 B2; (480 - 64 - 16) / 12 pixels a forward
    assert len(drawn) == 12
    box = drawn["B0 of stage 0: 4 to 6"]
    scale = 400 / 12
    assert float(box.get("x")) == pytest.approx(64 + 4 * scale, abs=0.01)
    assert float(box.get("width")) == pytest.approx(2 * scale, abs=0.01)
    assert float(drawn["B0 of stage 1: 2 to 4"].get("y")) > float(box.get("y"))
    assert box.get("fill") != drawn["F0 of stage 0: 0 to 1"].get("fill")


@pytest.mark.parametrize("name", SCHEDULES)
def test_svg_numbers_the_microbatches_and_names_what_it_shows(name):
    chart = panel(name, 4, 8)
    text = draw_svg(chart)
    assert len(boxes(text)) == sum(map(len, chart.schedule.ranks))
    words = [element.text for element in ET.fromstring(text).iter(f"{SVG}text")]
    assert f"{name}: 4 ranks, 8 micro-batches" in words
    assert {f"rank {rank}" for rank in range(4)} <= set(words)
    for number in range(8):
        assert words.count(str(number)) >= 4
    ops = {action.op for _, _, action in chart.schedule}
    legend = {Op.F: "forward (F)", Op.B: "backward (B)", Op.W: "weight gradient (W)"}
    assert {op for op, word in legend.items() if word in words} == ops & set(legend)
    assert any("makespan" in word for word in words)


def test_an_overlapped_pair_shares_its_row():
    schedule = make_schedule("dualpipe-v", 2, 4)
    first, second = min(schedule.pairs)
    drawn = boxes(draw_svg(Panel.of(schedule, simulate(schedule))))
    pair = [
        next(box for tip, box in drawn.items() if tip.startswith(f"{action}:"))
        for action in (first, second)
    ]
    assert pair[0].get("x") == pair[1].get("x")
    tops = [float(box.get("y")) for box in pair]
    assert tops[1] - tops[0] == float(pair[0].get("height")) == float(pair[1].get("height"))


def test_a_measured_run_is_drawn_beside_its_simulation():
    schedule = make_schedule("1f1b", 2, 1)
    measured = (
        (Span(Action(Op.F, 0, 0), 0.0, 0.2), Span(Action(Op.B, 0, 0), 0.75, 1.0)),
        (Span(Action(Op.F, 1, 0), 0.25, 0.45), Span(Action(Op.B, 1, 0), 0.449999999, 0.7)),
    )
    run = Panel(schedule=schedule, timeline=measured, title="measured <fast>", unit="seconds")
    text = draw_svg(Panel.of(schedule, simulate(schedule)), run)
    words = [element.text for element in ET.fromstring(text).iter(f"{SVG}text")]
    assert "measured <fast>" in words
    assert "seconds; makespan 1, 55.0% idle" in words
    assert {box.get("height") for box in boxes(text).values()} == {"22.0"}  # clocks may be off
    with pytest.raises(ValueError, match="the timeline has 1 ranks, but the schedule has 2"):
        Panel(schedule=schedule, timeline=measured[:1])


def test_text_shows_the_order_and_the_waiting():
    assert draw_text(panel("1f1b", 2, 2)) == (
        "1f1b: 2 ranks, 2 micro-batches\n"
        "rank 0 |F0-F1-      B0----   B1----\n"
        "rank 1 |   F0-B0----F1-B1----\n"
        "makespan 9 (time of a forward), 33.3% of it idle"
    )
    long = draw_text(panel("1f1b", 2, 40), width=60)
    assert max(map(len, long.splitlines())) <= 60
    assert "F3b&" in draw_text(panel("dualpipe-v", 2, 6))
    with pytest.raises(ValueError, match="width is 5"):
        draw_text(panel("1f1b"), width=5)


def test_drawings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_svg()
    with pytest.raises(ValueError, match="width is 100: expected at least 200"):
        draw_svg(panel("1f1b"), width=100)


def test_the_command_draws_and_shows(tmp_path, capsys):
    path = tmp_path / "out.svg"
    main(["draw", "zb-v", "--stages", "4", "--microbatches", "8", "-o", str(path)])
    assert capsys.readouterr().out == f"{path}: makespan 51, 5.9% idle\n"
    assert path.read_text() == draw_svg(panel("zb-v", 4, 8))
    main(["show", "interleaved", "--stages", "2", "--microbatches", "4", "--group", "4"])
    shown = capsys.readouterr().out
    assert str(make_schedule("interleaved", 2, 4, group=4)) in shown
    assert "right; makespan 27, peak activations 7, 5" in shown
    main(["show", "1f1b", "--stages", "1", "--microbatches", "3", "--overlap"])
    assert "F0 F1&B0 F2&B1 B2" in capsys.readouterr().out
    main(["draw", "1f1b", "--stages", "1", "--overlap", "--pair-share", "0.8"])
    assert "makespan 19.8" in capsys.readouterr().out  # 3 + 7 * 0.8 * 3
    main(["show", "1f1b", "--stages", "2", "--json"])
    text = capsys.readouterr().out
    assert Schedule.from_json(text) == make_schedule("1f1b", 2)
    (tmp_path / "own.json").write_text(text)
    main(["draw", str(tmp_path / "own.json"), "--forward", "2"])
    assert "makespan 36" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["draw", "zbv"], "mt-pipeline: unknown schedule 'zbv'. Did you mean 'zb-v'?"),
        (["draw", "dualpipe", "--stages", "3"], "mt-pipeline: stages is 3: dualpipe pairs"),
        (["show", "missing.json"], "mt-pipeline: missing.json: No such file or directory"),
        (["draw", "1f1b", "--group", "2"], "mt-pipeline: schedule '1f1b' has no option 'group'"),
    ],
)
def test_the_command_says_what_is_wrong(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize("command", ["show", "draw"])
@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('[["F", 0, 0], ', "[", "rank 0, action 0: F0 of stage 0 is missing on this rank"),
        ('["F", 0, 0]', '["F", 9, 0]', "rank 0, action 0: F0 of stage 9: there are stages 0..1"),
    ],
)
def test_the_command_exits_with_one_and_names_what_is_wrong_with_a_file(
    tmp_path, capsys, command, old, new, sentence
):
    text = make_schedule("1f1b", 2, 1).to_json()
    (tmp_path / "broken.json").write_text(text.replace(old, new))
    with pytest.raises(SystemExit, match="1"):
        main([command, str(tmp_path / "broken.json")])
    written = capsys.readouterr()
    assert sentence in written.err
    assert "makespan" not in written.out


def test_missing_tyro_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    with pytest.raises(SystemExit, match="2"):
        main(["show", "1f1b"])
    assert "pip install tyro" in capsys.readouterr().err


def test_import_does_not_bring_the_command_line():
    code = "import sys, mt_schedule; assert 'tyro' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(not DRAWINGS.exists(), reason="only in the repository")
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_drawings_of_the_docs_are_the_commands(name, tmp_path):
    path = tmp_path / "out.svg"
    main(["draw", name, "--stages", "4", "--microbatches", "8", "-o", str(path)])
    assert (DRAWINGS / f"{name}.svg").read_text() == path.read_text()
