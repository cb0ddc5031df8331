"""Split strings are read strictly; held-out files are chosen by name."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_data import (
    DataError,
    Document,
    HeldOut,
    cut_document,
    parse_split,
    split_files,
    split_ranges,
)


@pytest.mark.parametrize(
    ("text", "fractions"),
    [
        ("969,30,1", (0.969, 0.03, 0.001)),
        ("99, 1, 0", (0.99, 0.01, 0.0)),
        ("1", (1.0, 0.0, 0.0)),
        ("3,1", (0.75, 0.25, 0.0)),
        (".5,0.5", (0.5, 0.5, 0.0)),
        ("8.,2", (0.8, 0.2, 0.0)),
    ],
)
def test_split_string_gives_fractions(text, fractions):
    assert parse_split(text) == pytest.approx(fractions, abs=1e-15)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-5",
        "99/1/0",
        "a",
        "1,2,3,4",
        "1,,2",
        "1 2",
        "0",
        "0,0,0",
        "nan",
        "inf",
        "1e3",
        "1.2.3",
        "٣",
        "1,2,",
        "9" * 400,
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(DataError, match="split"):
        parse_split(text)


def test_refusal_names_the_part():
    with pytest.raises(DataError, match=r"split '99,-1,0' must be one to three .*'-1' is not one"):
        parse_split("99,-1,0")


def test_ranges_round_half_to_even_as_megatron_does():
    assert split_ranges("1,1", 5) == [range(0, 2), range(2, 5), None]
    assert split_ranges("1,1", 7) == [range(0, 4), range(4, 7), None]
    assert split_ranges("969,30,1", 1000) == [range(969), range(969, 999), range(999, 1000)]
    assert split_ranges("1,0,1", 10) == [range(0, 5), None, range(5, 10)]


@settings(max_examples=80, deadline=None)
@given(
    parts=st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any),
    count=st.integers(0, 10**12),
)
def test_ranges_cover_everything_once(parts, count):
    ranges = [r for r in split_ranges(",".join(map(str, parts)), count) if r is not None]
    assert ranges[0].start == 0
    assert ranges[-1].stop == count
    assert all(a.stop == b.start for a, b in itertools.pairwise(ranges))


NAMES = [f"/data/part{n % 7}/file{n}.txt" for n in range(400)]


def test_held_out_files_are_a_share_and_the_rest_is_kept():
    kept, held = split_files(NAMES, fraction=0.1, seed=1)
    assert sorted(map(str, kept + held)) == sorted(NAMES)
    assert 20 <= len(held) <= 60
    assert [str(p) for p in kept] == [n for n in NAMES if n in set(map(str, kept))]


def test_side_of_a_file_depends_on_its_name_and_the_seed_only():
    _, held = split_files(NAMES, fraction=0.1, seed=1)
    half = NAMES[::-2]
    _, fewer = split_files(half, fraction=0.1, seed=1)
    assert set(map(str, fewer)) == set(map(str, held)) & set(half)
    moved = [name.replace("/data", "/mnt/elsewhere") for name in NAMES]
    _, elsewhere = split_files(moved, fraction=0.1, seed=1)
    assert [p.name for p in elsewhere] == [p.name for p in held]
    assert split_files(NAMES, fraction=0.1, seed=2)[1] != held
    _, more = split_files(NAMES, fraction=0.2, seed=1)
    assert set(held) < set(more)


@settings(max_examples=40, deadline=None)
@given(count=st.integers(2, 6), seed=st.integers(0, 50), fraction=st.floats(0.001, 0.999))
def test_neither_side_is_empty(count, seed, fraction):
    kept, held = split_files(NAMES[:count], fraction=fraction, seed=seed)
    assert kept
    assert held


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 2])
def test_fraction_is_checked(fraction):
    with pytest.raises(DataError, match="must lie between 0 and 1"):
        split_files(NAMES, fraction=fraction)


def test_one_file_cannot_be_split():
    with pytest.raises(DataError, match="cannot hold out a part of 1 files"):
        split_files(NAMES[:1])


def test_documents_are_held_out_by_name_as_files_are():
    many = [Document(path="/data/a.jsonl", text=f"text {n}", line=n) for n in range(1, 201)]
    names = [f"{document.path}:{document.line}" for document in many]
    for fraction in (0.2, 1e-9, 1 - 1e-9):
        rule = HeldOut(fraction=fraction, seed=1, by="name", root="/data").fitted(iter(many))
        held = [name for name, each in zip(names, many, strict=True) if rule.holds_out(each)]
        assert held == [*map(str, split_files(names, fraction=fraction, seed=1)[1])]
        assert 0 < len(held) < 200


def test_documents_are_held_out_by_content_whatever_their_place():
    rule = HeldOut(fraction=0.2, seed=1)
    here = [Document(path="a", text=f"text {n}", line=n) for n in range(500)]
    there = [Document(path="b", text=each.text) for each in here[::-1]]
    held = [each.text for each in here if rule.holds_out(each)]
    assert held[::-1] == [each.text for each in there if rule.holds_out(each)]
    assert abs(len(held) - 100) < 4 * (500 * 0.2 * 0.8) ** 0.5
    other = HeldOut(fraction=0.2, seed=2)
    assert held != [each.text for each in here if other.holds_out(each)]


def test_of_one_document_the_end_is_held_out():
    first, second = cut_document(Document(path="a", text="1\n2\n3\n4\n"), fraction=0.3)
    assert (first.text, second.text) == ("1\n2\n3\n", "4\n")
    first, second = cut_document(Document(path="a", text="0123456789"), fraction=0.3)
    assert (first.text, second.text) == ("0123456", "789")
