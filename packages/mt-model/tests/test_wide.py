"""bf16 products in fp32 equal bf16 products, and serve processors without bf16 instructions."""

import pytest
import torch
import torch.nn.functional as F
from mt_kernels import KernelError
from mt_model import GPT, Kernels, gpt, serving_products
from mt_model.kernels import wide
from mt_model.kernels.wide import LEAST_ROWS, WideGemm

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def values(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(BF16)


@pytest.mark.parametrize("lead", [(LEAST_ROWS,), (2, LEAST_ROWS)])
def test_a_product_is_the_exact_one_rounded_once(lead: tuple[int, ...]):
    x, weight, bias = values(*lead, 48), values(40, 48), values(40)
    exact = x.double() @ weight.double().T + bias.double()
    found = WideGemm().forward(x, weight, bias)
    assert found.dtype == BF16
    assert found.shape == (*lead, 40)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5)


def test_few_rows_and_other_dtypes_have_the_bits_of_torch():
    x, weight = values(LEAST_ROWS - 1, 48), values(40, 48)
    assert torch.equal(WideGemm().forward(x, weight), F.linear(x, weight))
    x, weight = values(64, 48).double(), weight.double()
    assert torch.equal(WideGemm().forward(x, weight), F.linear(x, weight))


def test_a_model_serves_by_them_where_the_processor_has_no_bf16(monkeypatch):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    tokens = torch.arange(40)[None]
    plain = GPT(gpt(**sizes), dtype=BF16, kernels=Kernels(gemm="cpu"), seed=1).eval()
    monkeypatch.setattr(wide, "packed_obstacle", lambda _: "no such instructions")
    monkeypatch.setattr("mt_model.generation.packing.packed_obstacle", lambda _: "none")
    word = serving_products(BF16, CPU)
    assert (word, serving_products(torch.float32, CPU)) == ("wide", "auto")
    model = GPT(gpt(**sizes), dtype=BF16, kernels=Kernels(gemm=word), seed=1).eval()
    assert isinstance(model.shard.gemm, WideGemm)
    found, expected = (each.logits(tokens).float() for each in (model, plain))
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def test_they_are_refused_where_they_gain_nothing(monkeypatch):
    monkeypatch.setattr(wide, "packed_obstacle", lambda _: None)
    assert serving_products(BF16, CPU, packs=False) == "auto"
    config = gpt(vocab_size=64, hidden_size=32, num_layers=1, num_heads=4)
    with pytest.raises(KernelError, match="multiplies bf16"):
        GPT(config, dtype=BF16, kernels=Kernels(gemm="wide"), seed=1)
