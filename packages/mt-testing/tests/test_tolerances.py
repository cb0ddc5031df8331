import re
from pathlib import Path

import pytest
import torch
from mt_testing import assert_close, tolerance
from mt_testing.tolerances import FACTORS

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gemm_tolerance_accepts_rounding_and_refuses_a_lost_term(dtype):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(32, 512, generator=generator, dtype=torch.float64).to(dtype)
    b = torch.randn(512, 32, generator=generator, dtype=torch.float64).to(dtype)
    expected = a.double() @ b.double()
    assert_close(a @ b, expected, op="gemm")
    with pytest.raises(AssertionError, match="op='gemm'"):
        assert_close(a[:, 1:] @ b[1:], expected, op="gemm")


def test_exact_refuses_one_unit_in_the_last_place():
    one = torch.ones(4)
    assert_close(one, one.clone())
    other = one.clone()
    other[2] = torch.nextafter(other[2], torch.tensor(2.0))
    with pytest.raises(AssertionError, match=r"1 of 4 elements differ; the worst at \[2\]"):
        assert_close(other, one)


def test_integers_are_exact_whatever_the_op():
    large = torch.tensor([2**62 + 1])
    assert_close(large, large.clone(), op="training")
    with pytest.raises(AssertionError, match="1 of 1"):
        assert_close(large - 1, large, op="training")


def test_all_zero_reference_needs_a_scale():
    zero, small = torch.zeros(3), torch.full((3,), 1e-7)
    with pytest.raises(AssertionError, match="3 of 3"):
        assert_close(small, zero, op="gemm")
    assert_close(small, zero, op="gemm", scale=1.0)


def test_nan_and_infinity_must_match():
    special = torch.tensor([torch.nan, torch.inf, 1.0])
    assert_close(special, special.clone(), op="gemm")
    for wrong in (
        [1.0, torch.inf, 1.0],
        [torch.nan, -torch.inf, 1.0],
        [torch.nan, torch.inf, torch.nan],
    ):
        with pytest.raises(AssertionError, match="1 of 3"):
            assert_close(torch.tensor(wrong), special, op="gemm")


def test_nested_structures_name_the_place():
    good = {"layers": [torch.ones(2), torch.zeros(2)]}
    bad = {"layers": [torch.ones(2), torch.ones(2)]}
    with pytest.raises(AssertionError, match=re.escape("grads['layers'][1]: 2 of 2")):
        assert_close(bad, good, op="gemm", name="grads")
    with pytest.raises(AssertionError, match=re.escape("['other'] is not ['layers']")):
        assert_close({"other": 1}, good)
    with pytest.raises(AssertionError, match="has not 2 items"):
        assert_close({"layers": [torch.ones(2)]}, good)
    with pytest.raises(AssertionError, match=re.escape("shape (2,), expected (1, 2)")):
        assert_close(torch.ones(2), torch.ones(1, 2))


def test_unknown_op_lists_the_table():
    with pytest.raises(ValueError, match="op is 'matmul'; the table has exact, elementwise"):
        tolerance(torch.float32, "matmul")


def test_docs_publish_the_table():
    page = Path(__file__).parents[3] / "docs" / "mt-testing.md"
    if not page.exists():
        pytest.skip("not in the workspace")
    text = page.read_text()
    for op in FACTORS:
        cells = [f"{tolerance(dtype, op):.1e}" if op != "exact" else "0" for dtype in DTYPES]
        assert f"| {op} | {' | '.join(cells)} |" in text


def test_what_is_no_dtype_and_no_kind_is_named():
    with pytest.raises(TypeError, match=r"dtype must be a torch\.dtype, got None"):
        tolerance(None, "gemm")
    with pytest.raises(ValueError, match=r"op is \[\]"):
        tolerance(torch.float32, [])
