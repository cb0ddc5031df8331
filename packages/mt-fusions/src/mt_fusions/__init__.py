"""Small fused operations of transformers, for any model."""

from __future__ import annotations

from mt_fusions.activations.activation import activate
from mt_fusions.activations.bias_gelu import BIAS_GELU, bias_gelu, bias_gelu_tanh
from mt_fusions.activations.gated import geglu, quick_geglu, squared_relu, swiglu
from mt_fusions.activations.gates import GATED, SILU_PRODUCT, SQUARED_RELU
from mt_fusions.attention.rope import apply_rope
from mt_fusions.attention.rotation import ROPE, swap_pairs, turn
from mt_fusions.graphs.autograd_graph import AutogradGraph
from mt_fusions.graphs.graph import Graph
from mt_fusions.graphs.graph_pool import GraphPool
from mt_fusions.graphs.tape import GraphError
from mt_fusions.kernels import fused_kernel
from mt_fusions.losses.cross_entropy import cross_entropy
from mt_fusions.losses.logit_loss import LOSS, LogitLoss, TokenLosses
from mt_fusions.losses.terms import IGNORE_INDEX, LossOptions
from mt_fusions.norms.add_norm import add_layer_norm, add_rms_norm
from mt_fusions.norms.layer_norm import LAYER_NORM, layer_norm
from mt_fusions.norms.rms_norm import RMS_NORM, rms_norm
from mt_fusions.operator import operator
from mt_fusions.permute import permute, unpermute
from mt_fusions.residual.addition import RESIDUAL, Sum
from mt_fusions.residual.bias_dropout_add import bias_dropout_add

__all__ = [
    "BIAS_GELU",
    "GATED",
    "IGNORE_INDEX",
    "LAYER_NORM",
    "LOSS",
    "RESIDUAL",
    "RMS_NORM",
    "ROPE",
    "SILU_PRODUCT",
    "SQUARED_RELU",
    "AutogradGraph",
    "Graph",
    "GraphError",
    "GraphPool",
    "LogitLoss",
    "LossOptions",
    "Sum",
    "TokenLosses",
    "activate",
    "add_layer_norm",
    "add_rms_norm",
    "apply_rope",
    "bias_dropout_add",
    "bias_gelu",
    "bias_gelu_tanh",
    "cross_entropy",
    "fused_kernel",
    "geglu",
    "layer_norm",
    "operator",
    "permute",
    "quick_geglu",
    "rms_norm",
    "squared_relu",
    "swap_pairs",
    "swiglu",
    "turn",
    "unpermute",
]
