"""Small fused operations of transformers, for any model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_fusions.activations.activation import activate as activate
from mt_fusions.activations.bias_gelu import BIAS_GELU as BIAS_GELU
from mt_fusions.activations.bias_gelu import bias_gelu as bias_gelu
from mt_fusions.activations.bias_gelu import bias_gelu_tanh as bias_gelu_tanh
from mt_fusions.activations.gated import geglu as geglu
from mt_fusions.activations.gated import quick_geglu as quick_geglu
from mt_fusions.activations.gated import squared_relu as squared_relu
from mt_fusions.activations.gated import swiglu as swiglu
from mt_fusions.activations.gates import GATED as GATED
from mt_fusions.activations.gates import SILU_PRODUCT as SILU_PRODUCT
from mt_fusions.activations.gates import SQUARED_RELU as SQUARED_RELU
from mt_fusions.activations.invariant import invariant_activation as invariant_activation
from mt_fusions.activations.invariant import invariant_gated as invariant_gated
from mt_fusions.activations.invariant import invariant_sigmoid as invariant_sigmoid
from mt_fusions.activations.invariant import invariant_softplus as invariant_softplus
from mt_fusions.attention.rope import apply_rope as apply_rope
from mt_fusions.attention.rotation import ROPE as ROPE
from mt_fusions.attention.rotation import swap_pairs as swap_pairs
from mt_fusions.attention.rotation import turn as turn
from mt_fusions.graphs.autograd_graph import AutogradGraph as AutogradGraph
from mt_fusions.graphs.graph import Graph as Graph
from mt_fusions.graphs.graph_pool import GraphPool as GraphPool
from mt_fusions.graphs.tape import GraphError as GraphError
from mt_fusions.kernels import fused_kernel as fused_kernel
from mt_fusions.losses.cross_entropy import cross_entropy as cross_entropy
from mt_fusions.losses.logit_loss import LOSS as LOSS
from mt_fusions.losses.logit_loss import LogitLoss as LogitLoss
from mt_fusions.losses.logit_loss import TokenLosses as TokenLosses
from mt_fusions.losses.terms import IGNORE_INDEX as IGNORE_INDEX
from mt_fusions.losses.terms import LossOptions as LossOptions
from mt_fusions.norms.add_norm import add_layer_norm as add_layer_norm
from mt_fusions.norms.add_norm import add_rms_norm as add_rms_norm
from mt_fusions.norms.layer_norm import LAYER_NORM as LAYER_NORM
from mt_fusions.norms.layer_norm import layer_norm as layer_norm
from mt_fusions.norms.rms_norm import RMS_NORM as RMS_NORM
from mt_fusions.norms.rms_norm import rms_norm as rms_norm
from mt_fusions.operator import operator as operator
from mt_fusions.permute import permute as permute
from mt_fusions.permute import unpermute as unpermute
from mt_fusions.residual.addition import RESIDUAL as RESIDUAL
from mt_fusions.residual.addition import Sum as Sum
from mt_fusions.residual.bias_dropout_add import bias_dropout_add as bias_dropout_add

if not TYPE_CHECKING:
    __getattr__ = resolve_later(__name__)
