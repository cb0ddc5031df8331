"""What a change can fail is found from the files that differ and from who needs what."""

import subprocess

import pytest
from changed import base_of, changed_paths, sessions
from workspace import load

ALL = [f"tests(mt-{name})" for name in ("app", "ground", "other", "part", "testing")]
QUICK = ["lint", "typecheck"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("packages/mt-app/src/mt_app/core.py", ["tests(mt-app)", "integration"]),
        ("packages/mt-other/src/mt_other/core.py", ["tests(mt-other)", "integration"]),
        ("packages/mt-part/tests/test_core.py", ["tests(mt-part)"]),
        ("packages/mt-ground/src/mt_ground/core.py", [*ALL[:-1], "integration"]),
        ("packages/mt-testing/src/mt_testing/core.py", [*ALL, "integration"]),
        ("packages/mt-part/README.md", ["tests(mt-part)", "docs"]),
        ("packages/mt-gone/src/mt_gone/core.py", ["integration"]),
        ("tests-integration/tests/test_x.py", ["integration"]),
        ("uv.lock", [*ALL, "integration"]),
        ("docs/mt-part.md", ["docs"]),
        ("tools/lanes.py", []),
    ],
)
def test_who_needs_what_differs_is_tested(tree, path, expected):
    found = sessions(load(tree.root), [path])
    assert found == [*QUICK, *expected]


def test_a_manifest_builds_the_wheels_too(tree):
    assert "wheels" in sessions(load(tree.root), ["packages/mt-part/pyproject.toml"])


def test_base_is_where_the_branch_left_main_and_on_main_the_commit_before(tree):
    def git(*arguments):
        names = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
        subprocess.run(["git", *names, *arguments], cwd=tree.root, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    for number in range(2):
        tree.write("x.txt", str(number))
        git("add", ".")
        git("commit", "-q", "-m", "x")
    assert base_of(tree.root, None) == "HEAD~1"
    assert changed_paths(tree.root, "HEAD~1") == ["x.txt"]
    git("switch", "-q", "-c", "branch")
    tree.write("y.txt", "")
    git("add", ".")
    git("commit", "-q", "-m", "y")
    tree.write("z.txt", "")
    assert changed_paths(tree.root, base_of(tree.root, None)) == ["y.txt", "z.txt"]
    assert base_of(tree.root, "abc") == "abc"
