"""Rules on what a package imports: declared, from a lower layer, through the public API."""

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions

from packaging.utils import canonicalize_name
from source_imports import LAZY, Import, imports_of, is_lazy, is_typing, tree_of
from workspace import TEST_ONLY, Package, Problem, Workspace


def check_imports(workspace: Workspace) -> Iterator[Problem]:
    """Every import of every package's sources is declared; imports of siblings go down a layer."""
    for package in workspace.packages:
        found = imports_of(package.source)
        for each in _first_of_each_module(found):
            if each.head == package.module or each.head in sys.stdlib_module_names:
                continue
            if each.head in workspace.by_module():
                yield from _check_sibling(workspace, package, each)
            yield from _check_declared(workspace, package, each)
        yield from _check_unused(workspace, package, {each.head for each in found})


def check_public_names(workspace: Workspace) -> Iterator[Problem]:
    """The public names of each package are exactly what its `__init__` offers."""
    for package in workspace.packages:
        path = package.source / "__init__.py"
        if not path.is_file():
            continue
        tree = tree_of(path)
        listed, (bound, offered) = listed_names(tree), _bound_names(tree, package.module)
        if listed is None:
            yield Problem(
                where=package.where(path),
                what="no public names",
                fix=f"Import each as itself (`import X as X`), with `{LAZY}`, or state __all__",
            )
            continue
        for name in sorted({name for name in listed if listed.count(name) > 1}):
            yield Problem(
                where=package.where(path), what=f"{name} is twice in __all__", fix="Drop one"
            )
        for name in sorted(set(listed) - bound):
            if "__getattr__" not in bound:
                yield Problem(
                    where=package.where(path),
                    what=f"__all__ names {name}, which is not defined here",
                    fix=f"Import {name} or drop it from __all__",
                )
        for name in sorted(offered - set(listed)):
            if not name.startswith("_"):
                yield Problem(
                    where=package.where(path),
                    what=f"public name {name} is not in __all__",
                    fix=f"Import it as itself, add it to __all__, or rename it to _{name}",
                )


def _first_of_each_module(found: list[Import]) -> list[Import]:
    """One import per module and kind, so that a problem is said once."""
    first: dict[tuple[str, bool], Import] = {}
    for each in found:
        first.setdefault((each.module, each.optional), each)
    return list(first.values())


def _check_sibling(workspace: Workspace, package: Package, each: Import) -> Iterator[Problem]:
    where = package.where(each.path, each.line)
    sibling = workspace.by_module()[each.head]
    if sibling.folder.name == TEST_ONLY:
        yield Problem(
            where=where,
            what=f"sources import {each.head}, which is for tests only",
            fix="Move what is needed out of the tests, or the import into tests/",
        )
    elif not workspace.contract.allows(package.module, each.head):
        yield Problem(
            where=where,
            what=f"{package.module} imports {each.head}, which is not in a lower layer",
            fix="Move the shared code down, or pass the object in as an argument",
        )
    if "." in each.module:
        yield Problem(
            where=where,
            what=f"imports {each.module}, a private module of another package",
            fix=f"Import the name from {each.head}; add it to the __all__ there if it is public",
        )


def _check_declared(workspace: Workspace, package: Package, each: Import) -> Iterator[Problem]:
    needed = package.dependencies + package.extra_of(each.path)
    always = {canonicalize_name(line.name) for line in needed}
    sometimes = {canonicalize_name(line.name) for line in package.extras}
    providers = _providers(workspace, each.head)
    if providers & always or (each.optional and providers & sometimes):
        return
    shown = " or ".join(sorted(providers))
    where = package.where(each.path, each.line)
    if providers & sometimes:
        yield Problem(
            where=where,
            what=f"imports {each.module} always, but {shown} comes with an extra only",
            fix=f"Import it in the function that uses it, or move {shown} to dependencies",
        )
    else:
        yield Problem(
            where=where,
            what=f"imports {each.module}, but {package.name} does not declare {shown}",
            fix=f"Add {shown} to dependencies in {package.where()}",
        )


def _check_unused(workspace: Workspace, package: Package, heads: set[str]) -> Iterator[Problem]:
    for requirement in workspace.siblings(package.dependencies):
        sibling = workspace.by_name()[canonicalize_name(requirement.name)]
        if sibling.module not in heads:
            yield Problem(
                where=package.where(),
                what=f"declares {sibling.folder.name} but never imports {sibling.module}",
                fix=f"Drop {sibling.folder.name} from dependencies",
            )


def _providers(workspace: Workspace, head: str) -> set[str]:
    """The distributions that provide import name `head`, here or in this environment."""
    if head in workspace.by_module():
        return {workspace.by_module()[head].folder.name}
    installed = _installed().get(head, [])
    return {str(canonicalize_name(name)) for name in installed} or {str(canonicalize_name(head))}


@cache
def _installed() -> Mapping[str, list[str]]:
    return packages_distributions()


def listed_names(tree: ast.Module) -> list[str] | None:
    """Return the names of a literal `__all__`, or those imported as themselves for `resolve_later`.

    None if the module does neither.
    """
    for node in tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=names))
                | ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.List(elts=names))
            ) if all(isinstance(name, ast.Constant) for name in names):
                return [str(name.value) for name in names if isinstance(name, ast.Constant)]
    if not is_lazy(tree):
        return None
    froms = [node for node in _statements(tree) if isinstance(node, ast.ImportFrom)]
    return [alias.name for node in froms for alias in node.names if alias.asname == alias.name]


def _statements(tree: ast.Module) -> list[ast.stmt]:
    """The statements of a module, with those under TYPE_CHECKING if they run at first use."""
    typing = [node for node in tree.body if isinstance(node, ast.If) and is_typing(node)]
    return tree.body + [each for node in typing if is_lazy(tree) for each in node.body]


def _bound_names(tree: ast.Module, package: str) -> tuple[set[str], set[str]]:
    """The names a module binds, and those of them it offers: defined in `package`, not imported."""
    bound: set[str] = set()
    imported: set[str] = set()
    for node in _statements(tree):
        match node:
            case ast.Import(names=names):
                imported |= {alias.asname or alias.name.partition(".")[0] for alias in names}
            case ast.ImportFrom(module=module, names=names, level=level):
                own = level > 0 or str(module).partition(".")[0] == package
                (bound if own else imported).update(alias.asname or alias.name for alias in names)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.Assign(targets=targets):
                bound |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                bound.add(name)
    return bound | imported, bound
