"""Layers of an encoder and a decoder, from their attention and feed-forward."""

from __future__ import annotations

from dataclasses import replace

from mt_model.attend.score_bias import RelativeConfig
from mt_model.attention.config import AttentionConfig
from mt_model.attention.cross_attention_config import CrossAttentionConfig
from mt_model.feed_forward.mlp_config import MLPConfig
from mt_model.stack.layer_config import LayerConfig


def encoder_decoder_layers(
    attention: AttentionConfig, mlp: MLPConfig, *, encoder: int, decoder: int
) -> tuple[LayerConfig, ...]:
    """Make the layers of a T5: all of the encoder, and two entries for each of the decoder.

    A decoder's layer is self-attention without a feed-forward, and then attention to the memory
    with one. Of a relative bias the encoder has a table with both directions, called `encoder`, and
    the decoder's self-attention one of its own, `decoder`.

    Args:
        attention: Attention of each layer; its `causal` is ignored.
        mlp: Feed-forward of each layer.
        encoder: Number of layers of the encoder.
        decoder: Number of layers of the decoder.
    """
    both, own = (
        replace(attention, causal=is_causal, score_bias=_bias(attention, is_causal=is_causal))
        for is_causal in (False, True)
    )
    across = CrossAttentionConfig(
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        qkv_bias=attention.qkv_bias,
        out_bias=attention.out_bias,
        dropout=attention.dropout,
        softcap=attention.softcap,
        scale=attention.scale,
    )
    pair = (LayerConfig(mixer=own), LayerConfig(mixer=across, feed_forward=mlp))
    return (LayerConfig(mixer=both, feed_forward=mlp),) * encoder + pair * decoder


def _bias(attention: AttentionConfig, *, is_causal: bool) -> RelativeConfig | None:
    bias = attention.score_bias
    if not isinstance(bias, RelativeConfig):
        return None
    name = "decoder" if is_causal else "encoder"
    return replace(bias, bidirectional=not is_causal, table=name)
