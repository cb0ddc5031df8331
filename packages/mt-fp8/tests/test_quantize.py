"""Quantised tensors stand for what they were made of, within half a step, and by one definition."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed as dist
from drawing import LAYOUTS, bits, hard, laid_out, same_bits
from exact import magnitudes, nearest, step
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mt_fp8 import QTensor, Recipe, Scaling, quantize, recipe
from mt_fp8.quantize import amax_of

NAMES = ("tensorwise", "rowwise", "delayed", "blockwise", "mxfp8", "nvfp4")
FP4 = {"format": "e2m1", "scale": "nvfp4"}
SCALINGS = {
    "tensor": Scaling(),
    "tensor e5m2 pow2": Scaling(format="e5m2", scale="pow2"),
    "tensor margin": Scaling(margin=2),
    "row": Scaling(block="row"),
    "row pow2": Scaling(block="row", scale="pow2"),
    "head": Scaling(block="head"),
    "token": Scaling(block="token", scale="pow2"),
    "1x128": Scaling(block=(1, 128), scale="pow2"),
    "1x128 e5m2": Scaling(block=(1, 128), format="e5m2"),
    "128x128": Scaling(block=(128, 128), scale="pow2"),
    "5x7": Scaling(block=(5, 7)),
    "mxfp8": Scaling(block=(1, 32), scale="e8m0"),
    "mxfp8 e5m2 floor": Scaling(block=(1, 32), scale="e8m0", exponent="floor", format="e5m2"),
    "mxfp8 floor": Scaling(block=(1, 32), scale="e8m0", exponent="floor"),
    "mxfp4": Scaling(block=(1, 32), scale="e8m0", format="e2m1"),
    "fp4 tensor": Scaling(format="e2m1"),
    "nvfp4": Scaling(block=(1, 16), **FP4),
    "nvfp4 16x16": Scaling(block=(16, 16), **FP4),
}
# Elements of these may lie beyond the largest code of their block, whose scale was rounded down.
CLIPS = {"nvfp4", "nvfp4 16x16", "mxfp8 floor", "mxfp8 e5m2 floor"}


def block_bounds(shape, scaling):
    """Start and stop of rows and columns of each block of a matrix, in the order of scales."""
    rows, columns = {
        "tensor": shape, "row": (1, shape[1]), "head": (1, shape[1]), "token": shape
    }.get(scaling.block, scaling.block)  # fmt: skip
    for top in range(0, shape[0], rows):
        for left in range(0, shape[1], columns):
            yield slice(top, top + rows), slice(left, left + columns)


def check_error(q, x, *, clips=False):
    """Half a step of each element in units of its scale, and what fp32 rounds in between."""
    steps = q.steps().flatten().tolist()
    values = q.dequantize(torch.float64)
    for s, (rows, columns) in zip(steps, block_bounds(x.shape, q.scaling), strict=True):
        found, expected = values[rows, columns].flatten(), x[rows, columns].flatten()
        top = float(magnitudes(q.scaling.format)[-1])
        for a, b in zip(found.tolist(), expected.tolist(), strict=True):
            if math.isinf(b):
                assert a == pytest.approx(math.copysign(top * s, b), rel=1e-6)
                continue
            units = min(abs(b / s), top) if s else 0.0
            half = float(step(q.scaling.format, Fraction(units))) / 2 * s
            limit = max(half, abs(b) - top * s) if clips else half
            assert abs(a - b) <= limit * (1 + 1e-5) + abs(b) * 1e-6 + (abs(b) if not s else 0), (
                a,
                b,
                s,
            )


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("finite", [True, False], ids=["finite", "infinities"])
def test_error_is_half_a_step_of_the_block(name, finite):
    x = hard(9, 150, seed=len(name), finite=finite)
    check_error(quantize(x, SCALINGS[name]), x.double(), clips=name in CLIPS)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40),
    st.sampled_from(list(SCALINGS)),
)
@example([3.190147189883798e38], "tensor e5m2 pow2")  # its code stands for 2^128
def test_error_is_half_a_step_whatever_the_numbers(numbers, name):
    x = torch.tensor([numbers], dtype=torch.float32)
    scaling = SCALINGS[name]
    q = quantize(x, scaling)
    assert not q.dequantize(torch.float64).isnan().any()
    finite = x[x.isfinite()].abs()
    if finite.numel() and finite.max() > 1e-25 and scaling.scale != "nvfp4":
        check_error(q, x.double(), clips=name in CLIPS)


def scale_by_hand(amax, scaling):
    """The scale of one block: powers of two exactly, others by NumPy's divisions in fp32."""
    top = float(magnitudes(scaling.format)[-1])
    if scaling.scale == "e8m0":
        if scaling.exponent == "floor":
            exponent = math.frexp(amax)[1] - math.frexp(top)[1]
        else:
            ratio = Fraction(amax) / Fraction(top)
            exponent = math.ceil(math.log2(amax) - math.log2(top)) - 2
            while Fraction(2) ** exponent < ratio:
                exponent += 1
        return 2.0 ** max(-127, exponent)
    if scaling.scale == "pow2":
        factor = 2.0 ** (math.frexp(top / amax)[1] - 1)
        return 2.0**scaling.margin / factor
    factor = np.float32(top) / np.float32(amax) / np.float32(2.0**scaling.margin)
    return float(np.float32(1) / factor)


