"""Each package installs alone, brings only what it declares, and its examples run there."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
QUICK = (
    "mt-data",
    "mt-retro",
    "mt-multimodal",
)  # they need no torch, with which an environment takes long

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


def project(package: str) -> dict:
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]


def declared(package: str, extras: frozenset[str] = frozenset()) -> tuple[set[str], set[str]]:
    """What `package[extras]` brings as the manifests say: our packages, and third parties."""
    table = project(package)
    lines = list(table["dependencies"])
    for extra in extras:
        lines += table["optional-dependencies"][extra]
    ours, third_parties = {package}, set()
    for requirement in map(Requirement, lines):
        if requirement.name in PACKAGES:
            more = declared(requirement.name, frozenset(requirement.extras))
            ours, third_parties = ours | more[0], third_parties | more[1]
        else:
            third_parties.add(requirement.name)
    return ours, third_parties


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
    # nox sets the first two, which would win over VIRTUAL_ENV.
    foreign = ("UV_PYTHON", "UV_PROJECT_ENVIRONMENT", "PYTHONPATH", "PYTHONHOME")
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

    ours, third_parties = declared(package)
    account = json.loads(run(python, "-c", ACCOUNT, *sorted(third_parties), env=environment))
    assert set(account["installed"]) - set(account["reached"]) == ours
    assert {canonicalize_name(name) for name in third_parties} <= set(account["reached"])

    modules = [name.replace("-", "_") for name in PACKAGES]
    find = f"import importlib.util as u; print([m for m in {modules} if u.find_spec(m)])"
    importable = run(python, "-c", find, env=environment, cwd=tmp_path)
    assert importable.strip() == str([name.replace("-", "_") for name in sorted(ours)])

    if extras := sorted(project(package).get("optional-dependencies", {})):
        wanted = f"packages/{package}[{','.join(extras)}]"
        run("uv", "pip", "install", wanted, cwd=ROOT, env=environment)
    for example in sorted((ROOT / "packages" / package).glob("examples/*.py")):
        run(python, str(example), env=environment, cwd=tmp_path)
