"""Rows of every kind come once an epoch, whatever ranks, micro-batches and threads read them."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_data import (
    BatchSampler,
    ChatDataset,
    GPTDataset,
    IndexedDataset,
    IndexedWriter,
    MaskedDataset,
    MaskedVocabulary,
    Mixture,
    PairDataset,
    Prefetcher,
    Rows,
    SpanDataset,
    SpanVocabulary,
    mixed,
    mixture_sources,
)
from mt_tokenizer import train_tokenizer

FIRST, LAST, SENTINEL = 5, 500, 999  # ids below FIRST are special ones
SIZE = 16
LINES = [{"prompt": f"say {n}", "completion": "yes" * (n % 3 + 1)} for n in range(40)]
KINDS = ("text", "text packed", "masked", "masked pairs", "spans", "spans packed")
KINDS += tuple(
    f"{kind} {packing}" for kind in ("chat", "pairs") for packing in ("best-fit", "none")
)


def opened(kind, folder):
    """Return a data set and how its samples become rows."""
    name, _, how = kind.partition(" ")
    rows = Rows(packing="documents" if kind == "text packed" else "none")
    if name in ("chat", "pairs"):
        tokenizer = train_tokenizer(["say 1 2 3 yes"], 260)
        given = {"packing": how, "seed": 3}
        if name == "pairs":
            return PairDataset(folder / "p.jsonl", tokenizer, lengths=(32, 24), **given), rows
        return ChatDataset(folder / "p.jsonl", tokenizer, sequence_length=48, **given), rows
    indexed, given = IndexedDataset(folder / "c"), {"sequence_length": SIZE, "seed": 3}
    if name == "text":
        return GPTDataset(indexed, **given), rows
    if name == "spans":
        packing = "documents" if how else "none"
        vocabulary = SpanVocabulary(sentinel=SENTINEL, eod=1)
        return SpanDataset(indexed, vocabulary=vocabulary, packing=packing, **given), rows
    ids = np.arange(LAST)
    special = dict(zip(("cls", "sep", "mask", "pad"), range(4), strict=True))
    vocabulary = MaskedVocabulary(**special, ordinary=ids[FIRST:], starts=ids % 3 == 0)
    return MaskedDataset(indexed, vocabulary=vocabulary, pairs=how == "pairs", **given), rows


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    """Return a data set of a kind, how it is read, and the rows of two epochs and some more."""
    folder = tmp_path_factory.mktemp("kinds")
    with IndexedWriter(folder / "c", np.int32) as writer:  # each id stands once in all documents
        for at in range(FIRST, LAST, 45):
            writer.add_document(np.arange(at, min(at + 45, LAST)))
    (folder / "p.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in LINES))
    dataset, rows = opened(request.param, folder)
    count = 2 * len(dataset) + 40
    samples = mixed([dataset], Mixture(sources=mixture_sources([dataset], [])), num_samples=count)
    batch = rows.read(samples, np.arange(count))
    return dataset, rows, samples, [{name: batch[name][n] for name in batch} for n in range(count)]


def units(dataset, row, index):
    """Return a row's content from the data set: its items, or its ordinary tokens."""
    if hasattr(dataset, "items"):
        return dataset.items(index)
    found = [row[name] for name in ("labels", "encoder_tokens") if name in row]
    if isinstance(dataset, MaskedDataset):
        found = [np.where(row["labels"] < 0, row["tokens"], row["labels"])]
    if "token_types" in row:  # the second text may be of another document
        found = [found[0][row["token_types"] == 0]]
    return [each for ids in found for each in ids.tolist() if FIRST <= each < LAST]


def test_an_epoch_has_each_item_or_token_once(kind):
    dataset, _, _, rows = kind
    most = len(LINES) if hasattr(dataset, "items") else LAST - FIRST
    share = 0.4 if "token_types" in rows[0] else 0.9  # the end of an epoch fills no row of text
    for begin in (0, len(dataset)):
        epoch = range(begin, begin + len(dataset))
        found = Counter(each for n in epoch for each in units(dataset, rows[n], n))
        assert set(found.values()) == {1}
        assert len(found) == most if hasattr(dataset, "items") else len(found) > share * most


def check(kind, dp, micro, turns, ahead):
    """Compare what the ranks of a layout read with the rows by their number."""
    _, rows, samples, expected = kind
    size, read = dp * micro * turns, []
    for rank in range(dp):
        sampler = BatchSampler(
            samples, global_batch_size=size, micro_batch_size=micro, dp_rank=rank, dp_size=dp
        ).with_rows(rows)
        with Prefetcher(sampler, list, depth=ahead) as steps:
            read += [batch for step in range(len(sampler)) for batch in steps.step(step)]
    numbers = np.concatenate([batch["sample_ids"] for batch in read]).tolist()
    assert sorted(numbers) == list(range(len(expected) // size * size))
    for batch in read:
        for place, number in enumerate(batch["sample_ids"].tolist()):
            for name, values in expected[number].items():
                assert np.array_equal(batch[name][place], values), (number, name)


def test_each_row_of_an_epoch_comes_once_on_every_layout(kind):
    check(kind, dp=3, micro=2, turns=2, ahead=2)


SIZES = st.integers(1, 8)


@pytest.mark.campaign
@settings(max_examples=400, deadline=None)
@given(dp=SIZES, micro=SIZES, turns=st.integers(1, 4), ahead=SIZES)
def test_each_row_of_an_epoch_comes_once_on_drawn_layouts(kind, dp, micro, turns, ahead):
    if dp * micro * turns <= 40:
        check(kind, dp, micro, turns, ahead)