@pytest.mark.parametrize("name", [n for n, s in SCALINGS.items() if s.scale != "nvfp4"])
def test_scales_are_those_of_the_definition(name):
    scaling = SCALINGS[name]
    x = torch.randn(9, 150, generator=torch.Generator().manual_seed(2)) * 3
    x[4] *= 2.0**-20
    x[5, :32] = torch.tensor([448.0, 57344.0] * 16)  # a power of two times max: nothing to round
    found = quantize(x, scaling).steps().flatten().tolist()
    for s, (rows, columns) in zip(found, block_bounds(x.shape, scaling), strict=True):
        expected = scale_by_hand(x[rows, columns].abs().max().item(), scaling)
        assert s == expected


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_nvfp4_has_two_levels_of_scales(block):
    scaling = Scaling(block=block, **FP4)
    x = hard(20, 50, seed=3)
    q = quantize(x, scaling)
    total = x.abs().max().item()
    assert math.isclose(q.global_scale.item(), total / (448 * 6), rel_tol=3e-7)
    codes = q.scales.view(torch.uint8).flatten().tolist()
    values = q.codes()
    for code, (rows, columns) in zip(codes, block_bounds(x.shape, scaling), strict=True):
        amax = x[rows, columns].abs().max().item()
        target = amax / 6 * (448 * 6) / total
        near = {nearest("e4m3", Fraction(target * (1 + e))) for e in (-1e-6, 0, 1e-6)}
        assert code in near
        s = float(magnitudes("e4m3")[code]) * total / 2688
        for v, item in zip(
            values[rows, columns].flatten(), x[rows, columns].flatten(), strict=True
        ):
            near = {
                nearest("e2m1", Fraction(item.item() * (1 + e) / s if s else 0))
                for e in (-1e-6, 0, 1e-6)
            }
            assert abs(v.item()) in {float(magnitudes("e2m1")[code & 7]) for code in near}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_quantising_is_pure_and_the_same_for_any_dtype_and_layout(name, dtype):
    scaling = SCALINGS[name]
    x = hard(6, 133, seed=4).clamp(-6e4, 6e4).to(dtype)
    for layout in LAYOUTS:
        given_ = laid_out(x, layout)
        plain = given_.contiguous().clone()
        q = quantize(given_, scaling)
        assert torch.equal(given_, plain)
        assert same_bits(q, quantize(given_, scaling))
        assert same_bits(q, quantize(plain.float(), scaling))
        assert q.dtype == dtype
        assert q.dequantize().dtype == dtype


