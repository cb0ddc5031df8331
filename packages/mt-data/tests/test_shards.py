"""A corpus in shards: samples of blocks, built one after the other, read before all are there."""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from mt_data import (
    DataError,
    DataFileError,
    GPTDataset,
    HeldOut,
    IndexedDataset,
    Part,
    ShardedDataset,
    ShardPlan,
    Shards,
    build_corpus,
    build_shards,
    read_documents,
    shard_prefix,
)
from mt_tokenizer import load_tokenizer, train_tokenizer

WORDS = ["one", "two", "three", "four", "naïve", "日本"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Lines, texts, an empty file, and no newline at the end."""
    folder, draw = tmp_path_factory.mktemp("source") / "texts", random.Random(7)
    folder.mkdir()
    lines = [
        json.dumps({"text": f"{n} " + " ".join(draw.choices(WORDS, k=5))}, ensure_ascii=False)
        for n in range(1200)
    ]
    (folder / "a.jsonl").write_text("\n".join(lines[:700]), encoding="utf-8-sig")
    (folder / "b.jsonl").touch()
    (folder / "c.jsonl").write_text("\n\n".join(lines[700:]))
    for number in range(9):
        (folder / f"d{number}.txt").write_text(f"text {number}" * 40)
    train_tokenizer([" ".join(WORDS) * 4], 300).save(folder.parent / "tok.json")
    return folder


@pytest.fixture
def plan(source):
    rule = HeldOut(fraction=0.1, seed=1)
    return ShardPlan.of((str(source),), glob="**/*", shard_bytes=12_000, held_out=rule)


@pytest.mark.parametrize(("count", "blocks"), [(1, 3), (3, 16), (40, 50)])
def test_parts_of_drawn_blocks_hold_each_document_once(source, count, blocks):
    whole = sorted(document.text for document in read_documents(source))
    parts = [
        [
            each.text
            for each in read_documents(source, part=Part(number=n, count=count, blocks=blocks))
        ]
        for n in range(1, count + 1)
    ]
    assert sorted(text for part in parts for text in part) == whole
    if count == 3:  # and each is a sample of the whole: its documents lie all over it
        for part in parts:
            numbers = [int(text.split()[0]) for text in part if text[0].isdigit()]
            assert min(numbers) < 200
            assert max(numbers) > 1000


def test_a_bad_line_of_a_block_is_named_by_its_place(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "a"}\n' * 50 + "{\n" + '{"text": "a"}\n' * 50)
    with pytest.raises(DataFileError, match=r"bad\.jsonl, line \d+ from byte \d+ on: not valid"):
        list(read_documents(path, part=Part(number=1, count=1, blocks=8)))


def test_one_shard_has_the_samples_of_its_data_set(source, tmp_path):
    build_corpus(read_documents(source), tmp_path / "x", load_tokenizer(source.parent / "tok.json"))
    indexed = IndexedDataset(tmp_path / "x")
    plain = GPTDataset(indexed, sequence_length=30, seed=4)
    sharded = ShardedDataset(
        lambda _: indexed,
        GPTDataset,
        count=1,
        sequence_length=30,
        seed=4,
        identity=[],
        num_tokens=1,
    )
    for index in (0, 7, plain.samples_per_epoch, 3 * plain.samples_per_epoch + 1):
        np.testing.assert_array_equal(sharded.sample(index, 2, 9), plain.sample(index, 2, 9))
        ours, theirs = sharded.sample_documents(index), plain.sample_documents(index)
        np.testing.assert_array_equal(ours, theirs)


def test_an_epoch_has_each_sample_once_and_its_beginning_needs_the_first_shard(
    source, plan, tmp_path
):
    build_shards(plan, tmp_path, load_tokenizer(source.parent / "tok.json"))
    opened, indexed = [], {}

    def open_shard(shard):
        opened.append(shard)
        indexed[shard] = IndexedDataset(shard_prefix(tmp_path, shard))
        return indexed[shard]

    def samples():
        return ShardedDataset(
            open_shard,
            GPTDataset,
            count=plan.count,
            sequence_length=20,
            seed=2,
            identity=[],
            num_tokens=1,
        )

    some = samples()
    some.sample(0)
    assert opened == [0]
    sizes = [
        GPTDataset(IndexedDataset(shard_prefix(tmp_path, n)), sequence_length=20, seed=2)
        for n in range(plan.count)
    ]
    total = sum(each.samples_per_epoch for each in sizes)
    for epoch in range(3):
        expected = sorted(
            tuple(each.sample(epoch * each.samples_per_epoch + n))
            for each in sizes
            for n in range(each.samples_per_epoch)
        )
        found = [tuple(some.sample(epoch * total + n)) for n in range(total)]
        assert sorted(found) == expected
        again = samples()
        assert tuple(again.sample(epoch * total + 5)) == found[5]


def test_shards_too_short_for_a_sample_are_left_out(source, tmp_path):
    tokenizer = load_tokenizer(source.parent / "tok.json")
    for number, count in enumerate((2, 60, 0, 60)):
        part = Part(number=1, count=1, blocks=1)
        path = tmp_path / f"{number}.jsonl"
        path.write_text('{"text": "one"}\n' * count)
        build_corpus(read_documents(path, part=part), shard_prefix(tmp_path, number), tokenizer)

    def sharded(length):
        return ShardedDataset(
            lambda shard: IndexedDataset(shard_prefix(tmp_path, shard)),
            GPTDataset,
            count=4,
            sequence_length=length,
            seed=0,
            identity=[],
            num_tokens=1,
        )

    assert [sharded(20)._find(index)[0] for index in (0, 40)]
    with pytest.raises(DataError, match="none of 4 shards holds one sample"):
        sharded(10_000).sample(0)


def test_a_reader_waits_for_a_process_that_builds_the_same_bytes(source, plan, tmp_path):
    tokenizer = source.parent / "tok.json"
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    build_shards(plan, theirs, load_tokenizer(tokenizer))
    shards = Shards(plan=plan, folder=ours)
    with shards.building(tokenizer):
        last = shards.open(plan.count - 1)
    assert shards.num_built == plan.count > 3
    assert last.fingerprint == IndexedDataset(shard_prefix(theirs, plan.count - 1)).fingerprint
    for path in sorted(theirs.glob("shard-*.bin")):
        assert path.read_bytes() == (ours / path.name).read_bytes()


def test_a_document_that_can_not_be_read_ends_all_who_wait(source, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(f'{{"text": "one {n}"}}\n' for n in range(900)) + "{\n")
    rule = HeldOut(fraction=0.5)
    plan = ShardPlan.of((str(path),), glob="**/*", shard_bytes=6000, held_out=rule)
    starter, other = (Shards(plan=plan, folder=tmp_path) for _ in range(2))
    with starter.building(source.parent / "tok.json"):
        for each in (starter, other):
            with pytest.raises(DataError, match=r"bad\.jsonl, line"):
                [each.open(shard) for shard in range(plan.count)]


def test_a_building_process_that_is_killed_ends_all_who_wait(source, plan, tmp_path):
    starter, other = (Shards(plan=plan, folder=tmp_path) for _ in range(2))
    with (tmp_path / ".build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # it waits for its turn
        with starter.building(source.parent / "tok.json"):
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            os.kill(int(children[-1]), signal.SIGKILL)
            for each in (starter, other):
                with pytest.raises(DataError, match="was killed"):
                    each.open(0)
    with starter.building(source.parent / "tok.json"):  # the next one goes on
        assert Shards(plan=plan, folder=tmp_path).open(1).num_tokens


def test_a_reader_that_is_closed_waits_no_more(plan, tmp_path):
    shards = Shards(plan=plan, folder=tmp_path)
    found = []

    def read():
        try:
            shards.open(0)
        except DataError as error:
            found.append(error)

    thread = threading.Thread(target=read)
    with shards.building(Path("absent")):
        (tmp_path / "build.failed").unlink(missing_ok=True)
        thread.start()
    thread.join(20)
    assert found


def test_the_building_process_ends_with_the_one_that_started_it(source, plan, tmp_path):
    task = {"folder": str(tmp_path), "tokenizer": "x", "eod": None, "plan": plan.to_dict()}
    lock = (tmp_path / ".build.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)  # it waits for its turn
    task["tokenizer"] = str(source.parent / "tok.json")
    command = [sys.executable, "-m", "mt_data.shard_process"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    process.stdin.write(json.dumps(task).encode() + b"\n")
    process.stdin.flush()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)
    process.stdin.close()  # as the kernel does after kill -9
    assert process.wait(20) == 0
    lock.close()
