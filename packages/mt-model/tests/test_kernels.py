"""Every fast function against its plain form, and against torch's own where there is one."""

from itertools import product
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from mt_fusions import (
    BIAS_GELU,
    GATED,
    LAYER_NORM,
    RMS_NORM,
    ROPE,
    SILU_PRODUCT,
    activate,
)
from mt_kernels import AUTO, Candidate
from mt_model import Activation, NormConfig
from mt_model.attend.distance import spread_in_order
from mt_model.attend.pairs import Pairs
from mt_model.attend.reference import reference_attention
from mt_model.attend.scores import Scores
from mt_model.attention.matmul_attention import HeadNorm, matmul_attention
from mt_model.block.norm import build_norm
from mt_model.kernels.gemm import CpuGemm
from mt_model.recurrent.causal_convolution import silu_convolution, silu_convolution_reference
from mt_model.rope.config import RopeConfig, Rotary
from mt_model.rope.rotary import rotary_table
from mt_testing import sample

rms_norm_reference = RMS_NORM.get("reference").function
gated_reference = GATED.get("reference").function


def rms_norm(x, weight, eps, *, kernel=AUTO, **form):
    return RMS_NORM.find(kernel, x, weight).function(x, weight, eps, **form)


def gated(x, kind, *, kernel=AUTO, clamp=None, up_offset=0.0):
    chosen = GATED.find(kernel, x, kind, clamp, up_offset)
    return chosen.function(x, kind, clamp=clamp, up_offset=up_offset)


def rotate(query, key, table, *, kernel=AUTO):
    return ROPE.find(kernel, query, key, *table).function(query, key, *table)


def rotate_reference(x, table):
    return ROPE.get("reference").function(x, x, *table)[0]


DTYPES = [torch.float64, torch.float32, torch.bfloat16]
RELATIVE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def rand(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def assert_near(actual, expected, dtype):
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error < RELATIVE[dtype], error


def assert_same_function(fast, plain, inputs, dtype):
    """Compare values and gradients of `fast` at `dtype` with `plain` in fp64."""
    fast_in = [t.to(dtype).requires_grad_() for t in inputs]
    plain_in = [t.detach().double().requires_grad_() for t in fast_in]
    y, expected = fast(*fast_in), plain(*plain_in)
    assert y.dtype == dtype
    assert_near(y, expected, dtype)
    grad = rand(*y.shape, dtype=dtype, seed=9)
    actual_grads = torch.autograd.grad(y, fast_in, grad)
    expected_grads = torch.autograd.grad(expected, plain_in, grad.double())
    for a, e in zip(actual_grads, expected_grads, strict=True):
        assert_near(a, e, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 16), (7, 24), (2, 3, 4, 2, 8)])
def test_rms_norm_matches_plain_form(dtype, shape):
    inputs = [rand(*shape), rand(shape[-1]) + 1]
    assert_same_function(
        lambda x, w: rms_norm(x, w, 1e-5),
        lambda x, w: rms_norm_reference(x, w, 1e-5),
        inputs,
        dtype,
    )


FORMS = [{"zero_centered": True}, {"rounds_first": True}]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_rms_norm_match_the_plain_one(dtype, form):
    assert_same_function(
        lambda x, w: rms_norm(x, w, 1e-5, **form),
        lambda x, w: rms_norm_reference(x, w, 1e-5, **form),
        [rand(3, 5, 16), rand(16)],
        dtype,
    )
    assert_same_function(
        lambda x: rms_norm(x, None, 1e-5), lambda x: rms_norm(x, None, 1e-5), [rand(3, 16)], dtype
    )


