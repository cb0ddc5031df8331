"""Documents: the files that are read, their order, and the names of bad records."""

import gc
import json
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_data import DataError, DataFileError, Document, read_documents, standard_library_sources
from mt_data.documents import records as records_module


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=8),
    ascii_only=st.booleans(),
    bom=st.booleans(),
    line_end=st.sampled_from(["\n", "\r\n", "\n\n"]),
)
def test_json_lines_come_back(tmp_path_factory, texts, ascii_only, bom, line_end):
    path = tmp_path_factory.getbasetemp() / "a.jsonl"
    lines = [json.dumps({"id": 1, "text": t}, ensure_ascii=ascii_only) + line_end for t in texts]
    path.write_bytes(b"\xef\xbb\xbf" * bom + "".join(lines).encode())
    documents = list(read_documents(path))
    assert [document.text for document in documents] == texts
    step = 2 if line_end == "\n\n" else 1
    assert [document.line for document in documents] == [1 + step * i for i in range(len(texts))]
    assert all(document.path == str(path) for document in documents)


BAD_LINES = [
    (b"{", "not valid JSON: Expecting property name enclosed in double quotes at character 2"),
    (b"nope", "not valid JSON: Expecting value at character 1"),
    (b'{"text": "a"} x', "not valid JSON: Extra data at character 15"),
    (b'{"text": "a\x00"}', "not valid JSON: Invalid control character"),
    (b'{"text": "\xff"}', "invalid UTF-8 at byte 10 (0xff): invalid start byte"),
    (b'{"text": "\xe9', "invalid UTF-8 at byte 10 (0xe9)"),
    (b'{"body": "a", "id": 1}', "no key 'text'; the object has 'body', 'id'"),
    (b"{}", "no key 'text'; the object has none"),
    (b'{"text": 5}', "'text' must be a string, found int"),
    (b'{"text": null}', "'text' must be a string, found NoneType"),
    (b'["text"]', "expected a JSON object, found list"),
    (b'{"text": "a", "text": "b"}', "the key 'text' occurs twice"),
    (b'{"text": "a", "x": {"k": 1, "k": 2}}', "the key 'k' occurs twice"),
    (b'{"text": "a", "score": NaN}', "NaN is not JSON"),
    (b'{"text": "\\ud800"}', "'text' has a lone surrogate at character 0"),
    (b"[" * 100_000, "not valid JSON"),
    (b'{"x": ' + b"9" * 5000 + b"}", "not valid JSON: Exceeds the limit"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_bad_line_is_named_with_its_reason(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    documents = read_documents(path)
    assert next(documents).text == "good"
    with pytest.raises(DataFileError) as error:
        next(documents)
    assert str(error.value).startswith(f"{path}:2: ")
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_deep_json_runs_no_finalizer_without_room_for_its_calls(tmp_path, monkeypatch, name):
    def finalize(*_, calls=4):
        return calls and finalize(calls=calls - 1)

    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    (tmp_path / name).write_text('{"text":' * 100_000)
    threshold = gc.get_threshold()
    gc.callbacks.append(finalize)
    gc.set_threshold(1)
    try:
        with pytest.raises(DataFileError, match="not valid JSON"):
            list(read_documents(tmp_path / name))
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(finalize)
    assert not ignored


def test_bad_lines_are_skipped_and_counted_only_when_asked(tmp_path):
    path = tmp_path / "a.jsonl"
    good = b'{"text": "good"}'
    path.write_bytes(b"\n".join(part for line, _ in BAD_LINES for part in (line, good)))
    skipped: list[DataFileError] = []
    documents = list(read_documents(path, on_error=skipped.append))
    assert len(documents) == len(skipped) == len(BAD_LINES)
    assert [error.path for error in skipped] == [
        f"{path}:{2 * n + 1}" for n in range(len(BAD_LINES))
    ]


def test_line_length_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(records_module, "MAX_LINE", 100)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "' + "x" * 200)
    with pytest.raises(DataFileError, match=r"a\.jsonl:1: the line is longer than 100 bytes"):
        list(read_documents(path))


def test_other_key_can_be_read(tmp_path):
    path = tmp_path / "a.ndjson"
    path.write_text('{"body": "x", "text": "y"}')
    assert [d.text for d in read_documents(path, key="body")] == ["x"]


def test_replacing_marks_bytes_that_are_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ok \xff")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "\xff\\ud800"}')
    texts = [d.text for d in read_documents(tmp_path, encoding_errors="replace")]
    assert texts[0] == "ok \ufffd"
    assert texts[1][0] == "\ufffd"
    texts[1].encode()
    with pytest.raises(DataFileError, match=r"^a\.txt: invalid UTF-8 at byte 3 .0xff."):
        list(read_documents(tmp_path))
    with pytest.raises(DataError, match="choose one of strict, replace"):
        read_documents(tmp_path, encoding_errors="ignore")


def test_text_file_is_one_document_kept_as_it_is(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\0\n")
    assert list(read_documents(path)) == [Document(path=str(path), text="one\r\ntwo\0\n")]


def test_folder_is_read_in_order_of_relative_names(tmp_path):
    for name in ("b.py", "a/z.py", "a/b/c.py", "a.txt", "Z.py", "data.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"text": "line"}\n' if name.endswith("jsonl") else name)
    documents = list(read_documents(tmp_path))
    names = ["Z.py", "a.txt", "a/b/c.py", "a/z.py", "b.py", "data.jsonl"]
    assert [d.path for d in documents] == names
    assert documents[0].text == "Z.py"
    assert documents[-1] == Document(path="data.jsonl", text="line", line=1)
    assert [d.path for d in read_documents(tmp_path, glob="**/*.py")] == [
        n for n in names if n.endswith(".py")
    ]


def test_list_of_files_is_read_in_its_order(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(name)
    files = [tmp_path / "b", tmp_path / "a"]
    assert [d.text for d in read_documents(files)] == ["b", "a"]


def test_missing_source_is_an_error_at_the_call(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing: no such file or folder"):
        read_documents(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"no file in this folder matches the glob '\*\.md'"):
        read_documents(tmp_path, glob="*.md")


@pytest.mark.parametrize("glob", ["", ".", "/", "/abs/*", "**.py", "a/b**/*.py", "***"])
def test_a_glob_that_is_none_says_what_is_one(tmp_path, glob):
    (tmp_path / "a.py").write_text("text")
    with pytest.raises(DataError) as error:
        read_documents(tmp_path, glob=glob)
    assert str(error.value) == (
        f"glob {glob!r} does not select files in a folder; use a relative pattern with each ** "
        "alone between slashes, such as '**/*.py'"
    )


def test_standard_library_sources_are_text_without_tests_or_copies():
    files = standard_library_sources()
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [file.relative_to(root).as_posix() for file in files]
    assert names == sorted(names)
    assert {"json/decoder.py", "asyncio/events.py", "argparse.py"} <= set(names)
    assert not [n for n in names if "site-packages" in n or "/test/" in n or n.startswith("test/")]
    contents = [file.read_bytes() for file in files]
    assert len(set(contents)) == len(contents)
    for content in contents:
        content.decode()
    assert 400 < len(files) < 1000
    assert 7e6 < sum(map(len, contents)) < 16e6
