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

LINKED_PAGES = ("*.md", "docs/**/*.md", "packages/*/*.md")


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
    """The tooling finds packages under packages/; a list of them would go stale.

    What a file imports it uses; that is in no list.
    """
    names = [package.folder.name for package in workspace.packages]
    for path in sorted(path for pattern in SCANNED for path in workspace.root.glob(pattern)):
        text = _read(path).replace("_", "-")
        used = re.findall(r"^(?:from|import) ([\w-]+)", text, flags=re.MULTILINE)
        rest = [name for name in names if name not in used]
        named = [name for name in rest if re.search(rf"(?<![\w-]){name}(?![\w-])", text)]
        if len(named) >= LIST_LENGTH:
            yield Problem(
                where=path.relative_to(workspace.root).as_posix(),
                what=f"names {len(named)} packages ({', '.join(named)})",
                fix="Discover them from packages/*",
            )


def check_links(workspace: Workspace) -> Iterator[Problem]:
    """Links lead to files that exist, and every page of docs/ is in an index.

    The index is docs/README.md, or the README.md of a folder below, which is in that one.
    """
    root = workspace.root
    linked: dict[Path, set[str]] = {}
    for page in sorted({path for pattern in LINKED_PAGES for path in root.glob(pattern)}):
        text = re.sub(r"^(\s*)(```|~~~).*?^\1\2", "", _read(page), flags=re.DOTALL | re.MULTILINE)
        linked[page] = set(re.findall(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", text))
        for link in sorted(link for link in linked[page] if not (page.parent / link).exists()):
            yield Problem(
                where=page.relative_to(root).as_posix(),
                what=f"links {link}, which does not exist",
                fix="Mend or drop the link",
            )
    docs = root / "docs"
    for page in sorted(set(docs.rglob("*.md")) - {docs / "README.md"}):
        index = page.parent / "README.md"
        if index == page or index not in linked:
            index = docs / "README.md"
        name = page.relative_to(index.parent).as_posix()
        if name not in linked.get(index, set()):
            where = index.relative_to(root).as_posix()
            yield Problem(where=where, what=f"{name} is not in the index", fix="Link it")


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
