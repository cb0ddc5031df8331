"""Tensor and sequence parallel layers that take a process group."""

from mt_tensor_parallel.all_to_all import all_to_all, all_to_all_rows
from mt_tensor_parallel.collectives import (
    all_gather,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter,
    scatter_to_group,
)
from mt_tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from mt_tensor_parallel.embedding import VocabParallelEmbedding
from mt_tensor_parallel.functional import parallel_linear
from mt_tensor_parallel.gemm import Gemm, TorchGemm
from mt_tensor_parallel.heads import exchange_kv_groups
from mt_tensor_parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    defer_weight_gradients,
)
from mt_tensor_parallel.linear_cross_entropy import (
    IGNORE_INDEX,
    linear_cross_entropy,
    linear_cross_entropy_reference,
)
from mt_tensor_parallel.lora import LoraLinear, add_lora, lora_state, save_lora
from mt_tensor_parallel.overlap import Overlap, pick_overlap
from mt_tensor_parallel.recompute import DiscardedOutput, recompute
from mt_tensor_parallel.rng import RngStreams
from mt_tensor_parallel.wgrad import Deferral, WgradStore

__all__ = [
    "IGNORE_INDEX",
    "ColumnParallelLinear",
    "Deferral",
    "DiscardedOutput",
    "Gemm",
    "LoraLinear",
    "Overlap",
    "RngStreams",
    "RowParallelLinear",
    "TorchGemm",
    "VocabParallelEmbedding",
    "WgradStore",
    "add_lora",
    "all_gather",
    "all_to_all",
    "all_to_all_rows",
    "copy_to_group",
    "defer_weight_gradients",
    "exchange_kv_groups",
    "gather_from_group",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "lora_state",
    "parallel_linear",
    "pick_overlap",
    "recompute",
    "reduce_from_group",
    "reduce_scatter",
    "save_lora",
    "scatter_to_group",
    "vocab_parallel_cross_entropy",
]
