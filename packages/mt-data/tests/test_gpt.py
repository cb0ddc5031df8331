"""Samples: golden indices, coverage of every token, order by seed and epoch only."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_data import PADDING, DataError, GPTDataset, Permutation
from mt_data.datasets.order import MegatronOrder, Stream, sample_count


class Fake:
    """Documents in memory; token values are unique unless the lengths are only claimed."""

    dtype = np.dtype("int64")
    fingerprint = "fake"

    def __init__(self, lengths):
        self.lengths = np.array(lengths, np.int32)
        self.begins = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def read(self, index, offset=0, length=None):
        assert length is not None
        assert 0 < length <= self.lengths[index] - offset
        begin = self.begins[index] + offset
        return np.arange(begin, begin + length)


LENGTHS = [5, 3, 7]


def sample_rows(lengths, order, s, *, keep_tail=False):
    """Megatron's sample index, by what samples are read with: where each begins, the last ends."""
    stream = Stream.of(np.arange(len(order)), np.asarray(lengths)[order])
    count = sample_count(stream.num_tokens, s, keep_tail=keep_tail)
    begins = [min(j * s, stream.num_tokens - 1) for j in range(count + 1)]
    return [list(next(stream.pieces(begin, 1))[:2]) for begin in begins]


@pytest.mark.parametrize(
    ("order", "options", "rows"),
    [
        ([0, 1, 2], {}, [[0, 0], [0, 4], [2, 0], [2, 4]]),
        ([0, 1, 2], {"keep_tail": True}, [[0, 0], [0, 4], [2, 0], [2, 4], [2, 6]]),
        ([2, 0, 1], {}, [[0, 0], [0, 4], [1, 1], [2, 0]]),
        (
            [0, 1, 2, 2, 1, 0],
            {},
            [[0, 0], [0, 4], [2, 0], [2, 4], [3, 1], [3, 5], [4, 2], [5, 3]],
        ),
    ],
)
def test_samples_begin_at_the_golden_rows(order, options, rows):
    assert sample_rows(LENGTHS, order, 4, **options) == rows


def walk(lengths, order, s, keep_tail):
    """Megatron's rule as a walk over documents, one sample after the other."""
    total, overlap = sum(lengths[d] for d in order), 1
    count = -(-(total - overlap) // s) if keep_tail else (total - overlap) // s
    rows, position, offset = [[0, 0]], 0, 0
    for _ in range(count):
        needed = s + overlap
        while needed:
            rest = lengths[order[position]] - offset
            if needed <= rest:
                offset += needed - overlap
                needed = 0
            elif position == len(order) - 1:
                offset = lengths[order[position]] - overlap
                needed = 0
            else:
                needed -= rest
                position, offset = position + 1, 0
        rows.append([position, offset])
    return rows


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    s=st.integers(1, 7),
    keep_tail=st.booleans(),
    random=st.randoms(use_true_random=False),
)
def test_samples_begin_where_a_walk_over_documents_says(lengths, s, keep_tail, random):
    order = list(range(len(lengths))) * 2
    random.shuffle(order)
    rows = sample_rows(lengths, order, s, keep_tail=keep_tail)
    assert rows == walk(lengths, order, s, keep_tail)


def test_samples_step_over_empty_documents():
    lengths = [0, 2, 0, 0, 3, 0]
    rows = sample_rows(lengths, range(6), 2)
    assert rows == [[1, 0], *walk(lengths, range(6), 2, False)[1:]]  # a walk starts before [0]


def test_sample_counts_are_exact_where_megatrons_float_is_not():
    # 20480001 / 4096 is 5000.0002; in 32-bit floats it is 5000, and the last sample is lost.
    assert sample_count(20_480_002, 4096, keep_tail=True) == 5001
    assert sample_count(2**62 + 2, 2, keep_tail=True) == 2**61 + 1


def test_positions_beyond_2_31_tokens_are_exact():
    lengths = np.full(5, 2**31 - 1, np.int32)
    rows = sample_rows(lengths, range(5), 2**20)
    assert len(rows) == (5 * (2**31 - 1) - 1) // 2**20 + 1
    expected = [divmod(j * 2**20, 2**31 - 1) for j in range(len(rows))]
    assert rows == [list(pair) for pair in expected]
    for order in ("stable", "megatron"):
        dataset = GPTDataset(Fake(lengths), sequence_length=2**20, order=order, seed=3)
        starts = sorted(int(dataset[i][0]) for i in range(0, len(dataset), 171))
        assert starts[-1] > 2**33
        assert len(dataset) == len(rows) - 1


def test_megatron_order_equals_the_golden_shuffle():
    order = MegatronOrder(np.array(LENGTHS), 4, 1234, keep_tail=False, num_samples=None)
    assert order.document_order.tolist() == [0, 1, 2]
    assert order.document_order.dtype == np.int32
    assert order.shuffle.tolist() == [1, 2, 0]
    dataset = GPTDataset(Fake(LENGTHS), sequence_length=4, seed=1234, order="megatron")
    assert [sample.tolist() for sample in dataset] == [
        [4, 5, 6, 7, 8],
        [8, 9, 10, 11, 12],
        [0, 1, 2, 3, 4],
    ]


