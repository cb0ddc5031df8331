"""Kernels that multiply rows by the weights of their experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from mt_kernels import Candidate, Registry, triton_obstacle
from mt_tensor_parallel import Gemm
from torch import Tensor


class GroupedKernel(NamedTuple):
    """The three products of a grouped linear layer, each for all experts at once.

    `ends` holds the cumulative number of rows up to and including each expert, int32 [E].

    Attributes:
        forward: Takes rows [N, in], weights [E, out, in] and ends; returns [N, out].
        dgrad: Takes gradients [N, out], weights [E, out, in] and ends; returns [N, in].
        wgrad: Takes gradients [N, out], rows [N, in] and ends; returns [E, out, in].
    """

    forward: Callable[[Tensor, Tensor, Tensor], Tensor]
    dgrad: Callable[[Tensor, Tensor, Tensor], Tensor]
    wgrad: Callable[[Tensor, Tensor, Tensor], Tensor]


def _gemm_obstacle(gemms: Sequence[Gemm]) -> str | None:
    other = next((gemm for gemm in gemms if not gemm.is_autograd), None)
    return None if other is None else f"an expert's strategy is {other!r}, not torch's own product"


def _grouped_mm_obstacle(x: Tensor, weight: Tensor, gemms: Sequence[Gemm]) -> str | None:
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"torch's grouped_mm has no {x.dtype}"
    if weight.device.type == "cuda" and torch.cuda.get_device_capability(weight.device) < (8, 0):
        return "torch's grouped_mm needs compute capability 8.0"
    unit = 16 // weight.element_size()
    if weight.shape[1] % unit or weight.shape[2] % unit:
        return (
            f"torch's grouped_mm needs sizes that are multiples of {unit} in {weight.dtype}, and "
            f"the weight is {weight.shape[1]} x {weight.shape[2]}"
        )
    return _gemm_obstacle(gemms)


def _torch_forward(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)


def _torch_dgrad(grad: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(grad.contiguous(), weight, offs=ends)


def _torch_wgrad(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(grad.contiguous().t(), x, offs=ends)


def _triton_obstacle(x: Tensor, weight: Tensor, gemms: Sequence[Gemm]) -> str | None:
    return triton_obstacle(x) or _gemm_obstacle(gemms)


def _triton_forward(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    from mt_moe.gpu.grouped_gemm import multiply_rows

    return multiply_rows(x, weight.transpose(1, 2), ends)


def _triton_dgrad(grad: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    from mt_moe.gpu.grouped_gemm import multiply_rows

    return multiply_rows(grad, weight, ends)


def _triton_wgrad(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    from mt_moe.gpu.grouped_gemm import multiply_experts

    return multiply_experts(grad, x, ends)


_GROUPED_MM = GroupedKernel(_torch_forward, _torch_dgrad, _torch_wgrad)
_TRITON = GroupedKernel(_triton_forward, _triton_dgrad, _triton_wgrad)

# Obstacles get rows [N, in], weights [E, out, in] and the experts' strategies. The loop, None, is
# the reference and serves any strategy: one expert after the other, and the host waits for counts.
GROUPED_KERNELS: Registry[GroupedKernel | None] = Registry(
    "grouped_linear",
    (
        Candidate("grouped_mm", _GROUPED_MM, _grouped_mm_obstacle),
        Candidate("triton", _TRITON, _triton_obstacle),
        Candidate("loop", None),
    ),
)
