"""Recurrences by chunks, in matrix products, are the recurrences step by step."""

import pytest
import torch
from mt_model.recurrent.causal_convolution import causal_convolution
from mt_model.recurrent.decay import segments_of
from mt_model.recurrent.delta_rule import DeltaSteps, delta_rule, delta_rule_step
from mt_model.recurrent.ssd import SsdSteps, ssd, ssd_step

DOCUMENTS = torch.tensor([[4] * 3 + [2] * 1 + [9] * 9, [1] * 13])


def ssd_inputs(dtype=torch.float64):
    torch.manual_seed(0)
    rate = -torch.empty(6).uniform_(1, 16)
    dt = torch.empty(2, 13, 6).uniform_(0.001, 0.3)
    x, b, c = (torch.randn(2, 13, n, d) for n, d in ((6, 5), (2, 3), (2, 3)))
    state = torch.randn(2, 6, 5, 3)
    *steps, state = (part.to(dtype).requires_grad_() for part in (x, dt, rate, b, c, state))
    return SsdSteps(*steps), state


def delta_inputs(dtype=torch.float64):
    torch.manual_seed(0)
    query, key = (torch.nn.functional.normalize(torch.randn(2, 13, 2, 5), dim=-1) for _ in "qk")
    log_decay, beta = -torch.empty(2, 13, 6).uniform_(0.01, 3), torch.rand(2, 13, 6)
    value, state = torch.randn(2, 13, 6, 3), torch.randn(2, 6, 5, 3)
    parts = (query, key, value, log_decay, beta, state)
    *steps, state = (part.to(dtype).requires_grad_() for part in parts)
    return DeltaSteps(*steps), state


def ssd_reference(steps, *, state=None, segments=None):
    """Take the steps one by one; only the rate is the same for all tokens."""
    x, dt, rate, b, c = steps

    def step(x, dt, b, c, *, state):
        return ssd_step(SsdSteps(x, dt, rate, b, c), state)

    return step_by_step(step, (x, dt, b, c), (*x.shape[2:], b.shape[-1]), state, segments)


def delta_rule_reference(steps, *, state=None, segments=None):
    """Take the steps one by one."""

    def step(*parts, state):
        return delta_rule_step(DeltaSteps(*parts), state)

    sizes = (steps.value.shape[2], steps.key.shape[-1], steps.value.shape[-1])
    return step_by_step(step, steps, sizes, state, segments)


def step_by_step(step, parts, sizes, state, segments):
    """Outputs and last state of a recurrence, from a zero state where a document begins."""
    if state is None:
        wide = torch.promote_types(parts[0].dtype, torch.float32)
        state = torch.zeros(parts[0].shape[0], *sizes, dtype=wide)
    outputs = []
    for t in range(parts[0].shape[1]):
        if segments is not None and t:
            state = state * (segments[:, t] == segments[:, t - 1])[:, None, None, None]
        y, state = step(*(part[:, t] for part in parts), state=state)
        outputs.append(y)
    return torch.stack(outputs, 1), state


RULES = {
    "ssd": (ssd, ssd_reference, ssd_inputs),
    "delta_rule": (delta_rule, delta_rule_reference, delta_inputs),
}


def results(rule, inputs, **options):
    """Outputs, last state and the gradient of every input."""
    steps, state = inputs
    y, last = rule(steps, state=state, **options)
    wave = torch.arange(y.numel(), dtype=y.dtype).view_as(y).sin()
    total = (y * wave).sum() + (last * last.detach().cos()).sum()
    return [y.detach(), last.detach(), *torch.autograd.grad(total, (*steps, state))]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "packed"])