@pytest.mark.parametrize("function", [rms_norm, rms_norm_reference, RMS_NORM.get("torch").function])
def test_the_weight_multiplies_before_the_rounding_or_after_it(function):
    """1.0078 and a weight of the same size: one rounding gives another bf16 than two."""
    x, weight = rand(64, 32, dtype=torch.bfloat16), (rand(32) * 0.3 + 1).bfloat16()
    exact = F.rms_norm(x.double(), (32,), None, 1e-5)
    once = (exact * weight.double()).bfloat16()
    twice = exact.bfloat16() * weight

    def differ(a, b):
        return (a != b).double().mean()

    assert differ(once, twice) > 0.1
    plain = {"zero_centered": False, "rounds_first": False}
    # The root is taken in fp32, which may round another way where a value is between two.
    assert differ(function(x, weight, 1e-5, **plain), once) < 0.005
    assert differ(function(x, weight, 1e-5, **{**plain, "rounds_first": True}), twice) < 0.005
    # 1 + w is not rounded: bf16 has no number between 1 and 1.0078.
    small = torch.full((32,), 0.003, dtype=torch.bfloat16)
    centered = function(x, small, 1e-5, **{**plain, "zero_centered": True})
    assert differ(centered, (exact * (1 + small.double())).bfloat16()) < 0.005
    assert differ(centered, exact.bfloat16()) > 0.1


@pytest.mark.parametrize("kernel", ["fused", "torch", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_every_kernel_of_layer_norm_matches_torch(kernel, dtype, zero_centered):
    norm = LAYER_NORM.get(kernel).function
    assert_same_function(
        lambda x, w, b: norm(x, w, b, 1e-5, zero_centered=zero_centered),
        lambda x, w, b: F.layer_norm(x, (16,), w + zero_centered, b, 1e-5),
        [rand(3, 5, 16), rand(16), rand(16, seed=1)],
        dtype,
    )


def test_gradients_of_layer_norm_in_bf16_are_no_sums_in_bf16():
    """torch's on a CPU adds rows in bf16, where 256 + 1 is 256."""
    norm = build_norm(NormConfig(kind="layer"), 16, dtype=torch.bfloat16).to_empty(device="cpu")
    with torch.no_grad():
        norm.weight.fill_(1)
        norm.bias.fill_(0)
    x = rand(4096, 16, dtype=torch.bfloat16)
    norm(x).sum().backward()
    assert torch.equal(norm.bias.grad, torch.full((16,), 4096.0, dtype=torch.bfloat16))
    wide = F.layer_norm(x.double(), (16,), None, None, norm.eps)
    assert (norm.weight.grad - wide.sum(0)).abs().max() <= 2e-2 * wide.sum(0).abs().max()


@pytest.mark.parametrize("kernel", ["fused", "cpu", "torch", "reference"])
@pytest.mark.parametrize("form", [{}, *FORMS])
def test_every_kernel_of_rms_norm_matches_the_plain_one(kernel, form):
    assert_same_function(
        lambda x, w: rms_norm(x, w, 1e-5, kernel=kernel, **form),
        lambda x, w: rms_norm_reference(x, w, 1e-5, **form),
        [rand(3, 5, 16), rand(16)],
        torch.float64,
    )


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "gelu_quick"])
@pytest.mark.parametrize("terms", [{}, {"clamp": 0.8, "up_offset": 1.0}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_gates_match_the_plain_form(kind, terms, dtype):
    assert_same_function(
        lambda x: gated(x, kind, kernel="fused", **terms),
        lambda x: gated_reference(x, kind, **terms),
        [rand(3, 4, 2, 16)],
        dtype,
    )


@pytest.mark.parametrize("kernel", ["fused", "torch", "reference"])
@pytest.mark.parametrize("shape", [(2, 5, 3, 8), (2, 4, 2, 3, 16)])
@pytest.mark.parametrize("rope", ["half", "interleaved", "partial", "both"])
@pytest.mark.parametrize("by_row", [False, True])
def test_every_kernel_turns_queries_and_keys_as_the_plain_form(kernel, shape, rope, by_row):
    positions = torch.arange(shape[1])
    positions = torch.stack((positions, positions + 3)) if by_row else positions
    table = turning(positions, shape[-1], rope)

    def both(*given):
        return torch.cat([x.flatten() for x in rotate(*given, table, kernel=kernel)])

    def plain(*given):
        return torch.cat([rotate_reference(x, table).flatten() for x in given])

    key = rand(*shape[:-2], 1, shape[-1], seed=1)
    assert_same_function(both, plain, [rand(*shape), key], torch.float64)


def test_rms_norm_matches_torch_and_finite_differences():
    x, w = rand(4, 6).requires_grad_(), rand(6).requires_grad_()
    assert torch.allclose(rms_norm(x, w, 1e-5), F.rms_norm(x, (6,), w, 1e-5), rtol=1e-12)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x, w))


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocked_weight_gradient_matches_the_whole_product(dtype):
    grad, x = rand(3, 7, 16, dtype=dtype), rand(3, 7, 24, dtype=dtype)
    expected = torch.einsum("bso,bsi->oi", grad.double(), x.double())
    for block_size in (4, 7, 100):
        assert_near(CpuGemm(block_size=block_size).wgrad(grad, x), expected, dtype)


