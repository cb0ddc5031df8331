"""GPT-2: learned positions, LayerNorms, one matrix for queries, keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from mt_files import Checks
from mt_model import (
    MAX_LAYERS,
    AttentionConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    NormConfig,
    Sizes,
)

from mt_hf.family.decoder import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    check_activation,
    end_links,
    first_layer,
)
from mt_hf.family.family import Family
from mt_hf.family.link import Link, leaves


@dataclass(frozen=True, kw_only=True)
class GPT2Fields:
    """The fields of a GPT-2's config.json, with the defaults of transformers.

    Fields that begin with `summary` belong to a head that a language model does not have, and
    `n_ctx` is an old second name of `n_positions`.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False
    n_ctx: int | None = None
    summary_type: str = "cls_index"
    summary_use_proj: bool = True
    summary_activation: str | None = None
    summary_proj_to_labels: bool = True
    summary_first_dropout: float = 0.1

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner")
        checks.at_most(MAX_LAYERS, "n_layer")
        check_activation(checks, "activation_function", self.activation_function)
        if not checks.errors and self.n_embd % self.n_head:
            checks.add("n_embd", f"{self.n_embd} is not a multiple of n_head={self.n_head}")
        if self.embd_pdrop != self.resid_pdrop:
            checks.add("embd_pdrop", f"{self.embd_pdrop} is not resid_pdrop={self.resid_pdrop}")
        if self.reorder_and_upcast_attn:
            checks.add("reorder_and_upcast_attn", "true: the order of roundings is not built")
        checks.done()

    def scale(self, layer: int) -> float | None:
        """Return the scale of a layer's scores; None means the usual one."""
        if self.scale_attn_weights and not self.scale_attn_by_inverse_layer_idx:
            return None
        usual = (self.n_embd // self.n_head) ** -0.5 if self.scale_attn_weights else 1.0
        return usual / (layer + 1) if self.scale_attn_by_inverse_layer_idx else usual


def _read(given: GPT2Fields) -> ModelConfig:
    mlp = MLPConfig(
        ffn_size=given.n_inner or 4 * given.n_embd,
        activation=ACTIVATIONS[given.activation_function],
        gated=False,
        bias=True,
    )
    layers = tuple(
        LayerConfig(
            mixer=AttentionConfig(
                num_heads=given.n_head,
                num_kv_heads=given.n_head,
                head_dim=given.n_embd // given.n_head,
                qkv_bias=True,
                out_bias=True,
                dropout=given.attn_pdrop,
                scale=given.scale(index),
            ),
            feed_forward=mlp,
        )
        for index in range(given.n_layer)
    )
    return ModelConfig(
        vocab_size=given.vocab_size,
        hidden_size=given.n_embd,
        max_sequence_length=given.n_positions,
        layers=layers,
        norm=NormConfig(kind="layer", eps=given.layer_norm_epsilon),
        positions="learned",
        tied=given.tie_word_embeddings,
        dropout=given.resid_pdrop,
        init_std=given.initializer_range or ModelConfig.init_std,
    )


def _write(config: ModelConfig) -> GPT2Fields:
    mixer, mlp = first_layer(config)
    last = cast("AttentionConfig", config.layers[-1].mixer)
    usual = mixer.scale in (None, mixer.head_dim**-0.5)
    return GPT2Fields(
        vocab_size=config.vocab_size,
        n_positions=config.max_sequence_length,
        n_embd=config.hidden_size,
        n_layer=config.num_layers,
        n_head=mixer.num_heads,
        n_inner=mlp.ffn_size,
        activation_function=ACTIVATION_NAMES[mlp.activation],
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=mixer.dropout,
        layer_norm_epsilon=config.norm.eps,
        initializer_range=config.init_std,
        tie_word_embeddings=config.tied,
        scale_attn_weights=usual,
        scale_attn_by_inverse_layer_idx=getattr(last, "scale", None) != mixer.scale
        or (usual and mixer.scale is not None),
    )


def _links(config: ModelConfig) -> Iterator[Link]:
    hidden, positions = config.hidden_size, (config.max_sequence_length, config.hidden_size)
    yield from end_links(config, "transformer.wte", "transformer.ln_f")
    yield from leaves("transformer.wpe", "embedding.positions", *positions, bias=False)
    for index, layer in enumerate(config.layers):
        source, target = f"transformer.h.{index}", f"layers.{index}"
        yield from leaves(f"{source}.ln_1", f"{target}.mixer_norm", hidden)
        yield from _attention(f"{source}.attn", f"{target}.mixer", hidden)
        yield from leaves(f"{source}.ln_2", f"{target}.feed_forward_norm", hidden)
        ffn = cast("MLPConfig", layer.feed_forward).ffn_size
        up, down = f"{target}.feed_forward.up", f"{target}.feed_forward.down"
        yield from _transposed(f"{source}.mlp.c_fc", up, (hidden, ffn))
        yield from _transposed(f"{source}.mlp.c_proj", down, (ffn, hidden))


def _attention(source: str, target: str, hidden: int) -> Iterator[Link]:
    """Yield the columns of queries, keys and values, and the output projection."""
    for index in range(3):
        columns, box = (index * hidden, (index + 1) * hidden), {1: (index, index + 1)}
        yield Link(
            source=f"{source}.c_attn.weight",
            shape=(hidden, 3 * hidden),
            target=f"{target}.qkv.weight",
            part={1: columns},
            box=box,
            order=(1, 2, 3, 0),
        )
        yield Link(
            source=f"{source}.c_attn.bias",
            shape=(3 * hidden,),
            target=f"{target}.qkv.bias",
            part={0: columns},
            box=box,
        )
    yield from _transposed(f"{source}.c_proj", f"{target}.out", (hidden, hidden), (2, 0, 1))


def _transposed(source: str, target: str, shape: Sizes, order: Sizes = (1, 0)) -> Iterator[Link]:
    """Yield a matrix stored with a row for each input, and its bias."""
    weight, columns = f"{source}.weight", shape[1]
    yield Link(source=weight, shape=shape, target=f"{target}.weight", order=order)
    yield Link(source=f"{source}.bias", shape=(columns,), target=f"{target}.bias")


FAMILY = Family(
    name="gpt2",
    architectures=("GPT2LMHeadModel",),
    fields=GPT2Fields,
    read=_read,
    write=_write,
    links=_links,
    ignored=(".attn.bias", ".attn.masked_bias"),
    copies=(("lm_head.weight", "transformer.wte.weight"),),
)
