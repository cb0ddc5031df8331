"""DeepSeek's families: latent attention, and experts after the first layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from mt_files import Checks
from mt_model import LayerConfig, MLAConfig, MLPConfig, ModelConfig, MoEConfig, score_scale

from mt_hf.family.decoder import ACTIVATIONS, DecoderFields, decoder_links, fields_of, model_of
from mt_hf.family.experts import ExpertNames, dense_of, experts_of, feed_forward_links
from mt_hf.family.link import Link, leaves
from mt_hf.family.table import Names, read_values, write_values

NAMES = ExpertNames(shared="shared_experts")
_MIXER: Names = {
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
    "qk_nope_head_dim": "nope_head_dim",
    "qk_rope_head_dim": "rope_head_dim",
    "v_head_dim": "v_head_dim",
}
_EXPERTS: Names = {
    "n_routed_experts": "num_experts",
    "norm_topk_prob": "normalize",
    "routed_scaling_factor": "scale",
}
_LATENT_EPS = 1e-6  # norms of latents ignore rms_norm_eps


@dataclass(frozen=True, kw_only=True)
class LatentFields(DecoderFields):
    """Fields of a DeepSeek's config.json about attention and experts.

    The first `first_k_dense_replace` layers have an MLP of `intermediate_size`. Norms of latents
    have an epsilon of 1e-6 regardless of `rms_norm_eps`. `head_dim`, `qk_head_dim` and `ep_size`
    have no effect. `aux_loss_alpha` is the weight of the balancing loss, of each sequence with
    `seq_aux`; it counts in training here, and changes no logit.
    """

    kv_lora_rank: int = 512
    q_lora_rank: int | None = 1536
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    qk_head_dim: int | None = None
    v_head_dim: int = 128
    attention_bias: bool = False
    n_routed_experts: int = 64
    n_shared_experts: int = 2
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int = 1407
    moe_layer_freq: int = 1
    first_k_dense_replace: int = 0
    n_group: int | None = None
    topk_group: int | None = None
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    aux_loss_alpha: float = 0.0
    seq_aux: bool = True
    output_router_logits: bool = False
    ep_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = Checks(self)
        sizes = ("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "n_group")
        checks.at_least(1, *sizes, "topk_group")
        checks.at_least(0, "first_k_dense_replace", "aux_loss_alpha")
        checks.done()
        if self.num_experts_per_tok is None:
            checks.add("num_experts_per_tok", "missing; give the number of experts of a token")
        if self.heads[0] != self.heads[1]:
            text = f"{self.heads[1]} is not num_attention_heads={self.heads[0]}"
            checks.add(
                "num_key_value_heads", f"{text}: each head has keys of its own; leave it out"
            )
        if self.moe_layer_freq != 1:
            checks.add("moe_layer_freq", f"{self.moe_layer_freq} is not built; use 1")
        if self.first_k_dense_replace >= self.num_hidden_layers:
            checks.add("first_k_dense_replace", "leaves no layer that has experts")
        checks.done()

    @property
    def moe(self) -> MoEConfig:
        """The part of the experts' config that the families have in common."""
        return MoEConfig(
            **read_values(self, _EXPERTS),
            ffn_size=self.moe_intermediate_size,
            top_k=self.num_experts_per_tok or 0,
            activation=ACTIVATIONS[self.hidden_act],
            shared_size=self.n_shared_experts * self.moe_intermediate_size,
            aux_loss=0.0 if self.seq_aux else self.aux_loss_alpha,
            sequence_aux_loss=self.aux_loss_alpha if self.seq_aux else 0.0,
        )


LatentT = TypeVar("LatentT", bound=LatentFields)


def latent_config(given: LatentFields, moe: MoEConfig, *, interleaved: bool) -> ModelConfig:
    """Return the model of a config.json.

    Args:
        given: Fields of the config.json.
        moe: The experts.
        interleaved: Whether rotary channels pair up with their neighbours.
    """
    rope = replace(given.rope, interleaved=interleaved)
    mixer = MLAConfig(
        **read_values(given, _MIXER),
        num_heads=given.num_attention_heads,
        rope=rope,
        down_bias=given.attention_bias,
        out_bias=given.attention_bias,
        norm_eps=_LATENT_EPS,
        dropout=given.attention_dropout,
    )
    mixer = replace(mixer, scale=score_scale(mixer.head_dim, rope))
    mlp = MLPConfig(ffn_size=given.intermediate_size, activation=moe.activation)
    first, count = given.first_k_dense_replace, given.num_hidden_layers
    layers = [LayerConfig(mixer=mixer, feed_forward=mlp)] * first
    layers += [LayerConfig(mixer=mixer, feed_forward=moe)] * (count - first)
    return model_of(given, tuple(layers))


def latent_fields(kind: type[LatentT], config: ModelConfig, **rest: Any) -> LatentT:
    """Return the fields of a DeepSeek model; the caller compares all layers.

    Args:
        kind: Class of the fields.
        config: The model.
        rest: Further fields of the family.

    Raises:
        ValueError: No layer has experts, or the first one has no latent attention.
    """
    moe, layers = experts_of(config)
    mixer = config.layers[0].mixer
    if not isinstance(mixer, MLAConfig):
        found = type(mixer).__name__
        raise ValueError(f"layer 0 has {found}, and no latent attention")  # noqa: TRY004
    found = {
        **write_values(mixer, _MIXER),
        **write_values(moe, _EXPERTS),
        "qk_head_dim": mixer.head_dim,
        "head_dim": mixer.rope_head_dim,
        "n_shared_experts": moe.shared_size // moe.width,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.width,
        "first_k_dense_replace": layers[0],
        "aux_loss_alpha": moe.sequence_aux_loss or moe.aux_loss,
        "seq_aux": not moe.aux_loss,
    }
    return fields_of(kind, config, mixer, dense_of(config, moe), **found | rest)


def latent_links(config: ModelConfig) -> Iterator[Link]:
    """Yield the links of a DeepSeek model."""
    mlp = partial(feed_forward_links, names=NAMES)
    yield from decoder_links(config, attention=_attention_links, mlp=mlp)


def _attention_links(source: str, target: str, mixer: Any, hidden: int) -> Iterator[Link]:
    """Yield the links of projections to latents, norms, projections to heads, and the output."""
    heads, rank, low = mixer.num_heads, mixer.kv_lora_rank, mixer.q_lora_rank
    bias = mixer.down_bias
    if low is None:
        linears = [("q_proj", "query", heads * mixer.head_dim, hidden, False)]
    else:
        linears = [
            ("q_a_proj", "query_down", low, hidden, bias),
            ("q_b_proj", "query", heads * mixer.head_dim, low, False),
        ]
        yield from leaves(f"{source}.q_a_layernorm", f"{target}.query_norm", low, bias=False)
    wide = heads * (mixer.nope_head_dim + mixer.v_head_dim)
    linears += [
        ("kv_a_proj_with_mqa", "latent", rank + mixer.rope_head_dim, hidden, bias),
        ("kv_b_proj", "key_value", wide, rank, False),
        ("o_proj", "out", hidden, heads * mixer.v_head_dim, mixer.out_bias),
    ]
    yield from leaves(f"{source}.kv_a_layernorm", f"{target}.latent_norm", rank, bias=False)
    for theirs, ours, rows, columns, has_bias in linears:
        yield from leaves(f"{source}.{theirs}", f"{target}.{ours}", rows, columns, bias=has_bias)
