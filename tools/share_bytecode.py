"""Share compiled bytecode between virtual environments by hard links.

uv hard-links the sources of a wheel into each environment but no bytecode, so every new environment
compiles torch again at its first import. A `.pyc` is valid wherever its source has the recorded
mtime and size, which hard-linked sources have, and Python corrects the file names in it when it
loads. So each session takes what an earlier one compiled, and gives what it compiled itself.

    python tools/share_bytecode.py FROM TO

links every `.pyc` of the environment FROM into the environment TO, where TO has the same package
and no newer `.pyc`.
"""

import os
import shutil
import sys
from pathlib import Path


def site_packages(venv: Path) -> Path:
    """The site-packages folder of a virtual environment."""
    return next(venv.glob("lib/python*/site-packages"), venv / "Lib" / "site-packages")


def share(source: Path, target: Path) -> int:
    """Link the bytecode of site-packages `source` into `target`; returns how many files."""
    linked = 0
    for folder, _, names in os.walk(source):
        if os.path.basename(folder) != "__pycache__":
            continue
        destination = target / os.path.relpath(folder, source)
        if not destination.parent.is_dir():
            continue
        destination.mkdir(exist_ok=True)
        for name in names:
            if name.endswith(".pyc"):
                linked += _link(os.path.join(folder, name), os.path.join(destination, name))
    return linked


def _link(source: str, target: str) -> bool:
    if os.path.exists(target) and not _is_newer(source, target):
        return False
    temporary = f"{target}.{os.getpid()}"  # other sessions may be at it too
    try:
        os.link(source, temporary)
    except OSError:  # another file system, or no hard links on it
        shutil.copy2(source, temporary)
    os.replace(temporary, target)
    if os.path.exists(temporary):  # two names of one file are not renamed
        os.unlink(temporary)
    return True


def _is_newer(source: str, target: str) -> bool:
    """Whether the target is of an older version of the module."""
    same = os.path.samefile(source, target)
    return not same and os.path.getmtime(source) > os.path.getmtime(target)


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    source, target = (site_packages(Path(argument)) for argument in arguments)
    print(f"{share(source, target)} bytecode files shared")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
