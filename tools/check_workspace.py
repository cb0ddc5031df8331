"""Check what keeps the packages of the workspace apart and releasable.

    python tools/check_workspace.py [ROOT]

One line for each problem, with the way to mend it; exit code 1 if there is any.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import experimental_rules
import glossary_rules
import import_rules
import manifest_rules
import shape_rules
import text_rules
from workspace import Problem, Workspace, load

RULES = (
    manifest_rules.check_contract,
    manifest_rules.check_names,
    manifest_rules.check_requirements,
    manifest_rules.check_sources,
    manifest_rules.check_files,
    import_rules.check_imports,
    import_rules.check_public_names,
    shape_rules.check_own_strings,
    shape_rules.check_circles,
    shape_rules.check_crowded_folders,
    experimental_rules.check_experimental,
    glossary_rules.check_glossary,
    text_rules.check_machine_paths,
    text_rules.check_hand_kept_lists,
    text_rules.check_links,
)


def check(workspace: Workspace) -> Iterator[Problem]:
    """The problems that any rule finds."""
    for rule in RULES:
        yield from rule(workspace)


def main(arguments: list[str]) -> int:
    """Check the workspace that holds this file, or the one named; returns the exit code."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    workspace = load(root.resolve())
    problems = list(check(workspace))
    for problem in problems:
        print(problem)
    print(f"{len(workspace.packages)} packages checked, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
