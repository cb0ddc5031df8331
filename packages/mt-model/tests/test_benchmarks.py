import json
import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def report_of(monkeypatch, tmp_path):
    def run(script, *arguments):
        out = tmp_path / "report.json"
        monkeypatch.syspath_prepend(BENCHMARKS)
        path = str(BENCHMARKS / script)
        monkeypatch.setattr(sys, "argv", [path, *map(str, arguments), "--smoke", "--out", str(out)])
        runpy.run_path(path, run_name="__main__")
        return json.loads(out.read_text())

    return run


def test_kernels_compares_sides_that_compute_the_same(report_of) -> None:
    results = report_of("kernels.py")["results"]
    assert {name.partition(",")[0] for name in results} >= {"norm", "silu", "rope", "loss"}
    assert all(low > 0 for result in results.values() for low, _, _ in result.values())
