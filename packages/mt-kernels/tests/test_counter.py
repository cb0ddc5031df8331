"""The bits of a key and a counter stay those of splitmix64 with two key words."""

from __future__ import annotations

import pytest
import torch
from mt_kernels import random_bits

INDEX = [0, 1, 5, 2**33 + 7, 2**62, -1]
KEYS = [0, 1, 7222090853987394285, 2**63 - 1]


def words(key: int, index: int) -> int:
    z = (index * 0x9E3779B97F4A7C15 + key) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z ^= (key ^ 0x5851F42D4C957F2D) * 0xD6E8FEB86659FD93 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


@pytest.mark.parametrize("bits", [24, 53])
@pytest.mark.parametrize("key", KEYS)
def test_bits_are_splitmix64_with_a_second_key_word(key: int, bits: int) -> None:
    index = torch.tensor(INDEX)
    expected = [words(key, i) >> 64 - bits for i in INDEX]
    assert random_bits(key, index, bits=bits).tolist() == expected
    assert random_bits(torch.tensor(key), index, bits=bits).tolist() == expected
    assert index.tolist() == INDEX
