"""Each rule finds the defect it is for, in one line that says how to mend it, and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

PART = "packages/mt-part/pyproject.toml"
CORE = "packages/mt-part/src/mt_part/core.py"
INIT = "packages/mt-part/src/mt_part/__init__.py"
HOME = "/" + "home/somebody"

# (file, old text, new text, the one line expected)
REPLACED = {
    "package missing from root_packages": (
        "pyproject.toml",
        '"mt_part", "mt_other", "mt_ground", "mt_testing"]',
        '"mt_other", "mt_ground", "mt_testing"]',
        "pyproject.toml [tool.importlinter]: mt_part is not in root_packages, "
        'so no contract sees it. Add "mt_part" to root_packages.',
    ),
    "package missing from the layers": (
        "pyproject.toml",
        "mt_part | mt_other",
        "mt_other",
        "pyproject.toml [tool.importlinter]: mt_part is in 0 layers. "
        "Put it into exactly one line of layers.",
    ),
    "contract names a package that is gone": (
        "pyproject.toml",
        '"mt_ground | mt_testing"',
        '"mt_ground | mt_testing | mt_gone"',
        "pyproject.toml [tool.importlinter]: mt_gone is no package here. "
        "Drop it from the contract.",
    ),
    "wheel ships another folder": (
        PART,
        'packages = ["src/mt_part"]',
        'packages = ["src"]',
        f"{PART}: the wheel holds packages = ['src']. "
        'Set packages = ["src/mt_part"] in [tool.hatch.build.targets.wheel].',
    ),
    "pin without a cap": (
        PART,
        "mt-ground>=0.1.0,<0.2",
        "mt-ground>=0.1.0",
        f"{PART}: pin mt-ground>=0.1.0 lacks a floor (>=) or a cap (<). "
        'Write "mt-ground>=0.1.0,<0.2".',
    ),
    "pin without a floor": (
        PART,
        "mt-ground>=0.1.0,<0.2",
        "mt-ground<0.2",
        f"{PART}: pin mt-ground<0.2 lacks a floor (>=) or a cap (<). "
        'Write "mt-ground>=0.1.0,<0.2".',
    ),
    "pin that excludes the tree": (
        PART,
        "mt-ground>=0.1.0,<0.2",
        "mt-ground>=0.2.0,<0.3",
        f"{PART}: pin mt-ground<0.3,>=0.2.0 excludes 0.1.0, the version in this tree. "
        'Write "mt-ground>=0.1.0,<0.2".',
    ),
    "third party without a floor": (
        PART,
        "numpy>=1.26",
        "numpy",
        f"{PART}: numpy has no floor. Write numpy>=OLDEST-TESTED.",
    ),
    "torch with a cap": (
        PART,
        '"numpy>=1.26"',
        '"numpy>=1.26", "torch>=2.11,<3"',
        f"{PART}: torch<3,>=2.11 caps torch. Keep the floor only.",
    ),
    "no workspace source": (
        PART,
        "mt-ground = { workspace = true }",
        "",
        f"{PART}: mt-ground would come from an index, not from this workspace. "
        "Add `mt-ground = { workspace = true }` to [tool.uv.sources].",
    ),
    "no workspace source at the root": (
        "pyproject.toml",
        "mt-app = { workspace = true }",
        "",
        "pyproject.toml: mt-app would come from an index, not from this workspace. "
        "Add `mt-app = { workspace = true }` to [tool.uv.sources].",
    ),
    "source that nothing needs": (
        PART,
        "[tool.uv.sources]",
        "[tool.uv.sources]\nmt-other = { workspace = true }",
        f"{PART}: [tool.uv.sources] names mt-other, which nothing here needs. Drop the line.",
    ),
    "test group that joins packages": (
        "packages/mt-app/pyproject.toml",
        'test = ["pytest>=8"',
        'test = ["pytest>=8", "mt-part>=0.1.0,<0.2"',
        "packages/mt-app/pyproject.toml: a dependency group brings mt-part. Groups may use "
        "mt-testing alone; tests that join packages go to tests-integration.",
    ),
    "changelog without the version": (
        "packages/mt-part/CHANGELOG.md",
        "## [0.1.0]",
        "## [0.1.0rc1]",
        "packages/mt-part/CHANGELOG.md: no section for version 0.1.0. "
        "Add `## [0.1.0]` and what changed.",
    ),
    "public name that is not in __all__": (
        INIT,
        "import work\n",
        "import work\nfrom mt_part.core import work as play\n",
        f"{INIT}: public name play is not in __all__. "
        "Import it as itself, add it to __all__, or rename it to _play.",
    ),
    "name in __all__ that is not there": (
        INIT,
        '["work"]',
        '["play", "work"]',
        f"{INIT}: __all__ names play, which is not defined here. "
        "Import play or drop it from __all__.",
    ),
    "name twice in __all__": (
        INIT,
        '["work"]',
        '["work", "work"]',
        f"{INIT}: work is twice in __all__. Drop one.",
    ),
    "no __all__": (
        INIT,
        '__all__ = ["work"]',
        "",
        f"{INIT}: no public names. Import each as itself (`import X as X`), with "
        "`__getattr__ = resolve_later(__name__)`, or state __all__.",
    ),
    "name that is not imported as itself": (
        INIT,
        'from mt_part.core import work\n\n__all__ = ["work"]',
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
        "    from mt_part.core import work as work, play\n"
        "__getattr__ = resolve_later(__name__)",
        f"{INIT}: public name play is not in __all__. "
        "Import it as itself, add it to __all__, or rename it to _play.",
    ),
    "dead link": (
        "docs/README.md",
        "# Pages",
        "# Pages\n\n[design](design.md#groups)",
        "docs/README.md: links design.md, which does not exist. Mend or drop the link.",
    ),
    "page that the index lacks": (
        "docs/README.md",
        "- [mt-part](mt-part.md)\n",
        "",
        "docs/README.md: mt-part.md is not in the index. Link it.",
    ),
}

# (source text added to mt_part/core.py, the line expected without its place)
IMPORTED = {
    "third party not declared": (
        "import yaml_like\n",
        "imports yaml_like, but mt-part does not declare yaml-like. "
        f"Add yaml-like to dependencies in {PART}.",
    ),
    "distribution of another name, extra only": (
        "import yaml\n",
        "imports yaml always, but pyyaml comes with an extra only. "
        "Import it in the function that uses it, or move pyyaml to dependencies.",
    ),
    "import of the layer above, lazy": (
        "def late():\n    import mt_app\n",
        "mt_part imports mt_app, which is not in a lower layer. "
        "Move the shared code down, or pass the object in as an argument.",
    ),
    "import of the same layer under TYPE_CHECKING": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from mt_other import work as o\n",
        "mt_part imports mt_other, which is not in a lower layer. "
        "Move the shared code down, or pass the object in as an argument.",
    ),
    "import by a string": (
        "import importlib\nimportlib.import_module('mt_app')\n",
        "mt_part imports mt_app, which is not in a lower layer. "
        "Move the shared code down, or pass the object in as an argument.",
    ),
    "sibling not declared": (
        "def late():\n    import mt_app\n",
        "imports mt_app, but mt-part does not declare mt-app. "
        f"Add mt-app to dependencies in {PART}.",
    ),
    "private module of a sibling": (
        "from mt_ground.core import work as w\n",
        "imports mt_ground.core, a private module of another package. "
        "Import the name from mt_ground; add it to the __all__ there if it is public.",
    ),
    "test package in the sources": (
        "import mt_testing\n",
        "sources import mt_testing, which is for tests only. "
        "Move what is needed out of the tests, or the import into tests/.",
    ),
}

OWN = "packages/mt-part/src/mt_part"
STATEMENT = "Write an import statement, in the function if it must be late."

# (source text added to mt_part/core.py, the own module that a string imports)
OWN_STRINGS = {
    "constant": ("import importlib\nimportlib.import_module('mt_part.low')\n", "mt_part.low"),
    "constant with a name": (
        "from importlib import import_module\nLOW = 'mt_part.low'\nimport_module(LOW)\n",
        "mt_part.low",
    ),
    "f-string": (
        "from importlib import import_module\ndef late(x):\n    import_module(f'mt_part.{x}')\n",
        "mt_part.*",
    ),
    "f-string of __name__": (
        "from importlib import import_module\nimport_module(f'{__package__}.low')\n",
        "mt_part.low",
    ),
    "sum": (
        "from importlib import import_module\nimport_module('mt_part.' + str())\n",
        "mt_part.*",
    ),
}

# Files of mt_part with a circle, and the folder, members and first line that are named.
CIRCLES = {
    "files": (
        {"a.py": "import mt_part.b\n", "b.py": "from mt_part import a\n"},
        "",
        "a, b",
        "a.py:1",
    ),
    "late import": (
        {"a.py": "def late():\n    import mt_part.b\n", "b.py": "from mt_part.a import late\n"},
        "",
        "a, b",
        "a.py:2",
    ),
    "folders": (
        {
            "one/a.py": "import mt_part.two.a\n",
            "one/b.py": "",
            "two/a.py": "",
            "two/b.py": "from mt_part.one import b\n",
        },
        "",
        "one, two",
        "one/a.py:1",
    ),
    "folder with its own root": (
        {
            "one/__init__.py": "from mt_part.one.a import x\n",
            "one/a.py": "from mt_part.one import y\n",
        },
        ".one",
        "__init__, a",
        "one/__init__.py:1",
    ),
    "lazy names": (
        {
            "one/__init__.py": (
                "if TYPE_CHECKING:\n    from mt_part.one.a import x\n"
                "__getattr__ = resolve_later(__name__)\n"
            ),
            "one/a.py": "from mt_part.one import y\n",
        },
        ".one",
        "__init__, a",
        "one/__init__.py:2",
    ),
}

NO_CIRCLES = {
    "TYPE_CHECKING": {
        "a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import mt_part.b\n",
        "b.py": "import mt_part.a\n",
    },
    "one way": {
        "one/a.py": "from mt_part.two import a, b\n",
        "two/a.py": "import mt_part.two.b\n",
        "two/b.py": "",
    },
}

ALLOWED = {
    "extra imported where it is used": "def late():\n    import yaml\n",
    "extra imported with a handler": "try:\n    import yaml\nexcept ImportError:\n    pass\n",
    "relative import": "from . import core\n",
    "standard library": "import concurrent.futures\n",
}


def test_sound_workspace_has_no_problems(tree):
    assert tree.problems() == []


@pytest.mark.parametrize("defect", REPLACED)
def test_manifest_or_text_defect_gives_one_line(tree, defect):
    path, old, new, expected = REPLACED[defect]
    tree.replace(path, old, new)
    assert tree.problems() == [expected]


@pytest.mark.parametrize("defect", IMPORTED)
def test_import_defect_is_found_with_its_line(tree, defect):
    source, expected = IMPORTED[defect]
    line = len((tree.root / CORE).read_text().splitlines()) + source.count("\n")
    tree.append(CORE, source)
    assert f"{CORE}:{line}: {expected}" in tree.problems()


@pytest.mark.parametrize("kind", OWN_STRINGS)
def test_own_module_imported_by_a_string_is_found(tree, kind):
    source, module = OWN_STRINGS[kind]
    tree.write(f"{OWN}/low.py", "")
    line = len((tree.root / CORE).read_text().splitlines()) + source.count("\n")
    tree.append(CORE, source)
    assert tree.problems() == [
        f"{CORE}:{line}: imports {module}, a module of its own package, by a string. {STATEMENT}"
    ]


@pytest.mark.parametrize("kind", CIRCLES)
def test_circle_of_files_or_folders_is_found(tree, kind):
    files, folder, members, first = CIRCLES[kind]
    for path, text in files.items():
        tree.write(f"{OWN}/{path}", text)
    assert tree.problems() == [
        f"{OWN}/{first}: a circle of imports in mt_part{folder} over 2: {members}. "
        "Move what both need below both, or pass it in as an argument."
    ]


@pytest.mark.parametrize("kind", NO_CIRCLES)
def test_imports_that_are_no_circle_give_no_problem(tree, kind):
    for path, text in NO_CIRCLES[kind].items():
        tree.write(f"{OWN}/{path}", text)
    assert tree.problems() == []


def test_glossary_is_held_to_the_sources(tree):
    row = "| part | `mt_base.Gone` | what it is | `old_word` |"
    tree.write(
        "docs/glossary.md", f"| term | in code | meaning | not |\n|---|---|---|---|\n{row}\n"
    )
    tree.write(f"{OWN}/more.py", "old_word = 1\n")
    found = [each for each in tree.problems() if "not in the index" not in each]
    assert [each.partition(". ")[0] for each in found] == [
        "docs/glossary.md:3: mt_base.Gone is not public",
        f"{OWN}/more.py: the retired word 'old_word'",
    ]


def test_crowded_folder_is_found(tree):
    for number in range(25):
        tree.write(f"{OWN}/room/f{number}.py", "")
    assert tree.problems() == []
    tree.write(f"{OWN}/room/f25.py", "")
    assert tree.problems() == [
        f"{OWN}/room: 26 files in one folder, of at most 25. "
        "Sort them into folders that are concepts."
    ]


@pytest.mark.parametrize("kind", ALLOWED)
def test_allowed_import_gives_no_problem(tree, kind):
    tree.append(CORE, ALLOWED[kind])
    assert tree.problems() == []


def test_a_folder_of_an_extra_imports_what_that_extra_brings(tree):
    tree.write("packages/mt-part/src/mt_part/yaml/core.py", "import yaml\n")
    assert tree.problems() == []
    tree.write("packages/mt-part/src/mt_part/other/core.py", "import yaml\n")
    assert any("mt_part/other/core.py:1: imports yaml always" in each for each in tree.problems())


def test_agreed_edge_inside_a_layer_holds_in_one_direction_only(tree):
    source = (tree.root / "packages/mt-other/src/mt_other/core.py").read_text()
    assert "from mt_part import" in source  # the agreed edge; the sound tree has no problems
    tree.append(CORE, "from mt_other import work as other_work\n")
    assert any("mt_part imports mt_other, which is not in a lower" in p for p in tree.problems())


def test_declared_sibling_that_is_never_imported_is_found(tree):
    tree.write(CORE, "def work():\n    pass\n")
    assert tree.problems() == [
        f"{PART}: declares mt-ground but never imports mt_ground. Drop mt-ground from dependencies."
    ]


def test_test_package_as_a_dependency_is_found(tree):
    tree.replace(PART, '"numpy>=1.26"', '"numpy>=1.26", "mt-testing>=0.1.0,<0.2"')
    assert f"{PART}: mt-testing is a dependency of mt-part. Move it to the test group." in (
        tree.problems()
    )


def test_names_of_folder_distribution_and_import_agree(tree):
    tree.replace(PART, 'name = "mt-part"', 'name = "mt-parts"')
    tree.write("packages/mt-part/src/extra/__init__.py", "")
    assert tree.problems() == [
        f"{PART}: project name 'mt-parts' is not the folder's name 'mt-part'. "
        'Set name = "mt-part".',
        "packages/mt-part/src: holds ['extra', 'mt_part'], expected only mt_part. "
        "Keep the sources in src/mt_part.",
    ]


def test_version_that_is_not_static_is_found(tree):
    tree.replace(PART, 'version = "0.1.0"', 'dynamic = ["version"]')
    expected = f"{PART}: version '' is not a static X.Y.Z. Set version = \"X.Y.Z\" under [project]."
    assert expected in tree.problems()


def test_folder_with_a_foreign_name_is_found(tree):
    (tree.root / "packages/mt-part").rename(tree.root / "packages/part")
    assert (
        "packages/part/pyproject.toml: folder part is not named mt-*. Rename it." in tree.problems()
    )


@pytest.mark.parametrize(
    ("path", "fix"),
    [
        ("packages/mt-part/README.md", "Write what it is, how to install and embed it."),
        (
            "packages/mt-part/src/mt_part/py.typed",
            "Add the empty file, so that users see the types.",
        ),
        ("docs/mt-part.md", "Write the package's page: concepts, formulas, how to extend."),
    ],
)
def test_missing_file_is_found(tree, path, fix):
    tree.remove(path)
    assert f"{path}: missing. {fix}" in tree.problems()


@pytest.mark.parametrize(
    ("path", "pattern"),
    [("tests/test_core.py", "tests/test_*.py"), ("examples/work.py", "examples/*.*")],
)
def test_package_without_tests_or_examples_is_found(tree, path, pattern):
    tree.remove(f"packages/mt-part/{path}")
    expected = f"packages/mt-part: no {pattern}. Add one that runs in seconds on a CPU."
    assert tree.problems() == [expected]


def test_a_folder_of_pages_may_have_an_index_of_its_own(tree):
    tree.write("docs/parts/one.md", "# One\n")
    missing = "docs/README.md: parts/one.md is not in the index. Link it."
    assert tree.problems() == [missing]
    tree.write("docs/parts/README.md", "[one](one.md)\n")
    assert tree.problems() == [missing.replace("one.md", "README.md")]
    tree.append("docs/README.md", "\n[parts](parts/README.md)\n")
    assert tree.problems() == []
    tree.write("docs/parts/README.md", "# Parts\n")
    assert tree.problems() == ["docs/parts/README.md: one.md is not in the index. Link it."]


def test_machine_path_is_found_with_its_line(tree):
    tree.append("packages/mt-part/README.md", f"\nSee {HOME}/notes.\n")
    assert tree.problems() == [
        f"packages/mt-part/README.md:3: machine path '{HOME}'. "
        "Write a path relative to the repository, or a placeholder such as DIR."
    ]


@pytest.mark.parametrize(
    "text", ["https://example.com" + HOME, "~/runs", "/tmp/run", "a/root/b", "packages/work/x"]
)
def test_other_paths_are_not_machine_paths(tree, text):
    tree.append("packages/mt-part/README.md", f"\n{text}\n")
    assert tree.problems() == []


def test_ignored_files_are_not_scanned_and_new_ones_are(tree):
    tree.write(".gitignore", "ignored.txt\n")
    tree.write("ignored.txt", HOME)
    tree.write("new.txt", HOME)
    subprocess.run(["git", "init", "-q"], cwd=tree.root, check=True)
    assert [problem.partition(":")[0] for problem in tree.problems()] == ["new.txt"]


def test_binary_file_is_passed_over(tree):
    (tree.root / "data.bin").write_bytes(b"\xff\xfe" + HOME.encode())
    assert tree.problems() == []


def test_hand_kept_package_list_in_the_tooling_is_found(tree):
    tree.write("noxfile.py", "ALL = ['mt-app', 'mt_part', 'mt-ground']\n")
    assert tree.problems() == [
        "noxfile.py: names 3 packages (mt-app, mt-ground, mt-part). Discover them from packages/*."
    ]


def test_packages_that_a_tool_imports_are_no_list(tree):
    imports = "import mt_app\nfrom mt_part import work\nfrom mt_ground import thing\n"
    tree.write("tools/page.py", imports)
    assert tree.problems() == []
    tree.append("tools/page.py", "ALL = ['mt-other', 'mt-testing', 'mt-app']\n")
    assert tree.problems() == []
    tree.write("tools/page.py", "ALL = ['mt-other', 'mt-testing', 'mt-app']\n")
    assert len(tree.problems()) == 1


def test_two_packages_named_in_the_tooling_are_an_example(tree):
    tree.write("noxfile.py", "# such as mt-app or mt-part\n")
    assert tree.problems() == []


@pytest.mark.parametrize(("spoiled", "code"), [(False, 0), (True, 1)])
def test_command_counts_problems_and_sets_the_exit_code(tree, spoiled, code):
    if spoiled:
        tree.remove("packages/mt-part/README.md")
    command = [sys.executable, Path(__file__).parents[1] / "check_workspace.py", tree.root]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == code
    assert finished.stdout.endswith(f"5 packages checked, {code} problems\n")
