"""Name the nox sessions that a change can fail: `python tools/changed.py [BASE]`.

What differs from BASE counts, committed or not; by default BASE is where the branch left `main`,
or on `main` the commit before. A package is tested if its folder differs, or the sources of one
that it needs. What all packages share (the lock, the root's manifest, the sessions) means all.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from packaging.utils import canonicalize_name
from workspace import Workspace, load

ALWAYS = ("lint", "typecheck")
SHARED = ("pyproject.toml", "uv.lock", "noxfile.py", ".ci/run")


def base_of(root: Path, given: str | None) -> str:
    """Return the commit to compare with."""
    if given:
        return given
    forked = _git(root, "merge-base", "HEAD", "main", check=False)
    head = _git(root, "rev-parse", "HEAD")
    return forked if forked and forked != head else "HEAD~1"


def changed_paths(root: Path, base: str) -> list[str]:
    """Return what differs from `base`, in commits, in the working tree and in new files."""
    tracked = _git(root, "diff", "--name-only", base, "--")
    new = _git(root, "ls-files", "--others", "--exclude-standard")
    return sorted({*tracked.splitlines(), *new.splitlines()})


def sessions(workspace: Workspace, paths: Iterable[str]) -> list[str]:
    """Return the sessions that what differs can fail, lint and types always."""
    paths = list(paths)
    names = sorted(workspace.by_name())
    folders = {path.split("/")[1] for path in paths if path.startswith("packages/")}
    sources = {
        path.split("/")[1]
        for path in paths
        if path.startswith("packages/") and path.split("/")[2] in ("src", "pyproject.toml")
    }
    if any(path in SHARED for path in paths):
        folders = sources = set(names)
    touched = (folders | dependents(workspace, sources)) & set(names)
    found = [*ALWAYS, *(f"tests({name})" for name in sorted(touched))]
    if sources or any(path.startswith("tests-integration/") for path in paths):
        found.append("integration")
    if sources & set(names) and any(path.endswith("pyproject.toml") for path in paths):
        found.append("wheels")
    if any(path.endswith(".md") or "/examples/" in path for path in paths):
        found.append("docs")
    return found


def dependents(workspace: Workspace, changed: set[str]) -> set[str]:
    """Return the packages changed and all that need one of them, in their tests too."""
    needs = {
        name: {
            canonicalize_name(each.name)
            for each in [*package.dependencies, *package.extras, *package.groups]
        }
        for name, package in workspace.by_name().items()
    }
    found = set(changed)
    while more := {name for name, needed in needs.items() if needed & found} - found:
        found |= more
    return found


def _git(root: Path, *arguments: str, check: bool = True) -> str:
    command = ["git", *arguments]
    return subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=check
    ).stdout.strip()


def main(arguments: list[str]) -> int:
    """Print the sessions, one a line."""
    root = Path(__file__).resolve().parent.parent
    base = base_of(root, arguments[0] if arguments else None)
    print("\n".join(sessions(load(root), changed_paths(root, base))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