@pytest.mark.parametrize("num_samples", [4, 7, 8, 9, 10, 11, 12, 40])
def test_megatron_order_follows_the_rules_step_by_step(num_samples):
    lengths, s, seed = [9, 14, 7], 4, 77
    tokens = 30
    epochs = 1
    while epochs * tokens < num_samples * s + 1:
        epochs += 1
    before, each = ((epochs - 1) * tokens - 1) // s, (tokens - 1) // s
    separate = epochs > 1 and num_samples - before < int(0.8 * each)
    random = np.random.RandomState(seed)
    parts = []
    for count in [epochs - 1, 1] if separate else [epochs]:
        part = np.array([0, 1, 2] * count, np.int32)
        random.shuffle(part)
        parts.append(part)
    documents = np.concatenate(parts)
    total = (epochs * tokens - 1) // s
    shuffle = np.arange(total, dtype=np.uint32)
    if separate:
        first, last = shuffle[:before], shuffle[before:]
        random.shuffle(first)
        random.shuffle(last)
    else:
        random.shuffle(shuffle)

    order = MegatronOrder(np.array(lengths), s, seed, keep_tail=False, num_samples=num_samples)
    assert order.document_order.tolist() == documents.tolist()
    assert order.shuffle.tolist() == shuffle.tolist()
    assert order.num_samples == total >= num_samples
    dataset = GPTDataset(
        Fake(lengths), sequence_length=s, seed=seed, order="megatron", num_samples=num_samples
    )
    assert len(dataset) == num_samples
    begins = np.concatenate([[0], np.cumsum(lengths)])
    stream = np.concatenate([np.arange(begins[d], begins[d + 1]) for d in documents])
    for i in range(num_samples):
        assert dataset[i].tolist() == stream[shuffle[i] * s : shuffle[i] * s + s + 1].tolist()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(lambda x: sum(x) > 1),
    s=st.integers(1, 9),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 3),
)
def test_an_epoch_has_every_token_once_as_a_label_but_the_first(lengths, s, seed, epoch):
    dataset = GPTDataset(Fake(lengths), sequence_length=s, seed=seed, keep_tail=True)
    n = dataset.samples_per_epoch
    samples = [dataset.sample(epoch * n + i) for i in range(n)]
    labels = np.concatenate([sample[1:] for sample in samples])
    labels = labels[labels != PADDING]
    assert len(np.unique(labels)) == len(labels) == sum(lengths) - 1
    inputs = np.concatenate([sample[:-1] for sample in samples])
    assert len(inputs) == n * s


def test_dropped_tail_is_shorter_than_a_sample_and_differs_between_epochs():
    dataset = GPTDataset(Fake([50] * 4), sequence_length=30, seed=0)
    assert len(dataset) == 6
    missing = set()
    for epoch in range(8):
        seen = {t for i in range(6) for t in dataset.sample(6 * epoch + i).tolist()}
        missing.add(frozenset(range(200)) - seen)
        assert len(seen) == 181
    assert len(missing) > 1


def test_stable_order_keeps_its_beginning_when_more_samples_are_asked_for():
    lengths = [17, 4, 29, 11, 6]
    long = GPTDataset(Fake(lengths), sequence_length=5, num_samples=100, seed=9)
    for num_samples in (1, 7, 13, 14, 60):
        short = GPTDataset(Fake(lengths), sequence_length=5, num_samples=num_samples, seed=9)
        assert len(short) == num_samples
        for i in range(num_samples):
            assert short[i].tolist() == long[i].tolist()
        assert short.fingerprint == long.fingerprint


def test_megatron_order_does_not():
    lengths = [17, 4, 29, 11, 6]

    def make(n):
        options = {"sequence_length": 5, "seed": 9, "order": "megatron"}
        return GPTDataset(Fake(lengths), num_samples=n, **options)

    assert [s.tolist() for s in make(13)] != [make(100)[i].tolist() for i in range(13)]
    assert make(13).fingerprint != make(100).fingerprint


def test_samples_do_not_depend_on_the_order_of_access():
    dataset = GPTDataset(Fake([17, 4, 29]), sequence_length=5, num_samples=60, seed=1)
    forward = [dataset[i].tolist() for i in range(60)]
    again = GPTDataset(Fake([17, 4, 29]), sequence_length=5, num_samples=60, seed=1)
    order = np.random.default_rng(0).permutation(60).tolist()
    assert {i: again[i].tolist() for i in order} == dict(enumerate(forward))


def test_epochs_and_seeds_are_shuffled_differently():
    orders = set()
    for seed in range(3):
        dataset = GPTDataset(Fake([40, 41, 42, 43]), sequence_length=4, seed=seed)
        n = dataset.samples_per_epoch
        for epoch in range(3):
            orders.add(tuple(int(dataset.sample(epoch * n + i)[0]) for i in range(n)))
    assert len(orders) == 9


def test_stable_order_is_frozen():
    """The order is a file format: a run resumed with a later version must see the same data."""
    dataset = GPTDataset(Fake([8, 3, 11, 5]), sequence_length=4, seed=7)
    found = [dataset.sample(i).tolist() for i in (0, 1, 5, 6, 11)]
    assert found == STABLE_SAMPLES


