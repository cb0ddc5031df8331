"""Quantise a model of your own and see what it costs: bytes, and the change of its output.

python examples/own_model.py
"""

import torch
from mt_quant import QuantizationConfig, Rule, quantize
from torch import nn


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).bfloat16()


if __name__ == "__main__":
    x = torch.randn(4, 512, dtype=torch.bfloat16)
    plain = model()
    expected = plain(x).detach()
    size = sum(param.nbytes for param in plain.parameters())
    for name in ("int8", "int4-g64", "int4-g32-asym"):
        small = quantize(model(), QuantizationConfig(rules=(Rule(weight=name),)))
        bytes_left = sum(param.nbytes for param in small.parameters())
        change = float((small(x).detach() - expected).norm() / expected.norm())
        print(f"{name:14s} {bytes_left / size:5.0%} of the bytes, output changed by {change:.1%}")
