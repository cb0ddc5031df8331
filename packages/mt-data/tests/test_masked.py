"""Rows for masked language modelling: hidden tokens, their shares, and no lost text."""

import numpy as np
import pytest
from mt_data import (
    PADDING,
    BatchSampler,
    DataError,
    IndexedDataset,
    IndexedWriter,
    MaskedDataset,
    MaskedVocabulary,
    Masking,
    Rows,
    count_labels,
)
from mt_tokenizer import Tokenizer, train_tokenizer

CLS, SEP, MASK, PAD, EOD = range(5)
FIRST, SIZE = 5, 400
GOLDEN_TOKENS = [
    [0, 2, 1, 100, 101, 1, 3, 3, 3, 3, 3, 3],
    [0, 100, 101, 102, 1, 2, 104, 105, 106, 107, 108, 1],
    [0, 200, 283, 202, 203, 204, 205, 206, 207, 1, 208, 1],
]
GOLDEN_PLACES = [[1], [5], [2], [1], [6], [2]]
GOLDEN_CLASSES = [1, 0, 0, 1, 1, 0, 1, 1]


def vocabulary(every=3):
    """A vocabulary with ordinary ids from `FIRST` on; every `every`-th id begins a word."""
    ids = np.arange(SIZE)
    return MaskedVocabulary(
        cls=CLS, sep=SEP, mask=MASK, pad=PAD, ordinary=ids[FIRST:], starts=ids % every == 0
    )


@pytest.fixture
def indexed(tmp_path):
    """Documents that each have a range of ids of their own, up and up."""
    lengths = [30, 1, 44, 0, 17, 62, 2]
    with IndexedWriter(tmp_path / "c", np.int32) as writer:
        at = FIRST
        for length in lengths:
            writer.add_document([*range(at, at + length), EOD])
            at += length
    return IndexedDataset(tmp_path / "c")


def rows_of(indexed, **changes):
    options = {"sequence_length": 16, "vocabulary": vocabulary(), "seed": 3}
    return MaskedDataset(indexed, **{**options, **changes})


def restored(row):
    return np.where(row["labels"] == PADDING, row["tokens"], row["labels"])


def test_rows_are_held():
    """A change of these numbers changes the rows of every run."""

    class Counting:
        dtype, lengths, fingerprint = np.dtype(np.int32), np.array([9, 12]), "f"

        def read(self, index, offset=0, length=None):
            return np.arange(offset, offset + length) + 100 * (index + 1)

    rows = MaskedDataset(
        Counting(), sequence_length=12, vocabulary=vocabulary(), pairs=True, seed=1
    )
    assert [rows.row(i)["tokens"].tolist() for i in (0, 1, 5)] == GOLDEN_TOKENS
    assert [np.flatnonzero(rows.row(i)["labels"] + 100).tolist() for i in range(6)] == GOLDEN_PLACES
    assert [int(rows.row(i)["sequence_labels"]) for i in range(8)] == GOLDEN_CLASSES


@pytest.mark.parametrize("whole_words", [False, True])
def test_every_token_comes_once_an_epoch_and_is_told(indexed, whole_words):
    rows = rows_of(indexed, masking=Masking(whole_words=whole_words))
    for epoch in range(2):
        found = []
        for index in range(len(rows)):
            row = rows.row(epoch * len(rows) + index)
            length = int(row["mask"].sum())
            text = restored(row)[:length]
            assert (text[0], text[-1]) == (CLS, SEP)
            assert (row["tokens"][length:] == PAD).all()
            assert "token_types" not in row
            most = 3 if whole_words else 2
            assert 0 < np.count_nonzero(row["labels"] != PADDING) <= most or text[1] == EOD
            found += text[1:-1].tolist()
        everything = np.concatenate([indexed.read(i) for i in range(len(indexed))])
        assert sorted(found) == sorted(everything.tolist())


def test_pairs_follow_each_other_or_are_of_two_documents(indexed):
    rows = rows_of(indexed, pairs=True)
    ends = np.cumsum([30, 1, 44, 0, 17, 62, 2]) + FIRST
    document = np.searchsorted(ends, np.arange(SIZE), side="right")
    classes = []
    for index in range(600):
        row = rows.row(index)
        text, types = restored(row), row["token_types"]
        length = int(row["mask"].sum())
        first, second = (np.flatnonzero(text[:length] == SEP)[[0, -1]]).tolist()
        assert second == length - 1
        assert types.tolist() == [int(first < place <= second) for place in range(16)]
        a, b = text[1:first], text[first + 1 : second]
        assert len(a)
        assert len(b)
        classes.append(int(row["sequence_labels"]))
        if b[0] == EOD:
            continue
        follows = b[0] == a[-1] + 1 and document[a[-1]] == document[b[0]]
        assert follows == (classes[-1] == 0)
    assert abs(np.mean(classes) - 0.5) < 4 * 0.5 / 600**0.5


