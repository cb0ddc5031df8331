"""Rules on the shape of a package: no circles of files or folders, no crowded folder."""

from collections import Counter
from collections.abc import Iterator, Mapping

from source_imports import UNKNOWN, Import, imports_of, module_name
from workspace import Package, Problem, Workspace

MOST_FILES = 25  # in a folder; more are to be sorted into folders that are concepts

Graph = dict[str, dict[str, Import]]  # by importer, by imported module: the first import


def check_own_strings(workspace: Workspace) -> Iterator[Problem]:
    """No package imports its own modules by a string, which hides them from every other rule."""
    for package in workspace.packages:
        for each in imports_of(package.source):
            if each.string and each.head.rstrip(UNKNOWN) == package.module:
                yield Problem(
                    where=package.where(each.path, each.line),
                    what=f"imports {each.module}, a module of its own package, by a string",
                    fix="Write an import statement, in the function if it must be late",
                )


def check_circles(workspace: Workspace) -> Iterator[Problem]:
    """The files and folders of a package import each other in one direction.

    In each folder, its files and its folders (each as one) are compared. What a function imports
    counts, and so does a string; what stands under TYPE_CHECKING does not.
    """
    for package in workspace.packages:
        graph = own_graph(package)
        for folder in sorted({name.rpartition(".")[0] for name in graph} | {package.module}):
            inside = _between_children(graph, folder)
            for circle in circles(inside):
                members = ", ".join(sorted(each.removeprefix(f"{folder}.") for each in circle))
                shown = next(
                    each
                    for a in sorted(circle)
                    for b, each in sorted(inside[a].items())
                    if b in circle
                )
                yield Problem(
                    where=package.where(shown.path, shown.line),
                    what=f"a circle of imports in {folder} over {len(circle)}: {members}",
                    fix="Move what both need below both, or pass it in as an argument",
                )


def check_crowded_folders(workspace: Workspace) -> Iterator[Problem]:
    """No folder has too many files to find the right one."""
    for package in workspace.packages:
        files = Counter(path.parent for path in package.source.rglob("*.py"))
        for folder, number in sorted(files.items()):
            if number > MOST_FILES:
                yield Problem(
                    where=package.where(folder),
                    what=f"{number} files in one folder, of at most {MOST_FILES}",
                    fix="Sort them into folders that are concepts",
                )


def own_graph(package: Package) -> Graph:
    """Return which modules of a package import which others."""
    folder = package.source
    graph: Graph = {module_name(path, folder): {} for path in sorted(folder.rglob("*.py"))}
    for each in imports_of(folder):
        importer = module_name(each.path, folder)
        if each.typing or each.head != package.module:
            continue
        submodules = {f"{each.module}.{name}" for name in each.names} & graph.keys()
        whole = len(submodules) < len(each.names) or not each.names
        for imported in submodules | ({each.module} & graph.keys() if whole else set()):
            if imported != importer:
                graph[importer].setdefault(imported, each)
    return graph


def _between_children(graph: Graph, folder: str) -> Graph:
    """Return the imports between what a folder holds, each folder in it as one; and itself."""

    def child(module: str) -> str | None:
        if module == folder:
            return f"{folder}.__init__"
        if not module.startswith(f"{folder}."):
            return None
        return ".".join(module.split(".")[: folder.count(".") + 2])

    children: Graph = {}
    for importer, imported in graph.items():
        if (a := child(importer)) is None:
            continue
        links = children.setdefault(a, {})
        for module, each in imported.items():
            if (b := child(module)) is not None and b != a:
                links.setdefault(b, each)
                children.setdefault(b, {})
    return children


def circles(graph: Mapping[str, Mapping[str, object]]) -> list[set[str]]:
    """Return the sets of nodes that reach each other, of two or more each."""
    reached = {node: _reachable(graph, node) for node in graph}
    found: list[set[str]] = []
    for node in graph:
        circle = {other for other in reached[node] if node in reached[other]}
        if len(circle) > 1 and circle not in found:
            found.append(circle)
    return found


def _reachable(graph: Mapping[str, Mapping[str, object]], start: str) -> set[str]:
    """Return every node that a way of one or more links leads to."""
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += graph[node]
    return seen
