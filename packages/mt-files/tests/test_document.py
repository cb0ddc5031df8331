"""YAML as plain values, and refused constructs."""

from __future__ import annotations

from pathlib import Path

import pytest
from mt_files import PlainText, SchemaError, parse_yaml, read_yaml


def test_scalars_stay_text_and_each_value_has_its_place(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("a: no\nb:\n  - {c: 010, d: '1'}\n")
    document = read_yaml(path)
    assert document.root == {"a": "no", "b": [{"c": "010", "d": "1"}]}
    inner = document.root["b"][0]
    assert isinstance(inner["c"], PlainText)
    assert not isinstance(inner["d"], PlainText)
    assert document.place("b[0].d") == f"{path}:3"
    assert document.place("b[0].unknown") == f"{path}:3"
    assert document.place("missing") == f"{path}:1"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a: &x 1", "anchors"),
        ("a: !!python/object 1", "tag"),
        ("a: 1\na: 2", "already set on line 1"),
        ("a: [", ":1: "),
        ("a:\n\tb: 1", "spaces only"),
        ("--- 1\n--- 2", "second document"),
        ("[" * 30, "nested deeper"),
        ("{[1]: 2}", "plain words"),
        ('"\\UFFFFFFFF"', "not valid YAML"),
    ],
)
def test_traps_of_yaml_are_errors_with_a_place(text: str, word: str) -> None:
    with pytest.raises(SchemaError, match=word) as caught:
        parse_yaml(text, "run.yaml")
    assert str(caught.value).startswith("run.yaml:")


def test_text_that_is_no_utf8_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(SchemaError, match=r"run\.yaml:2: .*UTF-8"):
        read_yaml(path)


def test_an_empty_document_is_none() -> None:
    assert parse_yaml("", "x").root is None