def test_shares_are_those_that_are_asked_for(tmp_path):
    with IndexedWriter(tmp_path / "c", np.int32) as writer:
        writer.add_document((np.arange(40_000) % (SIZE - FIRST) + FIRST).tolist())
    rows = rows_of(IndexedDataset(tmp_path / "c"), sequence_length=202)
    hidden = masked = kept = 0
    drawn = []
    for index in range(200):
        row = rows.row(index)
        chosen = row["labels"] != PADDING
        now, then = row["tokens"][chosen], row["labels"][chosen]
        hidden += chosen.sum()
        masked += (now == MASK).sum()
        kept += (now == then).sum()
        drawn += now[(now != MASK) & (now != then)].tolist()
    assert hidden == 30 * 200
    tolerance = 4 * (0.25 / hidden) ** 0.5
    assert abs(masked / hidden - 0.8) < tolerance
    assert abs(kept / hidden - 0.1) < tolerance
    assert abs(len(drawn) / hidden - 0.1) < tolerance
    assert min(drawn) >= FIRST
    assert abs(np.mean(drawn) - (SIZE + FIRST) / 2) < 4 * SIZE / (12 * len(drawn)) ** 0.5


def test_whole_words_are_hidden_with_all_their_tokens(indexed):
    rows = rows_of(indexed, masking=Masking(fraction=0.4, whole_words=True))
    for index in range(len(rows)):
        row = rows.row(index)
        text, chosen = restored(row), row["labels"] != PADDING
        places = np.flatnonzero(text >= FIRST)
        words = np.cumsum(text[places] % 3 == 0)
        for word in np.unique(words):
            assert len(set(chosen[places[words == word]].tolist())) == 1
        assert chosen.sum() <= max(3, int(0.4 * len(places) + 0.5))


@pytest.mark.parametrize("spans", ["geometric", "ngrams"])
@pytest.mark.parametrize("whole_words", [False, True])
def test_spans_have_their_lengths_and_fill_the_share(spans, whole_words):
    """Each span is drawn as it should be, in one piece, and the tokens are as many as asked for."""
    masking = Masking(fraction=0.04, spans=spans, whole_words=whole_words)
    places = np.delete(np.arange(30_000), [9_000, 20_000])  # three runs of text
    starts = np.arange(len(places)) % 2 == 0
    found: list[int] = []
    for seed in range(12):
        draws = np.random.default_rng(seed)
        chosen, firsts = masking.choose(places, starts, lambda _, d=draws: d.random(len(places)))
        assert (np.diff(chosen) > 0).all()
        assert len(chosen) in ((1200, 1199) if whole_words else (1200,))
        for first in np.unique(firsts):
            own = chosen[firsts == first]
            assert (own == np.arange(first, first + len(own))).all()
            found.append(len(own) / (2 if whole_words else 1))
    lengths = np.arange(1, 11)
    shares = {"geometric": 0.8**lengths, "ngrams": 1 / lengths}[spans]
    assert np.isclose(masking.shares(), shares / shares.sum()).all()
    mean = {"geometric": 3.797, "ngrams": 3.414}[spans]  # SpanBERT's 3.8
    assert masking.shares() @ lengths == pytest.approx(mean, abs=5e-4)
    assert np.mean(found) == pytest.approx(mean, abs=0.25)
    assert max(found) == 10


def test_all_of_a_span_become_the_same_and_no_span_crosses_a_separator(indexed):
    rows = rows_of(
        indexed,
        pairs=True,
        masking=Masking(fraction=0.6, masked=0.5, random=0.3, spans="geometric"),
    )
    kinds = []
    for index in range(200):
        row = rows.row(index)
        text, chosen = restored(row), np.flatnonzero(row["labels"] != PADDING)
        assert (text[chosen] >= FIRST).all()
        places = np.flatnonzero(text >= FIRST)
        draw = {what: rows._draw(index, what, 16)[places] for what in ("places", "lengths")}
        again, firsts = rows.masking.choose(places, rows.vocabulary.starts[text[places]], draw.get)
        assert (again == chosen).all()
        for first in np.unique(firsts):
            own = chosen[firsts == first]
            assert np.ptp(np.searchsorted(np.flatnonzero(text == SEP), own)) == 0
            now, then = row["tokens"][own], text[own]
            masked, kept = now == MASK, now == then
            assert masked.all() or not masked.any()
            assert kept.all() or kept.mean() < 1 / 2 or len(own) < 3
            kinds.append("masked" if masked.all() else "kept" if kept.all() else "random")
    assert {kind: kinds.count(kind) > 40 for kind in kinds} == dict.fromkeys(kinds, True)
    assert len(set(kinds)) == 3


