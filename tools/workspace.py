"""The workspace as its manifests describe it: packages, their requirements, the layers contract."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TEST_ONLY = "mt-testing"  # for test groups; no library or app may need it


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One finding: its place, the problem, and a fix."""

    where: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}. {self.fix}."


@dataclass(frozen=True, kw_only=True)
class Package:
    """One member of the workspace."""

    root: Path
    folder: Path
    manifest: dict[str, Any]

    @property
    def name(self) -> str:
        """The distribution's name, or the folder's where the manifest has none."""
        return self.manifest.get("project", {}).get("name", self.folder.name)

    @property
    def module(self) -> str:
        """The import name that belongs to the folder."""
        return self.folder.name.replace("-", "_")

    @property
    def version(self) -> str:
        """The version, empty where the manifest has none."""
        return self.manifest.get("project", {}).get("version", "")

    @property
    def source(self) -> Path:
        """The folder of the import package."""
        return self.folder / "src" / self.module

    @property
    def dependencies(self) -> list[Requirement]:
        """What every installation brings."""
        listed = self.manifest.get("project", {}).get("dependencies", [])
        return [Requirement(line) for line in listed]

    @property
    def extras(self) -> list[Requirement]:
        """What the extras bring, all together."""
        tables = self.manifest.get("project", {}).get("optional-dependencies", {})
        return [Requirement(line) for lines in tables.values() for line in lines]

    def extra_of(self, path: Path) -> list[Requirement]:
        """Return what the extra of the name of a file's folder brings."""
        tables = self.manifest.get("project", {}).get("optional-dependencies", {})
        folder = path.relative_to(self.source).parts[0]
        return [Requirement(line) for line in tables.get(folder, ())]

    @property
    def groups(self) -> list[Requirement]:
        """What the dependency groups bring, all together."""
        tables = self.manifest.get("dependency-groups", {})
        lines = [line for lines in tables.values() for line in lines if isinstance(line, str)]
        return [Requirement(line) for line in lines]

    @property
    def sources(self) -> dict[str, Any]:
        """`[tool.uv.sources]`."""
        return self.manifest.get("tool", {}).get("uv", {}).get("sources", {})

    def where(self, path: Path | None = None, line: int | None = None) -> str:
        """`path` of this package (its manifest by default) as a reader at the root writes it."""
        shown = (path or self.folder / "pyproject.toml").relative_to(self.root).as_posix()
        return f"{shown}:{line}" if line else shown


@dataclass(frozen=True, kw_only=True)
class Contract:
    """The layers contract of import-linter: the import names by layer, top first."""

    roots: frozenset[str]
    layers: tuple[frozenset[str], ...]
    edges: frozenset[tuple[str, str]] = field(default=frozenset())

    def layer(self, module: str) -> int | None:
        """The index of the layer that holds `module`, 0 at the top."""
        return next((index for index, layer in enumerate(self.layers) if module in layer), None)

    def allows(self, importer: str, imported: str) -> bool:
        """Whether `importer` may import `imported`: it is lower, or the edge is agreed on."""
        above, below = self.layer(importer), self.layer(imported)
        if above is None or below is None:
            return True  # a package without a layer is a finding of its own
        return above < below or (importer, imported) in self.edges


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Everything the rules look at."""

    root: Path
    manifest: dict[str, Any]
    packages: tuple[Package, ...]
    others: tuple[Package, ...]  # members that are never published: the root, tests-integration
    contract: Contract

    def by_name(self) -> dict[str, Package]:
        """The published packages by distribution name."""
        return {package.folder.name: package for package in self.packages}

    def by_module(self) -> dict[str, Package]:
        """The published packages by import name."""
        return {package.module: package for package in self.packages}

    def siblings(self, requirements: list[Requirement]) -> list[Requirement]:
        """Return the requirements that name a published package of this workspace."""
        names = self.by_name()
        return [each for each in requirements if canonicalize_name(each.name) in names]


def load(root: Path) -> Workspace:
    """Read the workspace at `root`.

    Raises:
        FileNotFoundError: there is no pyproject.toml at `root`.
    """
    manifest = _read(root / "pyproject.toml")
    folders = sorted(
        path for path in root.glob("packages/*") if (path / "pyproject.toml").is_file()
    )
    others = [root, *(path.parent for path in root.glob("*/pyproject.toml"))]
    return Workspace(
        root=root,
        manifest=manifest,
        packages=tuple(_package(root, folder) for folder in folders),
        others=tuple(_package(root, folder) for folder in others),
        contract=_contract(manifest),
    )


def _read(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _package(root: Path, folder: Path) -> Package:
    return Package(root=root, folder=folder, manifest=_read(folder / "pyproject.toml"))


def _contract(manifest: dict[str, Any]) -> Contract:
    table = manifest.get("tool", {}).get("importlinter", {})
    contracts = table.get("contracts", [])
    layers: dict[str, Any] = next((each for each in contracts if each.get("type") == "layers"), {})
    edges = set()
    for line in layers.get("ignore_imports", []):
        importer, _, imported = line.partition("->")
        edges.add((_head(importer), _head(imported)))
    return Contract(
        roots=frozenset(table.get("root_packages", [])),
        layers=tuple(
            frozenset(name.strip() for name in layer.replace(":", "|").split("|"))
            for layer in layers.get("layers", [])
        ),
        edges=frozenset(edges),
    )


def _head(expression: str) -> str:
    return expression.strip().partition(".")[0]
