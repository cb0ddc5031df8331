"""The config of a language model's attention to the neighbours of its text's chunks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mt_files import Checks

from mt_model.attention.config import AttentionConfig
from mt_model.attention.cross_attention_config import CrossAttentionConfig
from mt_model.block.sizes import MAX_LAYERS, MAX_LENGTH
from mt_model.feed_forward.mlp_config import MLPConfig
from mt_model.rope.config import RopeConfig
from mt_model.stack.layer_config import LayerConfig

_SHALLOW = 15  # largest number of layers of a model that attends to neighbours from layer 6


@dataclass(frozen=True, kw_only=True)
class RetroConfig:
    """Chunked cross-attention to retrieved neighbours (Retro; Borgeaud et al., 2022).

    A text is cut into chunks of `chunk` tokens, each with `neighbours` neighbours of
    `2 * chunk` tokens. The last token of a chunk and the `chunk - 1` tokens after it attend to the
    chunk's encoded neighbours, between attention and feed-forward of the layers `first`,
    `first + every`, and on.

    Attributes:
        chunk: Number of tokens of a chunk.
        neighbours: Number of neighbours of a chunk; missing neighbours are masked.
        encoder_layers: Number of bidirectional layers of the neighbours' encoder, each of which
            also attends to the hidden states of the chunk, as they enter layer `first`.
        first: Number of the first layer with cross-attention, counted from 1; by default as in the
            paper: 6, or 9 in models of more than 15 layers.
        every: Distance of the layers with cross-attention.
    """

    chunk: int = 64
    neighbours: int = 2
    encoder_layers: int = 2
    first: int | None = None
    every: int = 3

    def __post_init__(self) -> None:
        checks = Checks(self)
        names = ("chunk", "neighbours", "encoder_layers", "first", "every")
        checks.at_least(1, *names)
        checks.at_most(MAX_LENGTH, "chunk", "neighbours")
        checks.at_most(MAX_LAYERS, "encoder_layers", "first", "every")
        checks.done()

    @property
    def length(self) -> int:
        """Number of tokens of a neighbour, with its continuation."""
        return 2 * self.chunk

    def places(self, num_layers: int) -> range:
        """Return the indices of the layers with cross-attention, counted from 0."""
        return range(self._first(num_layers) - 1, num_layers, self.every)

    def _first(self, num_layers: int) -> int:
        if self.first is not None:
            return self.first
        return 6 if num_layers <= _SHALLOW else 9

    @staticmethod
    def owns(name: str) -> bool:
        """Return whether a model without neighbours lacks a parameter, by its name."""
        return re.match(r"neighbours\.|layers\.\d+\.cross(_norm)?\.", name) is not None

    def obstacle(self, layers: Sequence[LayerConfig]) -> str | None:
        """Return why layers can't attend to neighbours; None if they can."""
        places = self.places(len(layers))
        if not places:
            first, count = self._first(len(layers)), len(layers)
            return f"first={first}, and the model has {count} layers; use a smaller one"
        for index in places:
            layer = layers[index]
            if not isinstance(layer.mixer, AttentionConfig) or layer.feed_forward is None:
                return (
                    f"layer {index + 1} has no attention followed by a feed-forward; choose first "
                    "and every so that they name layers that do"
                )
            if layer.parallel or layer.norms != "pre":
                return (
                    f"layer {index + 1} has parallel={layer.parallel} and norms={layer.norms!r}; "
                    "cross-attention stands between branches with parallel=False and norms='pre'"
                )
        return None

    def cross(self, layer: LayerConfig) -> CrossAttentionConfig:
        """Return the attention to neighbours of a layer, with the heads of its own attention."""
        own = _attention(layer)
        return CrossAttentionConfig(
            num_heads=own.num_heads, num_kv_heads=own.num_kv_heads, head_dim=own.head_dim
        )

    def encoder_layer(self, layer: LayerConfig, hidden_size: int) -> LayerConfig:
        """Return a layer of the neighbours' encoder, from the first that attends to them."""
        own, fed = _attention(layer), layer.feed_forward
        rope = RopeConfig() if own.rope is None else RopeConfig(theta=own.rope.theta)
        mixer = AttentionConfig(
            num_heads=own.num_heads,
            num_kv_heads=own.num_kv_heads,
            head_dim=own.head_dim,
            rope=rope if own.head_dim % 2 == 0 else None,
            causal=False,
        )
        if isinstance(fed, MLPConfig):
            return LayerConfig(mixer=mixer, feed_forward=replace(fed, dropout=0.0))
        return LayerConfig(mixer=mixer, feed_forward=MLPConfig(ffn_size=4 * hidden_size))

    def num_parameters(self, layers: Sequence[LayerConfig], hidden_size: int, norm: int) -> int:
        """Count the parameters of all new parts, with norms of `norm` parameters each."""
        places = self.places(len(layers))
        cross = sum(self.cross(layers[i]).num_parameters(hidden_size) + norm for i in places)
        layer = layers[places[0]]
        entries = self.encoder_layer(layer, hidden_size).entries
        each = sum(entry.num_parameters(hidden_size) + norm for entry in entries)
        each += self.cross(layer).num_parameters(hidden_size) + norm
        return cross + self.encoder_layers * each + norm

    def flops_per_token(self, layers: Sequence[LayerConfig], hidden_size: int) -> int:
        """Count the operations for a token of the text, with its share of the encoder.

        A token has `2 * neighbours` tokens of neighbours. It attends to all of its chunk's.
        """
        places, beside = self.places(len(layers)), 2 * self.neighbours

        def attending(layer: LayerConfig, queries: int, memory: int, keys: int) -> int:
            cross = self.cross(layer)
            query, key = cross.num_heads * cross.head_dim, cross.num_kv_heads * cross.head_dim
            projections = hidden_size * (query * queries + key * memory)
            return 12 * (projections + query * keys * queries)

        total = sum(attending(layers[i], 1, beside, self.neighbours * self.length) for i in places)
        first = layers[places[0]]
        entries = self.encoder_layer(first, hidden_size).entries
        each = sum(entry.flops_per_token(hidden_size, self.length) for entry in entries)
        each = beside * each + attending(first, beside, 1, self.chunk)
        return total + self.encoder_layers * each


def _attention(layer: LayerConfig) -> AttentionConfig:
    if not isinstance(layer.mixer, AttentionConfig):
        raise TypeError(f"attention to neighbours has the heads of attention, not {layer.mixer}")
    return layer.mixer
