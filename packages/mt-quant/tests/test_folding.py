"""Folded scales: the same output, and less error of rounding."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from mt_quant import (
    CalibrationError,
    QuantizationConfig,
    QuantizationError,
    Rule,
    SharedInput,
    fold_scales,
    quantize,
)
from mt_quant.models.folding import fold_scale
from torch import Tensor, nn

WIDTH, HEADS, KV_HEADS, HEAD = 32, 4, 2, 8


class ZeroCentredNorm(nn.Module):
    """RMSNorm whose weight w stands for 1 + w."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (WIDTH,)) * (1 + self.weight)


class Block(nn.Module):
    """Grouped-query attention and a gated feed-forward, in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), ZeroCentredNorm()
        self.query = nn.Linear(WIDTH, HEADS * HEAD)
        self.key = nn.Linear(WIDTH, KV_HEADS * HEAD)
        self.value = nn.Linear(WIDTH, KV_HEADS * HEAD)
        self.out = nn.Linear(HEADS * HEAD, WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64)
        self.down = nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.first(x)
        query, key, value = (
            layer(normed).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.second(x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))

    def shared_inputs(self) -> list[SharedInput]:
        heads = torch.arange(KV_HEADS * HEAD).view(KV_HEADS, 1, HEAD)
        return [
            SharedInput(layers=(self.query, self.key, self.value), source=self.first),
            SharedInput(
                layers=(self.out,),
                source=self.value,
                rows=heads.expand(-1, HEADS // KV_HEADS, -1).flatten(),
            ),
            SharedInput(layers=(self.gate, self.up), source=self.second, offset=1.0),
            SharedInput(layers=(self.down,), source=self.up),
        ]


def example(dtype: torch.dtype = torch.float64) -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    block = Block()
    with torch.no_grad():
        for param in block.parameters():
            param.add_(torch.randn_like(param) * 0.1)
        block.first.weight[[3, 9]] *= 20
        block.second.weight[[5]] += 15
    return block.to(dtype), torch.randn(8, 12, WIDTH).to(dtype)


@pytest.mark.parametrize("by", ["awq", "smoothquant"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_the_output_stays(by: str, dtype: torch.dtype, tolerance: float) -> None:
    block, x = example(dtype)
    with torch.no_grad():
        before, weight = block(x), block.query.weight.clone()
        after = fold_scales(block, block.shared_inputs(), [x], by=by, format="int4-g16")(x)
    assert not torch.equal(block.query.weight, weight)
    assert float((after - before).norm() / before.norm()) < tolerance


@pytest.mark.parametrize("by", ["awq", "smoothquant"])
def test_rounding_hurts_less_afterwards(by: str) -> None:
    block, x = example(torch.float32)
    config = QuantizationConfig(
        rules=(Rule(weight="int8" if by == "smoothquant" else "int4-g16",
                    input="int8-tensor" if by == "smoothquant" else None),)
    )  # fmt: skip
    with torch.no_grad():
        before = block(x)
        plain = quantize(copy.deepcopy(block), config)(x)
        folded = fold_scales(block, block.shared_inputs(), [x], by=by, format="int4-g16")
        after = quantize(folded, config)(x)
    assert float((after - before).norm()) < 0.8 * float((plain - before).norm())


def test_passes_that_hold_less_at_once_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for limit in (1 << 30, 1):
        monkeypatch.setattr(sys.modules["mt_quant.models.folding"], "_BYTES", limit)
        block, x = example()
        made.append(fold_scales(block, block.shared_inputs(), list(x.split(3)), format="int4-g16"))
    for one, other in zip(made[0].parameters(), made[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_nothing_is_changed_where_the_description_does_not_fit() -> None:
    block, x = example()
    state = copy.deepcopy(block.state_dict())
    wrong = [
        (SharedInput(layers=(), source=block.first), "no layer"),
        (SharedInput(layers=(nn.Linear(4, 4),), source=block.first), "no module of the model"),
        (SharedInput(layers=(block.first,), source=block.second), "no linear layer"),
        (SharedInput(layers=(block.query, block.down), source=block.first), "can't share"),
        (SharedInput(layers=(block.down,), source=block.first), r"weight of shape \(32,\)"),
        (SharedInput(layers=(block.out,), source=block.value), "indices of 16 outputs"),
    ]
    for shared, match in wrong:
        with pytest.raises(QuantizationError, match=match):
            fold_scales(block, [shared], [x], by="smoothquant")
    with pytest.raises(QuantizationError, match="must have the same scale"):
        fold_scale(block.shared_inputs()[1], torch.rand(HEADS * HEAD) + 1)
    with pytest.raises(QuantizationError, match="finite and above 0"):
        fold_scale(block.shared_inputs()[0], torch.zeros(WIDTH))
    with pytest.raises(QuantizationError, match="5 features"):
        fold_scale(block.shared_inputs()[0], torch.ones(5))
    with pytest.raises(QuantizationError, match="by must be"):
        fold_scales(block, block.shared_inputs(), [x], by="gptq")
    assert all(torch.equal(value, state[name]) for name, value in block.state_dict().items())


def test_missing_and_broken_data_is_refused() -> None:
    block, x = example()
    with pytest.raises(CalibrationError, match="no calibration data"):
        fold_scales(block, block.shared_inputs(), [])
    with pytest.raises(CalibrationError, match="query got an input that is not finite"):
        fold_scales(block, block.shared_inputs(), [x * float("nan")])
