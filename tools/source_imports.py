"""The imports of a source tree, found in its syntax trees: lazy and TYPE_CHECKING ones too."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LAZY = "__getattr__ = resolve_later(__name__)"  # then TYPE_CHECKING's imports run, at first use
UNKNOWN = "*"  # the part of a module's name that only the run knows


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported module.

    Attributes:
        module: Its full name; `*` ends it where a string is put together at run time.
        names: The names that a `from` statement takes from the module.
        path: The file that imports it.
        line: The line of the statement or call.
        optional: Inside a function, under TYPE_CHECKING, or tried with a handler for its absence.
        typing: Under TYPE_CHECKING, so never imported in a run.
        string: Imported by a call with a string, such as `import_module("x")`.
    """

    module: str
    names: tuple[str, ...] = ()
    path: Path
    line: int
    optional: bool
    typing: bool = False
    string: bool = False

    @property
    def head(self) -> str:
        """The import name of the package that the module belongs to."""
        return self.module.partition(".")[0]


def imports_of(folder: Path) -> list[Import]:
    """Return the imports of every Python file under `folder`, the root of an import package."""
    files = sorted(folder.rglob("*.py"))
    return [each for path in files for each in _imports_in(path, folder, _changed(path))]


def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file, parsed once for all rules."""
    return _parsed(path, _changed(path))


@cache
def _parsed(path: Path, changed: tuple[int, int]) -> ast.Module:
    del changed  # part of the cache's key
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _changed(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def module_name(path: Path, folder: Path) -> str:
    """Return the full name of the module at `path` in the import package at `folder`."""
    parts = path.relative_to(folder.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _imports_in(path: Path, folder: Path, changed: tuple[int, int]) -> list[Import]:
    del changed  # part of the cache's key
    tree, name = tree_of(path), module_name(path, folder)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    constants = _constants(tree) | {"__name__": name, "__package__": package}
    lazy = is_lazy(tree)

    def found(node: ast.AST, *, optional: bool, typing: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            for module, names, string in _imported(child, package, constants):
                yield Import(
                    module=module,
                    names=names,
                    path=path,
                    line=child.lineno,  # type: ignore[attr-defined]
                    optional=optional,
                    typing=typing,
                    string=string,
                )
            inner = is_typing(child)
            yield from found(
                child,
                optional=optional or inner or _is_optional(child),
                typing=typing or (inner and not lazy),
            )

    return list(found(tree, optional=False, typing=False))


def _imported(
    node: ast.AST, package: str, constants: dict[str, str]
) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """Yield module, names and "by a call" of each module that a statement or call imports."""
    match node:
        case ast.Import(names=aliases):
            yield from ((alias.name, (), False) for alias in aliases)
        case ast.ImportFrom(module=module, names=aliases, level=level):
            above = package.split(".")[: package.count(".") + 2 - level] if level else []
            full = ".".join([*above, *([module] if module else [])])
            yield full, tuple(alias.name for alias in aliases), False
        case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=[first, *_]):
            if called in ("import_module", "__import__"):
                text = _text(first, constants)
                own = text.partition(".")[0] == package.partition(".")[0]
                literal = isinstance(first, ast.Constant) and not text.startswith(".")
                if own or literal:
                    yield text, (), True


def _text(node: ast.expr, constants: dict[str, str]) -> str:
    """Return the known parts of a string: constants unchanged, anything else as `*`."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name):
            return constants.get(name, UNKNOWN)
        case ast.JoinedStr(values=values):
            return "".join(_text(value, constants) for value in values)
        case ast.FormattedValue(value=value):
            return _text(value, constants)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, constants) + _text(right, constants)
    return UNKNOWN


def _constants(tree: ast.Module) -> dict[str, str]:
    """Return the strings that names are bound to at module level."""
    found = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                found[name] = text
    return found


def is_lazy(tree: ast.Module) -> bool:
    """Return whether a module imports at first use what stands under TYPE_CHECKING."""
    return any(ast.unparse(node) == LAZY for node in ast.walk(tree))


def is_typing(node: ast.AST) -> bool:
    """Return whether a statement runs for type checkers alone."""
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            return True
    return False


def _is_optional(node: ast.AST) -> bool:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            return True
        case ast.Try(handlers=handlers):
            names = {"ImportError", "ModuleNotFoundError"}
            caught = [
                name for handler in handlers if handler.type for name in ast.walk(handler.type)
            ]
            return any(isinstance(name, ast.Name) and name.id in names for name in caught)
    return False
