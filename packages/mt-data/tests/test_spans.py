"""Spans are cut out of texts as they are in T5, and rows depend on seed and index alone."""

import numpy as np
import pytest
from mt_data import (
    PADDING,
    BatchSampler,
    DataError,
    IndexedDataset,
    IndexedWriter,
    Rows,
    SpanCorruption,
    SpanDataset,
    SpanVocabulary,
)

VOCABULARY = SpanVocabulary(sentinel=999, eod=1)
SENTINELS = range(901, 1000)


@pytest.fixture(scope="module")
def indexed(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("spans") / "data"
    with IndexedWriter(prefix, np.int32) as writer:
        for first in range(2, 800, 90):
            writer.add_document(np.arange(first, first + 90))
    return IndexedDataset(prefix)


def dataset(indexed, **changes):
    given = {"sequence_length": 40, "vocabulary": VOCABULARY, "seed": 3, **changes}
    return SpanDataset(indexed, **given)


def restored(row):
    """The text of a row: each sentinel of the encoder replaced by what the decoder writes."""
    spans, number = {}, None
    assert row["labels"][row["labels"] != PADDING][-1] == VOCABULARY.eod
    for token in row["labels"][row["labels"] != PADDING].tolist():
        if token in SENTINELS:
            number = token
            spans[number] = []
        elif token != VOCABULARY.eod:
            spans[number].append(token)
    assert list(spans) == [999 - i for i in range(len(spans))]
    text = []
    for token in row["encoder_tokens"].tolist()[:-1]:
        text += spans.pop(token) if token in SENTINELS else [token]
    assert not spans
    return text


@pytest.mark.parametrize("length", [3, 8, 17, 40, 200])
def test_a_row_is_its_text_with_the_spans_elsewhere(indexed, length):
    found = dataset(indexed, sequence_length=length)
    noise, spans = found.corruption.counts(found.text_length)
    for index in range(12):
        row = found.row(index)
        text = restored(row)
        assert len(text) == found.text_length
        steps = set(np.diff(text).tolist())
        assert len(steps) < 8  # tokens count up within a document
        assert row["encoder_tokens"][-1] == VOCABULARY.eod
        assert (row["encoder_tokens"] > 900).sum() == spans
        assert (row["labels"] != PADDING).sum() == noise + spans + 1
        assert row["encoder_tokens"][0] < 900  # what stays comes first
        assert row["tokens"][0] == 0
        real = row["labels"] != PADDING
        assert np.array_equal(row["tokens"][1:][real[1:]], row["labels"][:-1][real[1:]])


@pytest.mark.parametrize(("inputs", "text", "targets"), [(512, 568, 114), (1024, 1137, 229)])
def test_lengths_are_those_of_t5(inputs, text, targets):
    """512 tokens of the encoder with 114 of the decoder, as published (section 3.1.2)."""
    corruption = SpanCorruption()
    assert corruption.text_length(inputs) == text
    noise, spans = corruption.counts(text)
    assert noise + spans + 1 == targets


@pytest.mark.parametrize("density", [0.05, 0.15, 0.3, 0.45])
@pytest.mark.parametrize("mean", [1.0, 3.0, 10.0])
def test_every_length_of_the_encoder_is_filled(density, mean):
    corruption = SpanCorruption(density=density, mean_length=mean)
    for inputs in range(3, 300):
        length = corruption.text_length(inputs)
        noise, spans = corruption.counts(length)
        assert length - noise + spans + 1 == inputs
        assert 1 <= spans <= min(noise, length - noise)
    sizes = np.array([corruption.sizes(length) for length in range(2, 400)])
    assert (np.diff(sizes, axis=0) >= 0).all()


def test_lengths_of_spans_are_as_likely_as_each_other(indexed):
    found = dataset(indexed)
    noise, spans = found.corruption.counts(found.text_length)
    assert (noise, spans) == (7, 2)
    firsts = [int(found._lengths((i,), "cut", noise, spans)[0]) for i in range(1200)]
    counts = np.bincount(firsts, minlength=noise)[1:]
    assert counts.sum() == 1200
    assert counts.min() > 150  # 200 each are expected, with a deviation of 13


def test_rows_depend_on_seed_and_index_alone(indexed):
    first, again, other = dataset(indexed), dataset(indexed), dataset(indexed, seed=4)
    later = first.row(7)["encoder_tokens"]
    assert np.array_equal(later, again.row(7)["encoder_tokens"])
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != other.fingerprint
    assert not np.array_equal(later, other.row(7)["encoder_tokens"])
    epoch = first.samples_per_epoch
    texts = [sorted(map(tuple, (restored(first.row(i + n)) for i in range(epoch)))) for n in (0,)]
    assert len(set(texts[0])) == epoch


def pairs_of(row):
    """The pairs of a packed row, each as a row of its own."""
    numbers = row["encoder_documents"]
    count = numbers.max() + 1
    assert set(numbers.tolist()) - {PADDING} == set(range(count))
    for number in range(count):
        sides = {"encoder_": numbers == number, "": row["documents"] == number}
        yield {
            name: array[sides["encoder_" if name.startswith("encoder") else ""]]
            for name, array in row.items()
        }


SHORT = (30, 2, 9, 90, 5, 3, 1, 17, 60, 4, 11, 40)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Documents of counting tokens, of which each begins at a number of hundred, with an end."""
    prefix = tmp_path_factory.mktemp("short") / "data"
    with IndexedWriter(prefix, np.int32) as writer:
        for number, length in enumerate(SHORT * 2):
            writer.add_document([*range(1000 + 100 * number, 1000 + 100 * number + length), 1])
    return IndexedDataset(prefix)


def test_documents_of_a_text_are_pairs_of_their_own(documents):
    vocabulary = SpanVocabulary(sentinel=999, eod=1, start=7)
    given = {"sequence_length": 64, "vocabulary": vocabulary, "decoder_length": 40}
    plain, found = (dataset(documents, **given, packing=name) for name in ("none", "documents"))
    assert (
        plain.fingerprint == found.fingerprint
    )  # a run that changes it goes on with the next text
    counts, used = [], 0
    for index in range(3 * found.samples_per_epoch):
        text = plain._texts.sample(index)[:-1]
        parts = np.split(text, np.flatnonzero(text == 1) + 1)
        parts = [part[part != 1].tolist() for part in parts if (part != 1).sum() > 1]
        row = found.row(index)
        assert {name: len(array) for name, array in row.items()} == {
            name: 64 if name.startswith("encoder") else 40 for name in row
        }
        texts = []
        for pair in pairs_of(row):
            texts.append(restored(pair))
            read, written = found.corruption.sizes(len(texts[-1]))
            assert (len(pair["encoder_tokens"]), len(pair["labels"])) == (read, written)
            assert pair["encoder_tokens"][-1] == 1
            assert pair["tokens"].tolist() == [7, *pair["labels"][:-1].tolist()]
            for side, length in (("encoder_", read), ("", written)):
                assert np.array_equal(pair[f"{side}positions"], np.arange(length))
        expected, room = [], np.array([64, 40])
        for part in parts:  # as much of each as there is a place for
            sizes = {n: found.corruption.sizes(n) for n in range(2, len(part) + 1)}
            fits = [n for n, size in sizes.items() if (size <= room).all()]
            if not fits:
                break
            expected.append(part[: fits[-1]])
            room -= sizes[fits[-1]]
        assert texts == expected
        filled = row["documents"] == PADDING
        assert (row["labels"][filled] == PADDING).all()
        assert (row["tokens"][filled] == 7).all()
        counts.append(len(texts))
        used += sum(map(len, texts))
    assert max(counts) > 3
    assert used > 0.9 * found.text_length * len(counts)


@pytest.mark.parametrize("packing", ["none", "documents"])
def test_ranks_that_share_sequences_have_their_parts_of_both(indexed, packing):
    found = dataset(indexed, decoder_length=16, packing=packing)
    sampler = BatchSampler(found, global_batch_size=2, micro_batch_size=2)
    whole = sampler.with_rows(Rows(packing=packing)).step(0)[0]
    both = []
    for parts in (((0, 10), (30, 40)), ((10, 20), (20, 30))):
        rows = Rows(parts=parts, packing=packing)
        both.append(rows.read(found, np.arange(2)))
    assert whole.keys() == both[0].keys()
    for name, array in whole.items():
        if name in ("sample_ids", "documents", "encoder_documents"):  # those of whole sequences
            assert np.array_equal(both[1][name], array), name
        else:
            n = 10 if name.startswith("encoder") else 4
            parts = both[0][name][:, :n], both[1][name], both[0][name][:, n:]
            assert np.array_equal(np.concatenate(parts, axis=1), array), name


@pytest.mark.parametrize("packing", ["none", "documents"])
def test_evaluation_fills_batches_with_empty_rows(indexed, packing):
    found = dataset(indexed, packing=packing)
    batches = list(found.batches(2, limit=3, rows=Rows(packing=packing)))
    assert [batch["sample_ids"].tolist() for batch in batches] == [[0, 1], [2, -1]]
    assert (batches[1]["labels"][1] == PADDING).all()
    if packing == "none":
        with pytest.raises(DataError, match="makes whole rows with packing='none'; use that"):
            Rows(packing="documents").read(found, np.arange(1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 2}, "sequence_length is 2"),
        ({"decoder_length": 9}, "decoder_length is 9, but 2 spans of 7 tokens.* take 10; use that"),
        ({"vocabulary": SpanVocabulary(sentinel=0, eod=1)}, "2 spans need 2 sentinels"),
        ({"sequence_length": 2000}, "do not hold one sample"),
        ({"packing": "some"}, "packing is 'some'; choose 'none' or 'documents'"),
    ],
)
def test_what_can_not_be_is_refused(indexed, changes, message):
    with pytest.raises(DataError, match=message):
        dataset(indexed, **changes)


@pytest.mark.parametrize("changes", [{"density": 0.0}, {"density": 0.6}, {"mean_length": 0.5}])
def test_a_corruption_that_can_not_be_is_refused(changes):
    with pytest.raises(DataError, match=next(iter(changes))):
        SpanCorruption(**changes)


@pytest.mark.parametrize(("density", "mean_length"), [(0.15, 3.0), (0.5, 1.0), (0.5, 20.0)])
def test_a_text_is_as_long_as_the_encoder_takes(density: float, mean_length: float) -> None:
    corruption = SpanCorruption(density=density, mean_length=mean_length)
    becomes = {length: corruption.sizes(length)[0] for length in range(2, 200)}
    for inputs in range(1, 100):
        fitting = [length for length, size in becomes.items() if size == inputs]
        if fitting:
            assert corruption.text_length(inputs) == max(fitting)
            continue
        with pytest.raises(DataError, match=f"no text fills exactly {inputs} .* use") as caught:
            corruption.text_length(inputs)
        below = max((size for size in becomes.values() if size < inputs), default=None)
        above = min(size for size in becomes.values() if size > inputs)
        named = str(above) if below is None else f"{below} or {above}"
        assert str(caught.value).endswith(f"use {named}")


def test_the_length_of_a_huge_text_is_found_at_once() -> None:
    corruption = SpanCorruption(density=0.5, mean_length=20.0)
    length = corruption.text_length(1 << 27)
    assert corruption.sizes(length)[0] == 1 << 27 < corruption.sizes(length + 1)[0]
