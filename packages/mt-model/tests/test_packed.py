"""Products of packed weights have the same bits as unpacked ones, and follow weight changes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from mt_model import DTYPES, GPT, Kernels, MoEConfig, gpt, pack_weights, packing_obstacle
from mt_model.kernels.gemm import InvariantGemm, PackedGemm

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    packing_obstacle(torch.bfloat16, CPU) is not None, reason="oneDNN packs no bf16 here"
)


def values(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(96, 160), (33, 20), (64, 2048)])
def test_a_row_has_the_same_bits_packed_or_not_and_among_any_rows(
    sizes: tuple[int, int], dtype: torch.dtype
):
    weight, bias = values(*sizes, dtype=dtype), values(sizes[0], dtype=dtype)
    x = values(300, sizes[1], dtype=dtype)
    gemm = InvariantGemm()
    whole = gemm.forward(x, weight, bias)
    gemm.pack([weight])
    assert gemm.layout_of(weight) is not None
    torch.testing.assert_close(whole, F.linear(x, weight, bias), rtol=2e-2, atol=2e-2)
    for count in (0, 1, 2, 3, 4, 7, 17, 64, 300):
        for start in (0, 300 - count):
            own = gemm.forward(x[start : start + count], weight, bias)
            assert torch.equal(own, whole[start : start + count])
    assert torch.equal(gemm.forward(x[None, :1], weight, bias), whole[None, :1])


def test_a_weight_that_changed_is_multiplied_as_it_is():
    weight, x = values(32, 16, dtype=torch.float32), values(3, 16, dtype=torch.float32)
    gemm = PackedGemm()
    gemm.pack([weight])
    weight.mul_(2)
    assert gemm.layout_of(weight) is None
    assert torch.equal(gemm.forward(x, weight), F.linear(x, weight))
    gemm.pack([weight])
    torch.testing.assert_close(gemm.forward(x, weight), F.linear(x, weight))
    assert copy.deepcopy(gemm).packed_bytes == 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("experts", [None, 4])
def test_packed_models_have_the_bits_of_others(experts: int | None, *, tied: bool):
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "tied": tied}
    moe = None if experts is None else MoEConfig(num_experts=experts, top_k=2, ffn_size=32)
    model = GPT(gpt(**sizes, moe=moe), kernels=Kernels(attention="invariant"), seed=1).eval()
    tokens = torch.arange(40)[None] % 96
    before = model.logits(tokens)
    multiplied = sum(x.nbytes for x in model.parameters() if x.dim() > 1)
    if not tied:
        multiplied -= model.embedding.weight.nbytes
    routers = 0 if experts is None else 2 * experts * 64 * 4
    assert pack_weights(model) == multiplied - routers
    assert torch.equal(model.logits(tokens), before)
    assert pack_weights(model, when=False) == 0


def test_other_dtypes_and_products_are_left_as_they_are():
    reason = packing_obstacle(DTYPES["fp64"], CPU)
    assert reason is not None
    assert "float64" in reason
    assert pack_weights(GPT(gpt(vocab_size=96, hidden_size=64, num_layers=1, num_heads=4))) == 0
