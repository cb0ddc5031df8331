"""Bytecode is shared between environments, and the import walk finds what a wheel lacks."""

import importlib.util
import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest
import share_bytecode
import walk_imports

SITE = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


@pytest.fixture
def venvs(tmp_path):
    """Two environments with the same hard-linked module; the first has its bytecode."""
    first, second = (tmp_path / name / SITE / "pkg" for name in ("first", "second"))
    for folder in (first, second):
        folder.mkdir(parents=True)
    (first / "module.py").write_text("VALUE = 1\ndef f():\n    return f.__code__.co_filename\n")
    os.link(first / "module.py", second / "module.py")
    py_compile.compile(str(first / "module.py"))
    return tmp_path / "first", tmp_path / "second"


def cached(venv: Path) -> Path:
    return Path(importlib.util.cache_from_source(str(venv / SITE / "pkg" / "module.py")))


def test_shared_bytecode_is_what_python_loads_under_its_own_file_name(venvs):
    first, second = venvs
    assert share_bytecode.main([str(first), str(second)]) == 0
    assert cached(second).samefile(cached(first))
    code = "import module; print(module.f())"
    shown = subprocess.run(
        [sys.executable, "-v", "-c", code],
        cwd=second / SITE / "pkg",
        capture_output=True,
        text=True,
    )
    assert shown.stdout.strip() == str(second / SITE / "pkg" / "module.py")
    assert f"{cached(second)} matches" in shown.stderr


def test_bytecode_of_a_package_that_the_target_lacks_is_left_out(venvs):
    first, second = venvs
    (first / SITE / "other" / "__pycache__").mkdir(parents=True)
    (first / SITE / "other" / "__pycache__" / "m.pyc").write_bytes(b"")
    share_bytecode.share(first / SITE, second / SITE)
    assert not (second / SITE / "other").exists()


def test_newer_bytecode_replaces_older_and_not_the_reverse(venvs):
    first, second = venvs
    share_bytecode.share(first / SITE, second / SITE)
    cached(second).unlink()
    cached(second).write_bytes(b"older")
    os.utime(cached(second), (1, 1))
    assert share_bytecode.share(second / SITE, first / SITE) == 0
    assert share_bytecode.share(first / SITE, second / SITE) == 1
    assert cached(second).samefile(cached(first))


def test_bytecode_is_copied_where_links_are_not_possible(venvs, monkeypatch):
    def refuse(*_):
        raise OSError("no hard links here")

    first, second = venvs
    monkeypatch.setattr(os, "link", refuse)
    assert share_bytecode.share(first / SITE, second / SITE) == 1
    assert cached(second).read_bytes() == cached(first).read_bytes()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package in an environment of its own, importable here."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)

    def install(name, **modules):
        (tmp_path / name).mkdir()
        for module, text in {"__init__": "", **modules}.items():
            (tmp_path / name / f"{module}.py").write_text(text)
        (tmp_path / name / "py.typed").touch()
        importlib.invalidate_caches()
        return tmp_path / name

    yield install
    for module in set(sys.modules) - before:
        del sys.modules[module]


def test_walk_imports_every_module_but_the_program(installed):
    installed("walked_sound", core="VALUE = 1", __main__="raise SystemExit(3)")
    assert walk_imports.walk("walked_sound") == []
    assert "walked_sound.core" in sys.modules


def test_walk_names_the_module_and_the_line_that_fails(installed):
    folder = installed("walked_broken", core="\nimport not_installed_anywhere")
    assert walk_imports.walk("walked_broken") == [
        "walked_broken.core: ModuleNotFoundError: No module named 'not_installed_anywhere' "
        f"({folder / 'core.py'}:2)"
    ]


def test_walk_refuses_a_package_from_outside_the_environment(installed, monkeypatch, tmp_path):
    folder = installed("walked_outside")
    (folder / "py.typed").unlink()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "elsewhere"))
    assert walk_imports.walk("walked_outside") == [
        f"walked_outside: imported from {folder}, which is not in the environment "
        f"{tmp_path / 'elsewhere'}",
        "walked_outside: the installed package has no py.typed",
    ]


def test_walk_reports_a_package_that_is_not_installed(capsys):
    assert walk_imports.main(["walked_nowhere"]) == 1
    assert "walked_nowhere: ModuleNotFoundError" in capsys.readouterr().out


def test_walk_leaves_the_folder_of_an_extra_out(installed, tmp_path):
    folder = installed("walked_extra")
    (folder / "fast").mkdir()
    (folder / "fast/__init__.py").touch()
    (folder / "fast/core.py").write_text("import not_installed_anywhere")
    (tmp_path / "walked_extra-1.dist-info").mkdir()
    lines = "Metadata-Version: 2.1\nName: walked-extra\nVersion: 1\nProvides-Extra: fast\n"
    (tmp_path / "walked_extra-1.dist-info/METADATA").write_text(lines)
    assert walk_imports.walk("walked_extra") == []
