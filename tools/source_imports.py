"""The imports of a source tree, found in its syntax trees: lazy and TYPE_CHECKING ones too."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported module."""

    module: str
    path: Path
    line: int
    optional: (
        bool  # inside a function, under TYPE_CHECKING, or tried with a handler for its absence
    )

    @property
    def head(self) -> str:
        """The import name of the package that the module belongs to."""
        return self.module.partition(".")[0]


def imports_of(folder: Path) -> list[Import]:
    """The absolute imports of every Python file under `folder`."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for module, line, optional in _walk(tree, optional=False):
            found.append(Import(module=module, path=path, line=line, optional=optional))
    return found


def _walk(node: ast.AST, *, optional: bool) -> Iterator[tuple[str, int, bool]]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import(names=names):
                yield from ((alias.name, child.lineno, optional) for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module, child.lineno, optional
            case ast.Call() if (named := _imported_by_call(child)) is not None:
                yield named, child.lineno, optional
        yield from _walk(child, optional=optional or _is_optional(child))


def _is_optional(node: ast.AST) -> bool:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            return True
        case ast.Try(handlers=handlers):
            names = {"ImportError", "ModuleNotFoundError"}
            caught = [
                name for handler in handlers if handler.type for name in ast.walk(handler.type)
            ]
            return any(isinstance(name, ast.Name) and name.id in names for name in caught)
    return False


def _imported_by_call(call: ast.Call) -> str | None:
    """The module that `import_module("...")` or `__import__("...")` names."""
    match call:
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(module)), *_],
        ) if not module.startswith("."):
            return module
    return None
