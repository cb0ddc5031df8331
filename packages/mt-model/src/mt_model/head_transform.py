"""A layer between the last norm and the head."""

from __future__ import annotations

import torch
from mt_tensor_parallel import parallel_linear
from torch import Tensor, nn

from mt_model.activation import activate
from mt_model.config import ModelConfig
from mt_model.norm import build_norm
from mt_model.placement import Placement


class HeadTransform(nn.Module):
    """`norm(act(W x + b))`, as in the head of BERT's masked language model.

    Every tensor-parallel rank holds it whole; under sequence parallelism it has the rank's tokens,
    and its gradients are partial.

    Args:
        config: Of the model.
        kind: The activation.
        placement: Of this rank.

    Shape:
        forward(x): [..., hidden] -> the same.
    """

    def __init__(self, config: ModelConfig, kind: str, *, placement: Placement) -> None:
        super().__init__()
        self.kind, self.gemm, size = kind, placement.gemm, config.hidden_size
        like = {"dtype": placement.dtype, "device": torch.device("meta")}
        self.weight = nn.Parameter(torch.empty(size, size, **like))
        self.bias = nn.Parameter(torch.empty(size, **like))
        self.norm = build_norm(config.norm, size, dtype=placement.dtype)
        placement.mark_replicated(self, partial=placement.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """Transform what the head multiplies."""
        y = parallel_linear(x, self.weight, self.bias, mode="column", gemm=self.gemm)
        return self.norm(activate(y, self.kind))
