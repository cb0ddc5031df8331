import json
import runpy
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_engine_measures_all_rows_beside_their_goals(monkeypatch, tmp_path) -> None:
    out = tmp_path / "report.json"
    monkeypatch.syspath_prepend(BENCHMARKS)
    script = str(BENCHMARKS / "engine.py")
    arguments = ["--quick", "--rounds", "1", "--threads", "1", "--peers", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(script, run_name="__main__")
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 8
    ways = [way for row in rows.values() for way in row.get("ways", {}).values()]
    assert all(way["tokens_per_s"][1] > 0 for way in ways)
    room = rows["room, bf16"]["ratios"]["room 128 / room 16"]
    assert room["goal"] == 0.95
    assert room["ratio"][0] > 0
