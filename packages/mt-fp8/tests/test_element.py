"""Codes mean what their bits say, and rounding is to the nearest, ties to even, in every format."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from exact import FIELDS, magnitudes, nearest, value_of
from mt_fp8 import QTensor, Scaling, quantize

FORMATS = list(FIELDS)


def codes_of(q):
    """One code for each element."""
    data = q.data.view(torch.uint8).flatten()
    if q.scaling.format != "e2m1":
        return data.tolist()
    return torch.stack((data & 15, data >> 4), -1).flatten()[: q.shape[-1]].tolist()


def with_factor_one(x, name):
    scaling = Scaling(format=name)
    return quantize(torch.as_tensor(x, dtype=torch.float32), scaling, factor=torch.ones(()))


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_stands_for_the_value_of_its_bits(name):
    count = 16 if name == "e2m1" else 256
    codes = torch.arange(count, dtype=torch.uint8)
    data = codes[0::2] | codes[1::2] << 4 if name == "e2m1" else codes
    tensors = {"data": data, "scales": torch.ones(())}
    q = QTensor.from_tensors(
        tensors, scaling=Scaling(format=name), dtype=torch.float32, shape=(count,)
    )
    for code, found in enumerate(q.dequantize().tolist()):
        expected = value_of(name, code)
        if expected is None:
            assert not math.isfinite(found), code
        else:
            assert Fraction(found) == expected, code
            assert math.copysign(1, found) == (-1 if code >= count // 2 else 1)


@pytest.mark.parametrize("name", FORMATS)
def test_every_value_keeps_its_code(name):
    half = len(magnitudes(name))
    values = [float(value) for value in magnitudes(name)]
    q = with_factor_one(values + [-value for value in values], name)
    sign = 1 << sum(FIELDS[name][:2])
    assert codes_of(q) == [*range(half), *range(sign, sign + half)]


@pytest.mark.parametrize("name", FORMATS)
def test_every_tie_goes_to_the_even_code_and_its_neighbours_to_the_nearest(name):
    values = magnitudes(name)
    ties = [float((a + b) / 2) for a, b in pairwise(values)]
    limit = float(values[-1])
    beyond = float(values[-1] + (values[-1] - values[-2]) / 2)
    x = torch.tensor([*ties, limit, beyond, 1e30, 1e-40, 0.0], dtype=torch.float32)
    x = torch.cat((x, x.nextafter(torch.tensor(torch.inf)), x.nextafter(torch.tensor(-torch.inf))))
    x = torch.cat((x, -x))
    expected = [nearest(name, Fraction(item)) for item in x.tolist()]
    sign = 1 << sum(FIELDS[name][:2])
    expected = [
        code | sign if math.copysign(1, item) < 0 else code
        for code, item in zip(expected, x.tolist(), strict=True)
    ]
    assert codes_of(with_factor_one(x, name)) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_drawn_numbers_of_all_sizes_round_to_the_nearest(name):
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31, (4000,), generator=generator).to(torch.int32)
    x = bits.view(torch.float32)
    inside = torch.randn(4000, generator=generator) * 4
    x = torch.cat((x[x.isfinite()], inside))
    codes = codes_of(with_factor_one(x, name))
    sign = 1 << sum(FIELDS[name][:2])
    for item, code in zip(x.tolist(), codes, strict=True):
        assert code & ~sign == nearest(name, Fraction(item)) & ~sign, item
        assert bool(code & sign) == (math.copysign(1, item) < 0)


@pytest.mark.parametrize("name", FORMATS)
def test_infinities_become_the_largest_and_nan_is_positive_nan(name):
    minus_nan = torch.tensor([-1], dtype=torch.int32).view(torch.float32)
    x = torch.cat((torch.tensor([1.0, torch.inf, -torch.inf, torch.nan]), minus_nan))
    q = with_factor_one(x, name)
    top, sign = len(magnitudes(name)) - 1, 1 << sum(FIELDS[name][:2])
    codes = codes_of(q)
    assert codes[1:3] == [top, top + sign]
    if name == "e2m1":
        assert q.dequantize().isnan().all()
    else:
        assert codes[3:] == [0x7F, 0x7F]
        assert q.dequantize()[:3].tolist() == [
            1.0,
            float(magnitudes(name)[-1]),
            -float(magnitudes(name)[-1]),
        ]
