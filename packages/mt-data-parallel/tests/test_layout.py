import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_data_parallel import plan_buckets
from mt_data_parallel.layout import plan_whole

NUMELS = {"a": 100, "b": 30, "c": 200}


def rows(layout):
    return [(p.name, p.start, p.end, p.bucket) for p in layout.params]


def spans(layout):
    return [(b.start, b.end, b.unpadded) for b in layout.buckets]


# The expected numbers are those of Megatron-LM's parameter layout for the same inputs.
def test_without_a_limit_there_is_one_padded_bucket_in_reversed_order():
    layout = plan_buckets(NUMELS, bucket_size=None, world_size=4)
    assert rows(layout) == [("c", 0, 200, 0), ("b", 256, 286, 0), ("a", 320, 420, 0)]
    assert spans(layout) == [(0, 512, 420)]
    assert layout.numel == 512


def test_a_bucket_closes_once_it_holds_the_limit():
    layout = plan_buckets(NUMELS, bucket_size=150, world_size=4)
    assert rows(layout) == [("c", 0, 200, 0), ("b", 256, 286, 1), ("a", 320, 420, 1)]
    assert spans(layout) == [(0, 256, 200), (256, 512, 164)]


def test_bucket_ends_are_multiples_of_the_ranks_too():
    layout = plan_buckets({"w1": 100, "b1": 10, "w2": 300}, bucket_size=350, world_size=6)
    assert rows(layout) == [("w2", 0, 300, 0), ("b1", 320, 330, 0), ("w1", 384, 484, 0)]
    assert spans(layout) == [(0, 768, 484)]  # lcm(6, 128) = 384


def test_a_shared_embedding_has_a_bucket_of_its_own():
    numels = {"emb": 1000, "w1": 100, "b1": 10, "w2": 300}
    layout = plan_buckets(numels, bucket_size=350, world_size=6, alone=("emb",))
    places = [("w2", 0, 300, 0), ("b1", 320, 330, 0), ("w1", 384, 484, 0), ("emb", 768, 1768, 1)]
    assert rows(layout) == places
    assert [(b.start, b.end) for b in layout.buckets] == [(0, 768), (768, 1920)]


def test_padding_for_bandwidth_ends_buckets_at_multiples_of_65536():
    layout = plan_buckets(NUMELS, bucket_size=150, world_size=4, pad_for_bandwidth=True)
    assert [(b.start, b.end) for b in layout.buckets] == [(0, 65536), (65536, 131072)]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=20),
    bucket_size=st.none() | st.integers(1, 5000),
    world_size=st.integers(1, 8),
)
def test_owned_parameters_never_lie_across_two_ranks(sizes, bucket_size, world_size):
    numels = {f"p{i}": size for i, size in enumerate(sizes)}
    costs = {name: float(size) ** 1.5 for name, size in numels.items()}
    layout = plan_whole(numels, costs=costs, bucket_size=bucket_size, world_size=world_size)
    assert sorted(p.name for p in layout.params) == sorted(numels)
    position = 0
    for param in sorted(layout.params, key=lambda p: p.start):
        bucket = layout.buckets[param.bucket]
        part = (bucket.end - bucket.start) // world_size
        first = (param.start - bucket.start) // part
        assert first == (param.end - 1 - bucket.start) // part < world_size
        assert param.end - param.start == numels[param.name]
        assert param.start >= position
        position = param.end
    assert layout.numel % world_size == 0


def test_owned_matrices_are_balanced_by_cost():
    numels = {f"w{i}": 64 * 64 for i in range(12)} | {f"v{i}": 64 * 16 for i in range(12)}
    costs = {name: 64.0**3 if name[0] == "w" else 64.0 * 16**2 for name in numels}
    layout = plan_whole(numels, costs=costs, bucket_size=None, world_size=4)
    part = layout.numel // 4
    loads = [sum(costs[p.name] for p in layout.params if p.start // part == r) for r in range(4)]
    assert max(loads) == min(loads)


def test_nothing_to_lay_out_is_an_empty_layout():
    layout = plan_buckets({}, bucket_size=10)
    assert layout.numel == 0
    assert layout.buckets == ()


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3000), max_size=20),
    bucket_size=st.none() | st.integers(1, 5000),
    world_size=st.integers(1, 12),
)
def test_every_layout_is_disjoint_aligned_and_complete(sizes, bucket_size, world_size):
    numels = {f"p{i}": size for i, size in enumerate(sizes)}
    layout = plan_buckets(numels, bucket_size=bucket_size, world_size=world_size)
    assert [p.name for p in layout.params] == list(reversed(numels))
    position = 0
    for param in layout.params:
        assert param.end - param.start == numels[param.name]
        assert param.start % 64 == 0
        assert param.start >= position
        position = param.end
        bucket = layout.buckets[param.bucket]
        assert bucket.start <= param.start < param.end <= bucket.end
    position = 0
    for index, bucket in enumerate(layout.buckets):
        assert bucket.start == position
        assert bucket.end % math.lcm(world_size, 128) == 0
        position = bucket.end
        inside = [p for p in layout.params if p.bucket == index]
        assert bucket.unpadded == inside[-1].end - bucket.start
        if bucket_size is not None:
            # Full, unless it is the last one; and not full before its last parameter came.
            assert bucket.unpadded >= bucket_size or index == len(layout.buckets) - 1
            assert len(inside) == 1 or inside[-2].end - bucket.start < bucket_size
    assert layout.numel == position


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bucket_size": 0}, "bucket_size must be at least 1 element, or None .* got 0"),
        ({"bucket_size": 1, "world_size": 0}, "world_size must be at least 1, got 0"),
        ({"bucket_size": 1, "alone": ("z",)}, "alone names 'z', which numels lacks"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_buckets(NUMELS, **arguments)


def test_a_missing_cost_is_named():
    with pytest.raises(ValueError, match="costs has no entry for 'b'"):
        plan_whole(NUMELS, costs={"a": 1.0}, bucket_size=None)


def test_an_empty_parameter_is_refused_by_name():
    with pytest.raises(ValueError, match="parameter 'b' has 0 elements"):
        plan_buckets({"a": 1, "b": 0}, bucket_size=None)
