"""The package stays small and light to import."""

import ast
import subprocess
import sys
from pathlib import Path

import mt_pipeline
import pytest

SOURCES = sorted(Path(mt_pipeline.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_functions_are_short_and_own_their_state(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        assert not isinstance(node, ast.Nonlocal | ast.Global)
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 80, node.name


def test_import_adds_few_modules_to_torch():
    code = (
        "import sys, torch; before = set(sys.modules); import mt_pipeline; "
        "new = set(sys.modules) - before; assert len(new) < 60, new; "
        "assert all(hasattr(mt_pipeline, name) for name in mt_pipeline.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
