"""Kernels of attention against each other, and how one is chosen."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from mt_model import GPT, Kernels, gpt
from mt_model.attend import kernels as module
from mt_model.attend.flex import flex_attention
from mt_model.attend.kernels import ATTENTION, attention
from mt_model.attend.scores import Scores
from mt_parallel_state import ParallelLayout, ParallelState

DOCUMENTS = torch.tensor([[0] * 3 + [1] * 6, [0] * 5 + [2] * 4])
CASES = {
    "causal": {},
    "both ways": {"causal": False},
    "window": {"window": 3},
    "window both ways": {"window": 3, "causal": False},
    "documents": {"documents": DOCUMENTS},
    "documents window": {"documents": DOCUMENTS, "window": 2, "causal": False},
    "cap": {"softcap": 1.5},
    "sinks": {"sinks": torch.linspace(-1, 1, 4, dtype=torch.float64)},
    "bias": {"bias": torch.linspace(-1, 1, 4 * 17).view(4, 17).double(), "causal": False},
    "bias window": {"bias": torch.linspace(-1, 1, 4 * 17).view(4, 17).double(), "window": 3},
    "all": {"sinks": torch.zeros(4).double(), "softcap": 2.0, "window": 4, "documents": DOCUMENTS},
    "mask": {"allowed": torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(1)) < 0.7},
}
CASES["mask"]["allowed"] |= torch.eye(9).bool()


def tensors(dtype=torch.float64, keys=9, width=8):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 9, 4, 8), (2, keys, 2, 8), (2, keys, 2, width)
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [x.to(dtype).requires_grad_() for x in made]


def by_name(name: str):
    return ATTENTION.get(name)


REFUSED = {
    "sdpa": {"window", "window both ways", "documents", "documents window", "cap", "sinks", "all"},
    "tiles": {"mask"},
    "reference": set(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_kernel_refuses_what_it_cannot_compute(name) -> None:
    given, kernel = tensors(), by_name(name)
    scores = {case: Scores(scale=0.4, **options) for case, options in CASES.items()}
    assert {case for case, s in scores.items() if kernel.obstacle(*given, s)} == REFUSED[name]


@pytest.mark.parametrize("width", [8, 6])
@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name in ("sdpa", "tiles") for case in CASES if case not in REFUSED[name]],
)
def test_a_kernel_that_serves_computes_what_the_reference_does(name, case, width) -> None:
    kernel, scores, given = by_name(name), Scores(scale=0.4, **CASES[case]), tensors(width=width)
    found, expected = kernel.function(*given, scores), by_name("reference").function(*given, scores)
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)
    grad = torch.randn(found.shape, dtype=torch.float64)
    ours = torch.autograd.grad(found, given, grad)
    for a, b in zip(ours, torch.autograd.grad(expected, given, grad), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("case", [case for case in CASES if "bias" not in case])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # as it is here
@torch.no_grad()
def test_flex_attention_computes_what_the_reference_does(case, monkeypatch) -> None:
    plain = "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    monkeypatch.setattr(plain, True, raising=False)  # newer ones compile the unfused form too
    given = [x.detach() for x in tensors(torch.float32)]
    options = {key: x.float() if key == "sinks" else x for key, x in CASES[case].items()}
    scores = Scores(scale=0.4, **options)
    found = flex_attention(*given, scores, fused=False)
    assert torch.allclose(
        found, by_name("reference").function(*given, scores), rtol=1e-4, atol=1e-5
    )


def test_each_case_has_a_kernel_and_the_choice_is_that_of_capability() -> None:
    for case, options in CASES.items():
        given, scores = tensors(), Scores(scale=0.4, **options)
        first = next(k.name for k in ATTENTION.candidates if k.obstacle(*given, scores) is None)
        plain = case in ("causal", "both ways", "mask", "bias", "bias window")
        assert first == ("sdpa" if plain else "tiles"), case
        expected = by_name("reference").function(*given, scores)
        assert torch.allclose(attention(*given, scores), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("sdpa", "kernel 'sdpa' of attention does not serve: a window or documents"),
        ("flash", "kernel 'flash' of attention does not serve: device cpu"),
        ("te", "kernel 'te' of attention does not serve: device cpu"),
        ("flex", "kernel 'flex' of attention does not serve: device cpu"),
        ("matmul", "kernel 'matmul' of attention does not serve: sinks or a soft cap"),
    ],
)
def test_a_named_kernel_serves_or_says_why_not(kernel, message) -> None:
    config = gpt(vocab_size=8, hidden_size=8, num_layers=1, num_heads=2, window=3, softcap=1.0)
    tokens = torch.arange(8)[None]
    with pytest.raises(ValueError, match=message):
        GPT(config, kernels=Kernels(attention=kernel))(tokens)


def test_named_kernels_give_the_same_numbers() -> None:
    config = gpt(vocab_size=8, hidden_size=8, num_layers=2, num_heads=2, init_std=0.3)
    tokens, found = torch.arange(8)[None], {}
    for kernel in ("auto", "matmul", "sdpa", "tiles", "reference"):
        model = GPT(config, kernels=Kernels(attention=kernel), dtype=torch.float64)
        loss = model(tokens, labels=tokens)["lm"]
        loss.backward()
        grads = [p.grad.flatten() for p in model.parameters()]
        found[kernel] = torch.cat([loss.detach()[None], *grads])
        model.logits(tokens, cache=model.new_cache(batch_size=1, max_length=8))
    for numbers in found.values():
        assert torch.allclose(numbers, found["auto"], rtol=1e-9, atol=1e-12)


def shared(kernel: str) -> str | torch.Tensor:
    config = gpt(vocab_size=8, hidden_size=8, num_layers=1, num_heads=2, window=3)
    state = ParallelState(ParallelLayout(cp=2))
    tokens = torch.arange(4)[None]
    try:
        model = GPT(config, state, kernels=Kernels(attention=kernel), dtype=torch.float64)
        return model(tokens, labels=tokens)["lm"].detach()
    except ValueError as error:
        return str(error)


def test_a_kernel_is_named_for_shared_sequences_too(ranks) -> None:
    def each():
        return {name: shared(name) for name in ("auto", "reference", "tiles", "sdpa")}

    for found in ranks(2, each):
        assert torch.allclose(found["reference"], found["auto"], rtol=1e-12)
        assert torch.equal(found["tiles"], found["auto"])
        assert "kernel 'sdpa' does not serve: it needs whole sequences" in found["sdpa"]
    with pytest.raises(
        ValueError, match=r"attention: 'fast' is not one of auto.*Did you mean flash"
    ):
        Kernels(attention="fast")


class Cuda:
    """As much of a tensor on a GPU as a kernel asks for before it runs."""

    def __init__(self, dtype=torch.bfloat16, width=64):
        self.device, self.dtype, self.shape = torch.device("cuda"), dtype, (2, 16, 4, width)


def test_installed_kernels_of_a_gpu_say_what_they_serve(monkeypatch) -> None:
    for package, name in (("flash_attn", "flash"), ("transformer_engine", "te")):
        given, kernel = (Cuda(), Cuda(), Cuda()), by_name(name)
        assert kernel.obstacle(*given, Scores(scale=1.0)) == f"{package} is not installed"
        monkeypatch.setattr(module, "_INSTALLED", frozenset({package}))
        assert kernel.obstacle(*given, Scores(scale=1.0, window=3)) is None
        for options, why in (
            ({"documents": DOCUMENTS}, "documents or a mask"),
            ({"sinks": torch.zeros(4)}, "sinks or a bias of the scores"),
            ({"bias": torch.zeros(4, 31)}, "sinks or a bias of the scores"),
            ({"kept": torch.zeros(4)}, "dropout by global index"),
        ):
            assert kernel.obstacle(*given, Scores(scale=1.0, **options)) == why
        half = (Cuda(torch.float32),) * 3
        assert kernel.obstacle(*half, Scores(scale=1.0)) == "dtype torch.float32"
        uneven = (Cuda(), Cuda(), Cuda(width=32))
        assert "head_dim 64 of queries and 32" in kernel.obstacle(*uneven, Scores(scale=1.0))
    assert by_name("te").obstacle(*given, Scores(scale=1.0, softcap=2.0)) == "a soft cap of 2.0"
    narrow = (Cuda(width=8),) * 3
    assert by_name("flex").obstacle(*narrow, Scores(scale=1.0)) == "head_dim 8, below 16"
    assert by_name("flex").obstacle(*given, Scores(scale=1.0, sinks=torch.zeros(4))) is None


@pytest.mark.parametrize(("causal", "sides"), [(True, (2, 0)), (False, (2, 2))])
def test_flash_attn_is_called_with_what_it_knows(monkeypatch, causal, sides) -> None:
    fake, calls = ModuleType("flash_attn"), []

    def flash_attn_func(q, k, v, **options):
        calls.append(options)
        return q

    fake.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    given = tensors()
    by_name("flash").function(*given, Scores(scale=0.4, window=3, softcap=2.0, causal=causal))
    expected = {"softmax_scale": 0.4, "causal": causal, "window_size": sides, "softcap": 2.0}
    assert calls == [expected]


def test_transformer_engine_is_called_with_what_it_knows(monkeypatch) -> None:
    fake, made = ModuleType("transformer_engine.pytorch"), []

    class DotProductAttention:
        def __init__(self, heads, width, **options):
            made.append((heads, width, options))

        def __call__(self, q, k, v):
            return q.flatten(2)

    fake.DotProductAttention = DotProductAttention
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", fake)
    query, key, value = tensors()
    module._te_module.cache_clear()
    out = by_name("te").function(query, key, value, Scores(scale=0.4))
    module._te_module.cache_clear()
    assert torch.equal(out, query)
    (heads, width, options), *_ = made
    assert (heads, width, options["num_gqa_groups"]) == (4, 8, 2)
    assert (options["attn_mask_type"], options["window_size"]) == ("causal", (-1, 0))
    assert (options["softmax_scale"], options["attention_dropout"]) == (0.4, 0.0)