STABLE_SAMPLES = [
    [5, 6, 7, 22, 23],
    [15, 16, 17, 18, 19],
    [11, 12, 13, 14, 15],
    [19, 20, 21, 8, 9],
    [11, 12, 13, 14, 15],
]


def test_only_the_given_sequences_are_read():
    dataset = GPTDataset(Fake([10] * 6), sequence_length=3, sequences=range(2, 4), num_samples=40)
    tokens = {token for sample in dataset for token in sample.tolist()}
    assert tokens == set(range(20, 40))


def test_fingerprint_covers_what_decides_the_samples():
    def make(**changes):
        options = {"sequence_length": 4, "seed": 0, **changes}
        return GPTDataset(Fake(LENGTHS), **options).fingerprint

    changes = [{"seed": 1}, {"sequence_length": 3}, {"keep_tail": True}, {"order": "megatron"}]
    prints = [make(), *(make(**change) for change in changes), make(sequences=range(1, 3))]
    assert len(set(prints)) == len(prints)
    assert make(num_samples=50) == make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 0}, "sequence_length is 0"),
        ({"sequence_length": 15}, "15 tokens do not hold one sample of sequence_length . 1 = 16"),
        (
            {"sequence_length": 15, "order": "megatron"},
            r"do not hold one sample of sequence_length \+ 1 = 16; use a longer corpus or a "
            r"shorter sequence_length \(training.sequence_length in a run's YAML file\), or in "
            r"Python keep_tail=True, which pads the incomplete sample$",
        ),
        ({"sequence_length": 4, "num_samples": 0}, "num_samples is 0"),
        ({"sequence_length": 4, "order": "random"}, "choose 'stable' or 'megatron'"),
        ({"sequence_length": 4, "sequences": range(2, 9)}, r"must lie in range\(0, 3\)"),
        ({"sequence_length": 4, "sequences": range(1, 1)}, "no sequences"),
    ],
)
def test_impossible_requests_say_why(options, message):
    with pytest.raises(DataError, match=message):
        GPTDataset(Fake(LENGTHS), **options)


def test_float_tokens_are_refused():
    fake = Fake(LENGTHS)
    fake.dtype = np.dtype("f4")
    with pytest.raises(DataError, match="stores float32; training samples need integer tokens"):
        GPTDataset(fake, sequence_length=4)


@pytest.mark.parametrize("index", [3, -4])
def test_sample_out_of_range_is_named(index):
    with pytest.raises(IndexError, match=f"sample {index} does not exist; the dataset has 3"):
        GPTDataset(Fake(LENGTHS), sequence_length=4)[index]


def test_small_corpus_serves_with_keep_tail():
    dataset = GPTDataset(Fake([3]), sequence_length=8, keep_tail=True, num_samples=2)
    assert dataset[0].tolist() == [0, 1, 2] + [PADDING] * 6


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 3000), key=st.integers())
def test_permutation_is_a_bijection(size, key):
    permutation = Permutation(size, key)
    many = permutation(np.arange(size))
    assert sorted(many.tolist()) == list(range(size))
    assert [permutation(i) for i in range(min(size, 20))] == many[:20].tolist()


@pytest.mark.parametrize("size", [2**31 + 11, 2**40, 2**62 - 57])
def test_large_permutation_is_injective_where_sampled(size):
    permutation = Permutation(size, "large")
    index = np.random.default_rng(0).integers(0, size, 2000)
    index = np.unique(np.append(index, [0, 1, size - 1]))
    image = permutation(index)
    assert len(np.unique(image)) == len(index)
    assert 0 <= image.min() <= image.max() < size
    assert [permutation(int(i)) for i in index[:50]] == image[:50].tolist()


def test_permutations_of_four_are_all_reached_about_equally():
    seen: dict[tuple[int, ...], int] = {}
    for key in range(4800):
        image = tuple(Permutation(4, key)(np.arange(4)).tolist())
        seen[image] = seen.get(image, 0) + 1
    assert len(seen) == 24
    chi_square = sum((count - 200) ** 2 / 200 for count in seen.values())
    assert chi_square < 60  # 23 degrees of freedom: p about 4e-5


def test_permutation_is_frozen_and_keyed():
    assert Permutation(10, 1, np.int64(2), "x")(np.arange(10)).tolist() == FROZEN_PERMUTATION
    keys = [(1,), ("1",), (1, 1), (11,), (2,)]
    images = {tuple(Permutation(50, *key)(np.arange(50)).tolist()) for key in keys}
    assert len(images) == len(keys)


FROZEN_PERMUTATION = [0, 5, 6, 7, 2, 3, 8, 4, 1, 9]


def test_permutation_checks_its_range():
    with pytest.raises(DataError, match="size 0"):
        Permutation(0, 1)
    for index in (-1, 5):
        with pytest.raises(IndexError, match="permutation of 5"):
            Permutation(5, 1)(index)
        with pytest.raises(IndexError, match="permutation of 5"):
            Permutation(5, 1)(np.array([index]))
