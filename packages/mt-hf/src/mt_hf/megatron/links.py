"""Links from tensors of Megatron-core's GPTModel to our parameters.

Megatron's matrices have our order of elements: queries, keys and values by groups of heads, the
gate before the other half of a gated feed-forward. So each link is a view.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from mt_model import AttentionConfig, MLPConfig, ModelConfig, MoEConfig

from mt_hf.family.link import Link

_LAYERS = "decoder.layers"
# Transformer Engine keeps the weight of a norm in the linear layer behind it.
_MIXER_NORM = ("input_layernorm.{}", "self_attention.linear_qkv.layer_norm_{}")
_MLP_NORM = ("pre_mlp_layernorm.{}", "mlp.linear_fc1.layer_norm_{}")


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """One layer's tensors: rows of the tensors of all layers, or tensors of its own."""

    index: int
    count: int
    names: Collection[str]

    def link(self, source: str, target: str, *shape: int) -> Link:
        """Return the link of one of its tensors.

        Args:
            source: Name of the tensor within a layer.
            target: Name of the parameter within a layer.
            shape: Shape of the layer's tensor.
        """
        target = f"layers.{self.index}.{target}"
        own = f"{_LAYERS}.{self.index}.{source}"
        if own in self.names:
            return Link(source=own, shape=shape, target=target)
        return Link(
            source=f"{_LAYERS}.{source}",
            shape=(self.count, *shape),
            target=target,
            part={0: (self.index, self.index + 1)},
        )

    def first(self, patterns: tuple[str, ...], leaf: str) -> str:
        """Return the name of a norm's weight or bias that the checkpoint has."""
        for pattern in patterns:
            name = pattern.format(leaf)
            if {f"{_LAYERS}.{name}", f"{_LAYERS}.{self.index}.{name}"} & set(self.names):
                return name
        return patterns[0].format(leaf)


def megatron_links(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Link]:
    """Yield the links of every parameter.

    Args:
        config: The model.
        shapes: Shapes of the checkpoint's tensors, by name.
    """
    hidden, rows = config.hidden_size, config.vocab_size
    yield _whole("embedding.word_embeddings.weight", "embedding.weight", rows, hidden)
    if config.positions == "learned":
        name, length = "embedding.position_embeddings.weight", config.max_sequence_length
        yield _whole(name, "embedding.positions.weight", length, hidden)
    leaves = ("weight", "bias") if config.norm.has_bias else ("weight",)
    for leaf in leaves:
        yield _whole(f"decoder.final_layernorm.{leaf}", f"final_norm.{leaf}", hidden)
    if not config.tied:
        yield _whole("output_layer.weight", "head.weight", rows, hidden)
    for index, entry in enumerate(config.layers):
        layer = _Layer(index=index, count=config.num_layers, names=shapes.keys())
        for leaf in leaves:
            yield layer.link(layer.first(_MIXER_NORM, leaf), f"mixer_norm.{leaf}", hidden)
            yield layer.link(layer.first(_MLP_NORM, leaf), f"feed_forward_norm.{leaf}", hidden)
        yield from _attention(layer, cast("AttentionConfig", entry.mixer), hidden)
        if isinstance(entry.feed_forward, MoEConfig):
            yield from _experts(layer, entry.feed_forward, hidden)
        else:
            yield from _mlp(layer, cast("MLPConfig", entry.feed_forward), hidden)


def _whole(source: str, target: str, *shape: int) -> Link:
    return Link(source=source, shape=shape, target=target)


def _attention(layer: _Layer, mixer: AttentionConfig, hidden: int) -> Iterator[Link]:
    out = mixer.num_heads * mixer.head_dim
    rows = out + 2 * mixer.num_kv_heads * mixer.head_dim
    source = "self_attention"
    yield layer.link(f"{source}.linear_qkv.weight", "mixer.qkv.weight", rows, hidden)
    if mixer.qkv_bias:
        yield layer.link(f"{source}.linear_qkv.bias", "mixer.qkv.bias", rows)
    yield layer.link(f"{source}.linear_proj.weight", "mixer.out.weight", hidden, out)
    if mixer.out_bias:
        yield layer.link(f"{source}.linear_proj.bias", "mixer.out.bias", hidden)


def _mlp(layer: _Layer, mlp: MLPConfig, hidden: int) -> Iterator[Link]:
    ffn = cast("int", mlp.ffn_size)
    rows = 2 * ffn if mlp.gated else ffn
    yield layer.link("mlp.linear_fc1.weight", "feed_forward.up.weight", rows, hidden)
    yield layer.link("mlp.linear_fc2.weight", "feed_forward.down.weight", hidden, ffn)
    if mlp.bias:
        yield layer.link("mlp.linear_fc1.bias", "feed_forward.up.bias", rows)
        yield layer.link("mlp.linear_fc2.bias", "feed_forward.down.bias", hidden)


def _experts(layer: _Layer, moe: MoEConfig, hidden: int) -> Iterator[Link]:
    count, ffn = moe.num_experts, moe.width
    rows = 2 * ffn if moe.gated else ffn
    source, target = "mlp.experts.experts", "feed_forward.experts"
    yield layer.link("mlp.router.weight", "feed_forward.router.weight", count, hidden)
    yield layer.link(f"{source}.linear_fc1.weight", f"{target}.up.weight", count, rows, hidden)
    yield layer.link(f"{source}.linear_fc2.weight", f"{target}.down.weight", count, hidden, ffn)
    if moe.bias:
        yield layer.link(f"{source}.linear_fc1.bias", f"{target}.up.bias", count, rows)
        yield layer.link(f"{source}.linear_fc2.bias", f"{target}.down.bias", count, hidden)
