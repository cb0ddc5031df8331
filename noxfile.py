"""The workspace's verbs, for people and for CI: `uv run nox -l` lists them.

Packages are found under `packages/`, never listed. Sessions that hold a package to what it declares
have an environment of their own; the others run in the development environment of `uv run`.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
SOURCES = [f"packages/{package}/src" for package in PACKAGES]
DEV = ["uv", "run", "--frozen"]
OLDEST_TORCH = "2.11"
QUICK = "not gpu and not campaign"
REPORTS = ROOT / ".nox" / "reports"
LANES_FILE = REPORTS / "lanes.json"
# Seconds of everything, on two cores of the machine that tools/slowness.py's probe was timed on; a
# slower one has more. The goal is 14 minutes; what does not fit belongs in the campaign.
LIMIT_S = 18 * 60
UNSTEADY = 3  # so many tests of a session may fail and pass when they are run again

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"  # `uv sync --exact` removes what does not belong in a reused one
nox.options.sessions = ["check"]

# Without .pyc files `import torch` takes twice as long; `UV_LOCKED` is for `uv run nox` itself.
for variable in ("PYTHONDONTWRITEBYTECODE", "UV_LOCKED"):
    os.environ.pop(variable, None)

# A shell's background job is started with these ignored, and so would be the runs that tests stop.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)


@nox.session(python=False)
def check(session: nox.Session) -> None:
    """Everything that CI runs, the longest first in two lanes; then its time, within a limit."""
    packages = [f"tests({package})" for package in PACKAGES]
    before = slowness(session)
    failed = queue(session, ["lint", "typecheck", *packages, "integration:2", "wheels", "docs"])
    limits = ["--slowness", str((before + slowness(session)) / 2), "--limit", str(LIMIT_S)]
    limits += ["--out", str(REPORTS / "budget.json")]
    session.run(*DEV, "python", "tools/budget.py", str(LANES_FILE), str(REPORTS), *limits)
    if failed:
        session.error("a session failed; its output is above")


@nox.session(python=False)
def changed(session: nox.Session) -> None:
    """What can fail of `check` by what differs from a commit: `-- BASE`, else from `main`.

    Lint, types, the packages that differ or need one that does, and integration with any of them.
    On `main` itself the commit before is the base.
    """
    tool = [*DEV, "python", "tools/changed.py", *session.posargs]
    found = str(session.run(*tool, silent=True)).split()
    wide = [f"{name}:2" if name == "integration" else name for name in found]
    if queue(session, wide):
        session.error("a session failed; its output is above")


@nox.session(python=False)
def lint(session: nox.Session) -> None:
    """Format, lint, import contracts, workspace rules, and the tests of the tools."""
    steps = [
        ["ruff", "format", "--check", "--quiet", "."],
        ["ruff", "check", "--quiet", "."],
        ["lint-imports"],
        ["python", "tools/check_workspace.py"],
        ["pytest", "tools/tests", *session.posargs],
    ]
    failed = []
    for step in steps:  # all of them, so that one run shows everything
        try:
            session.run(*DEV, *step)
        except CommandFailed:
            failed.append(" ".join(step[:2]))
    if failed:
        session.error(f"failed: {', '.join(failed)}")


@nox.session(python=False)
def typecheck(session: nox.Session) -> None:
    """Pyright over the sources of every package and the tools."""
    tools = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tools/*.py"))
    session.run(*DEV, "pyright", *SOURCES, *tools, "noxfile.py")


@nox.session
@nox.parametrize("package", [nox.param(package, id=package) for package in PACKAGES])
def tests(session: nox.Session, package: str) -> None:
    """One package's tests with only what it declares: itself, its extras, its `test` group.

    Transformer Engine is built with CUDA when it is installed; a machine with a GPU may have it.
    """
    extras = ["--all-extras", *(["--no-extra", "te"] if package == "mt-fp8" else [])]
    sync(session, package, *extras, "--group", "test")
    pytest(session, package, f"packages/{package}/tests", "-m", QUICK)


@nox.session
def integration(session: nox.Session) -> None:
    """The tests that join packages."""
    sync(session, "mt-integration")
    # Two at a time, which take both lanes: a process for each half would import as much, and one
    # of them would end first.
    two = ["-n", os.environ.get("MT_LANES", "2"), "--dist", "worksteal"]
    pytest(session, "integration", "tests-integration/tests", "-m", QUICK, *two)


@nox.session(reuse_venv=False)
def wheels(session: nox.Session) -> None:
    """Build every wheel as it would be released, install the wheels alone, import every module."""
    dist = Path(session.create_tmp()) / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    build = ["uv", "build", "--all-packages", "--wheel", "--no-sources", "--quiet"]
    session.run(*build, "--out-dir", str(dist))
    locked = dist / "locked.txt"  # third parties as locked; the siblings as their wheels demand
    export = ["uv", "export", "--frozen", "--all-packages", "--no-emit-workspace", "--no-hashes"]
    session.run(*export, "--quiet", "--output-file", str(locked), silent=True)
    built = sorted(str(wheel) for wheel in dist.glob("*.whl"))
    session.install("--quiet", "--constraint", str(locked), *built)
    session.run("uv", "pip", "check")
    with bytecode(session):
        modules = [package.replace("-", "_") for package in PACKAGES]
        session.run("python", "tools/walk_imports.py", *modules)


@nox.session(python=False)
def docs(session: nox.Session) -> None:
    """Run every fenced command and snippet of the READMEs and docs pages, and every example."""
    session.run(*DEV, "python", "tools/run_docs.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """The benchmarks, or those named; they print ratios and are never a gate."""
    found = [
        *ROOT.glob("packages/*/benchmarks/*.py"),
        *ROOT.glob("tests-integration/benchmarks/*.py"),
    ]
    scripts = sorted(str(path.relative_to(ROOT)) for path in found)
    sync(session, "mt", "--group", "dev", "--group", "bench")
    with bytecode(session):
        for script in session.posargs or scripts:
            session.run("python", script)


@nox.session(python=False)
def gpu(session: nox.Session) -> None:
    """The tests and the benchmarks that need a CUDA device; never in CI."""
    session.run(*DEV, "pytest", *test_folders(), "-m", "gpu", "-ra", *session.posargs)
    for name in ("gpu_layers", "gpu_train"):
        script = f"tests-integration/benchmarks/{name}.py"
        out = f"docs/benchmarks/{name}.json"
        session.run(*DEV, "--group", "bench", "python", script, "--out", out)


@nox.session
def operators(session: nox.Session) -> None:
    """Ask the oldest torch for the operators that the packages call; makes the committed table."""
    session.install(f"torch=={OLDEST_TORCH}.*", "numpy")
    session.run("python", "tools/operator_facts.py", "--out", "tools/operators.json")


@nox.session(python=False)
def campaign(session: nox.Session) -> None:
    """The exhaustive and long tests, into their ledger; `-- mt-x` brings that package's rows only.

    `-- FILE` and `-- FOLDER` bring theirs.
    """
    report = str(Path(session.create_tmp()) / "campaign.xml")
    options = ["-m", "campaign and not gpu", "--junitxml", report]
    options += ["-n", os.environ.get("MT_LANES", "2"), "--dist", "worksteal"]
    threads = {"OMP_NUM_THREADS": "1"}  # several ranks on few cores
    named = [f"packages/{each}/tests" if each in PACKAGES else each for each in session.posargs]
    wanted = named or test_folders()
    try:
        session.run(*DEV, "pytest", *options, *wanted, env=threads)
    finally:
        ledger = [*DEV, "python", "tools/ledger.py", report, "--out", "docs/campaign.md"]
        if not session.posargs:
            session.run(*ledger)
        elif all(Path(each).exists() for each in named):  # whole files, no choice of rows
            session.run(*ledger, "--merge")


@nox.session(python=False)
def attack(session: nox.Session) -> None:
    """Damage, kill, confuse and starve a run thousands of times: what the ledger lacks, into it."""
    script = ["python", "tests-integration/attack/attack.py"]
    ledger = [] if set(session.posargs) & {"--case", "--sample"} else ["--out", "docs/attack.md"]
    session.run(*DEV, *script, *ledger, *session.posargs, env={"OMP_NUM_THREADS": "1"})


def slowness(session: nox.Session) -> float:
    """Return how many times as slow this machine is now as the one that the limit is of."""
    found = session.run(*DEV, "python", "tools/slowness.py", silent=True)
    return float(str(found).split()[-1])


def queue(session: nox.Session, sessions: list[str]) -> bool:
    """Run sessions in two lanes (`name:2` takes both); returns whether one failed."""
    shutil.rmtree(REPORTS, ignore_errors=True)
    known = ["--known", "tools/durations.json"]
    tool = [sys.executable, "tools/lanes.py", "--out", str(LANES_FILE), *known, *sessions]
    try:
        session.run(*tool)
    except CommandFailed:
        return True
    return False


def test_folders() -> list[str]:
    """Every folder of tests, packages first."""
    return [f"packages/{package}/tests" for package in PACKAGES] + ["tests-integration/tests"]


def sync(session: nox.Session, package: str, *options: str) -> None:
    """Make the session's environment hold exactly `package` with what `options` ask for."""
    session.run_install(
        *("uv", "sync", "--frozen", "--exact", "--quiet", "--no-default-groups"),
        *("--package", package, *options),
        env={"UV_PROJECT_ENVIRONMENT": session.virtualenv.location},
    )


