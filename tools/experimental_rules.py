"""Rules on what `mt_files.experimental` marks, and the page that lists it.

    python tools/experimental_rules.py > docs/experimental.md

makes the page; `check_workspace.py` says when it has to be made anew.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version
from source_imports import tree_of
from workspace import Package, Problem, Workspace, load

PAGE = "docs/experimental.md"
COMMAND = "python tools/experimental_rules.py"
INTRODUCTION = f"""# What is experimental

`mt_files.experimental` marks functions and classes whose shape isn't settled. The first use of
each warns with `mt_files.ExperimentalWarning`; it may change or go with any version. In the
version of the last column the mark ends: the thing has become permanent by then, or was removed.

`{COMMAND} > {PAGE}` makes this page of the sources.
"""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One use of `experimental`.

    Attributes:
        name: The marked thing by package, such as `mt_x.Thing`; empty where nothing is decorated.
        versions: `since` and `remove_in` as the sources have them; None where one isn't literal.
    """

    package: Package
    path: Path
    line: int
    name: str
    versions: dict[str, str | None]

    @property
    def where(self) -> str:
        """The place for messages."""
        return self.package.where(self.path, self.line)


def check_experimental(workspace: Workspace) -> Iterator[Problem]:
    """No mark has outlived its version, and the page lists them all."""
    sound = True
    for mark in marks(workspace):
        problem = _problem(mark)
        if problem is not None:
            sound = False
            yield problem
    page_path = workspace.root / PAGE
    written = page_path.read_text(encoding="utf-8") if page_path.is_file() else ""
    if sound and written != page(workspace):
        what = "is not what the sources say" if written else "missing"
        yield Problem(where=PAGE, what=what, fix=f"Run {COMMAND} > {PAGE}")


def marks(workspace: Workspace) -> Iterator[Mark]:
    """Yield the uses of `experimental` in all packages."""
    for package in workspace.packages:
        for path in sorted(package.source.rglob("*.py")):
            if "experimental" not in path.read_text(encoding="utf-8"):
                continue  # walking a tree takes much longer than reading the text
            tree = tree_of(path)
            decorated = dict(_decorated(tree, package.module))
            for call in ast.walk(tree):
                if isinstance(call, ast.Call) and _is_mark(call.func):
                    yield Mark(
                        package=package,
                        path=path,
                        line=call.lineno,
                        name=decorated.get(call, ""),
                        versions={each.arg or "": _literal(each.value) for each in call.keywords},
                    )


def page(workspace: Workspace) -> str:
    """Write the page of everything experimental."""
    found = sorted(marks(workspace), key=lambda mark: mark.name)
    if not found:
        return f"{INTRODUCTION}\nNothing is experimental now.\n"
    rows = [f"| `{m.name}` | {m.versions['since']} | {m.versions['remove_in']} |" for m in found]
    return "\n".join([INTRODUCTION, "| name | since | settled in |", "|---|---|---|", *rows, ""])


def _problem(mark: Mark) -> Problem | None:
    if not mark.name:
        what, fix = "experimental decorates nothing", "Write it above a function or a class"
        return Problem(where=mark.where, what=what, fix=fix)
    try:
        since, remove_in = (Version(mark.versions[name] or "") for name in ("since", "remove_in"))
        now = Version(mark.package.version)
    except (KeyError, InvalidVersion):
        what = f"the versions of experimental {mark.name} can't be read"
        fix = 'Write since="X.Y" and remove_in="X.Y" as literals'
        return Problem(where=mark.where, what=what, fix=fix)
    if since >= remove_in:
        what = f"experimental {mark.name} ends in {remove_in}, not after {since}"
        return Problem(where=mark.where, what=what, fix="Give a later remove_in")
    if now >= remove_in:
        what = f"{mark.name} was experimental until {remove_in}, and {mark.package.name} is {now}"
        fix = "Drop the mark to keep it for good, or remove it"
        return Problem(where=mark.where, what=what, fix=fix)
    return None


def _decorated(node: ast.AST, prefix: str) -> Iterator[tuple[ast.expr, str]]:
    """Yield each decorator with the dotted name of what it decorates."""
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{prefix}.{child.name}"
            yield from ((decorator, inner) for decorator in child.decorator_list)
        yield from _decorated(child, inner)


def _is_mark(function: ast.expr) -> bool:
    match function:
        case ast.Name(id="experimental") | ast.Attribute(attr="experimental"):
            return True
    return False


def _literal(value: ast.expr) -> str | None:
    match value:
        case ast.Constant(value=str(text)):
            return text
    return None


if __name__ == "__main__":
    sys.stdout.write(page(load(Path(__file__).resolve().parent.parent)))
