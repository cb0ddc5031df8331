"""Packed documents are known to the batch, and a rank may read its part of each row alone."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_data import (
    PADDING,
    BatchSampler,
    BlendedDataset,
    DataError,
    GPTDataset,
    IndexedDataset,
    IndexedWriter,
    Rows,
    SequentialWindows,
)

END = 99


def write(prefix, lengths, first=100):
    """Documents of counting tokens, unique over all of them, each with an end."""
    with IndexedWriter(prefix, np.int32) as writer:
        for length in lengths:
            writer.add_document([*range(first, first + length), END])
            first += length
    return IndexedDataset(prefix)


@pytest.fixture
def dataset(tmp_path):
    return write(tmp_path / "c", [3, 1, 7, 0, 2, 5, 4, 9, 1, 1, 6])


def samplers(dataset, **options):
    plain = BatchSampler(dataset, global_batch_size=4, micro_batch_size=2)
    return plain, plain.with_rows(Rows(**options))


@pytest.mark.parametrize("order", ["stable", "megatron"])
@pytest.mark.parametrize("length", [1, 4, 8])
def test_documents_change_where_one_ends(dataset, order, length):
    samples = GPTDataset(
        dataset, sequence_length=length, num_samples=16, seed=1, order=order, keep_tail=True
    )
    plain, packed = samplers(samples, packing="documents")
    for step in range(4):
        for before, batch in zip(plain.step(step), packed.step(step), strict=True):
            assert "documents" not in before
            assert np.array_equal(before["tokens"], batch["tokens"])
            for row in range(2):
                tokens, documents = batch["tokens"][row], batch["documents"][row]
                labels, whole = batch["labels"][row], before["labels"][row]
                real = tokens != 0  # padding becomes token 0
                ends = tokens[:-1] == END
                assert documents[0] == 0
                assert (documents == PADDING).any() == (not real.all())
                for number in np.unique(documents[real]):
                    own = np.flatnonzero(documents == number)
                    assert np.array_equal(batch["positions"][row, own], np.arange(len(own)))
                assert np.array_equal(np.diff(documents)[real[1:]] == 1, ends[real[1:]])
                # A label counts if and only if it is of the same document.
                expected = np.where((tokens == END) & (whole != PADDING), PADDING, whole)
                assert np.array_equal(labels, expected)


def test_documents_of_a_blend_are_those_of_its_datasets(dataset, tmp_path):
    other = write(tmp_path / "d", [2, 2, 8, 1, 1], first=500)
    parts = [GPTDataset(one, sequence_length=6, num_samples=12, seed=2) for one in (dataset, other)]
    blend = BlendedDataset(parts, weights=[0.5, 0.5], num_samples=12)
    for index in range(12):
        one, position = blend.origin(index)
        expected = parts[one].sample_documents(position)
        assert np.array_equal(blend.sample_documents(index), expected)
        assert len(expected) == 7
        assert np.array_equal(blend.sample(index, 2, 5), parts[one].sample(position)[2:5])


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=4, max_size=12),
    cuts=st.sets(st.integers(1, 7), max_size=3),
    packing=st.sampled_from(["none", "documents"]),
    ranks=st.integers(1, 3),
)
def test_parts_of_all_ranks_are_the_rows(tmp_path_factory, lengths, cuts, packing, ranks):
    indexed = write(tmp_path_factory.mktemp("parts") / "c", [20, *lengths])
    samples = GPTDataset(indexed, sequence_length=8, num_samples=8, seed=0)
    plain, packed = samplers(samples, packing=packing)
    bounds = [0, *sorted(cuts), 8]
    spans = list(itertools.pairwise(bounds))
    for step in range(2):
        for number, whole in enumerate(packed.step(step)):
            for rank in range(ranks):
                own = tuple(spans[rank::ranks])
                if not own:
                    continue
                part = plain.with_rows(Rows(packing=packing, parts=own)).step(step)[number]
                columns = np.concatenate([np.arange(*span) for span in own])
                assert np.array_equal(part["sample_ids"], whole["sample_ids"])
                for name in {"tokens", "labels", "positions"} & whole.keys():
                    assert np.array_equal(part[name], whole[name][:, columns])
                assert ("documents" in part) == (packing == "documents")
                if packing == "documents":  # whole: keys of other ranks are looked at too
                    assert np.array_equal(part["documents"], whole["documents"])


def test_a_rank_reads_its_own_tokens_only(dataset, monkeypatch):
    samples = GPTDataset(dataset, sequence_length=8, num_samples=8)
    read = []
    inner = dataset.read
    monkeypatch.setattr(dataset, "read", lambda i, at=0, n=None: read.append(n) or inner(i, at, n))
    plain, packed = samplers(samples, parts=((2, 4),))
    packed.step(0)
    assert sum(read) == 4 * 3  # two tokens and the next one as a label
    read.clear()
    plain.step(0)
    assert sum(read) == 4 * 9


@pytest.mark.parametrize("packing", ["none", "documents"])
@pytest.mark.parametrize("parts", [None, ((0, 2), (6, 8))])
def test_a_rank_that_reads_nothing_knows_which_labels_count(dataset, monkeypatch, packing, parts):
    samples = GPTDataset(dataset, sequence_length=8, num_samples=8, keep_tail=True)
    _, read = samplers(samples, packing=packing, parts=parts)
    expected = read.step(0) + read.step(1)
    assert any((batch["labels"] == PADDING).any() for batch in expected)
    monkeypatch.setattr(dataset, "read", None)
    _, unread = samplers(samples, packing=packing, parts=parts, stages=("middle",))
    for whole, batch in zip(expected, unread.step(0) + unread.step(1), strict=True):
        assert batch.keys() == whole.keys()
        assert not batch["tokens"].any()
        assert batch["tokens"].shape == whole["tokens"].shape
        assert np.array_equal(batch["labels"], np.where(whole["labels"] == PADDING, PADDING, 0))
        for name in batch.keys() - {"tokens", "labels"}:
            assert np.array_equal(batch[name], whole[name])


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=2, max_size=8),
    stride=st.integers(1, 6),
    start_id=st.sampled_from([None, 7]),
    cut=st.integers(1, 5),
)
def test_windows_are_packed_like_samples(tmp_path_factory, lengths, stride, start_id, cut):
    indexed = write(tmp_path_factory.mktemp("windows") / "c", lengths)
    windows = SequentialWindows(indexed, 6, stride, start_id=start_id)
    stream = [] if start_id is None else [(start_id, -1)]
    for number in range(len(indexed)):
        stream += [(token, number) for token in indexed[number]]
    counted = 0
    plain, packed = (
        list(windows.batches(2)),
        list(windows.batches(2, rows=Rows(packing="documents"))),
    )
    unread = list(windows.batches(2, rows=Rows(packing="documents", stages=("middle",))))
    part = list(windows.batches(2, rows=Rows(packing="documents", parts=((cut, 6),))))
    for whole, batch, none, some in zip(plain, packed, unread, part, strict=True):
        for row, window in enumerate(batch["sample_ids"]):
            if window < 0:
                assert (batch["labels"][row] == PADDING).all()
                continue
            pairs = stream[window * stride : window * stride + 7]
            before = whole["labels"][row]
            for place, ((_, one), (label, other)) in enumerate(itertools.pairwise(pairs)):
                counts = one == other and before[place] != PADDING
                assert batch["labels"][row, place] == (label if counts else PADDING)
                same = batch["documents"][row, : len(pairs)] == batch["documents"][row, place]
                assert np.array_equal(same, [document == one for _, document in pairs[:6]])
            counted += np.count_nonzero(batch["labels"][row] != PADDING)
        assert np.array_equal(none["labels"] == PADDING, batch["labels"] == PADDING)
        for name in ("tokens", "labels", "positions"):
            assert np.array_equal(some[name], batch[name][:, cut:])
    documents = sum(length > 0 for length in indexed.lengths)
    assert counted == indexed.num_tokens - documents


def test_wrong_ids_are_found_in_parts(dataset):
    samples = GPTDataset(dataset, sequence_length=8, num_samples=8)
    sampler = BatchSampler(samples, global_batch_size=4, micro_batch_size=2, vocab_size=100)
    with pytest.raises(DataError, match="has token id 1"):
        sampler.with_rows(Rows(parts=((0, 8),))).step(0)


def test_what_rows_cannot_be_is_refused(dataset):
    samples = GPTDataset(dataset, sequence_length=8, num_samples=8)
    sampler = BatchSampler(samples, global_batch_size=4, micro_batch_size=2)
    with pytest.raises(DataError, match="packing is 'x'; choose 'none' or 'documents'"):
        Rows(packing="x")
    for parts in ((), ((3, 3),), ((-1, 2),)):
        with pytest.raises(DataError, match="give one or more with 0 <= begin < end"):
            Rows(parts=parts)
    with pytest.raises(IndexError, match=r"tokens \[7, 12\) of a sample do not exist; it has 9"):
        sampler.with_rows(Rows(parts=((7, 11),))).step(0)
    plain = BatchSampler([np.arange(5)] * 4, global_batch_size=2, micro_batch_size=2)
    with pytest.raises(DataError, match="list has whole rows only"):
        plain.with_rows(Rows(packing="documents")).step(0)
    assert len(plain.with_rows(Rows()).step(0)) == 1
