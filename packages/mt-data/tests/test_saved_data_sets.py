"""Arrow, and folders that Hugging Face's `datasets` saved: the rows, in order, and no more."""

import gzip
import json
import random
import shutil
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard
from mt_data import DataFileError, read_documents
from mt_data.cli import main
from mt_data.documents.conversations import parse_conversation, read_lines

TEXTS = [f"text {number} naïve 日本\n" * (number % 4) for number in range(300)]
SAVED = Path(__file__).parent / "saved_by_datasets"
TALKS = [
    {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]},
    {
        "messages": [
            {"role": "user", "content": "three"},
            {"role": "assistant", "content": "four", "train": True},
        ],
        "tools": [{"type": "function"}],
    },
    {"messages": [{"role": "assistant", "content": None, "reasoning": "x"}]},
]


def stream(path, table, *, chunk=7, new=pyarrow.ipc.new_stream, **options):
    how = pyarrow.ipc.IpcWriteOptions(**options)
    with pyarrow.OSFile(str(path), "wb") as file, new(file, table.schema, options=how) as writer:
        writer.write_table(table, max_chunksize=chunk)


def saved(folder, texts=TEXTS, *, order=(1, 0), **state):
    """A data set of two files, as `save_to_disk` writes them, in a given order."""
    folder.mkdir(parents=True)
    half = len(texts) // 2
    for number, part in zip(order, (texts[:half], texts[half:]), strict=True):
        table = pyarrow.table({"id": list(range(len(part))), "text": part})
        stream(folder / f"data-0000{number}-of-00002.arrow", table)
    names = [{"filename": f"data-0000{number}-of-00002.arrow"} for number in order]
    (folder / "state.json").write_text(json.dumps({"_data_files": names, "_split": None, **state}))
    (folder / "dataset_info.json").write_text('{"features": {}}')
    return folder


def texts(source, **options):
    return [document.text for document in read_documents(source, **options)]


def test_a_folder_that_the_library_wrote_is_read():
    """The files were written by datasets 5.2.0, `DatasetDict.save_to_disk(..., num_shards=2)`."""
    found = [(d.path, d.line, d.text) for d in read_documents(SAVED / "train")]
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    numbers = [(name, line) for name in names for line in (1, 2, 3)]
    assert found == [(*at, f"text {n} ä") for n, at in enumerate(numbers)]
    with pytest.raises(DataFileError, match="name the folder of one of 'test', 'train'"):
        read_documents(SAVED)


def test_rows_come_in_the_order_of_the_state_and_no_other_file_is_read(tmp_path):
    folder = saved(tmp_path / "saved")
    stream(folder / "data-00002-of-00003.arrow", pyarrow.table({"text": ["of an older save"]}))
    assert texts(folder) == texts([folder]) == TEXTS
    (tmp_path / "other.txt").write_text("plain")
    (tmp_path / "state.json").write_text('{"text": "no state of a data set"}')
    assert texts(tmp_path) == ["plain", *TEXTS, "no state of a data set"]
    for path in folder.glob("data-0000[01]*"):
        path.with_name(f"{path.name}.zst").write_bytes(zstandard.compress(path.read_bytes()))
        path.unlink()
    assert texts(folder) == TEXTS


