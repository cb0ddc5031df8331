"""Numbers on the device equal the host's numbers."""

import math

import pytest
import torch
from mt_optim.gradients.scaling import root


def test_a_square_root_is_that_of_python() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(20_000, generator=generator, dtype=torch.float64)
    x *= 2.0 ** torch.randint(-300, 300, x.shape, generator=generator)
    expected = torch.tensor([math.sqrt(value) for value in x.tolist()], dtype=torch.float64)
    assert torch.equal(root(x), expected)
    assert torch.equal(root(x[7]), expected[7])


@pytest.mark.parametrize("value", [0.0, 4.0, math.inf, 5e-324])
def test_the_ends_have_roots_too(value) -> None:
    assert root(torch.tensor(value, dtype=torch.float64)).item() == math.sqrt(value)


def test_what_is_no_number_has_none() -> None:
    assert root(torch.tensor(math.nan, dtype=torch.float64)).isnan()
