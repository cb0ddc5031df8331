"""Counter-based randomness: exact layout invariance, and statistics of the values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_parallel_state import (
    ParallelLayout,
    PartitionSpec,
    fill_normal_,
    hash_key,
    initialize_,
    random_uniform,
    shard_param,
)
from torch import nn

GOLDEN_UNIFORM = [
    0.5497880096899815,
    0.5920578303500947,
    0.845898223032946,
    0.3280740499978293,
    0.1383164032212315,
]


def test_keys_do_not_collide_like_sums_or_concatenations() -> None:
    parts = [(1, 23), (12, 3), ("1", 23), ("1", "23"), (123,), ("123",), (24,), ("i", 1), (-1,), ()]
    assert len({hash_key(*p) for p in parts}) == len(parts)
    assert all(0 <= hash_key(*p) < 2**63 for p in parts)
    assert hash_key("init", 0, "embedding.weight") == 7222090853987394285
    with pytest.raises(TypeError, match=r"got 1\.5"):
        hash_key(1.5)


def test_uniform_values_are_fixed_for_ever() -> None:
    index = torch.tensor([0, 1, 2, 2**40, -1])
    actual = random_uniform(hash_key("golden"), index, dtype=torch.float64)
    assert actual.tolist() == GOLDEN_UNIFORM


def test_uniform_is_splitmix64_with_a_second_key_word() -> None:
    def bits(key: int, index: int) -> int:
        z = (index * 0x9E3779B97F4A7C15 + key) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z ^= (key ^ 0x5851F42D4C957F2D) * 0xD6E8FEB86659FD93 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    key, index = hash_key("python"), [0, 1, 5, 2**33 + 7, 2**62]
    words = [bits(key, i) for i in index]
    doubles = random_uniform(key, torch.tensor(index), dtype=torch.float64)
    floats = random_uniform(key, torch.tensor(index), dtype=torch.float32)
    assert doubles.tolist() == [(w >> 11) * 2.0**-53 for w in words]
    assert floats.tolist() == [(w >> 40) * 2.0**-24 for w in words]


def test_uniform_is_a_function_of_key_and_index_alone() -> None:
    index = torch.arange(70_000)
    whole = random_uniform(7, index)
    order = torch.randperm(70_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(random_uniform(7, index[order]), whole[order])
    assert torch.equal(random_uniform(7, index[33:40].view(7, 1)), whole[33:40].view(7, 1))
    assert not torch.equal(random_uniform(8, index), whole)


@pytest.mark.parametrize("key", [0, 7, 2**63 - 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_key_in_a_tensor_draws_what_the_number_draws(key, dtype) -> None:
    index = torch.arange(100) * 2**40
    whole = random_uniform(key, index, dtype=dtype)
    assert torch.equal(random_uniform(torch.tensor(key), index, dtype=dtype), whole)


def test_uniform_rejects_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match=r"float32 or torch\.float64, got torch\.bfloat16"):
        random_uniform(0, torch.arange(3), dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"int64, got torch\.int32"):
        random_uniform(0, torch.arange(3, dtype=torch.int32))


@pytest.mark.parametrize("stride", [1, 2**20, 2**33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_passes_chi_square_for_any_stride(stride: int, dtype: torch.dtype) -> None:
    n, bins = 200_000, 200
    u = random_uniform(hash_key("chi", stride), torch.arange(n) * stride, dtype=dtype)
    assert u.min() >= 0
    assert u.max() < 1
    observed = torch.histc(u.double(), bins, 0, 1)
    chi2 = ((observed - n / bins) ** 2 / (n / bins)).sum().item()
    assert abs(chi2 - (bins - 1)) < 5 * math.sqrt(2 * (bins - 1))
    low = (u.double() * 2**24 % 256).floor()  # the low bits of the fp32 draw are as uniform
    observed = torch.histc(low, 256, 0, 256)
    chi2 = ((observed - n / 256) ** 2 / (n / 256)).sum().item()
    assert abs(chi2 - 255) < 5 * math.sqrt(2 * 255)


def _correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]).double())[0, 1])


def test_neighbouring_counters_and_keys_are_uncorrelated() -> None:
    n = 200_000
    index = torch.arange(n)
    u = random_uniform(1, index)
    bound = 5 / math.sqrt(n)
    for lag in (1, 2, 64, 4096):
        assert abs(_correlation(u[:-lag], u[lag:])) < bound
    for other in (0, 2, 3, 1 << 40, hash_key("x")):
        assert abs(_correlation(u, random_uniform(other, index))) < bound


def test_a_shifted_key_is_not_a_shifted_sequence() -> None:
    golden = 0x9E3779B97F4A7C15  # were the key only added to the counter, this one would shift it
    a = random_uniform(1000, torch.arange(1, 1001))
    b = random_uniform((1000 + golden) % 2**63, torch.arange(0, 1000))
    assert not torch.equal(a, b)
    assert abs(_correlation(a, b)) < 5 / math.sqrt(1000)


def _normal(
    shape: tuple[int, ...], key: int = 3, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype)
    return fill_normal_(out, key=key, std=1.0, global_shape=shape, offsets=(0,) * len(shape))


def test_normal_has_the_moments_and_tails_of_a_normal() -> None:
    n = 400_000
    x = _normal((n,))
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((x**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / n)
    for z in (0.5, 1.0, 2.0, 3.0, 4.0):  # the distribution function, both sides
        p = 0.5 * math.erfc(z / math.sqrt(2))
        for count in ((x > z).sum(), (x < -z).sum()):
            assert abs(count.item() - n * p) < 5 * math.sqrt(n * p) + 1
    assert abs(_correlation(x[:-1], x[1:])) < 5 / math.sqrt(n)


def test_normal_is_box_muller_of_its_uniforms() -> None:
    index = torch.arange(50_000)
    u = random_uniform(3, index, dtype=torch.float64) + 2.0**-53
    v = random_uniform(3 ^ 0x2545F4914F6CDD1D, index, dtype=torch.float64)
    expected = torch.sqrt(-2 * torch.log(u)) * -torch.cos(2 * math.pi * v)
    torch.testing.assert_close(_normal((50_000,)), expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_box_equals_the_slice_of_the_whole(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    starts = [data.draw(st.integers(0, n - 1)) for n in shape]
    sizes = [data.draw(st.integers(1, n - s)) for n, s in zip(shape, starts, strict=True)]
    box = fill_normal_(
        torch.empty(sizes, dtype=torch.float64), key=3, std=1.0, global_shape=shape, offsets=starts
    )
    view = tuple(slice(s, s + n) for s, n in zip(starts, sizes, strict=True))
    assert torch.equal(box, _normal(shape)[view])


def test_boxes_larger_than_a_block_equal_the_slice_of_the_whole() -> None:
    whole = _normal((3, 70_001))
    for view in ((slice(1, 3), slice(0, 70_001)), (slice(0, 3), slice(17, 69_000))):
        part = whole[view]
        starts = tuple(s.start for s in view)
        box = fill_normal_(
            torch.empty_like(part), key=3, std=1.0, global_shape=(3, 70_001), offsets=starts
        )
        assert torch.equal(box, part)
    tall = _normal((70_001, 3))
    box = torch.empty(50_000, 2, dtype=torch.float64)
    fill_normal_(box, key=3, std=1.0, global_shape=(70_001, 3), offsets=(9, 1))
    assert torch.equal(box, tall[9:50_009, 1:])


def test_lower_precision_is_the_rounding_of_fp64() -> None:
    exact = _normal((1000,))
    assert torch.equal(_normal((1000,), dtype=torch.float32), exact.float())
    assert torch.equal(_normal((1000,), dtype=torch.bfloat16), exact.bfloat16())


def test_non_contiguous_and_empty_tensors_are_filled() -> None:
    whole = _normal((4, 6))
    target = torch.empty(6, 4, dtype=torch.float64).t()
    fill_normal_(target, key=3, std=1.0, global_shape=(4, 6), offsets=(0, 0))
    assert torch.equal(target, whole)
    fill_normal_(torch.empty(0, 6), key=3, std=1.0, global_shape=(4, 6), offsets=(4, 0))
    scalar = fill_normal_(torch.empty(()), key=3, std=1.0, global_shape=(), offsets=())
    assert scalar.dim() == 0


def test_boxes_outside_the_array_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"leaves the array of shape \(4,\) in dim 0: 3 \+ 2 > 4"):
        fill_normal_(torch.empty(2), key=0, std=1.0, global_shape=(4,), offsets=(3,))
    with pytest.raises(ValueError, match="one entry per dim"):
        fill_normal_(torch.empty(2), key=0, std=1.0, global_shape=(4, 1), offsets=(3,))
    with pytest.raises(ValueError, match=r"std must be finite and at least 0, got -1\.0"):
        fill_normal_(torch.empty(2), key=0, std=-1.0, global_shape=(2,), offsets=(0,))


def test_initialisation_does_not_depend_on_the_layout() -> None:
    whole = nn.Parameter(torch.empty(6, 8))
    initialize_(whole, seed=1, name="w", layout=ParallelLayout(), rank=0, std=0.02)
    assert whole.std().item() == pytest.approx(0.02, rel=0.4)
    for layout in (ParallelLayout(tp=2, dp=2), ParallelLayout(tp=4, pp=2, order="pp-tp")):
        for rank in range(layout.world_size):
            size = 8 // layout.tp
            part = shard_param(nn.Parameter(torch.empty(6, size)), PartitionSpec(None, "tp"))
            initialize_(part, seed=1, name="w", layout=layout, rank=rank, std=0.02)
            start = layout.coordinates(rank)["tp"] * size
            assert torch.equal(part, whole[:, start : start + size])
    other = initialize_(
        nn.Parameter(torch.empty(6, 8)), seed=1, name="v", layout=ParallelLayout(), rank=0, std=0.02
    )
    assert not torch.equal(other, whole)


@pytest.mark.gpu
def test_a_gpu_draws_the_values_of_the_cpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    index = torch.arange(100_000)
    for dtype in (torch.float32, torch.float64):
        there = random_uniform(3, index.cuda(), dtype=dtype)
        assert torch.equal(there.cpu(), random_uniform(3, index, dtype=dtype))
    box = torch.empty(300, 301, dtype=torch.float64, device="cuda")
    fill_normal_(box, key=3, std=1.0, global_shape=(300, 301), offsets=(0, 0))
    assert torch.equal(box.cpu(), _normal((300, 301)))


def test_no_two_streams_of_a_large_layout_share_a_key() -> None:
    """Additive seeds share 77 values among 1038 streams of this layout."""
    keys = {
        hash_key(seed, stream, "pp", pp, *(part for axis in at.items() for part in axis))
        for seed in (0, 1)
        for pp in range(16)
        for stream, at in [
            ("default", {}),
            *[("model-parallel", {"tp": tp}) for tp in range(8)],
            *[("expert", {"ep": ep, "etp": etp}) for ep in range(64) for etp in range(8)],
        ]
    }
    assert len(keys) == 2 * 16 * (1 + 8 + 512)
