"""Nemotron-H: layers of Mamba-2, attention or an MLP, of which two may form one layer here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from mt_files import Checks, shorten
from mt_model import AttentionConfig, LayerConfig, Mamba2Config, MLPConfig, ModelConfig, NormConfig

from mt_hf.families.text.mamba2 import STATE_SPACE, Limit, check_silu, mamba2_links, no_limit
from mt_hf.family.decoder import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    attention_links,
    check_activation,
    end_links,
    mlp_links,
)
from mt_hf.family.family import Family
from mt_hf.family.link import Link, leaves
from mt_hf.family.table import Names, model_fields, model_values, read_values, write_values

# Words for a layer, those of older files too, and the letters of a pattern.
_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "M": "linear_attention",
        "mamba": "linear_attention",
        "linear_attention": "linear_attention",
        "*": "full_attention",
        "attention": "full_attention",
        "full_attention": "full_attention",
        "-": "mlp",
        "mlp": "mlp",
    }
)


@dataclass(frozen=True, kw_only=True)
class NemotronHFields:
    """The fields of a Nemotron-H's config.json, with the defaults of transformers.

    Nothing reads the fields from `expand` on without layers of experts, and a file with experts is
    refused. `residual_in_fp32` changes where the residual stream of a bf16 model is rounded.
    """

    vocab_size: int = 131072
    hidden_size: int = 4096
    num_hidden_layers: int | None = None
    layers_block_type: tuple[str, ...] | None = None
    hybrid_override_pattern: str | None = None
    tie_word_embeddings: bool = False
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int = 128
    max_position_embeddings: int = 4096
    attention_bias: bool = False
    attention_dropout: float = 0.0
    sliding_window: int | None = None
    intermediate_size: int = 21504
    mlp_hidden_act: str = "relu2"
    mlp_bias: bool = False
    ssm_state_size: int = 128
    mamba_num_heads: int = 128
    mamba_head_dim: int = 64
    mamba_hidden_act: str = "silu"
    n_groups: int = 8
    conv_kernel: int = 4
    time_step_min: float = 0.001
    time_step_max: float = 0.1
    time_step_floor: float = 1e-4
    use_conv_bias: bool = True
    chunk_size: int = 128
    use_bias: bool = False
    initializer_range: float = 0.02
    layer_norm_epsilon: float = 1e-5
    hidden_dropout: float = 0.0
    expand: int = 2
    use_mamba_kernels: bool = True
    time_step_limit: tuple[float, Limit] = field(default_factory=no_limit)
    mamba_proj_bias: bool = False
    mamba_ssm_cache_dtype: str = "float32"
    residual_in_fp32: bool = False
    rescale_prenorm_residual: bool = True
    num_logits_to_keep: int | None = 1
    num_nextn_predict_layers: int = 0
    mtp_layers_block_type: tuple[str, ...] | None = None
    n_routed_experts: int = 8
    n_shared_experts: int = 1
    moe_intermediate_size: int = 7688
    moe_shared_expert_intermediate_size: int = 7688
    moe_shared_expert_overlap: bool = True
    moe_latent_size: int | None = None
    num_experts_per_tok: int = 2
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    output_router_logits: bool = False

    def __post_init__(self) -> None:
        checks = Checks(self)
        check_silu(checks, "mamba_hidden_act", self.mamba_hidden_act)
        check_activation(checks, "mlp_hidden_act", self.mlp_hidden_act)
        for name, reason in (
            ("attention_bias", "transformers builds no bias there"),
            ("sliding_window", "transformers builds no window there"),
            ("tie_word_embeddings", "transformers ties no head here"),
            ("num_nextn_predict_layers", "those layers are not built"),
        ):
            if getattr(self, name):
                checks.add(name, f"{getattr(self, name)} is not known, as {reason}")
        name = "layers_block_type" if self.layers_block_type else "hybrid_override_pattern"
        words = self.layers_block_type or self.hybrid_override_pattern
        if not words:
            checks.add("layers_block_type", "missing; the kind of each layer is needed")
        for word in words or ():
            if word not in _KINDS:
                text = f"{shorten(word)} is not built; built are {', '.join(_KINDS)}"
                checks.add(name, text + "; experts are not")
                break
        checks.done()
        alone = [i for i, kind in enumerate(self.kinds) if kind == "mlp" and not self._follows(i)]
        if alone:
            text = (
                f"layer {alone[0]} is an mlp that follows no mixer, and such a layer is not built"
            )
            checks.add(name, text)
        checks.done()

    def _follows(self, index: int) -> bool:
        """Whether the previous layer is a mixer."""
        return index > 0 and self.kinds[index - 1] != "mlp"

    @property
    def kinds(self) -> list[str]:
        """The kind of each layer."""
        words = self.layers_block_type or self.hybrid_override_pattern or ()
        return [_KINDS[word] for word in words]


def _read(given: NemotronHFields) -> ModelConfig:
    # The smallest step is time_step_min, and there is no largest, whatever time_step_limit says.
    mamba = Mamba2Config(**read_values(given, _MAMBA), min_dt=given.time_step_min)
    groups = given.num_key_value_heads or given.num_attention_heads
    attention = AttentionConfig(**read_values(given, _ATTENTION, num_kv_heads=groups))
    activation = ACTIVATIONS[given.mlp_hidden_act]
    mlp = MLPConfig(**read_values(given, _MLP, activation=activation), gated=False)
    mixers = {"linear_attention": mamba, "full_attention": attention}
    layers: list[LayerConfig] = []
    for kind in given.kinds:
        if kind == "mlp":
            layers[-1] = replace(layers[-1], feed_forward=mlp)
        else:
            layers.append(LayerConfig(mixer=mixers[kind]))
    return ModelConfig(
        **model_values(given),
        layers=tuple(layers),
        norm=NormConfig(eps=given.layer_norm_epsilon),
        positions="none",
        dropout=given.hidden_dropout,
    )


def _write(config: ModelConfig) -> NemotronHFields:
    found: dict[str, Any] = {}
    kinds = []
    for index, layer in enumerate(config.layers):
        for entry in layer.entries:
            if type(entry) not in _ENTRIES:
                raise ValueError(f"layer {index} has a {type(entry).__name__}")
            kind, names = _ENTRIES[type(entry)]
            kinds.append(kind)
            found |= write_values(entry, names)  # of one layer; the engine compares them all
    if "mlp_hidden_act" in found:
        found["mlp_hidden_act"] = ACTIVATION_NAMES[found["mlp_hidden_act"]]
    return NemotronHFields(
        **model_fields(config) | {"num_hidden_layers": len(kinds)},
        layers_block_type=tuple(kinds),
        layer_norm_epsilon=config.norm.eps,
        hidden_dropout=config.dropout,
        time_step_limit=no_limit(),
        **found,
    )


# The names of config.json by kind of entry.
_MAMBA: Names = {
    **STATE_SPACE,
    "mamba_num_heads": "num_heads",
    "mamba_head_dim": "head_dim",
    "ssm_state_size": "state_size",
}
_ATTENTION: Names = {
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "attention_dropout": "dropout",
}
_MLP: Names = {"intermediate_size": "ffn_size", "mlp_hidden_act": "activation", "mlp_bias": "bias"}
_ENTRIES: Mapping[type, tuple[str, Names]] = {
    Mamba2Config: ("linear_attention", _MAMBA),
    AttentionConfig: ("full_attention", _ATTENTION),
    MLPConfig: ("mlp", _MLP),
}


def _links(config: ModelConfig) -> Iterator[Link]:
    hidden = config.hidden_size
    yield from end_links(config, "backbone.embeddings", "backbone.norm_f")
    entries = [
        (index, entry) for index, layer in enumerate(config.layers) for entry in layer.entries
    ]
    for place, (index, entry) in enumerate(entries):
        source, target = f"backbone.layers.{place}", f"layers.{index}"
        branch = "feed_forward" if isinstance(entry, MLPConfig) else "mixer"
        yield from leaves(f"{source}.norm", f"{target}.{branch}_norm", hidden, bias=False)
        names = (f"{source}.mixer", f"{target}.{branch}")
        if isinstance(entry, Mamba2Config):
            yield from mamba2_links(*names, entry, hidden)
        elif isinstance(entry, AttentionConfig):
            yield from attention_links(*names, entry, hidden)
        elif isinstance(entry, MLPConfig):
            yield from mlp_links(*names, entry, hidden)


FAMILY = Family(
    name="nemotron_h",
    architectures=("NemotronHForCausalLM",),
    fields=NemotronHFields,
    read=_read,
    write=_write,
    links=_links,
    copies=(),
    renames=(("model.", "backbone."),),  # the model's own names, which adapters have
)
