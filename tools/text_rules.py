"""Rules on text: no machine paths, no hand-kept package lists, an index that names every page."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from workspace import Problem, Workspace

MACHINE_PATHS = re.compile(
    r"(?<![\w.~/-])/(?:home|Users|root|work)/[\w.-]+"  # a home or a checkout of one machine
    r"|\b[A-Z]:\\Users\\\w+"
    r"|(?:\.\./)+shared/"  # outside the repository
)
LIST_LENGTH = 3  # so many packages named in one file of the tooling is a list
SCANNED = ("noxfile.py", ".ci/*", ".github/**/*.yml", "tools/*.py")


def check_machine_paths(workspace: Workspace) -> Iterator[Problem]:
    """No committed text holds an absolute path of somebody's machine."""
    for path in _text_files(workspace.root):
        for number, line in enumerate(_read(path).splitlines(), start=1):
            if found := MACHINE_PATHS.search(line):
                yield Problem(
                    where=f"{path.relative_to(workspace.root).as_posix()}:{number}",
                    what=f"machine path {found.group()!r}",
                    fix="Write a path relative to the repository, or a placeholder such as DIR",
                )


def check_hand_kept_lists(workspace: Workspace) -> Iterator[Problem]:
    """The tooling finds packages under packages/; a list of them would go stale."""
    names = [package.folder.name for package in workspace.packages]
    for path in sorted(path for pattern in SCANNED for path in workspace.root.glob(pattern)):
        text = _read(path).replace("_", "-")
        named = [name for name in names if re.search(rf"(?<![\w-]){name}(?![\w-])", text)]
        if len(named) >= LIST_LENGTH:
            yield Problem(
                where=path.relative_to(workspace.root).as_posix(),
                what=f"names {len(named)} packages ({', '.join(named)})",
                fix="Discover them from packages/*",
            )


def check_docs_index(workspace: Workspace) -> Iterator[Problem]:
    """docs/README.md links every page under docs/, and links to files that exist."""
    docs = workspace.root / "docs"
    index = _read(docs / "README.md") if (docs / "README.md").is_file() else ""
    links = set(re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", index))
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} - {"README.md"}
    for page in sorted(pages - links):
        yield Problem(where="docs/README.md", what=f"{page} is not in the index", fix="Link it")
    for link in sorted(link for link in links if not (docs / link).exists()):
        yield Problem(where="docs/README.md", what=f"links {link}, which is missing", fix="Drop it")


def _text_files(root: Path) -> list[Path]:
    """The files of the repository that git does not ignore; all files where git knows none."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        paths = [root / name for name in listed.stdout.split("\0") if name]
    else:
        paths = list(root.rglob("*"))
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())


def _read(path: Path) -> str:
    """The text of `path`, empty where it is binary or no file."""
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, IsADirectoryError):
        return ""
