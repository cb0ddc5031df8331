"""A small sound workspace that each test spoils in one place."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

ROOT_MANIFEST = """
[project]
name = "mt"
version = "0.1.0"
dependencies = ["mt-app"]

[tool.uv.sources]
mt-app = { workspace = true }

[tool.importlinter]
root_packages = ["mt_app", "mt_part", "mt_other", "mt_ground", "mt_testing"]

[[tool.importlinter.contracts]]
type = "layers"
layers = ["mt_app", "mt_part | mt_other", "mt_ground | mt_testing"]
ignore_imports = ["mt_other.** -> mt_part"]
"""

MANIFEST = """
[project]
name = "{name}"
version = "0.1.0"
dependencies = [{dependencies}]

[project.optional-dependencies]
yaml = ["pyyaml>=6"]

[dependency-groups]
test = ["pytest>=8"{testing}]

[tool.uv.sources]
{sources}

[tool.hatch.build.targets.wheel]
packages = ["src/{module}"]
"""

NEEDS = {
    "mt-app": ["mt-part", "mt-ground"],
    "mt-part": ["mt-ground"],
    "mt-other": ["mt-part"],
    "mt-ground": [],
    "mt-testing": [],
}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_package(root: Path, name: str) -> None:
    module, needs = name.replace("-", "_"), NEEDS[name]
    folder, tested = root / "packages" / name, name != "mt-testing"
    pins = ['"numpy>=1.26"', *(f'"{need}>=0.1.0,<0.2"' for need in needs)]
    sources = [*needs, *(["mt-testing"] if tested else [])]
    manifest = MANIFEST.format(
        name=name,
        module=module,
        dependencies=", ".join(pins),
        testing=', "mt-testing>=0.1.0,<0.2"' if tested else "",
        sources="\n".join(f"{source} = {{ workspace = true }}" for source in sources),
    )
    imports = "".join(
        f"from {need.replace('-', '_')} import work as {need[3:]}_work\n" for need in needs
    )
    write(folder / "pyproject.toml", manifest)
    write(folder / "README.md", f"# {name}\n")
    write(folder / "CHANGELOG.md", "# Changelog\n\n## [0.1.0]\n\nFirst version.\n")
    write(folder / "src" / module / "py.typed", "")
    init = f'import math\n\nfrom {module}.core import work\n\n__all__ = ["work"]\n'
    write(folder / "src" / module / "__init__.py", init)
    core = f"import os\n\nimport numpy\n\n{imports}\n\ndef work():\n    import json\n"
    write(folder / "src" / module / "core.py", core)
    write(folder / "tests" / "test_core.py", "")
    write(folder / "examples" / "work.py", "")
    write(root / "docs" / f"{name}.md", f"# {name}\n")


class Tree:
    """The files of a workspace, for a test to spoil."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        write(self.root / path, text)

    def append(self, path: str, text: str) -> None:
        file = self.root / path
        file.write_text(file.read_text() + text)

    def replace(self, path: str, old: str, new: str) -> None:
        text = (self.root / path).read_text()
        assert old in text, f"{path} has no {old!r}"
        (self.root / path).write_text(text.replace(old, new))

    def remove(self, path: str) -> None:
        (self.root / path).unlink()

    def problems(self) -> list[str]:
        from check_workspace import check
        from workspace import load

        return [str(problem) for problem in check(load(self.root))]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    write(tmp_path / "pyproject.toml", ROOT_MANIFEST)
    index = "".join(f"- [{name}]({name}.md)\n" for name in [*NEEDS, "experimental"])
    write(tmp_path / "docs" / "README.md", f"# Pages\n\n{index}")
    for name in NEEDS:
        write_package(tmp_path, name)
    from experimental_rules import page
    from workspace import load

    write(tmp_path / "docs" / "experimental.md", page(load(tmp_path)))
    return Tree(tmp_path)