def test_rms_norm_leaves_a_strided_input_unchanged():
    whole = rand(4, 3, 6)
    before = whole.clone()
    y = rms_norm(whole[:, 1], torch.ones(6, dtype=torch.float64), 1e-5)
    assert torch.equal(whole, before)
    expected = F.rms_norm(before[:, 1].contiguous(), (6,), None, 1e-5)
    assert torch.allclose(y, expected, rtol=1e-12)


ROPES = {
    "half": RopeConfig(theta=100.0),
    "interleaved": RopeConfig(theta=100.0, interleaved=True),
    "partial": RopeConfig(theta=100.0, fraction=0.5),
    "both": RopeConfig(theta=100.0, fraction=0.75, interleaved=True),
}


def turning(positions, head_dim, rope="half", dtype=torch.float64):
    return rotary_table(positions, Rotary(ROPES[rope], head_dim), length=1, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 5, 3, 8), (1, 4, 2, 3, 16)])
@pytest.mark.parametrize("rope", ROPES)
def test_rotate_matches_plain_form(dtype, shape, rope):
    table = turning(torch.arange(shape[1]), shape[-1], rope, dtype)
    assert_same_function(
        lambda x: rotate(x, x, table)[0],
        lambda x: rotate_reference(x, table.to(torch.float64)),
        [rand(*shape)],
        dtype,
    )


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize(
    "function", [lambda x, table: rotate(x, x, table)[1], rotate_reference], ids=["fast", "plain"]
)
def test_rotation_is_multiplication_of_its_pairs_by_a_complex_phase(rope, function):
    x, config = rand(2, 7, 3, 8), ROPES[rope]
    half = int(8 * config.fraction) // 2
    found = function(x, turning(torch.arange(7), 8, rope))
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if config.interleaved else (i, i + half)
        phase = torch.exp(1j * torch.arange(7.0) * config.theta ** (-i / half))[:, None]
        z = torch.complex(x[..., a], x[..., b]) * phase
        assert torch.allclose(
            torch.stack((found[..., a], found[..., b])), torch.stack((z.real, z.imag))
        )
    assert torch.equal(found[..., 2 * half :], x[..., 2 * half :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", get_args(Activation))
@pytest.mark.parametrize("terms", [{}, {"clamp": 0.8, "up_offset": 1.0}])
def test_gated_activation_matches_plain_form(dtype, kind, terms):
    assert_same_function(
        lambda x: gated(x, kind, **terms),
        lambda x: gated_reference(x, kind, **terms),
        [rand(3, 4, 2, 16)],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_product_with_silu_matches_plain_form(dtype):
    inputs = [rand(3, 4, 16), rand(3, 4, 16, seed=1)]
    product = SILU_PRODUCT.find(AUTO, *inputs).function
    assert_same_function(product, lambda gate, x: F.silu(gate) * x, inputs, dtype)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("kernel", BIAS_GELU.names[1:])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_gelu_is_gelu_of_the_sum(dtype, kernel, kind):
    inputs = [rand(3, 5, 16), rand(16)]
    assert_same_function(
        lambda x, bias: BIAS_GELU.get(kernel).function(x, bias, kind),
        lambda x, bias: F.gelu(x + bias, approximate="tanh" if kind == "gelu_tanh" else "none"),
        inputs,
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 3, 9])
@pytest.mark.parametrize("taps", [1, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_convolution_with_silu_matches_plain_form(dtype, length, taps, bias):
    inputs = [rand(2, length, 2, 6), rand(6, taps), rand(6)][: 2 + bias]

    def of(function):  # of channels that lie between others, as those of a fused projection do
        return lambda x, *weights: function(x[:, :, 1], *weights, *[None] * (not bias))

    assert_same_function(of(silu_convolution), of(silu_convolution_reference), inputs, dtype)


def test_clamped_gate_is_that_of_gpt_oss():
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    sizes = {"hidden_size": 4, "intermediate_size": 8, "num_local_experts": 1}
    theirs = GptOssExperts(GptOssConfig(**sizes))
    gate_up = 6 * rand(5, 2, 8)
    interleaved = gate_up.transpose(1, 2).flatten(1)
    expected = theirs._apply_gate(interleaved)
    ours = gated(gate_up, "gelu_quick", clamp=theirs.limit, up_offset=1.0)
    assert (gate_up.abs() > theirs.limit).any()
    assert torch.allclose(ours, expected, rtol=1e-12)


def test_activations_match_their_formulas():
    x = rand(50)
    assert torch.allclose(activate(x, "silu"), x / (1 + torch.exp(-x)))
    assert torch.allclose(activate(x, "gelu"), x * 0.5 * (1 + torch.erf(x / 2**0.5)))
    tanh = torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))
    assert torch.allclose(activate(x, "gelu_tanh"), 0.5 * x * (1 + tanh))
    assert torch.allclose(activate(x, "gelu_quick"), x / (1 + torch.exp(-1.702 * x)))
    assert torch.equal(activate(x, "relu"), torch.where(x > 0, x, 0.0))
    assert torch.allclose(activate(x, "relu2"), torch.where(x > 0, x * x, 0.0))
    with pytest.raises(ValueError, match=r"one of silu.*swish"):
        activate(x, "swish")


def attend_by_torch(qkv, query_weight, key_weight, table, *, norm):
    query, key, value = qkv.split((qkv.shape[3] - 2, 1, 1), dim=3)
    if norm:
        query = F.rms_norm(query, query_weight.shape, query_weight, 1e-5)
        key = F.rms_norm(key, key_weight.shape, key_weight, 1e-5)
    if table is not None:
        query, key = rotate_reference(query, table), rotate_reference(key, table)
    query, key, value = (t.flatten(2, 3).transpose(1, 2) for t in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


def plain_matmul_attention(qkv, table, norm, *, pairs=None, bias=None):
    """Norms, rotation, softmax attention, in plain operations."""
    query, key, value = qkv.split((qkv.shape[3] - 2, 1, 1), dim=3)
    if norm is not None:
        query = rms_norm_reference(query, norm.query, norm.eps)
        key = rms_norm_reference(key, norm.key, norm.eps)
    if table is not None:
        query, key = ROPE.get("reference").function(query, key, *table)
    query, key, value = (t.flatten(2, 3) for t in (query, key, value))
    places = range(qkv.shape[1])
    allowed = (pairs or Pairs()).allowed(places, places, qkv.device)
    allowed = allowed[:, None] if allowed.dim() == 3 else allowed
    added = None if bias is None else spread_in_order(bias.to(qkv.dtype), places, places)
    scores = Scores(scale=qkv.shape[-1] ** -0.5, allowed=allowed, bias=added)
    return reference_attention(query, key, value, scores).flatten(2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "queries"), [(3, 1), (2, 3), (1, 4)])
@pytest.mark.parametrize("rope", [*ROPES, None])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("function", [matmul_attention, plain_matmul_attention])
def test_matmul_attention_matches_torch(dtype, groups, queries, rope, norm, function):
    table = None if rope is None else turning(torch.arange(9), 8, rope, dtype)
    wide = None if table is None else table.to(torch.float64)

    def fast(qkv, query_weight, key_weight):
        head_norm = HeadNorm(query_weight, key_weight, 1e-5) if norm else None
        return function(qkv, table, head_norm)

    def plain(qkv, query_weight, key_weight):
        return attend_by_torch(qkv, query_weight, key_weight, wide, norm=norm)

    inputs = [rand(2, 9, groups, queries + 2, 8), rand(8) + 1, rand(8, seed=3) + 1]
    if not norm:
        assert_same_function(
            lambda x: fast(x, *inputs[1:]), lambda x: plain(x, *inputs[1:]), inputs[:1], dtype
        )
    else:
        assert_same_function(fast, plain, inputs, dtype)


DOCUMENTS = torch.tensor([[3] * 2 + [1] * 7 + [5] * 2, [2] * 11])
PAIRS = {
    "causal": Pairs(),
    "all": Pairs(causal=False),
    "window": Pairs(window=3),
    "wide_window": Pairs(window=6),
    "window_of_both_sides": Pairs(causal=False, window=3),
    "documents": Pairs(documents=DOCUMENTS),
    "all_of_documents": Pairs(causal=False, documents=DOCUMENTS),
    "window_in_documents": Pairs(window=3, documents=DOCUMENTS),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
def test_matmul_attention_by_blocks_matches_plain_form(dtype, pairs, monkeypatch):
    monkeypatch.setattr("mt_model.attend.pairs.BLOCK", 4)
    blocks = pairs.blocks(11)
    assert [i for queries, _ in blocks for i in queries] == list(range(11))
    if pairs.window == 3:
        assert max(len(keys) for _, keys in blocks) <= 8
    table = turning(torch.arange(11), 8)

    def of(function, dtype):
        return lambda qkv: function(qkv, table.to(dtype), None, pairs=pairs)

    fast, plain = of(matmul_attention, dtype), of(plain_matmul_attention, torch.float64)
    assert_same_function(fast, plain, [rand(2, 11, 2, 4, 8)], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
def test_biased_matmul_attention_by_blocks_matches_plain_form(dtype, pairs, monkeypatch):
    monkeypatch.setattr("mt_model.attend.pairs.BLOCK", 4)

    def of(function):
        return lambda qkv, bias: function(qkv, None, None, pairs=pairs, bias=bias)

    inputs = [rand(2, 11, 2, 4, 8), rand(4, 21)]
    assert_same_function(of(matmul_attention), of(plain_matmul_attention), inputs, dtype)


@pytest.mark.parametrize(
    "pairs", sample(((pairs,) for pairs in PAIRS.values()), every=5), ids=PAIRS
)
def test_compiled_matmul_attention_has_the_bits_of_eager(pairs, monkeypatch):
    monkeypatch.setattr("mt_model.attend.pairs.BLOCK", 4)
    table = turning(torch.arange(11), 8)

    def of(qkv, query_weight, key_weight, bias):
        head_norm = HeadNorm(query_weight, key_weight, 1e-5)
        return matmul_attention(qkv, table, head_norm, pairs=pairs, bias=bias)

    torch.compiler.reset()
    inputs = [rand(2, 11, 2, 4, 8), rand(8) + 1, rand(8, seed=3) + 1, rand(4, 21)]
    found = []
    for function in (of, torch.compile(of, backend="aot_eager", fullgraph=True)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        y = function(*leaves)
        found.append((y, *torch.autograd.grad(y, leaves, rand(*y.shape, seed=9))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# opcheck itself asks leaves that it has copied for their gradients.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("has", "name"),
    sample(
        product(
            ((True, True, True), (False, True, False), (False, False, True)),
            ("window_in_documents", "all"),
        ),
        every=3,
    ),
)
def test_matmul_attention_is_an_operator_that_torch_checks(has, name, monkeypatch):
    monkeypatch.setattr("mt_model.attend.pairs.BLOCK", 4)
    normed, turned, biased = has
    weights = [(rand(8) + 1).requires_grad_() if normed else None for _ in range(2)]
    table = turning(torch.arange(11), 8).values if turned else None
    bias = rand(4, 21).requires_grad_() if biased else None
    causal, window, documents = PAIRS[name]
    given = rand(2, 11, 2, 4, 8).requires_grad_(), table, *weights, bias, documents
    call = torch.ops.mt_model.matmul_attention.default
    torch.library.opcheck(call, (*given, 1e-5, 0.3, False, causal, window, False))


def test_reference_attention_matches_torch_also_for_fewer_queries_than_keys():
    query, key, value = rand(2, 3, 6, 8), rand(2, 7, 2, 8), rand(2, 7, 2, 8, seed=1)
    mask = torch.ones(3, 7, dtype=torch.bool).tril(4)
    given = (x.transpose(1, 2) for x in (query, key, value))
    expected = F.scaled_dot_product_attention(*given, attn_mask=mask, enable_gqa=True)
    out = reference_attention(query, key, value, Scores(scale=8**-0.5, allowed=mask))
    assert torch.allclose(out, expected.transpose(1, 2), atol=1e-14)


@pytest.mark.parametrize("rotary", [True, False])
def test_attention_to_one_token_leaves_its_argument_and_has_a_backward(rotary):
    table = turning(torch.arange(1), 8) if rotary else None
    qkv, norm = rand(2, 1, 2, 4, 8).requires_grad_(), HeadNorm(rand(8) + 1, rand(8) + 1, 1e-5)
    before = qkv.detach().clone()
    out = matmul_attention(qkv, table, norm)
    assert torch.equal(qkv, before)
    # The softmax over one key is 1: each query has the value, which has the sum of the gradients.
    values = qkv[:, :, :, -1:].expand(2, 1, 2, 2, 8)
    assert torch.equal(out, values.flatten(2))
    grad = rand(*out.shape)
    (found,) = torch.autograd.grad(out, qkv, grad)
    assert torch.allclose(found[:, :, :, -1], grad.view(2, 1, 2, 2, 8).sum(3), rtol=1e-12)
    assert found[:, :, :, :-1].abs().max() < 1e-14


def test_rotation_takes_positions_of_each_row():
    x, positions = rand(2, 5, 3, 8), torch.tensor([[0, 1, 2, 3, 4], [7, 0, 1, 2, 9]])
    table = turning(positions, 8)
    rows = [turning(row, 8) for row in positions]
    by_row = [rotate(x[i : i + 1], x[i : i + 1], rows[i])[0] for i in range(2)]
    assert torch.equal(rotate(x, x, table)[0], torch.cat(by_row))


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_each_operation_has_one_kernel_for_every_device(device, monkeypatch):
    from mt_model.kernels.gemm import GEMM

    class On:
        def __init__(self):
            self.device, self.dtype, self.shape = torch.device(device), torch.float32, (2, 8)

    def names():
        norm = RMS_NORM.find(AUTO, On(), On()).name
        kinds = ("silu", "gelu", "relu")
        gates = [GATED.find(AUTO, On(), kind, None, 0).name for kind in kinds]
        return [norm, *gates, ROPE.find(AUTO, On(), On(), None).name]

    norm = "cpu" if device == "cpu" else "torch"
    assert names() == [norm, "torch", "torch", "reference", "torch"]
    products = GEMM.with_candidate(Candidate("onednn", CpuGemm, lambda *_: "not asked"))
    assert products.find(AUTO, On()).name == norm
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert names() == ["reference"] * 5


@pytest.mark.parametrize("rounds_first", [False, True])
@pytest.mark.parametrize("kernel", ["fused", "cpu", "torch", "reference"])
def test_rms_norm_with_a_wider_weight_keeps_the_dtype_of_its_input(kernel, rounds_first):
    x, weight = torch.arange(6.0).view(2, 3).bfloat16(), torch.tensor([1.0, 2.0, 3.0])
    found = rms_norm(x, weight, 1e-5, rounds_first=rounds_first, kernel=kernel)
    assert found.dtype == torch.bfloat16
