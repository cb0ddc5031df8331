"""The arguments of a Megatron-LM run, as far as they describe its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from mt_files import Checks, SchemaError, build
from mt_model import (
    MAX_LAYERS,
    Activation,
    AttentionConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    RopeConfig,
)

from mt_hf.family.error import ExchangeError

_NORMS: Mapping[str, Any] = MappingProxyType({"LayerNorm": "layer", "RMSNorm": "rms"})
_POSITIONS: Mapping[str, Any] = MappingProxyType(
    {"rope": "rope", "learned_absolute": "learned", "none": "none"}
)
# Arguments that change the model in a way that is not built here, and their values without it.
_OTHER: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "multi_latent_attention": (None, False),
        "qk_layernorm": (None, False),
        "apply_layernorm_1p": (None, False),
        "rotary_interleaved": (None, False),
        "rotary_seq_len_interpolation_factor": (None,),
        "use_rope_scaling": (None, False),
        "window_size": (None,),
        "softmax_type": (None, "vanilla"),
        "attention_output_gate": (None, False),
        "quick_geglu": (None, False),
        "glu_linear_offset": (None, 0.0),
        "activation_func_clamp_value": (None,),
        "mtp_num_layers": (None, 0),
        "moe_shared_expert_intermediate_size": (None,),
        "moe_router_score_function": (None, "softmax"),
        "moe_router_enable_expert_bias": (None, False),
        "moe_router_group_topk": (None,),
        "moe_router_topk_limited_devices": (None,),
        "moe_latent_size": (None,),
        "moe_apply_probs_on_input": (None, False),
        "hybrid_override_pattern": (None,),
        "heterogeneous_layers_config_path": (None,),
        "heterogeneous_layers_config_encoded_json": (None,),
        "no_rope_freq": (None,),
        "residual_connection_post_layernorm": (None, False),
        "apply_residual_connection_post_layernorm": (None, False),
    }
)


@dataclass(frozen=True, kw_only=True)
class MegatronArguments:
    """Arguments of Megatron-LM by its names, with the defaults of its command line."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    max_position_embeddings: int
    ffn_hidden_size: int | None = None
    kv_channels: int | None = None
    group_query_attention: bool = False
    num_query_groups: int | None = None
    position_embedding_type: str = "learned_absolute"
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    normalization: str = "LayerNorm"
    norm_epsilon: float = 1e-5
    swiglu: bool = False
    squared_relu: bool = False
    openai_gelu: bool = False
    bias_gelu_fusion: bool = True
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    untie_embeddings_and_output_weights: bool = False
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1
    init_method_std: float = 0.02
    num_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_layer_freq: int | list[int] = 1
    moe_router_topk: int = 2
    moe_router_pre_softmax: bool = False
    moe_router_topk_scaling_factor: float | None = None
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        sizes = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
        checks.at_least(1, *sizes, "ffn_hidden_size", "kv_channels", "num_query_groups")
        checks.at_least(1, "num_experts", "moe_ffn_hidden_size", "moe_router_topk")
        checks.at_most(MAX_LAYERS, "num_layers")
        for name, known in (("normalization", _NORMS), ("position_embedding_type", _POSITIONS)):
            if getattr(self, name) not in known:
                text = f"{getattr(self, name)!r:.60} is not one of {', '.join(known)}"
                checks.add(name, text)
        if isinstance(self.moe_layer_freq, list) and len(self.moe_layer_freq) != self.num_layers:
            checks.add("moe_layer_freq", "has another length than num_layers")
        checks.done()

    @property
    def is_sparse(self) -> list[bool]:
        """Whether each layer has experts."""
        every = self.moe_layer_freq
        if self.num_experts is None:
            return [False] * self.num_layers
        if isinstance(every, list):
            return [bool(each) for each in every]
        return [index % max(1, every) == 0 for index in range(self.num_layers)]

    @property
    def activation(self) -> Activation:
        """Activation of the feed-forwards."""
        if self.swiglu:
            return "silu"
        if self.squared_relu:
            return "relu2"
        # The fused kernel of bias and GELU is the approximation by tanh.
        fused = self.bias_gelu_fusion and self.add_bias_linear and self.num_experts is None
        return "gelu_tanh" if self.openai_gelu or fused else "gelu"

    def config(self, vocab_rows: int) -> ModelConfig:
        """Return the model.

        Args:
            vocab_rows: Rows of the embedding, with Megatron's padding.
        """
        heads, width = self.num_attention_heads, self.hidden_size
        groups = self.num_query_groups if self.group_query_attention else heads
        positions = _POSITIONS[self.position_embedding_type]
        rope = RopeConfig(theta=self.rotary_base, fraction=self.rotary_percent)
        mixer = AttentionConfig(
            num_heads=heads,
            num_kv_heads=groups or heads,
            head_dim=self.kv_channels or width // heads,
            rope=rope if positions == "rope" else None,
            qkv_bias=self.add_bias_linear or self.add_qkv_bias,
            out_bias=self.add_bias_linear,
            dropout=self.attention_dropout,
        )
        layers = tuple(
            LayerConfig(mixer=mixer, feed_forward=self._experts if sparse else self._mlp)
            for sparse in self.is_sparse
        )
        return ModelConfig(
            vocab_size=vocab_rows,
            vocab_multiple=next(n for n in (128, 64, 32, 16, 8, 4, 2, 1) if vocab_rows % n == 0),
            hidden_size=width,
            max_sequence_length=self.max_position_embeddings,
            layers=layers,
            norm=NormConfig(kind=_NORMS[self.normalization], eps=self.norm_epsilon),
            positions=positions,
            tied=not self.untie_embeddings_and_output_weights,
            dropout=self.hidden_dropout,
            init_std=self.init_method_std,
        )

    @property
    def _mlp(self) -> MLPConfig:
        return MLPConfig(
            ffn_size=self.ffn_hidden_size or 4 * self.hidden_size,
            activation=self.activation,
            gated=self.swiglu,
            bias=self.add_bias_linear,
        )

    @property
    def _experts(self) -> MoEConfig:
        return MoEConfig(
            num_experts=self.num_experts or 1,
            ffn_size=self.moe_ffn_hidden_size or self._mlp.ffn_size,
            top_k=self.moe_router_topk,
            activation=self.activation,
            gated=self.swiglu,
            bias=self.add_bias_linear,
            normalize=not self.moe_router_pre_softmax,
            scale=self.moe_router_topk_scaling_factor or 1.0,
            aux_loss=self.moe_aux_loss_coeff,
            router_z_loss=self.moe_z_loss_coeff or 0.0,
        )


def read_arguments(args: Any, where: str) -> MegatronArguments:
    """Return the arguments in a checkpoint.

    Args:
        args: The saved arguments as plain values; those that say nothing of the model are ignored.
        where: The checkpoint, for messages.

    Raises:
        ExchangeError: Arguments are missing or wrong, or describe a model that is not built here.
    """
    if not isinstance(args, Mapping):
        raise ExchangeError(
            f"{where}: holds no arguments of Megatron-LM (`args`), so the model's shape is unknown"
        )
    for name, plain in _OTHER.items():
        if (value := args.get(name)) not in plain:
            raise ExchangeError(f"{where}: {name}={value!r:.100} is a model that is not read")
    known = {field.name for field in fields(MegatronArguments)}
    given = {name: value for name, value in args.items() if name in known}
    try:
        return build(MegatronArguments, given)
    except SchemaError as error:
        raise ExchangeError(f"{where}: {error}") from error
