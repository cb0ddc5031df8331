"""Rules on the manifests: names, layers, pins, workspace sources, files that each package has."""

import re
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from workspace import TEST_ONLY, Package, Problem, Workspace

STATIC = re.compile(r"\d+\.\d+\.\d+")


def check_contract(workspace: Workspace) -> Iterator[Problem]:
    """Every package is in the layers contract once, and the contract names nothing else."""
    contract, modules = workspace.contract, workspace.by_module()
    where = "pyproject.toml [tool.importlinter]"
    in_layers = [module for layer in contract.layers for module in layer]
    for module in modules:
        if module not in contract.roots:
            yield Problem(
                where=where,
                what=f"{module} is not in root_packages, so no contract sees it",
                fix=f'Add "{module}" to root_packages',
            )
        if in_layers.count(module) != 1:
            yield Problem(
                where=where,
                what=f"{module} is in {in_layers.count(module)} layers",
                fix="Put it into exactly one line of layers",
            )
    for module in sorted((contract.roots | set(in_layers)) - set(modules)):
        yield Problem(
            where=where, what=f"{module} is no package here", fix="Drop it from the contract"
        )


def check_names(workspace: Workspace) -> Iterator[Problem]:
    """Folder, distribution, import package and wheel have one name; the version is static."""
    for package in workspace.packages:
        folder, where = package.folder.name, package.where()
        project = package.manifest.get("project", {})
        if not re.fullmatch(r"mt(-[a-z0-9]+)+", folder):
            yield Problem(where=where, what=f"folder {folder} is not named mt-*", fix="Rename it")
        if project.get("name") != folder:
            yield Problem(
                where=where,
                what=f"project name {project.get('name')!r} is not the folder's name {folder!r}",
                fix=f'Set name = "{folder}"',
            )
        found = sorted(path.parent.name for path in package.folder.glob("src/*/__init__.py"))
        if found != [package.module]:
            yield Problem(
                where=package.where(package.folder / "src"),
                what=f"holds {found or 'no import package'}, expected only {package.module}",
                fix=f"Keep the sources in src/{package.module}",
            )
        tool = package.manifest.get("tool", {}).get("hatch", {}).get("build", {})
        shipped = tool.get("targets", {}).get("wheel", {}).get("packages")
        if shipped != [f"src/{package.module}"]:
            yield Problem(
                where=where,
                what=f"the wheel holds packages = {shipped}",
                fix=f'Set packages = ["src/{package.module}"] in [tool.hatch.build.targets.wheel]',
            )
        if not STATIC.fullmatch(package.version):
            yield Problem(
                where=where,
                what=f"version {package.version!r} is not a static X.Y.Z",
                fix='Set version = "X.Y.Z" under [project]',
            )


def check_requirements(workspace: Workspace) -> Iterator[Problem]:
    """Sibling pins have floor and cap and admit the tree; third parties have a floor."""
    for package in workspace.packages:
        for requirement in [*package.dependencies, *package.extras, *package.groups]:
            if workspace.siblings([requirement]):
                yield from _check_pin(workspace, package, requirement)
            elif not any(each.operator in (">=", "==", "~=") for each in requirement.specifier):
                yield Problem(
                    where=package.where(),
                    what=f"{requirement} has no floor",
                    fix=f"Write {requirement.name}>=OLDEST-TESTED",
                )
            if requirement.name == "torch" and "<" in str(requirement.specifier):
                yield Problem(
                    where=package.where(),
                    what=f"{requirement} caps torch",
                    fix="Keep the floor only",
                )
        yield from _check_test_only(workspace, package)


def check_sources(workspace: Workspace) -> Iterator[Problem]:
    """Every sibling that a member needs has `workspace = true` in its `[tool.uv.sources]`."""
    for package in [*workspace.packages, *workspace.others]:
        needed = [*package.dependencies, *package.extras, *package.groups]
        names = {canonicalize_name(each.name) for each in workspace.siblings(needed)}
        for name in sorted(names):
            if package.sources.get(name) != {"workspace": True}:
                yield Problem(
                    where=package.where(),
                    what=f"{name} would come from an index, not from this workspace",
                    fix=f"Add `{name} = {{ workspace = true }}` to [tool.uv.sources]",
                )
        for name in sorted(set(package.sources) & set(workspace.by_name()) - names):
            yield Problem(
                where=package.where(),
                what=f"[tool.uv.sources] names {name}, which nothing here needs",
                fix="Drop the line",
            )


def check_files(workspace: Workspace) -> Iterator[Problem]:
    """Each package has its README, CHANGELOG, py.typed, tests, an example and a docs page."""
    for package in workspace.packages:
        docs = workspace.root / "docs" / f"{package.folder.name}.md"
        for path, fix in {
            package.folder / "README.md": "Write what it is, how to install and embed it",
            package.source / "py.typed": "Add the empty file, so that users see the types",
            docs: "Write the package's page: concepts, formulas, how to extend",
        }.items():
            if not path.is_file():
                yield Problem(where=package.where(path), what="missing", fix=fix)
        for pattern in ("tests/test_*.py", "examples/*.*"):
            if not any(package.folder.glob(pattern)):
                yield Problem(
                    where=package.where(package.folder),
                    what=f"no {pattern}",
                    fix="Add one that runs in seconds on a CPU",
                )
        yield from _check_changelog(package)


def _check_pin(
    workspace: Workspace, package: Package, requirement: Requirement
) -> Iterator[Problem]:
    sibling = workspace.by_name()[canonicalize_name(requirement.name)]
    if not STATIC.fullmatch(sibling.version):
        return  # a finding of its own, and no version to pin to
    operators = {each.operator for each in requirement.specifier}
    major, minor, _ = sibling.version.split(".")
    cap = f"0.{int(minor) + 1}" if major == "0" else str(int(major) + 1)
    fix = f'Write "{sibling.folder.name}>={sibling.version},<{cap}"'
    if not {">=", "<"} <= operators:
        yield Problem(
            where=package.where(),
            what=f"pin {requirement} lacks a floor (>=) or a cap (<)",
            fix=fix,
        )
    elif not requirement.specifier.contains(sibling.version, prereleases=True):
        yield Problem(
            where=package.where(),
            what=f"pin {requirement} excludes {sibling.version}, the version in this tree",
            fix=fix,
        )


def _check_test_only(workspace: Workspace, package: Package) -> Iterator[Problem]:
    for requirement in workspace.siblings([*package.dependencies, *package.extras]):
        if canonicalize_name(requirement.name) == TEST_ONLY:
            yield Problem(
                where=package.where(),
                what=f"{TEST_ONLY} is a dependency of {package.name}",
                fix="Move it to the test group",
            )
    for requirement in workspace.siblings(package.groups):
        if canonicalize_name(requirement.name) != TEST_ONLY:
            yield Problem(
                where=package.where(),
                what=f"a dependency group brings {requirement.name}",
                fix=f"Groups may use {TEST_ONLY} alone; tests that join packages go to "
                "tests-integration",
            )


def _check_changelog(package: Package) -> Iterator[Problem]:
    path = package.folder / "CHANGELOG.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if not re.search(rf"^## \[?{re.escape(package.version)}\]?(\s|$)", text, re.MULTILINE):
        yield Problem(
            where=package.where(path),
            what=f"no section for version {package.version}",
            fix=f"Add `## [{package.version}]` and what changed",
        )