@pytest.mark.parametrize("name", SCALINGS)
def test_leading_dims_are_quantised_one_by_one(name):
    scaling = SCALINGS[name]
    if scaling.block in ("tensor", "head") or scaling.scale == "nvfp4":
        pytest.skip("one scale spans them")
    x = hard(2, 3, 6, 40, seed=5)
    whole = quantize(x, scaling)
    for i in range(2):
        for j in range(3):
            part = quantize(x[i, j], scaling)
            assert torch.equal(part.dequantize(), whole.dequantize()[i, j])
            assert torch.equal(part.steps(), whole.steps()[i, j])


def test_caches_have_scales_of_heads_tokens_or_both():
    x = hard(2, 7, 4, 16, seed=6)  # batch, tokens, heads, head_dim
    by_head = quantize(x, Scaling(block="head"))
    assert by_head.scales.shape == (4, 1)
    by_token = quantize(x, Scaling(block="token"))
    assert by_token.scales.shape == (2, 7, 1, 1)
    assert quantize(x, Scaling(block="row")).scales.shape == (2, 7, 4, 1)
    for head in range(4):
        alone = quantize(x[:, :, head], Scaling())
        assert torch.equal(alone.dequantize(), by_head.dequantize()[:, :, head])
    alone = quantize(x[1, 3], Scaling())
    assert torch.equal(alone.dequantize(), by_token.dequantize()[1, 3])
    # A cache that is filled token by token keeps the scales it was given.
    later = quantize(x[:, 3:4], Scaling(block="head"), amax=amax_of(x, Scaling(block="head")))
    assert torch.equal(later.data.float(), by_head.data[:, 3:4].float())
    # Or the calibrated scales of heads, of queries, keys or values alike.
    scales = torch.tensor([0.5, 0.25, 2.0, 1.0])[:, None]
    given = quantize(x, Scaling(block="head"), factor=1 / scales)
    assert torch.equal(given.scales, scales)
    expected = (x / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(given.data.float(), expected.float())


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (0, 3, 16), (2, 0, 16)])
def test_empty_tensors_have_empty_codes(name, shape):
    q = quantize(torch.empty(shape), SCALINGS[name])
    assert q.dequantize().shape == shape
    assert not q.steps().isnan().any()


@pytest.mark.parametrize("name", SCALINGS)
def test_zeros_stay_zeros_with_their_signs(name):
    x = torch.zeros(4, 64)
    x[1] = -0.0
    q = quantize(x, SCALINGS[name])
    assert not q.dequantize().any()
    assert torch.equal(torch.signbit(q.codes()), torch.signbit(x))


@pytest.mark.parametrize("name", SCALINGS)
def test_nan_stays_nan_and_leaves_other_blocks_alone(name):
    x = hard(6, 256, seed=8)
    plain = quantize(x, SCALINGS[name]).dequantize()
    x[3, 200] = torch.nan
    q = quantize(x, SCALINGS[name])
    found = q.dequantize()
    assert found[3, 200].isnan()
    if q.scaling.format != "e2m1":
        assert found.isnan().sum() == 1
    for rows, columns in block_bounds(x.shape, q.scaling):
        if not x[rows, columns].isnan().any():
            assert torch.equal(found[rows, columns], plain[rows, columns])


def test_numbers_alone_and_rows_alone_can_be_quantised():
    assert quantize(torch.tensor(-3.0), Scaling(scale="pow2")).dequantize().item() == -3
    x = hard(70, seed=9)
    for name in ("row", "1x128", "mxfp8", "nvfp4", "fp4 tensor"):
        q = quantize(x, SCALINGS[name])
        assert torch.equal(q.dequantize(), quantize(x[None], SCALINGS[name]).dequantize()[0])


@pytest.mark.parametrize("name", SCALINGS)
def test_transposes_are_exact_where_there_is_one(name):
    x = hard(2, 37, 53, seed=11)
    q = quantize(x, SCALINGS[name])
    if q.scaling.is_square:
        assert same_bits(q.transposed(), quantize(x.mT, q.scaling))
    else:
        with pytest.raises(ValueError, match="no exact transpose"):
            q.transposed()


