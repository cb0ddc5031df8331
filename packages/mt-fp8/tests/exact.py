"""The formats in exact arithmetic, from the bits of codes and from no cast of torch's."""

from bisect import bisect_left
from fractions import Fraction
from functools import cache

FIELDS = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m1": (2, 1, 1)}  # exponent, mantissa, bias


def value_of(name, code):
    """A fraction; None for what is not finite."""
    exponent_bits, bits, bias = FIELDS[name]
    sign = -1 if code >> (exponent_bits + bits) else 1
    exponent = (code >> bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << bits) - 1)
    if name == "e5m2" and exponent == 31:
        return None
    if name == "e4m3" and exponent == 15 and mantissa == 7:
        return None
    if exponent == 0:
        return sign * Fraction(mantissa, 1 << bits) * Fraction(2) ** (1 - bias)
    return sign * (1 + Fraction(mantissa, 1 << bits)) * Fraction(2) ** (exponent - bias)


@cache
def magnitudes(name):
    """All magnitudes in ascending order, which is the order of the codes."""
    half = 1 << sum(FIELDS[name][:2])
    found = [value_of(name, code) for code in range(half)]
    return [value for value in found if value is not None]


def nearest(name, x):
    """The code of the nearest value, of the even code where two are as near, of max at most."""
    values, size = magnitudes(name), abs(x)
    above = bisect_left(values, size)
    half = 1 << sum(FIELDS[name][:2])
    sign = half if x < 0 else 0
    if above == len(values):
        return sign + len(values) - 1
    if above == 0:
        return sign
    lower, upper = size - values[above - 1], values[above] - size
    if lower == upper:
        return sign + (above if above % 2 == 0 else above - 1)
    return sign + (above if upper < lower else above - 1)


def step(name, x):
    """The distance of neighbours where a magnitude lies."""
    values = magnitudes(name)
    at = min(max(bisect_left(values, abs(x)), 1), len(values) - 1)
    return values[at] - values[at - 1]
