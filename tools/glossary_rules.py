"""Rules on the glossary: its names are in the packages, and the words that it retires are not."""

import re
from collections.abc import Iterator
from pathlib import Path

from import_rules import listed_names
from source_imports import tree_of
from workspace import Problem, Workspace

GLOSSARY = Path("docs/glossary.md")
_ROW = re.compile(r"^\|(?P<term>[^|]+)\|(?P<code>[^|]*)\|[^|]*\|(?P<retired>[^|]*)\|$")
_CODE = re.compile(r"`([^`]+)`")


def check_glossary(workspace: Workspace) -> Iterator[Problem]:
    """Each name of the glossary is public in its package, and no source uses a retired word."""
    page = workspace.root / GLOSSARY
    if not page.is_file():
        return
    modules = {package.module: package for package in workspace.packages}
    sources = {
        path: path.read_text(encoding="utf-8")
        for package in workspace.packages
        for path in sorted(package.source.rglob("*.py"))
    }
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        row = _ROW.match(line)
        if row is None:
            continue
        where = f"{GLOSSARY.as_posix()}:{number}"
        for name in _CODE.findall(row["code"]):
            module, _, attribute = name.partition(".")
            init = modules[module].source / "__init__.py" if module in modules else None
            public = None if init is None else listed_names(tree_of(init))
            if attribute not in (public or ()):
                fix = "Name one that is in the package's __all__, as `mt_x.Name`"
                yield Problem(where=where, what=f"{name} is not public", fix=fix)
        for word in _CODE.findall(row["retired"]):
            pattern = re.compile(rf"\b{re.escape(word)}\b")
            for path, text in sources.items():
                if pattern.search(text):
                    shown = path.relative_to(workspace.root).as_posix()
                    fix = f"Say {row['term'].strip()}, as the glossary does"
                    yield Problem(where=shown, what=f"the retired word {word!r}", fix=fix)