@pytest.mark.parametrize("name", SCALINGS)
def test_what_is_sent_comes_back(name):
    q = quantize(hard(3, 33, seed=12), SCALINGS[name])
    tensors = q.tensors()
    assert {t.dtype for t in tensors.values()} <= {torch.uint8, torch.float32}
    assert q.nbytes == sum(t.nbytes for t in tensors.values())
    back = QTensor.from_tensors(tensors, scaling=q.scaling, dtype=q.dtype, shape=q.shape)
    assert same_bits(q, back)
    assert back.data.dtype == q.data.dtype


def test_parts_of_a_tensor_share_a_scale_over_ranks(ranks):
    ranks(2, _share_a_scale)


def _share_a_scale():
    own = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    x = hard(8, 4, 48, seed=13)
    for name, scaling in SCALINGS.items():
        whole = quantize(x, scaling)
        part = quantize(x[own], scaling, group=dist.group.WORLD)
        assert torch.equal(part.dequantize(), whole.dequantize()[own]), name


def test_wrong_arguments_are_named():
    x = torch.ones(4, 32)
    with pytest.raises(TypeError, match="x must be a Tensor"):
        quantize([1.0], Scaling())
    with pytest.raises(TypeError, match=r"float16.*got torch.int64"):
        quantize(torch.ones(2, dtype=torch.int64), Scaling())
    with pytest.raises(TypeError, match="how must be"):
        quantize(x, 3)
    with pytest.raises(ValueError, match="Did you mean mxfp8"):
        quantize(x, "mxfp")
    with pytest.raises(ValueError, match="needs a tensor of 2 or more dims"):
        quantize(x[0], Scaling(block=(16, 16)))
    with pytest.raises(ValueError, match="needs a seed"):
        quantize(x, Scaling(stochastic=True))
    with pytest.raises(ValueError, match="multiple of 16"):
        quantize(x[:, :17], Scaling(block="row", hadamard=True))
    with pytest.raises(ValueError, match="amax must be numbers of the shape"):
        quantize(x, Scaling(block="row"), amax=torch.ones(4))
    with pytest.raises(ValueError, match="leaves input as it is"):
        quantize(x, Recipe(name="own", input=None, weight=Scaling(), grad=None))
    with pytest.raises(ValueError, match="no pairs of codes"):
        quantize(torch.ones(()), Scaling(format="e2m1"))
    q = quantize(x, Scaling())
    with pytest.raises(ValueError, match="data must have the shape"):
        QTensor.from_tensors(q.tensors(), scaling=q.scaling, dtype=q.dtype, shape=(4, 31))
    with pytest.raises(ValueError, match="tensors must be data, scales"):
        QTensor.from_tensors({}, scaling=Scaling(), dtype=x.dtype, shape=(1,))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"format": "e3m4"}, "is not one of e4m3"),
        ({"block": (0, 3)}, "a side below 1"),
        ({"block": "column"}, "block"),
        ({"scale": "nvfp4"}, "nvfp4 is for e2m1"),
        ({"scale": "nvfp4", "format": "e2m1"}, "nvfp4 has blocks"),
        ({"exponent": "floor"}, "floor is a rounding of e8m0"),
        ({"hadamard": True}, "rows are rotated"),
        ({"margin": -1}, "too small"),
        ({"eps": float("nan")}, "eps"),
        ({"block": (1, 16), "margin": 1, **FP4}, "has none"),
    ],
)
def test_scalings_that_make_no_sense_are_refused(fields, text):
    with pytest.raises(ValueError, match=text):
        Scaling(**fields)


def test_recipes_check_their_fields():
    assert recipe("delayed", history=4).history == 4
    with pytest.raises(TypeError, match="no field 'hystory'"):
        recipe("delayed", hystory=4)
    with pytest.raises(ValueError, match="delayed scaling is of block 'tensor'"):
        recipe("mxfp8", history=4)
    with pytest.raises(ValueError, match="history is 0"):
        recipe("mxfp8", margin=4)
    assert recipe("nvfp4").scaling("grad", column=True).hadamard
    assert not recipe("nvfp4").scaling("weight", column=True).hadamard
    assert set(bits(quantize(torch.ones(16), "nvfp4"))) == {"data", "scales", "global_scale"}
