"""Tensor and sequence parallel layers that take a process group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_tensor_parallel.embedding import VocabParallelEmbedding as VocabParallelEmbedding
from mt_tensor_parallel.functional import parallel_linear as parallel_linear
from mt_tensor_parallel.gemm import Gemm as Gemm
from mt_tensor_parallel.gemm import Operand as Operand
from mt_tensor_parallel.gemm import Role as Role
from mt_tensor_parallel.gemm import TorchGemm as TorchGemm
from mt_tensor_parallel.kv_groups import exchange_kv_groups as exchange_kv_groups
from mt_tensor_parallel.linear import ColumnParallelLinear as ColumnParallelLinear
from mt_tensor_parallel.linear import GemmLayer as GemmLayer
from mt_tensor_parallel.linear import RowParallelLinear as RowParallelLinear
from mt_tensor_parallel.linear import choose_gemms as choose_gemms
from mt_tensor_parallel.linear import defer_weight_gradients as defer_weight_gradients
from mt_tensor_parallel.linear import sum_weight_gradients as sum_weight_gradients
from mt_tensor_parallel.low_rank import LowRankPlace as LowRankPlace
from mt_tensor_parallel.low_rank import low_rank as low_rank
from mt_tensor_parallel.overlap import Overlap as Overlap
from mt_tensor_parallel.recompute import DiscardedOutput as DiscardedOutput
from mt_tensor_parallel.recompute import recompute as recompute

if TYPE_CHECKING:
    from mt_tensor_parallel.head_loss import block_rows as block_rows
    from mt_tensor_parallel.head_loss import linear_cross_entropy as linear_cross_entropy
    from mt_tensor_parallel.head_loss import (
        linear_cross_entropy_and_z as linear_cross_entropy_and_z,
    )
    from mt_tensor_parallel.lora import LoraAdapter as LoraAdapter
    from mt_tensor_parallel.lora import LoraOptions as LoraOptions
    from mt_tensor_parallel.lora import adapter_of as adapter_of
    from mt_tensor_parallel.lora import adapters as adapters
    from mt_tensor_parallel.lora import add_lora as add_lora
    from mt_tensor_parallel.lora import freeze_around_lora as freeze_around_lora
    from mt_tensor_parallel.lora import lora_delta as lora_delta
    from mt_tensor_parallel.lora import lora_parts as lora_parts
    from mt_tensor_parallel.lora import set_lora_step as set_lora_step
    from mt_tensor_parallel.lora_files import lora_state as lora_state
    from mt_tensor_parallel.lora_files import save_lora as save_lora
    from mt_tensor_parallel.quantized import QuantizedGemm as QuantizedGemm
    from mt_tensor_parallel.quantized import quantize_gemms as quantize_gemms
else:
    # Adapters, quantised products and the loss, which needs mt-fusions, are imported at first use:
    # a program with only the layers starts quickly.
    __getattr__ = resolve_later(__name__)
