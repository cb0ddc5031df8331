"""Which of torch's operators and private names the packages use, and what a torch has of them.

`python tools/operator_facts.py --out tools/operators.json` writes what the torch that runs it has.
Only torch is needed, so that any version can be asked; one that is built for CUDA answers on a
machine without a device. The table in `tools/operators.json` is of the oldest supported torch.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OURS = "mt_"  # operators that the packages define themselves
# Modules that define operators when they are imported.
DEFINING = ("torch.distributed._symmetric_memory",)
DEVICES = ("CUDA", "CPU")
# Made of other operators, for every device.
COMPOSITE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")


def names_used(sources: Iterable[Path]) -> dict[str, list[str]]:
    """Return the operators and private names of torch that sources use, with the files.

    Args:
        sources: Python files.
    """
    found: dict[str, set[str]] = {}
    for path in sources:
        for name in _names(ast.parse(path.read_text())):
            found.setdefault(name, set()).add(path.name)
    return {name: sorted(files) for name, files in sorted(found.items())}


def _names(tree: ast.AST) -> Iterator[str]:
    """Yield names of torch in full: of operators, and with a part that begins with `_`."""
    known = {"torch": "torch"}
    for name, stands_for in _imports(tree):
        known[name] = stands_for
        if any(_wanted(stands_for)):
            yield stands_for
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = _chain(node.value, known)
            if value and value.startswith("torch.ops."):
                known[node.targets[0].id] = value
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            yield from _wanted(_chain(node, known) or "")


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the local names of imports from torch, with the imported names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.startswith("torch") and each.asname:
                    yield each.asname, each.name
                elif each.name.startswith("torch."):
                    yield each.name, each.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            for each in node.names:
                yield each.asname or each.name, f"{node.module}.{each.name}"


def _chain(node: ast.AST, known: dict[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in known:
        return None
    return ".".join([known[node.id], *parts])


def _wanted(name: str) -> Iterator[str]:
    operator = re.fullmatch(r"torch\.ops\.(\w+)\.(\w+)(?:\.(\w+))?.*", name)
    if operator is not None:
        if not operator[1].startswith(OURS):
            overload = operator[3] if operator[3] not in (None, "default") else ""
            yield f"{operator[1]}::{operator[2]}" + (f".{overload}" if overload else "")
        return
    parts = name.split(".")
    private = [i for i, part in enumerate(parts) if re.match(r"_[^_]", part)]
    if parts[0] == "torch" and private:
        # What is asked of a class or an object is its own.
        yield ".".join(parts[: private[-1] + 1])


def facts(names: Iterable[str]) -> dict[str, Any]:
    """Return what the installed torch has of operators and private names.

    Args:
        names: As `names_used` gives them.

    Returns:
        By name: of an operator its overloads, each with its schema and where it has a kernel; of
        another name whether it is there. None for what is missing.
    """
    import torch

    for module in DEFINING:
        importlib.import_module(module)
    return {
        "torch": str(torch.__version__),
        "names": {name: _operator(name) or _is_there(name) for name in sorted(names)},
    }


def _operator(name: str) -> dict[str, Any] | None:
    import torch

    # `torch._foreach_add_` is an operator too.
    name = re.sub(r"^torch\.(\w+)$", r"aten::\1", name)
    plain, _, overload = name.partition(".")
    namespace, _, own = plain.partition("::")
    packet = getattr(getattr(torch.ops, namespace), own, None) if own else None
    if packet is None:
        return None
    wanted = [overload] if overload else packet.overloads()
    found = {}
    for each in wanted:
        if each not in packet.overloads():
            return None
        full = plain if each == "default" else f"{plain}.{each}"
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        found[each] = {
            "schema": str(getattr(packet, each)._schema),
            "on": [key for key in (*DEVICES, *COMPOSITE) if has(full, key)],
        }
    return found


def _is_there(name: str) -> bool | None:
    """Find a name, importing the modules that it is in."""
    if "::" in name:
        return None
    parts = name.split(".")
    value: Any = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], 2):
        if not hasattr(value, part):
            module = ".".join(parts[:index])
            if not hasattr(value, "__path__") or importlib.util.find_spec(module) is None:
                return None
            if index == len(parts):  # some take seconds to import
                return True
            importlib.import_module(module)
        value = getattr(value, part)
    return True


def problems(names: Iterable[str], old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Say what keeps names from working on two versions of torch, of an old one and of a new one.

    Args:
        names: As `names_used` gives them.
        old: `facts` of the old one.
        new: `facts` of the new one.
    """
    import torch

    found = []
    stale = sorted(set(names) ^ set(old["names"]))
    if stale:
        found.append(f"the table does not fit the sources: {', '.join(stale)}; nox -s operators")
    for name in sorted(set(names) & set(old["names"])):
        before, after = old["names"][name], new["names"][name]
        for which, own in ((old, before), (new, after)):
            if own is None:
                found.append(f"{name} is missing in torch {which['torch']}")
            elif isinstance(own, dict):
                device = "CPU" if name.endswith(("_for_cpu", "_for_cpu_backward")) else "CUDA"
                if not any({device, *COMPOSITE} & set(each["on"]) for each in own.values()):
                    found.append(f"{name} has no {device} kernel in torch {which['torch']}")
        if not isinstance(before, dict) or not isinstance(after, dict):
            continue
        for overload, own in before.items():
            schemas = own["schema"], after.get(overload, own)["schema"]
            was, now = map(torch._C.parse_schema, schemas)
            takes: Any = now  # torch's stubs lack the method
            if overload not in after or not takes.is_backward_compatible_with(was):
                found.append(f"{name}: {schemas[0]} is now {after.get(overload)}")
    return found


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    names = names_used(sources())
    options = parser.parse_args()
    options.out.write_text(json.dumps(facts(names), indent=1) + "\n")


def sources() -> list[Path]:
    """Return the Python files of all packages."""
    return sorted(ROOT.glob("packages/*/src/**/*.py"))


if __name__ == "__main__":
    main()
