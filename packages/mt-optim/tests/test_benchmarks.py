import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def results_of(monkeypatch, tmp_path):
    def run(script):
        out, path, threads = tmp_path / "report.json", BENCHMARKS / script, torch.get_num_threads()
        small = ["--width", "16", "--layers", "1", "--rounds", "2", "--out", str(out)]
        monkeypatch.setattr(sys, "argv", [str(path), *small])
        try:
            runpy.run_path(str(path), run_name="__main__")
        finally:
            torch.set_num_threads(threads)
        report = json.loads(out.read_text())
        assert {"date", "command", "machine", "torch"} <= set(report)
        return report["results"]

    return run


def check_times(found) -> None:
    assert set(found["time_ratios"]) == {"wall", "cpu"}
    for low, middle, high in found["time_ratios"].values():
        assert 0 < low <= middle <= high


@pytest.mark.parametrize("script", ["adamw.py", "muon.py"])
def test_both_sides_are_timed_in_turns(results_of, script) -> None:
    results = results_of(script)
    assert {"adamw.py": "step", "muon.py": "all"}[script] in results
    for found in results.values():
        assert found["rounds"] == 2
        check_times(found)


def test_more_on_the_host_is_more_to_copy(results_of) -> None:
    for found in results_of("offload.py").values():
        for share in found["shares"].values():
            check_times(share)
        copied = [share["to_host"] for share in found["shares"].values()]
        assert copied == sorted(copied)
        assert copied[0] == 0 < copied[-1]
