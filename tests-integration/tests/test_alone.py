"""Each package installs alone, brings only what it declares, and its examples run there."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
QUICK = ("mt-data", "mt-pipeline")  # one that needs numpy, one that needs torch; the rest take long

# In the environment under test: what is installed, and what the third parties in argv account for.
ACCOUNT = """
import importlib.metadata, json, re, sys

def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()

requires = {canonical(each.metadata["Name"]): each.requires or []
            for each in importlib.metadata.distributions()}
reached, queue = set(), list(sys.argv[1:])
while queue:
    name = canonical(re.match(r"[\\w.-]+", queue.pop()).group())
    if name in requires and name not in reached:
        reached.add(name)
        queue += requires[name]
print(json.dumps({"installed": sorted(requires), "reached": sorted(reached)}))
"""


def requirement_names(package: str) -> set[str]:
    manifest = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())
    lines = manifest["project"]["dependencies"]
    return {line.partition("[")[0].partition(">")[0].strip() for line in lines}


def closure(package: str) -> set[str]:
    """`package`, the siblings it declares, and theirs."""
    found = {package}
    for name in requirement_names(package):
        if name in PACKAGES:
            found |= closure(name)
    return found


def run(*command: str, **options) -> str:
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert finished.returncode == 0, f"{command}\n{finished.stdout}\n{finished.stderr}"
    return finished.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables for uv: no project environment, third parties in the locked versions."""
    locked = tmp_path_factory.mktemp("locked") / "requirements.txt"
    export = ["uv", "export", "--frozen", "--all-packages", "--no-emit-workspace", "--no-hashes"]
    locked.write_text(run(*export, "--quiet", cwd=ROOT))
    foreign = ("UV_PROJECT_ENVIRONMENT", "PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    return kept | {"UV_CONSTRAINT": str(locked)}


def marked(package: str):
    return package if package in QUICK else pytest.param(package, marks=pytest.mark.campaign)


@pytest.mark.parametrize("package", [marked(package) for package in PACKAGES])
def test_package_installs_alone_and_its_examples_run(package, environment, tmp_path):
    venv = tmp_path / "venv"
    python = str(venv / "bin" / "python")
    environment = environment | {"VIRTUAL_ENV": str(venv)}
    run("uv", "venv", "--quiet", "--python", sys.executable, str(venv), env=environment)
    run("uv", "pip", "install", f"packages/{package}", cwd=ROOT, env=environment)
    run(sys.executable, "tools/share_bytecode.py", sys.prefix, str(venv), cwd=ROOT)

    ours = closure(package)
    third_parties = {name for each in ours for name in requirement_names(each)} - set(PACKAGES)
    account = json.loads(run(python, "-c", ACCOUNT, *sorted(third_parties), env=environment))
    assert set(account["installed"]) - set(account["reached"]) == ours
    assert third_parties <= set(account["reached"])

    modules = [name.replace("-", "_") for name in PACKAGES]
    find = f"import importlib.util as u; print([m for m in {modules} if u.find_spec(m)])"
    importable = run(python, "-c", find, env=environment, cwd=tmp_path)
    assert importable.strip() == str([name.replace("-", "_") for name in sorted(ours)])

    for example in sorted((ROOT / "packages" / package).glob("examples/*.py")):
        run(python, str(example), env=environment, cwd=tmp_path)
