"""AdamW over many tensors: every kernel against torch's optimizer in fp64, and its manners."""

import mt_fusions
import pytest
import torch
from mt_fusions import AdamWOptions, AdamWState
from mt_fusions.adamw import _step
from oracle import DEVICE, Graph, assert_close, difference, drawn

SHAPES = [(5, 7), (70_001,), (0,), (1,), (2, 3, 5)]  # more than a chunk of a program
NUMBERS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def drawn_state(dtype=torch.float32, grad_dtype=None, master_dtype=torch.float32, device="cpu"):
    masters = [drawn(*s, seed=i, dtype=master_dtype, device=device) for i, s in enumerate(SHAPES)]
    moments = [[torch.zeros_like(w) for w in masters] for _ in range(2)]
    grads = [torch.zeros_like(w, dtype=grad_dtype or dtype) for w in masters]
    if dtype == master_dtype:
        return AdamWState(masters, grads, *moments)
    return AdamWState([w.to(dtype) for w in masters], grads, *moments, masters)


def trained(state, kernel, factor=None, steps=3):
    """Some steps, with the same gradients on a copy of the masters by torch's optimizer in fp64."""
    masters = state.masters or state.params
    exact = [w.double().clone().requires_grad_() for w in masters]
    optimizer = torch.optim.AdamW(exact, foreach=False, **NUMBERS)
    for step in range(1, steps + 1):
        for i, (g, w) in enumerate(zip(state.grads, exact, strict=True)):
            g.copy_(drawn(*g.shape, seed=100 * step + i))
            w.grad = g.double() * (1 if factor is None else factor.double())
        optimizer.step()
        options = AdamWOptions(step=step, **NUMBERS)
        mt_fusions.adamw_(state, options, factor=factor, kernel=kernel)
    moments = [[optimizer.state[w][name] for w in exact] for name in ("exp_avg", "exp_avg_sq")]
    return [w.detach() for w in exact], *moments


@pytest.mark.parametrize("kernel", ["cpu", "triton", "reference"])
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("dtypes", [(torch.float32, None), (torch.float16, torch.float32)])
def test_every_kernel_matches_torchs_optimizer_in_fp64(kernel, clipped, dtypes):
    device = DEVICE if kernel == "triton" else "cpu"
    state = drawn_state(*dtypes, device=device)
    factor = torch.tensor(0.3, device=device) if clipped else None
    masters, *moments = trained(state, kernel, factor)
    for found, exact in zip((state.exp_avgs, state.exp_avg_sqs), moments, strict=True):
        for own, one in zip(found, exact, strict=True):
            assert_close(own, one, torch.float32)
    for own, one in zip(state.masters or state.params, masters, strict=True):
        assert_close(own, one, torch.float32)
    for own, one in zip(state.params, state.masters or state.params, strict=True):
        assert torch.equal(own, one.to(own.dtype))


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_fp64_is_exact_and_bf16_parameters_are_the_rounded_masters(kernel):
    state = drawn_state(torch.float64, master_dtype=torch.float64)
    for own, one in zip(state.params, trained(state, kernel)[0], strict=True):
        assert_close(own, one, torch.float64)
    state = drawn_state(torch.bfloat16)
    for own, one in zip(state.masters, trained(state, kernel)[0], strict=True):
        assert_close(own, one, torch.float32)
    for own, one in zip(state.params, state.masters, strict=True):
        assert torch.equal(own, one.bfloat16())


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_gradients_are_left_as_they_are(kernel):
    state = drawn_state()
    for g in state.grads:
        g.fill_(2.0)
    options = AdamWOptions(step=1, **NUMBERS)
    mt_fusions.adamw_(state, options, factor=torch.tensor(0.5), kernel=kernel)
    assert all((g == 2).all() for g in state.grads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_global_norm_is_that_of_all_elements(dtype):
    tensors = [drawn(*shape, seed=i, dtype=dtype) for i, shape in enumerate([*SHAPES, (1 << 21,)])]
    exact = torch.cat([x.flatten().double() for x in tensors]).norm()
    norm = mt_fusions.global_norm(tensors)
    assert norm.dtype == torch.promote_types(dtype, torch.float32)
    assert difference(norm, exact) < (1e-12 if dtype == torch.float64 else 1e-6)
    assert mt_fusions.global_norm([]) == 0


def test_opcheck():
    state = drawn_state(torch.bfloat16)
    lists = [list(x) for x in state]
    numbers = [0.1, 0.9, 0.99, 1e-8, 0.1]
    torch.library.opcheck(_step, (*lists, torch.tensor(0.5), numbers, 2, "auto"))
    lists = [list(x) for x in drawn_state()]
    torch.library.opcheck(_step, (*lists, None, numbers, 1, "auto"))


def test_a_compiled_function_keeps_it_as_one_node():
    graph = Graph()
    state, same = drawn_state(), drawn_state()
    for own in (state, same):
        for g in own.grads:
            g.fill_(0.5)
    options = AdamWOptions(step=1, **NUMBERS)
    torch.compile(mt_fusions.adamw_, backend=graph, fullgraph=True)(state, options)
    mt_fusions.adamw_(same, options)
    assert sum(count for name, count in graph.counts.items() if "auto_functionalized" in name) == 1
    for own, one in zip(state.params, same.params, strict=True):
        assert torch.equal(own, one)


X = [torch.ones(2, 3)]


@pytest.mark.parametrize(
    ("state", "kind", "words"),
    [
        (AdamWState(X, [], X, X), ValueError, "0 grads for 1"),
        (AdamWState(X, [torch.ones(3)], X, X), ValueError, "one of grads"),
        (AdamWState([torch.ones(3, 2).t()], X, X, X), ValueError, "contiguous"),
        (AdamWState(X, X, [X[0].double()], X), TypeError, "exp_avgs is torch.float64"),
        (AdamWState([X[0].half()], X, [X[0].half()], [X[0].half()]), TypeError, "give some"),
        (AdamWState(X, [None], X, X), TypeError, "grads"),
        (tuple(X), TypeError, "state"),
    ],
)
def test_errors_say_what_is_wrong(state, kind, words):
    with pytest.raises(kind, match=words):
        mt_fusions.adamw_(state, AdamWOptions(step=1, lr=0.1))


@pytest.mark.parametrize(
    ("numbers", "kind", "words"),
    [
        ({"step": 0}, ValueError, "step"),
        ({"lr": -1.0}, ValueError, "lr"),
        ({"betas": (0.9, 1.0)}, ValueError, "betas"),
        ({"eps": "0"}, TypeError, "eps"),
    ],
)
def test_options_are_checked_where_they_are_made(numbers, kind, words):
    with pytest.raises(kind, match=words):
        AdamWOptions(**{"step": 1, "lr": 0.1, **numbers})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_the_kernel_matches_torchs_optimizer_in_fp64(dtype):
    state = drawn_state(dtype, device="cuda")
    for own, one in zip(state.masters or state.params, trained(state, "triton")[0], strict=True):
        assert_close(own, one, torch.float32)