@pytest.mark.parametrize("chunk_size", [1, 2, 4, 5, 13, 64])
def test_chunks_are_the_steps(rule, documents, chunk_size):
    chunked, plain, inputs = RULES[rule]
    options = {"segments": segments_of(documents)}
    expected = results(plain, inputs(), **options)
    found = results(chunked, inputs(), chunk_size=chunk_size, **options)
    for got, want in zip(found, expected, strict=True):
        assert (got - want).abs().max() <= 1e-11 * want.abs().max()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_size_of_chunks_changes_nothing_but_rounding(rule, dtype):
    chunked, _, inputs = RULES[rule]
    steps, state = inputs(dtype)
    expected, last = chunked(steps, state=state, chunk_size=13)
    assert expected.dtype == torch.float32
    for size in (1, 3, 8):
        y, end = chunked(steps, state=state, chunk_size=size)
        assert (y - expected).abs().max() <= 2e-6 * expected.abs().max()
        assert (end - last).abs().max() <= 2e-6 * last.abs().max()


@pytest.mark.parametrize("rule", RULES)
def test_decays_of_long_chunks_lose_nothing_in_fp32(rule):
    chunked, _, _ = RULES[rule]
    torch.manual_seed(0)
    length, heads = 512, 2
    if rule == "ssd":
        x, b, c = (torch.randn(1, length, n, 4) for n in (heads, 1, 1))
        dt, rate = torch.full((1, length, heads), 0.4), torch.tensor([-16.0, -1.0])
        steps = SsdSteps(x, dt, rate, b, c)
    else:
        q, k = (torch.nn.functional.normalize(torch.randn(1, length, 1, 4), dim=-1) for _ in "qk")
        decay = torch.full((1, length, heads), -5.0)
        value, beta = torch.randn(1, length, heads, 4), torch.rand(1, length, heads)
        steps = DeltaSteps(q, k, value, decay, beta)
    expected, _ = chunked(type(steps)(*(part.double() for part in steps)), chunk_size=512)
    y, _ = chunked(steps, chunk_size=512)
    assert (y - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("rule", RULES)
def test_a_sequence_in_two_passes_is_the_sequence(rule):
    chunked, _, inputs = RULES[rule]
    steps, state = inputs()
    per_token = [part.dim() > 1 for part in steps]
    expected, last = chunked(steps, state=state, chunk_size=4)
    found = []
    for a, b in ((0, 6), (6, 13)):
        own = [p[:, a:b] if cut else p for p, cut in zip(steps, per_token, strict=True)]
        y, state = chunked(type(steps)(*own), state=state, chunk_size=4)
        found.append(y)
    assert torch.allclose(torch.cat(found, 1), expected, rtol=1e-12, atol=1e-12)
    assert torch.allclose(state, last, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("taps", [1, 3, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_the_convolution_is_that_of_torch_and_starts_anew_with_documents(taps, bias):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 13, 6, dtype=torch.float64), torch.randn(6, taps).double()
    shift = torch.randn(6).double() if bias else None

    def whole(x):
        padded = torch.nn.functional.pad(x.transpose(1, 2), (taps - 1, 0))
        y = torch.nn.functional.conv1d(padded, weight[:, None], shift, groups=6)
        return y.transpose(1, 2)

    assert torch.allclose(causal_convolution(x, weight, shift), whole(x), rtol=1e-13, atol=1e-13)
    segments = segments_of(DOCUMENTS)
    y = causal_convolution(x, weight, shift, segments=segments)
    expected = torch.cat([whole(x[:1, a:b]) for a, b in ((0, 3), (3, 4), (4, 13))], 1)
    assert torch.allclose(y, torch.cat((expected, whole(x[1:]))), rtol=1e-13, atol=1e-13)
    later = causal_convolution(x[:, 5:], weight, shift, before=x[:, 5 - (taps - 1) : 5])
    assert torch.allclose(later, whole(x)[:, 5:], rtol=1e-13, atol=1e-13)


def test_documents_are_numbered_by_their_changes():
    assert segments_of(None) is None
    assert segments_of(torch.tensor([[7, 7, 2, 2, 7]])).tolist() == [[0, 0, 1, 1, 2]]