def pytest(session: nox.Session, name: str, *arguments: str) -> None:
    """Run pytest with one thread a process: tests run several ranks on few cores.

    What fails runs once more: a busy machine misses limits of time that the code keeps. A test that
    passes only then is named in a warning, so that it is mended and not forgotten.
    """
    cache = ROOT / ".nox" / "cache" / name
    shutil.rmtree(cache, ignore_errors=True)
    command = ["pytest", *arguments, "-o", f"cache_dir={cache}", *session.posargs]
    threads = {"OMP_NUM_THREADS": "1"}
    with bytecode(session):
        try:
            session.run(*command, "--junitxml", str(REPORTS / f"{name}.xml"), env=threads)
        except CommandFailed:
            failed = cache / "v" / "cache" / "lastfailed"
            names = sorted(json.loads(failed.read_text())) if failed.is_file() else []
            if not 0 < len(names) <= UNSTEADY:
                raise
            session.run(*command, "--last-failed", env=threads)
            session.warn(f"unsteady, passed only when run again: {', '.join(names)}")


@contextmanager
def bytecode(session: nox.Session) -> Iterator[None]:
    """Share compiled bytecode with the development environment, so that torch is compiled once."""
    share = ["python", "tools/share_bytecode.py"]
    session.run(*share, sys.prefix, session.virtualenv.location, silent=True)
    try:
        yield
    finally:
        session.run(*share, session.virtualenv.location, sys.prefix, silent=True)
