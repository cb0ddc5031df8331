import json
import runpy
import sys
from pathlib import Path

import pytest

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


@pytest.mark.campaign
def test_server_is_measured_beside_its_own_engine(monkeypatch, tmp_path) -> None:
    out = tmp_path / "report.json"
    script = str(BENCHMARKS / "server.py")
    arguments = ["--quick", "--rounds", "2", "--seconds", "1", "--peers", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    runpy.run_path(script, run_name="__main__")
    found = json.loads(out.read_text())
    assert found["streams"]["ratios"]["mt / engine"]["goal"] == 0.9
    assert found["streams"]["tokens_per_s"]["mt"][0] > 0
    under = found["arrivals"]["mt"]["under_load"]
    assert (under["answered"], under["errors"]) == (4, {})
    assert under["time_to_first_token_ms"]["p99"] > 0
