"""Batches do not depend on the layout; windows give every token once as a label."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_data import (
    PADDING,
    BatchSampler,
    DataError,
    GPTDataset,
    IndexedDataset,
    IndexedWriter,
    SequentialWindows,
)

ROWS = [np.arange(10 * i, 10 * i + 5) for i in range(50)]


def layouts_of(global_batch_size):
    return [
        (micro, dp)
        for dp in range(1, global_batch_size + 1)
        for micro in range(1, global_batch_size + 1)
        if global_batch_size % (micro * dp) == 0
    ]


@pytest.mark.parametrize("global_batch_size", [1, 2, 6, 8, 12])
def test_global_batch_is_the_same_for_every_layout(global_batch_size):
    for micro, dp in layouts_of(global_batch_size):
        samplers = [
            BatchSampler(
                ROWS,
                global_batch_size=global_batch_size,
                micro_batch_size=micro,
                dp_rank=rank,
                dp_size=dp,
            )
            for rank in range(dp)
        ]
        for step in (0, 1, len(samplers[0]) - 1):
            batches = [batch for sampler in samplers for batch in sampler.step(step)]
            assert all(batch["tokens"].shape == (micro, 4) for batch in batches)
            ids = np.concatenate([batch["sample_ids"] for batch in batches])
            tokens = np.concatenate([batch["tokens"] for batch in batches])
            order = np.argsort(ids)
            first = step * global_batch_size
            assert ids[order].tolist() == list(range(first, first + global_batch_size))
            expected = [ROWS[i][:-1].tolist() for i in range(first, first + global_batch_size)]
            assert tokens[order].tolist() == expected


def test_micro_batches_are_dealt_as_megatrons_single_sampler_does():
    consumed, micro, dp = 8, 2, 2
    for rank in range(dp):
        sampler = BatchSampler(
            ROWS, global_batch_size=8, micro_batch_size=micro, dp_rank=rank, dp_size=dp
        )
        walk, dealt = list(range(consumed, consumed + 8)), []
        for begin in range(0, 8, micro * dp):
            group = walk[begin : begin + micro * dp]
            dealt.append(group[rank * micro : (rank + 1) * micro])
        assert sampler.sample_ids(1).tolist() == dealt
        assert sampler.num_microbatches == 2


def test_any_step_can_be_asked_for_without_the_ones_before():
    sampler = BatchSampler(ROWS, global_batch_size=6, micro_batch_size=3)
    whole = [batch["tokens"].tolist() for step in range(8) for batch in sampler.step(step)]
    resumed = BatchSampler(ROWS, global_batch_size=6, micro_batch_size=3)
    assert [batch["tokens"].tolist() for batch in resumed.step(7)] == whole[-2:]
    assert len(sampler) == 8


def test_a_batch_size_that_changes_on_the_way_repeats_and_skips_nothing():
    before = BatchSampler(ROWS, global_batch_size=6, micro_batch_size=3)
    seen = [int(i) for step in range(3) for i in before.sample_ids(step).ravel()]
    for size in (4, 9):  # larger and smaller than 6: offsets of both signs
        after = BatchSampler(
            ROWS, global_batch_size=size, micro_batch_size=1, offset=len(seen) - 3 * size
        )
        more = [int(i) for step in range(3, 5) for i in after.sample_ids(step).ravel()]
        assert seen + more == list(range(18 + 2 * size))
    with pytest.raises(IndexError, match="needs samples -9"):
        BatchSampler(ROWS, global_batch_size=9, micro_batch_size=1, offset=-9).sample_ids(0)


def test_batch_has_shifted_labels_and_owns_contiguous_int64():
    rows = [row.copy() for row in ROWS]
    batch = BatchSampler(rows, global_batch_size=2, micro_batch_size=2).step(1)[0]
    assert batch["tokens"].tolist() == [[20, 21, 22, 23], [30, 31, 32, 33]]
    assert batch["labels"].tolist() == [[21, 22, 23, 24], [31, 32, 33, 34]]
    for name in ("tokens", "labels", "sample_ids"):
        assert batch[name].dtype == np.int64
        assert batch[name].flags["C_CONTIGUOUS"]
        batch[name][...] = -7
    assert rows[2].tolist() == [20, 21, 22, 23, 24]


def test_padding_becomes_token_0_with_no_label():
    row = np.array([4, 5, 6, PADDING, PADDING])
    batch = BatchSampler([row], global_batch_size=1, micro_batch_size=1, vocab_size=7).step(0)[0]
    assert batch["tokens"].tolist() == [[4, 5, 6, 0]]
    assert batch["labels"].tolist() == [[5, 6, -100, -100]]


@pytest.mark.parametrize("bad", [104, -1, 10**6])
def test_token_outside_the_vocabulary_is_named(bad):
    rows = [row.copy() for row in ROWS[:4]]
    rows[3][2] = bad
    sampler = BatchSampler(rows, global_batch_size=2, micro_batch_size=2, vocab_size=104)
    sampler.step(0)
    with pytest.raises(DataError, match=f"sample 3 has token id {bad} at position 2; the vocab"):
        sampler.step(1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            (10, 4, 0, 2),
            "global_batch_size 10 is not divisible by micro_batch_size 4 . dp_size 2 = 8; "
            "nearest valid: 8 or 16",
        ),
        ((3, 4, 0, 1), "nearest valid: 4$"),
        ((0, 1, 0, 1), "global_batch_size is 0; it must be at least 1"),
        ((4, 0, 0, 1), "micro_batch_size is 0"),
        ((4, 1, 0, 0), "dp_size is 0"),
        ((4, 1, 2, 2), "dp_rank is 2; it must lie in"),
        ((4, 1, -1, 2), "dp_rank is -1"),
    ],
)
def test_sizes_that_do_not_fit_say_what_would(sizes, message):
    batch, micro, rank, dp = sizes
    with pytest.raises(DataError, match=message):
        BatchSampler(
            ROWS, global_batch_size=batch, micro_batch_size=micro, dp_rank=rank, dp_size=dp
        )


@pytest.mark.parametrize("step", [8, -1])
def test_step_beyond_the_data_says_what_is_missing(step):
    sampler = BatchSampler(ROWS, global_batch_size=6, micro_batch_size=1)
    with pytest.raises(IndexError, match=rf"step {step} needs samples .*the dataset has 50 .8 ste"):
        sampler.step(step)


class Stream:
    def __init__(self, num_tokens):
        self.num_tokens = num_tokens

    def stream(self, start, length):
        assert start >= 0
        assert length >= 0
        assert start + length <= self.num_tokens
        return np.arange(start, start + length)


def check_windows(windows, total, start_id, minimum_context):
    """Each label follows its own input, and labels are all tokens in order."""
    labels_seen = []
    for index in range(len(windows)):
        tokens, labels = windows[index]
        assert len(tokens) == len(labels) == windows.sequence_length
        for position, label in enumerate(labels.tolist()):
            if label == PADDING:
                continue
            labels_seen.append(label)
            before = tokens[position]
            assert before == (start_id if label == 0 else label - 1)
            if index:
                assert position >= minimum_context
            context = tokens[: position + 1].tolist()
            expected = [label - 1 - k for k in range(position, -1, -1)]
            assert context == [start_id if token == -1 else token for token in expected]
    first = 1 if start_id is None else 0
    assert labels_seen == list(range(first, total))


@settings(max_examples=200, deadline=None)
@given(
    total=st.integers(2, 60),
    sequence_length=st.integers(1, 12),
    data=st.data(),
    start_id=st.sampled_from([None, 999]),
)
def test_windows_give_every_token_once_as_a_label(total, sequence_length, data, start_id):
    stride = data.draw(st.integers(1, sequence_length))
    windows = SequentialWindows(Stream(total), sequence_length, stride, start_id=start_id)
    assert windows.num_labels == total - (start_id is None)
    check_windows(windows, total, start_id, sequence_length - stride)


@settings(max_examples=60, deadline=None)
@given(
    total=st.integers(2, 60),
    rows=st.integers(1, 5),
    dp_size=st.integers(1, 4),
    limit=st.none() | st.integers(1, 20),
)
def test_window_batches_do_not_depend_on_the_layout(total, rows, dp_size, limit):
    windows = SequentialWindows(Stream(total), 5, 3, start_id=7)
    ranks = [
        list(windows.batches(rows, dp_rank=rank, dp_size=dp_size, limit=limit))
        for rank in range(dp_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    found = {}
    for batches in ranks:
        for batch in batches:
            assert batch["tokens"].shape == batch["labels"].shape == (rows, 5)
            assert batch["tokens"].min() >= 0
            for row, index in enumerate(batch["sample_ids"].tolist()):
                if index == -1:
                    assert (batch["labels"][row] == PADDING).all()
                else:
                    assert index not in found
                    found[index] = batch["labels"][row].tolist()
    count = len(windows) if limit is None else min(limit, len(windows))
    assert found == {i: windows[i][1].tolist() for i in range(count)}


def test_last_window_is_padded_without_labels(tmp_path):
    with IndexedWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_document([1, 2, 3])
        writer.add_document([4, 5])
    windows = SequentialWindows(IndexedDataset(tmp_path / "x"), 4, start_id=9)
    assert len(windows) == 2
    assert windows[0][0].tolist() == [9, 1, 2, 3]
    assert windows[0][1].tolist() == [1, 2, 3, 4]
    (batch,) = windows.batches(4)
    assert batch["tokens"].tolist()[1] == [4, 5, 0, 0]
    assert batch["labels"].tolist()[1] == [5, -100, -100, -100]
    assert batch["sample_ids"].tolist() == [0, 1, -1, -1]


@pytest.mark.parametrize(
    ("total", "options", "message"),
    [
        (5, {"sequence_length": 0}, "sequence_length is 0"),
        (5, {"sequence_length": 4, "stride": 5}, r"stride is 5; it must lie in \[1, 4\]"),
        (5, {"sequence_length": 4, "stride": 0}, "stride is 0"),
        (1, {"sequence_length": 4}, "nothing to predict in 1 tokens"),
        (0, {"sequence_length": 4, "start_id": 0}, "nothing to predict in 0 tokens"),
    ],
)
def test_impossible_windows_say_why(total, options, message):
    with pytest.raises(DataError, match=message):
        SequentialWindows(Stream(total), **options)


def test_window_arguments_are_checked():
    windows = SequentialWindows(Stream(9), 4)
    with pytest.raises(IndexError, match="window 2 does not exist; there are 2"):
        windows[2]
    for options in ({"size": 0}, {"size": 1, "dp_rank": 1}, {"size": 1, "limit": 0}):
        with pytest.raises(DataError, match="must be at least 1"):
            next(windows.batches(**options))


def test_sampler_reads_gpt_samples_from_disk(tmp_path):
    with IndexedWriter(tmp_path / "x", np.uint16) as writer:
        for begin in range(0, 100, 10):
            writer.add_document(np.arange(begin, begin + 10))
    dataset = GPTDataset(IndexedDataset(tmp_path / "x"), sequence_length=6, num_samples=40)
    sampler = BatchSampler(dataset, global_batch_size=8, micro_batch_size=4, vocab_size=100)
    tokens = [batch["tokens"] for step in range(2) for batch in sampler.step(step)]
    labels = [batch["labels"] for step in range(2) for batch in sampler.step(step)]
    assert np.array_equal(np.stack(tokens)[..., 1:], np.stack(labels)[..., :-1])
    assert len({row.tobytes() for batch in tokens for row in batch}) == 16
