"""Tensor and sequence parallel layers that take a process group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_tensor_parallel.embedding import VocabParallelEmbedding
from mt_tensor_parallel.functional import parallel_linear
from mt_tensor_parallel.gemm import Gemm, Operand, Role, TorchGemm
from mt_tensor_parallel.kv_groups import exchange_kv_groups
from mt_tensor_parallel.linear import (
    ColumnParallelLinear,
    GemmLayer,
    RowParallelLinear,
    choose_gemms,
    defer_weight_gradients,
    sum_weight_gradients,
)
from mt_tensor_parallel.overlap import Overlap
from mt_tensor_parallel.recompute import DiscardedOutput, recompute

if TYPE_CHECKING:
    from mt_tensor_parallel.head_loss import (
        block_rows,
        linear_cross_entropy,
        linear_cross_entropy_and_z,
    )
    from mt_tensor_parallel.lora import LoraLinear, add_lora, set_lora_step
    from mt_tensor_parallel.lora_files import lora_state, save_lora
    from mt_tensor_parallel.quantized import QuantizedGemm, quantize_gemms

__all__ = [
    "ColumnParallelLinear",
    "DiscardedOutput",
    "Gemm",
    "GemmLayer",
    "LoraLinear",
    "Operand",
    "Overlap",
    "QuantizedGemm",
    "Role",
    "RowParallelLinear",
    "TorchGemm",
    "VocabParallelEmbedding",
    "add_lora",
    "block_rows",
    "choose_gemms",
    "defer_weight_gradients",
    "exchange_kv_groups",
    "linear_cross_entropy",
    "linear_cross_entropy_and_z",
    "lora_state",
    "parallel_linear",
    "quantize_gemms",
    "recompute",
    "save_lora",
    "set_lora_step",
    "sum_weight_gradients",
]

# Adapters, quantised products and the loss, which needs mt-fusions, are imported at first use, so
# that a program with only the layers starts quickly.
__getattr__ = resolve_later(__name__)
