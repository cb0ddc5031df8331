"""A data set says its fields, and everything about a batch follows from them."""

import numpy as np
import pytest
from mt_data import (
    PADDING,
    BatchSampler,
    DataError,
    MixedRows,
    Mixture,
    MixtureSource,
    RowDataset,
    Rows,
)
from mt_files import FieldError, RowField

HALVES = ((0, 2), (6, 8)), ((2, 6),)


class Numbers(RowDataset):
    """Row n: tokens n, n + 1, ...; something of every cut, dim and dtype beside them."""

    sequence_length = 8
    fingerprint = "numbers"

    def __init__(self, bias=0.0, **wrong):
        self.bias, self.wrong = bias, wrong

    @property
    def fields(self):
        return (
            RowField(name="tokens", fill=7, is_tokens=True, stages=("first", "last")),
            RowField(name="labels", fill=PADDING, is_tokens=True, counts="tokens"),
            RowField(name="weights", dtype="float32", fill=self.bias),
            RowField(name="mask", dtype="bool", cut="whole"),
            RowField(name="types", dims=("side",), stages=("first",)),
            RowField(name="target", dims=(), fill=-1, cut="once", counts="sums"),
        )

    @property
    def sizes(self):
        return {"tokens": 8, "side": 4}

    def __len__(self):
        return 10

    def row(self, index):
        tokens = index % 10 + np.arange(8)
        row = {
            "tokens": tokens,
            "labels": np.where(tokens % 2, tokens + 1, PADDING),
            "weights": tokens.astype(np.float32) / 2,
            "mask": tokens < 12,
            "types": tokens[:4],
            "target": tokens.sum(),
        }
        return {name: array for name, array in (row | self.wrong).items() if array is not None}


def step(rows=None, dataset=None, **options):
    sampler = BatchSampler(
        dataset or Numbers(), global_batch_size=3, micro_batch_size=3, vocab_size=40, **options
    )
    return sampler.with_rows(rows or Rows()).step(0)[0]


def test_a_batch_has_the_declared_arrays_with_their_dtypes() -> None:
    dataset, batch = Numbers(), step()
    assert batch.keys() == {field.name for field in dataset.fields} | {"sample_ids"}
    for field in dataset.fields:
        assert batch[field.name].dtype == field.dtype
        assert np.array_equal(batch[field.name][2], dataset.row(2)[field.name])


def test_ranks_of_a_context_group_have_their_part_the_whole_or_nothing_twice() -> None:
    whole, parts = step(), [step(Rows(parts=part)) for part in HALVES]
    for part, own in zip(HALVES, parts, strict=True):
        places = np.concatenate([np.arange(*each) for each in part])
        for name in ("tokens", "labels", "weights"):
            assert np.array_equal(own[name], whole[name][:, places])
        assert np.array_equal(own["mask"], whole["mask"])
        assert np.array_equal(own["types"], whole["types"][:, places[::2] // 2])
    assert np.array_equal(parts[0]["target"], whole["target"])
    assert parts[1]["target"].tolist() == [-1, -1, -1]


def test_a_stage_that_reads_no_values_has_fill_in_their_place() -> None:
    whole, middle, last = step(), step(Rows(stages=("middle",))), step(Rows(stages=("last",)))
    assert (middle["tokens"] == 7).all()
    assert np.array_equal(last["tokens"], whole["tokens"])
    assert not middle["types"].any()
    assert not last["types"].any()
    for name in ("labels", "mask", "target"):  # labels are counted everywhere
        assert np.array_equal(middle[name], whole[name])


def test_an_empty_row_is_full_of_fill() -> None:
    batches = list(Numbers(bias=0.5).batches(4, limit=5))
    assert batches[1]["sample_ids"].tolist() == [4, -1, -1, -1]
    assert (batches[1]["labels"][1:] == PADDING).all()
    assert (batches[1]["weights"][1:] == 0.5).all()
    assert batches[1]["target"][1:].tolist() == [-1, -1, -1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": np.zeros(7, np.int64)}, r"tokens of a row of Numbers is int64 \[7\]"),
        ({"mask": np.zeros(8, np.int64)}, r"says bool \[8\]"),
        ({"mask": None}, r"row 0 of Numbers has .*; make both the same"),
        ({"more": np.zeros(8)}, r"row 0 of Numbers has .*'more'"),
        ({"tokens": np.full(8, 40)}, "sample 0 has token id 40 at position 0"),
        ({"labels": np.full(8, -1)}, "sample 0 has token id -1 at position 0"),
    ],
)
def test_a_row_that_is_not_as_declared_is_refused(wrong, message) -> None:
    with pytest.raises(DataError, match=message):
        step(dataset=Numbers(**wrong))


def test_only_equal_rows_are_mixed() -> None:
    half = MixtureSource(fingerprint="n", weight=0.5)
    mixture = Mixture(sources=(half, half))
    both = MixedRows([Numbers(), Numbers()], mixture, num_samples=6)
    assert step(dataset=both)["tokens"][:, 0].tolist() == [0, 0, 1]
    with pytest.raises(DataError, match="data set 1 have other fields or sizes"):
        MixedRows([Numbers(), Numbers(bias=1.0)], mixture, num_samples=6)


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        ({"dims": ()}, "cut: 'along', but the array has no dim"),
        ({"counts": "tokens", "stages": ("last",)}, "stages: .* every stage counts labels"),
        ({"dtype": "int16"}, "dtype: 'int16' is not one of"),
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused(declared, text) -> None:
    with pytest.raises(FieldError, match=text):
        RowField(name="x", **declared)
