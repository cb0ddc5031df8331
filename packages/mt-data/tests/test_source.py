"""Where documents come from: formats, compression, folders, globs, standard input."""

import bz2
import gzip
import io
import json
import lzma
import os
import sys

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_data import DataError, DataFileError, read_documents
from mt_data.documents import reader as reader_module
from mt_data.documents import records as records_module
from mt_data.documents.source import _matches
from mt_files import MissingExtraError

TEXTS = ["one\n", "", 'naïve 日本 "quoted" \\ back', "x" * 300, "[{", "}]"]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
COMPRESS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: zstandard.compress(data[:40]) + zstandard.compress(data[40:]),
}


def texts(source, **options):
    return [document.text for document in read_documents(source, **options)]


@pytest.mark.parametrize("ending", COMPRESS)
def test_compressed_files_give_their_content(tmp_path, ending):
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(COMPRESS[ending](LINES))
    assert texts(path) == TEXTS
    other = tmp_path / f"b.TXT{ending.upper()}"
    other.write_bytes(COMPRESS[ending](b"plain"))
    assert texts(other) == ["plain"]


@pytest.mark.parametrize("ending", COMPRESS)
def test_damaged_compression_is_named(tmp_path, ending):
    path = tmp_path / f"a.jsonl{ending}"
    content = COMPRESS[ending](LINES * 50)
    for damaged in (content[: len(content) // 2], b"no such thing", content[:20] + b"\0" * 20):
        path.write_bytes(damaged)
        with pytest.raises(DataFileError, match=r"a\.jsonl"):
            texts(path)
    skipped = []
    assert texts([path], on_error=skipped.append) is not None
    assert len(skipped) >= 1


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_json_arrays_and_objects_in_a_row_are_documents(tmp_path, monkeypatch, indent, chunk):
    monkeypatch.setattr(records_module, "_CHUNK", chunk)
    records = [{"id": n, "text": text} for n, text in enumerate(TEXTS)]
    (tmp_path / "array.json").write_text(json.dumps(records, indent=indent, ensure_ascii=False))
    (tmp_path / "lines.json").write_bytes(b"\xef\xbb\xbf" + LINES)
    in_a_row = "\n".join(json.dumps(record, indent=indent) for record in records)
    (tmp_path / "row.json").write_text(in_a_row)
    (tmp_path / "one.json").write_text(json.dumps(records[3], indent=indent))
    (tmp_path / "none.json").write_text(" [ ] \n")
    (tmp_path / "empty.json").write_text("")
    for name in ("array", "lines", "row"):
        documents = list(read_documents(tmp_path / f"{name}.json"))
        assert [document.text for document in documents] == TEXTS
        assert [document.line for document in documents] == [1, 2, 3, 4, 5, 6]
    assert texts(tmp_path / "one.json") == [TEXTS[3]]
    assert texts(tmp_path / "none.json") == texts(tmp_path / "empty.json") == []


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=6),
    chunk=st.integers(1, 20),
    ascii_only=st.booleans(),
)
def test_json_values_are_read_across_any_cut(tmp_path_factory, values, chunk, ascii_only):
    path = tmp_path_factory.getbasetemp() / "a.json"
    records = [{"text": value, "number": -1.5e-7} for value in values]
    path.write_text(json.dumps(records, ensure_ascii=ascii_only))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records_module, "_CHUNK", chunk)
        assert texts(path) == values


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "a"}', "the array does not end"),
        ('[{"text": "a"} {"text": "b"}]', "expecting ',' between"),
        ('[{"text": "a"}] x', "something follows the array"),
        ('[{"text": "a"},]', "Expecting value"),
        ('{"text": "a"', "Expecting ',' delimiter"),
        ('{"text": "a', "Unterminated string"),
        ('{"text": "a"}, {}', "Expecting value"),
        ("{" * 100, "Expecting property name"),
        ("[" * 100_000, "not valid JSON"),
        ('{"text": "a", "text": "b"}', "the key 'text' occurs twice"),
        ('[{"text": NaN}]', "NaN is not JSON"),
    ],
)
def test_bad_json_file_is_named(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(DataFileError) as error:
        texts(path)
    assert str(error.value).startswith(f"{path}: not valid JSON: ")
    assert message in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("content", "message"),
    [("[1]", ":1: expected a JSON object, found int"), ('[{"a": 1}]', ":1: no key 'text'")],
)
def test_bad_record_is_named_by_its_number(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(DataFileError, match=message):
        texts(path)


def parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def test_parquet_gives_a_column(tmp_path):
    parquet(tmp_path / "a.parquet", text=TEXTS, id=list(range(len(TEXTS))))
    documents = list(read_documents(tmp_path / "a.parquet"))
    assert [document.text for document in documents] == TEXTS
    assert [document.line for document in documents] == [1, 2, 3, 4, 5, 6]
    parquet(tmp_path / "b.parquet", body=[text.encode() for text in TEXTS])
    assert texts(tmp_path / "b.parquet", key="body") == TEXTS


def test_bad_parquet_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    parquet(path, body=["x"], id=[1])
    with pytest.raises(DataFileError, match="no column 'text'; it has 'body', 'id'"):
        texts(path)
    with pytest.raises(DataFileError, match=r"a\.parquet:1: 'id' must be a string, found int"):
        texts(path, key="id")
    parquet(path, text=["a", None, "b"])
    skipped = []
    assert texts(path, on_error=skipped.append) == ["a", "b"]
    assert "a.parquet:2: 'text' must be a string, found NoneType" in str(skipped[0])
    content = bytearray(path.read_bytes())
    for damaged in (b"", b"PAR1", content[: len(content) // 2], content[4:]):
        path.write_bytes(damaged)
        with pytest.raises(DataFileError, match="cannot be read as parquet"):
            texts(path)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("a.parquet", "pyarrow.parquet"),
        ("a.arrow", "pyarrow.ipc"),
        ("a.jsonl.zst", "zstandard"),
    ],
)
def test_missing_library_says_how_to_install_it(tmp_path, monkeypatch, name, module):
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=f"needs: pip install {module.partition('.')[0]}"):
        texts(tmp_path / name)


