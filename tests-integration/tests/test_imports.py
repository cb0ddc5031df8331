"""`import mt_x` stays light: what it adds over `import torch` (or numpy) is small."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_MODULES = 60
MAX_SECONDS = 0.15  # of CPU time, so that a busy machine does not fail the test

# Imports the baseline once, then each module in forks of that process: the best of three times, and
# the modules that it added. The first fork also writes the bytecode that the others read.
PROBE = """
import json, os, sys, time
baseline, *modules = sys.argv[1:]
__import__(baseline)

def probe(module):
    before = set(sys.modules)
    start = time.process_time()
    __import__(module)
    seconds = time.process_time() - start
    return {"seconds": seconds, "added": sorted(set(sys.modules) - before)}

def forked(module):
    read, write = os.pipe()
    if os.fork() == 0:
        with os.fdopen(write, "w") as stream:
            json.dump(probe(module), stream)
            stream.flush()
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        text = stream.read()
    os.wait()
    return json.loads(text)

runs = {module: [forked(module) for _ in range(3)] for module in modules}
best = {module: min(tries, key=lambda run: run["seconds"]) for module, tries in runs.items()}
print(json.dumps(best))
"""


def baseline_of(manifest: Path) -> str:
    lines = tomllib.loads(manifest.read_text())["project"]["dependencies"]
    return "torch" if any(line.startswith("torch>") for line in lines) else "numpy"


BASELINES = {
    manifest.parent.name.replace("-", "_"): baseline_of(manifest)
    for manifest in sorted(ROOT.glob("packages/*/pyproject.toml"))
}


def probe(baseline: str, modules: list[str]) -> dict[str, dict]:
    command = [sys.executable, "-c", PROBE, baseline, *modules]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.fixture(scope="module")
def imported():
    found = {}
    for baseline in sorted(set(BASELINES.values())):
        found |= probe(baseline, [module for module in BASELINES if BASELINES[module] == baseline])
    return found


def test_packages_are_found():
    assert {"mt_train", "mt_data"} <= BASELINES.keys()
    assert BASELINES["mt_data"] == "numpy"


@pytest.mark.parametrize("module", BASELINES)
def test_import_adds_few_modules_over_its_baseline(imported, module):
    added = imported[module]["added"]
    assert module in added
    assert len(added) < MAX_MODULES, f"{len(added)} modules, among them {added[:20]}"


@pytest.mark.parametrize("module", BASELINES)
def test_import_is_quick_over_its_baseline(imported, module):
    assert imported[module]["seconds"] < MAX_SECONDS


def test_probe_sees_a_heavy_import():
    heavy = probe("json", ["numpy"])["numpy"]
    assert len(heavy["added"]) > MAX_MODULES