def test_ranks_take_their_part_and_one_counts_the_class(indexed):
    rows = rows_of(indexed, pairs=True)
    sampler = BatchSampler(rows, global_batch_size=4, micro_batch_size=4, vocab_size=SIZE)
    (whole,) = sampler.step(0)
    parts = [((0, 4), (12, 16)), ((4, 8), (8, 12))]
    pieces = [sampler.with_rows(Rows(parts=part)).step(0)[0] for part in parts]
    for part, piece in zip(parts, pieces, strict=True):
        columns = np.concatenate([np.arange(*each) for each in part])
        for name in ("tokens", "labels", "token_types"):
            assert np.array_equal(piece[name], whole[name][:, columns])
        assert np.array_equal(piece["mask"], whole["mask"])
    for name in ("labels", "sequence_labels"):
        assert count_labels(pieces, name) == count_labels([whole], name) > 0
    assert count_labels(pieces[1:], "sequence_labels") == 0


def test_evaluation_has_every_row_once_and_fills_up(indexed):
    rows = rows_of(indexed)
    ids = []
    for rank in range(2):
        for batch in rows.batches(3, dp_rank=rank, dp_size=2):
            ids += batch["sample_ids"].tolist()
            empty = batch["sample_ids"] < 0
            assert (batch["labels"][empty] == PADDING).all()
            assert not batch["mask"][empty].any()
    assert sorted(i for i in ids if i >= 0) == list(range(len(rows)))
    assert len(ids) % 6 == 0


def test_a_tokenizer_says_what_is_special_and_where_words_begin():
    special = ["<|eod|>", "[CLS]", "[SEP]", "[MASK]", "[PAD]"]
    tokenizer = train_tokenizer(["some words of some text"] * 9, 290, special)
    assert tokenizer.eod_token == Tokenizer(tokenizer.engine).eod_token == "<|eod|>"
    found = MaskedVocabulary.of(tokenizer)
    assert [found.cls, found.sep, found.mask, found.pad] == [1, 2, 3, 4]
    assert found.ordinary.tolist() == list(range(5, tokenizer.vocab_size))
    starts = [bool(found.starts[number]) for number in tokenizer.encode("some words")]
    assert sum(starts) == 1
    with pytest.raises(DataError, match="no special token '<mask>' for mask"):
        MaskedVocabulary.of(tokenizer, {"mask": "<mask>"})
    with pytest.raises(DataError, match="must be 4 tokens"):
        MaskedVocabulary.of(tokenizer, {"mask": "[CLS]"})


def test_what_makes_no_rows_is_refused(indexed, tmp_path):
    with pytest.raises(DataError, match="no room for text"):
        rows_of(indexed, sequence_length=4, pairs=True)
    with pytest.raises(DataError, match="fraction is 0"):
        Masking(fraction=0)
    with pytest.raises(DataError, match="spans is 'long'; choose one of none, geometric, ngrams"):
        Masking(spans="long")
    with pytest.raises(DataError, match="their sum at most 1"):
        Masking(masked=0.8, random=0.3)
    with pytest.raises(DataError, match="packing='none'"):
        Rows(packing="documents").read(rows_of(indexed), np.arange(2))
    with IndexedWriter(tmp_path / "one", np.int32) as writer:
        writer.add_document(list(range(FIRST, 50)))
    with pytest.raises(DataError, match="at least two documents"):
        rows_of(IndexedDataset(tmp_path / "one"), pairs=True)


def test_what_decides_the_rows_is_in_the_fingerprint(indexed):
    changes = ({}, {"seed": 4}, {"pairs": True}, {"sequence_length": 12})
    changes += ({"masking": Masking(fraction=0.2)}, {"masking": Masking(whole_words=True)})
    changes += ({"masking": Masking(spans="ngrams")}, {"masking": Masking(spans="geometric")})
    changes += ({"masking": Masking(spans="geometric", longest=3)},)
    assert len({rows_of(indexed, **each).fingerprint for each in changes}) == len(changes)
    older = ["fraction", "masked", "random", "whole_words"]  # runs from before spans go on
    assert [*Masking().identity()] == older