def test_standard_input_is_json_lines_unless_said_otherwise(monkeypatch):
    for options, content, expected in (
        ({}, LINES, TEXTS),
        ({"format": "text"}, b"{plain", ["{plain"]),
        ({"format": "json"}, b'[{"text": "a"}]', ["a"]),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        reader = read_documents("-", **options)
        assert reader.total_bytes is None
        assert [document.text for document in reader] == expected


def test_several_sources_and_globs_are_read_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("b", "a"):
        os.mkdir(folder)
        for name in ("2.txt", "1.txt"):
            with open(f"{folder}/{name}", "w") as file:
                file.write(f"{folder}{name[0]}")
    documents = list(read_documents(["b", "a/2.txt", "a"]))
    assert [document.text for document in documents] == ["b1", "b2", "a2", "a1", "a2"]
    assert [document.path for document in documents][:3] == ["b/1.txt", "b/2.txt", "a/2.txt"]
    assert texts("*/1.txt") == ["a1", "b1"]
    assert texts("**/2.txt") == ["a2", "b2"]
    with open("[x].txt", "w") as file:
        file.write("literal")
    assert texts("[x].txt") == ["literal"]
    with pytest.raises(DataError, match=r"no file matches '\*\.md'"):
        read_documents("*.md")
    with pytest.raises(DataError, match="format is 'csv'; choose one of auto, jsonl"):
        read_documents("a", format="csv")


def test_links_out_of_a_folder_and_what_is_no_file_are_refused(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (tmp_path / "secret").write_text("secret")
    (folder / "a.txt").write_text("a")
    (folder / "inside").symlink_to("a.txt")
    assert texts(folder) == ["a", "a"]
    (folder / "out").symlink_to("../secret")
    with pytest.raises(DataFileError, match=r"^out: leads out of .*corpus"):
        texts(folder)
    skipped = []
    assert texts(folder, on_error=skipped.append) == ["a", "a"]
    assert len(skipped) == 1
    with pytest.raises(DataError, match="does not select files in a folder"):
        texts(folder, glob="../*")
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/zero"):
        with pytest.raises(DataFileError, match="a regular file is needed"):
            texts(path)


def test_progress_counts_bytes_on_disk(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES * 10_000)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES * 10_000))
    reader = read_documents(tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert (reader.total_bytes, reader.read_bytes) == (size, 0)
    seen = []
    for _ in reader:
        seen.append(reader.read_bytes)
    assert seen == sorted(seen)
    assert len(set(seen)) > 20
    assert reader.read_bytes == size


def test_messages_are_bounded(tmp_path):
    path = tmp_path / "a.jsonl"
    for record in (
        {"k" * 10**6: 1},
        {f"key{n}": 1 for n in range(10**5)},
        {"text": [1] * 10**6},
    ):
        path.write_text(json.dumps(record))
        with pytest.raises(DataFileError) as error:
            texts(path)
        assert len(str(error.value)) < 4000
    path.write_text('{"' + "k" * 10**6 + '": 1, "' + "k" * 10**6 + '": 2}')
    with pytest.raises(DataFileError, match="occurs twice") as error:
        texts(path)
    assert len(str(error.value)) < 4000


def test_one_document_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(reader_module, "MAX_TEXT", 100)
    monkeypatch.setattr(records_module, "MAX_LINE", 100)
    monkeypatch.setattr(records_module, "_CHUNK", 50)
    (tmp_path / "a.txt").write_text("x" * 101)
    with pytest.raises(DataFileError, match="is one document of more than 100 bytes"):
        texts(tmp_path / "a.txt")
    (tmp_path / "a.json").write_text(json.dumps({"text": "x" * 1000}))
    with pytest.raises(DataFileError, match="a value is longer than 100 characters"):
        texts(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("path", "glob", "fits"),
    [
        ("a.txt", "**/*", True),
        ("b/c/a.txt", "**/*.txt", True),
        ("b/c/a.txt", "*.txt", False),
        ("b/a.txt", "?/a.*", True),
        ("b/c/a.txt", "b/**/a.txt", True),
    ],
)
def test_globs_are_those_of_folders(path, glob, fits):
    assert _matches(path.split("/"), glob.split("/")) is fits