def test_a_split_is_named_unless_it_is_the_only_one(tmp_path):
    saved(tmp_path / "all" / "train")
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert texts(tmp_path / "all") == TEXTS
    saved(tmp_path / "all" / "test", TEXTS[:9])
    with pytest.raises(DataFileError, match="name the folder of one of 'test', 'train'"):
        texts(tmp_path)
    assert texts(tmp_path / "all" / "test") == TEXTS[:9]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"_indices_data_files": [{"filename": "indices.arrow"}]}, "flatten_indices"),
        ({"_data_files": 3}, "does not name files of rows"),
        ({"_data_files": [{"filename": "../x.arrow"}]}, "names '../x.arrow', which is not beside"),
        ({"_data_files": [{"filename": "state.json"}]}, "names 'state.json', which is not beside"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(tmp_path, state, message):
    (tmp_path / "x.arrow").touch()
    with pytest.raises(DataFileError, match=rf"state\.json: .*{message}"):
        read_documents(saved(tmp_path / "saved", **state))


def test_every_form_of_arrow_gives_its_texts(tmp_path):
    plain = pyarrow.table({"text": TEXTS, "id": list(range(len(TEXTS)))})
    coded = pyarrow.table({"text": pyarrow.array(TEXTS).dictionary_encode()})
    for name, table, options in (
        ("stream", plain, {}),
        ("file", plain, {"new": pyarrow.ipc.new_file}),
        ("compressed", plain, {"compression": "zstd"}),
        ("coded", coded, {}),
        ("large", plain.cast(pyarrow.schema({"text": "large_string", "id": "int64"})), {}),
        ("bytes", plain.cast(pyarrow.schema({"text": "binary", "id": "int64"})), {}),
    ):
        path = tmp_path / f"{name}.arrow"
        stream(path, table, **options)
        assert texts(path) == TEXTS, name
        assert [document.line for document in read_documents(path)][-1] == len(TEXTS)
    packed = tmp_path / "a.arrow.gz"
    packed.write_bytes(gzip.compress((tmp_path / "file.arrow").read_bytes()))
    assert texts(packed) == TEXTS
    with pytest.raises(
        DataFileError, match=r"stream\.arrow: no column 'body'; it has 'text', 'id'"
    ):
        texts(tmp_path / "stream.arrow", key="body")


def test_a_stream_is_read_batch_by_batch(tmp_path):
    path = tmp_path / "a.arrow"
    stream(path, pyarrow.table({"text": ["x" * 1000] * 5000}), chunk=100)
    reader = read_documents(path)
    next(reader)
    assert reader.read_bytes < path.stat().st_size / 10
    assert sum(1 for _ in reader) == 4999


def test_damage_is_named_and_leads_nowhere(tmp_path):
    """A flipped bit may change a text; it must not read other memory, or end the process."""
    path, draw = tmp_path / "a.arrow", random.Random(3)
    stream(path, pyarrow.table({"text": TEXTS}), chunk=50)
    whole = path.read_bytes()
    spoilt = [b"", b"ARROW1\0\0", whole[:3], whole[: len(whole) // 2], draw.randbytes(5000)]
    for _ in range(300):
        content = bytearray(whole)
        for bit in draw.sample(range(len(content) * 8), draw.choice([1, 1, 4])):
            content[bit // 8] ^= 1 << bit % 8
        spoilt.append(bytes(content))
    refused: list[DataFileError] = []
    for content in spoilt:
        path.write_bytes(content)
        assert all(isinstance(text, str) for text in texts([path], on_error=refused.append))
    assert len(refused) > 50
    assert all(error.path.startswith(str(path)) for error in refused)
    assert max(len(str(error)) for error in refused) < 1000


def test_conversations_of_tables_are_those_of_lines(tmp_path):
    lines = tmp_path / "talks.jsonl"
    lines.write_text("".join(json.dumps(talk) + "\n" for talk in TALKS))
    wanted = list(map(parsed, read_lines(lines)))
    rows = [{"id": b"x", "tools": None, **talk} for talk in TALKS]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "talks.parquet")
    stream(tmp_path / "talks.arrow", table, chunk=2)
    (tmp_path / "talks.json").write_text(json.dumps(TALKS, indent=1))
    for name in ("talks.parquet", "talks.arrow", "talks.json"):
        assert list(map(parsed, read_lines(tmp_path / name))) == wanted, name
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "README.md").write_text("about them")
    shutil.copy(lines, folder)
    shutil.copy(tmp_path / "talks.arrow", folder)
    assert list(map(parsed, read_lines(folder))) == wanted * 2
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"]}), tmp_path / "other.parquet")
    with pytest.raises(DataFileError, match=r"no column 'messages' or .*; it has 'text'"):
        list(read_lines(tmp_path / "other.parquet"))


def parsed(found):
    talk = parse_conversation(*found)
    return talk.messages, talk.tools


def test_a_saved_data_set_is_built(tmp_path, capsys):
    saved(tmp_path / "saved")
    source, out = str(tmp_path / "saved"), str(tmp_path / "c")
    with pytest.raises(SystemExit) as ended:
        main(["build", source, "--out", out, "--vocab-size", "300"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert f"{len([text for text in TEXTS if text])} documents" in said
    assert f"left out: {TEXTS.count('')} empty" in said
