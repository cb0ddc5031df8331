"""Import every module of installed packages, and check that it is the installed one.

    python tools/walk_imports.py mt_pipeline mt_optim ...

Run in an environment that holds the wheels and nothing of the source tree. It fails for a module
that does not import (a missing dependency, a file that the wheel lacks), but not for those in a
folder with the name of an extra, for a package that comes
from outside the environment, and for one without `py.typed`.
"""

import importlib
import pkgutil
import sys
import traceback
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path


def walk(name: str) -> list[str]:
    """Import package `name` and all modules under it; returns the problems, one line each."""
    try:
        package = importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - whatever an import raises is the finding
        return [describe(name, error)]
    folder = Path(package.__path__[0])
    problems = []
    if Path(sys.prefix).resolve() not in folder.resolve().parents:
        problems.append(
            f"{name}: imported from {folder}, which is not in the environment {sys.prefix}"
        )
    if not (folder / "py.typed").is_file():
        problems.append(f"{name}: the installed package has no py.typed")
    extras = _extras(name)
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        if module.name.rpartition(".")[2] == "__main__":  # importing it would run the program
            continue
        if module.name.split(".")[1] in extras:
            continue
        try:
            importlib.import_module(module.name)
        except Exception as error:  # noqa: BLE001 - whatever an import raises is the finding
            problems.append(describe(module.name, error))
    return problems


def _extras(name: str) -> list[str]:
    """The names of the extras of package `name`."""
    try:
        found = metadata(name.replace("_", "-"))
    except PackageNotFoundError:
        return []
    return found.get_all("Provides-Extra") or []


def describe(module: str, error: Exception) -> str:
    """One line for a failed import: the module, the error, and the line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{module}: {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"


def main(names: list[str]) -> int:
    """Walk the packages `names`; returns the exit code."""
    if not names:
        print(__doc__, file=sys.stderr)
        return 2
    problems = [problem for name in names for problem in walk(name)]
    for problem in problems:
        print(problem)
    loaded = sum(module.partition(".")[0] in names for module in sys.modules)
    print(f"{loaded} modules of {len(names)} packages imported, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
