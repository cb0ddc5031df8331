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


def test_families_compares_sides_that_compute_the_same(report_of) -> None:
    report = report_of("families.py", "--forms", "eager", "--length", 16, "--rounds", 2)
    assert {"llama", "gemma3", "mamba2", "t5"} <= set(report["results"])
    for result in report["results"].values():
        for clocks in result["speed_ratios"].values():
            assert all(low <= middle <= high for low, middle, high in clocks.values())
            assert all(low > 0 for low, _, _ in clocks.values())


def test_import_folder_reads_what_it_made(report_of) -> None:
    results = report_of("import_folder.py", "--rounds", 2)["results"]
    assert results["mt-hf import / safetensors, to disk, speed"][1] > 0
    assert results["from_pretrained / safetensors, to memory, speed"][1] > 0
