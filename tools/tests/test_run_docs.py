"""Fences are found, run where they should be, and never skipped in silence."""

import subprocess
import sys
from pathlib import Path

import pytest
import run_docs
from fences import FenceError, blocks_of

PAGE = Path("page.md")


def blocks(text: str) -> list[tuple[int, str, str, str | None]]:
    return [(each.line, each.language, each.code, each.reason) for each in blocks_of(PAGE, text)]


def test_bash_and_python_blocks_are_found_with_their_lines():
    text = "# Title\n\n```bash\necho 1\n```\n\n```python\nx = 1\n```\n\n```text\nno\n```\n"
    assert blocks(text) == [(3, "bash", "echo 1\n", None), (7, "python", "x = 1\n", None)]


def test_block_in_a_list_item_loses_its_indent():
    assert blocks("- item\n\n  ```python\n  if True:\n      x = 1\n  ```\n") == [
        (3, "python", "if True:\n    x = 1\n", None)
    ]


def test_fence_inside_a_longer_fence_is_text():
    assert blocks("````markdown\n```bash\nexit 1\n```\n````\n") == []


def test_comment_above_gives_the_reason_not_to_run():
    text = "<!-- not-run: needs a GPU -->\n\n```bash\nexit 1\n```\n\n```bash\ntrue\n```\n"
    assert [reason for *_, reason in blocks(text)] == ["needs a GPU", None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```bash\necho\n", "page.md:1: the fence is never closed"),
        ("```sh\necho\n```\n", "page.md:1: fence language 'sh' would not be run. Write 'bash'"),
        ("```py\nx\n```\n", "page.md:1: fence language 'py' would not be run. Write 'python'"),
        ("```bash\nuv sync\n```\n", "page.md:1: `uv sync` would change the environment"),
        ("```bash\npip install x\n```\n", "page.md:1: `pip install` would change the environment"),
        ("<!-- not-run: -->\n```bash\nx\n```\n", "page.md:2: not-run gives no reason"),
    ],
)
def test_fence_that_cannot_be_run_as_it_stands_is_an_error(text, message):
    with pytest.raises(FenceError, match=message):
        blocks_of(PAGE, text)


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(run_docs, "ROOT", tmp_path)
    return tmp_path


def test_blocks_of_a_page_run_in_order_in_one_scratch_copy(root, capsys):
    (root / "data.txt").write_text("kept\n")
    (root / "page.md").write_text(
        "```bash\ntest $(cat data.txt) = kept\necho new > data.txt\n```\n"
        "```python\nassert open('data.txt').read() == 'new\\n'\n```\n"
    )
    assert run_docs.run_page(root / "page.md")
    assert (root / "data.txt").read_text() == "kept\n"
    assert capsys.readouterr().out.count("ok ") == 2


def test_failing_block_is_reported_with_its_output_and_the_rest_still_runs(root, capsys):
    page = root / "page.md"
    page.write_text("```bash\necho before; false; echo after\n```\n```bash\ntrue\n```\n")
    assert not run_docs.run_page(page)
    output = capsys.readouterr().out
    assert "page.md:1 bash (exit code 1)\n    before" in output
    assert "after" not in output
    assert "page.md:4 bash" in output


def test_each_python_block_has_a_fresh_interpreter(root):
    page = root / "page.md"
    page.write_text("```python\nx = 1\n```\n```python\nassert 'x' not in globals()\n```\n")
    assert run_docs.run_page(page)


@pytest.mark.parametrize(("shown", "passed"), [("2", True), ("3", False)])
def test_interpreter_session_is_compared_with_what_it_shows(root, shown, passed):
    page = root / "page.md"
    page.write_text(f"```python\n>>> 1 + 1\n{shown}\n```\n")
    assert run_docs.run_page(page) is passed


def test_block_not_run_is_reported_with_its_reason(root, capsys):
    (root / "page.md").write_text("<!-- not-run: takes hours -->\n```bash\nfalse\n```\n")
    assert run_docs.run_page(root / "page.md")
    assert "not run page.md:2 bash: takes hours" in capsys.readouterr().out


def test_block_over_the_limit_is_ended_with_its_children(root, capsys, monkeypatch):
    monkeypatch.setattr(run_docs, "LIMIT_S", 0.5)
    (root / "page.md").write_text("```bash\nsleep 60 & wait\n```\n")
    assert not run_docs.run_page(root / "page.md")
    assert "ended after 0.5 s" in capsys.readouterr().out


def test_example_runs_outside_the_repository(root):
    example = root / "example.py"
    example.write_text("import os\nassert os.listdir() == []\n")
    assert run_docs.run_example(example)


def test_command_runs_all_pages_and_counts_failures(root, capsys):
    (root / "README.md").write_text("```bash\ntrue\n```\n")
    (root / "docs").mkdir()
    (root / "docs" / "page.md").write_text("```bash\nfalse\n```\n")
    assert run_docs.main(["--fresh"]) == 1
    output = capsys.readouterr().out
    assert output.endswith("2 pages and examples, 1 failed\n")
    assert run_docs.main(["--fresh", str(root / "README.md")]) == 0
    assert run_docs.main([str(root / "gone.md")]) == 2


def test_pages_with_the_most_commands_start_first(root):
    pages = {
        "one": "```python\n1\n```\n",
        "two": "```bash\na\nb\n```\n",
        "none": "",
        "bad": "```sh\n",
    }
    for name, text in pages.items():
        (root / f"{name}.md").write_text(text)
    found = sorted(pages, key=lambda name: -run_docs.length(root / f"{name}.md"))
    assert found[:2] == ["two", "one"]


def test_programs_of_a_folder_go_before_those_of_this_environment(root, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "python").write_text("#!/bin/sh\necho the stand-in of $1\nexit 1\n")
    (own / "python").chmod(0o700)
    (root / "page.md").write_text("```python\npass\n```\n")
    assert run_docs.run_page(root / "page.md")
    assert not run_docs.run_page(root / "page.md", own)


def test_bash_blocks_find_the_programs_of_this_environment(root):
    (root / "page.md").write_text(f"```bash\ntest $(command -v python) -ef {sys.executable}\n```\n")
    assert run_docs.run_page(root / "page.md")


def test_uv_in_a_block_uses_this_environment_unchanged(root):
    (root / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "0"\n')
    (root / "page.md").write_text("```bash\nuv run python -c 'import pytest'\n```\n")
    before = subprocess.run(["uv", "--version"], capture_output=True).returncode
    if before:
        pytest.skip("uv is not on PATH")
    assert run_docs.run_page(root / "page.md")
    assert not (root / ".venv").exists()
