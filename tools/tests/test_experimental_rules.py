"""Marks that outlived their version are found, and the page lists what the sources mark."""

import pytest

CORE = "packages/mt-part/src/mt_part/core.py"
SOURCE = """
import mt_files
from mt_files import experimental

@experimental(since="{since}", remove_in="{remove_in}")
class Thing:
    @mt_files.experimental(since="0.1", remove_in="0.3")
    def work(self): ...
"""
STALE = "docs/experimental.md: is not what the sources say. "


def marked(tree, since="0.1", remove_in="0.2"):
    source = SOURCE.format(since=since, remove_in=remove_in)
    line = len((tree.root / CORE).read_text().splitlines()) + 5
    tree.append(CORE, source)
    return [p for p in tree.problems() if "mt_files, " not in p], f"{CORE}:{line}: "


def test_page_lists_every_mark_and_is_held_to_be_current(tree):
    from experimental_rules import page
    from workspace import load

    problems, _ = marked(tree)
    assert [p.partition(" Run")[0] + " " for p in problems if "experimental.md" in p] == [STALE]
    written = page(load(tree.root))
    assert written.splitlines()[-2:] == [
        "| `mt_part.Thing` | 0.1 | 0.2 |",
        "| `mt_part.Thing.work` | 0.1 | 0.3 |",
    ]
    tree.write("docs/experimental.md", written)
    assert not [p for p in tree.problems() if "experimental" in p]


@pytest.mark.parametrize(
    ("since", "remove_in", "expected"),
    [
        (
            "0.0.1",
            "0.1",
            "mt_part.Thing was experimental until 0.1, and mt-part is 0.1.0. "
            "Drop the mark to keep it for good, or remove it.",
        ),
        (
            "0.3",
            "0.3",
            "experimental mt_part.Thing ends in 0.3, not after 0.3. Give a later remove_in.",
        ),
        (
            "0.1",
            "soon",
            "the versions of experimental mt_part.Thing can't be read. "
            'Write since="X.Y" and remove_in="X.Y" as literals.',
        ),
    ],
)
def test_mark_that_outlived_its_version_or_has_none_is_found(tree, since, remove_in, expected):
    problems, where = marked(tree, since, remove_in)
    assert where + expected in problems


def test_version_that_is_no_literal_is_found(tree):
    tree.append(CORE, "@experimental(since=SINCE, remove_in='0.2')\ndef f(): ...\n")
    assert any("mt_part.f can't be read" in problem for problem in tree.problems())


def test_mark_that_decorates_nothing_is_found(tree):
    tree.append(CORE, "f = experimental(since='0.1', remove_in='0.2')(work)\n")
    assert any(
        "experimental decorates nothing. Write it above a function or a class." in problem
        for problem in tree.problems()
    )


def test_missing_page_is_found(tree):
    tree.remove("docs/experimental.md")
    tree.replace("docs/README.md", "- [experimental](experimental.md)\n", "")
    assert tree.problems() == [
        "docs/experimental.md: missing. "
        "Run python tools/experimental_rules.py > docs/experimental.md."
    ]
