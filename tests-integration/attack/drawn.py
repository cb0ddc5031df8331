"""Indexes and records drawn by the thousand, and single bits of files that a run keeps of data."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import signal
import struct
import time
import traceback
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from world import BadError, Row, World, demand, flip_bit

NUMBER = 1000  # files of a case
MOST_SAID = 4000
VALUES = (-(2**63), -(2**31), -1, 0, 1, 2, 9, 2**31 - 1, 2**31, 2**62, 2**63 - 1)
TEXTS = ("old red", "", "é🎉", "\0", "x" * 3000, "\u2028", '"', "\\")
ODD = (None, 7, [], {}, ["old"], {"text": "old"}, True, 1e400, "\ud800")


def named(name: str, action: Callable[[], object]) -> bool:
    """Return whether an action is refused, by a short message that names a file."""
    from mt_data import DataError
    from mt_files import FileError

    try:
        action()
    except (DataError, FileError) as error:
        demand(name in str(error), f"{name} is not named: {error!s:.300}")
        demand(len(str(error)) < MOST_SAID, f"a message of {len(str(error))}: {error!s:.300}")
        return True
    return False


def drawn_indexes(world: World, rng: random.Random, scratch: Path) -> None:
    """Read indexes of which some places were exchanged: refused, or every sequence is there."""
    import numpy as np
    from mt_data import IndexedDataset, IndexedWriter

    prefix = scratch / "set"
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(rng.randrange(1, 9)):
            writer.add_document(np.arange(rng.randrange(1, 6)))
    (scratch / "set.json").unlink()
    index, whole = scratch / "set.idx", (scratch / "set.idx").read_bytes()

    def read() -> None:
        with IndexedDataset(prefix) as dataset:
            tokens = sum(len(dataset[number]) for number in range(len(dataset)))
            demand(tokens == dataset.num_tokens, "tokens of an index are lost")
            for number in range(dataset.num_documents):
                dataset.document(number)

    for _ in range(NUMBER):
        content = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 4))):
            _spoil(content, rng)
        index.write_bytes(content)
        named("set", read)


def _spoil(content: bytearray, rng: random.Random) -> None:
    """Exchange, add or remove something in an index."""
    at, how = rng.randrange(len(content) or 1), rng.randrange(6)
    if how == 0:
        del content[at:]
    elif how == 1:
        content[at:at] = rng.randbytes(rng.randrange(1, 20))
    elif how == 2 and content:
        content[at] ^= 1 << rng.randrange(8)
    elif len(content) > 34:
        form, step = ("<q", 8) if how < 5 else ("<i", 4)
        place = rng.choice((18, 26, 34 + step * rng.randrange((len(content) - 34) // step + 1)))
        value = rng.choice(VALUES)
        limit = 1 << (8 * step - 1)
        if place + step <= len(content):
            struct.pack_into(form, content, place, (value + limit) % (2 * limit) - limit)


def drawn_records(world: World, rng: random.Random, scratch: Path) -> None:
    """Read small files of drawn records, some damaged: texts come, or the file is named."""
    from mt_data import read_documents

    tables = world.once("drawn-tables", _tables)
    makers = (_lines, _lines, _json, _table, _table)
    for number in range(NUMBER):
        name, content = rng.choice(makers)(rng, tables)
        if rng.random() < 0.2:
            content, name = gzip.compress(content, 1), f"{name}.gz"
        if rng.random() < 0.5 and content:
            at = rng.randrange(len(content))
            flipped = bytes([content[at] ^ 1 << rng.randrange(8)])
            content = content[:at] + (flipped + content[at + 1 :] if rng.random() < 0.7 else b"")
        path = scratch / f"{number}-{name}"
        path.write_bytes(content)

        def read(path: Path = path) -> None:
            for document in islice(read_documents(path), 3000):
                demand(isinstance(document.text, str), f"a text is {type(document.text)}")

        named(path.name, read)
        path.unlink()


def _lines(rng: random.Random, _: Path) -> tuple[str, bytes]:
    """Return JSON lines, of which some have no text."""
    lines = [json.dumps(_record(rng)) for _ in range(rng.randrange(6))]
    return "a.jsonl", "\n".join(lines).encode()


def _json(rng: random.Random, _: Path) -> tuple[str, bytes]:
    """Return a JSON file of records, or of deep lists."""
    if rng.random() < 0.1:
        return "a.json", rng.choice((b"[", b'{"text":')) * rng.choice((10, 10_000, 100_000))
    records = [_record(rng) for _ in range(rng.randrange(6))]
    return "a.json", json.dumps(records).encode()


def _record(rng: random.Random) -> object:
    if rng.random() < 0.1:
        return rng.choice(ODD)
    text = rng.choice(ODD) if rng.random() < 0.1 else rng.choice(TEXTS)
    return {"id": 3, "text": text} if rng.random() < 0.9 else {"content": text}


def _table(rng: random.Random, tables: Path) -> tuple[str, bytes]:
    """Return one of the tables."""
    path = rng.choice(sorted(tables.iterdir()))
    return path.name, path.read_bytes()


def _tables(folder: Path) -> None:
    """Write tables, one of them with a text that is stored once and occurs in many rows."""
    import pyarrow.ipc
    import pyarrow.parquet

    folder.mkdir()
    small = pyarrow.table({"text": ["old red", "newish blue é" * 9] * 20, "id": [1, 2] * 20})
    many = pyarrow.table({"text": ["old" * 1000] * 3000})
    for name, table in (("small", small), ("many", many)):
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet", row_group_size=1500)
    with (
        pyarrow.OSFile(str(folder / "small.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, small.schema) as writer,
    ):
        writer.write_table(small, max_chunksize=30)


def bomb(world: World, rng: random.Random, scratch: Path) -> None:
    """Read a small parquet file of which a few rows are more than the memory: named, or texts."""
    import pyarrow
    import pyarrow.parquet
    from mt_data import read_documents

    text = pyarrow.array(["x" * rng.choice((1 << 20, 1 << 24, 1 << 26))])
    numbers = pyarrow.array([0] * rng.choice((10, 300, 5000)), pyarrow.int32())
    column = pyarrow.DictionaryArray.from_arrays(numbers, text)
    path = scratch / "bomb.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, compression="zstd")
    named("bomb", lambda: [len(each.text) for each in islice(read_documents(path), 5)])


def flipped_bits(world: World, rng: random.Random, scratch: Path) -> None:
    """Flip a bit of tokens, of a cached order and of a shard: whoever opens them names the file."""
    from mt_data import GPTDataset, IndexedDataset
    from mt_data.datasets import gpt

    gpt.SHARED_FROM = 1  # a small set has an order in a file too
    folder = Path(shutil.copytree(world.once("flips", _kept), scratch / "kept"))
    dataset = IndexedDataset(folder / "train")
    order = next((folder / "orders").glob("*-0.order"))
    flip_bit(order, rng)
    sample = GPTDataset(dataset, sequence_length=16, seed=3, order_folder=order.parent).sample
    flip_bit(folder / "train.bin", rng)
    shard = folder / rng.choice(("shard-00002.bin", "shard-00002.idx"))
    flip_bit(shard, rng)
    for path, action in (
        (order, lambda: sample(0)),
        (folder / "train.bin", dataset.verify),
        (shard, lambda: _shards(folder).open(1)),
    ):
        if not named(path.name, action):
            raise BadError(f"a flipped bit of {path.name} was not seen")


def _kept(folder: Path) -> None:
    """Make a set with an order in a file, and shards of a corpus."""
    from mt_data import GPTDataset, IndexedDataset, build_corpus, read_documents
    from mt_data.datasets import gpt
    from mt_tokenizer import train_tokenizer

    gpt.SHARED_FROM = 1
    folder.mkdir()
    texts = [f"old red {number} newish blue" * 3 for number in range(900)]
    lines = "".join(f"{json.dumps({'text': text})}\n" for text in texts)
    (folder / "texts.jsonl").write_text(lines)
    tokenizer = train_tokenizer(texts[:50], 300)
    tokenizer.save(folder / "tokenizer.json")
    build_corpus(read_documents(folder / "texts.jsonl"), folder / "train", tokenizer)
    dataset = IndexedDataset(folder / "train")
    GPTDataset(dataset, sequence_length=16, seed=3, order_folder=folder / "orders").sample(0)
    _shards(folder).build(folder / "tokenizer.json")


def changing_object(world: World, rng: random.Random, scratch: Path) -> None:
    """Exchange an object while its documents are read: all are of one version, or it is named."""
    from mt_data import read_documents
    from mt_data.documents import source
    from mt_files import ObjectStore, StoredObject, objects

    objects.BLOCK = 1 << 9
    store, ends = ObjectStore("memory://"), rng.choice((".jsonl", ".json", ".txt", ".jsonl.gz"))
    source.find_object = lambda _: StoredObject(store=store, info=store.head("a"))

    def put(version: int) -> None:
        lines = [
            json.dumps({"text": f"{version} {n} old red"}) for n in range(rng.randrange(1, 99))
        ]
        content = "\n".join(lines).encode()
        store.put("a", gzip.compress(content) if ends.endswith("gz") else content)

    refused, draws = 0, NUMBER // 4
    for _ in range(draws):
        put(0)
        documents, versions, at = read_documents(f"s3://bucket/a{ends}"), set(), rng.randrange(99)

        def read(documents=documents, versions=versions, at=at) -> None:
            for number, document in enumerate(documents):
                versions.update(re.findall(r"(\d) \d+ old red", document.text))
                if number == at:
                    put(1)

        if rng.random() < 0.2:
            put(1)
        refused += named("a", read)
        demand(versions in (set(), {"0"}), f"documents are of the versions {versions}")
    demand(0 < refused < draws, f"{refused} of {draws} changes were seen")


def two_builders(world: World, rng: random.Random, scratch: Path) -> None:
    """Let two processes build shards and an order in one folder, one killed perhaps: all fits."""
    from mt_data import GPTDataset, IndexedDataset
    from mt_data.datasets import gpt

    gpt.SHARED_FROM = 1
    whole = world.once("flips", _kept)
    folder = Path(shutil.copytree(whole, scratch / "kept"))
    shutil.rmtree(folder / "orders")
    for path in folder.glob("shard-*"):
        path.unlink()

    def work() -> None:
        dataset = IndexedDataset(folder / "train")
        GPTDataset(dataset, sequence_length=16, seed=3, order_folder=folder / "orders").sample(0)
        _shards(folder).build(folder / "tokenizer.json")

    def start() -> int:
        if (pid := os.fork()) == 0:
            try:
                work()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        return pid

    first, second = start(), start()
    kills = rng.random() < 0.5
    if kills:
        time.sleep(rng.uniform(0, 0.3))
        os.kill(first, signal.SIGKILL)
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (first, second)]
    demand(ends[1] == 0, f"the second builder ended with {ends[1]}")
    demand(ends[0] == 0 or kills, f"the first builder ended with {ends[0]}")
    work()
    for path in (*whole.glob("shard-*.*"), *whole.glob("orders/*.order")):
        own = folder / path.relative_to(whole)
        demand(own.read_bytes() == path.read_bytes(), f"{own.name} differs")


def _shards(folder: Path):
    from mt_data import HeldOut, ShardPlan, Shards

    source, rule = str(folder / "texts.jsonl"), HeldOut(fraction=0.2)
    plan = ShardPlan.of((source,), glob="*", shard_bytes=20_000, held_out=rule)
    return Shards(plan=plan, folder=folder)


ROWS = [
    Row(name="indexes drawn, 1,000 a case", attack=drawn_indexes, cases=100, sample=1),
    Row(name="files of records drawn, 1,000 a case", attack=drawn_records, cases=100, sample=1),
    Row(name="parquet files that are bombs", attack=bomb, cases=20, sample=1),
    Row(name="an object that changes, 250 a case", attack=changing_object, cases=40, sample=1),
    Row(name="two builders in one folder", attack=two_builders, cases=40, sample=1),
    Row(name="a bit of tokens, order and shard", attack=flipped_bits, cases=300, sample=2),
]
