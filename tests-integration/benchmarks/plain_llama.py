"""A Llama as somebody writes it by hand in plain torch: fused products, torch's attention."""

from __future__ import annotations

import torch
from mt_model import GPT, ModelConfig
from torch import Tensor, nn
from torch.nn import functional as F


class PlainLlama(nn.Module):
    """A model with the shape and weights of one of ours; it gives logits.

    Args:
        config: The model's config: equal layers of attention and a gated MLP, one norm before each.
        source: The model whose weights are copied.
    """

    def __init__(self, config: ModelConfig, source: GPT) -> None:
        super().__init__()
        ours = dict(source.named_parameters())
        self.embedding = nn.Parameter(ours["embedding.weight"].detach().clone())
        self.head = self.embedding
        if "head.weight" in ours:
            self.head = nn.Parameter(ours["head.weight"].detach().clone())
        self.norm = nn.Parameter(ours["final_norm.weight"].detach().clone())
        self.layers = nn.ModuleList(
            _Layer(config, {name: ours[f"layers.{index}.{name}"] for name in _NAMES})
            for index in range(config.num_layers)
        )
        self.eps = config.norm.eps
        mixer = config.layers[0].mixer
        rates = mixer.rope.theta ** -(torch.arange(0, mixer.head_dim, 2) / mixer.head_dim)
        angles = torch.outer(torch.arange(config.max_sequence_length), rates)
        turned = torch.stack((angles.cos(), angles.sin())).to(source.shard.dtype)
        self.register_buffer("turned", turned, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits.

        Shape:
            tokens: `[B, S]`; the logits are `[B, S, vocab_size]`.
        """
        x = F.embedding(tokens, self.embedding)
        cos, sin = self.turned[:, : tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(F.rms_norm(x, x.shape[-1:], self.norm, self.eps), self.head)


_NAMES = (
    *("mixer_norm.weight", "mixer.qkv.weight", "mixer.out.weight"),
    *("feed_forward_norm.weight", "feed_forward.up.weight", "feed_forward.down.weight"),
)


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig, weights: dict[str, Tensor]) -> None:
        super().__init__()
        mixer = config.layers[0].mixer
        self.eps, self.head_dim = config.norm.eps, mixer.head_dim
        self.heads = mixer.num_heads, mixer.num_kv_heads
        qkv = weights["mixer.qkv.weight"]  # [kv_groups, q_per_group + 2, head_dim, hidden]
        parts = qkv[:, :-2], qkv[:, -2], qkv[:, -1]
        self.qkv = _copy(torch.cat([part.reshape(-1, qkv.shape[-1]) for part in parts]))
        self.out = _copy(weights["mixer.out.weight"].reshape(qkv.shape[-1], -1))
        self.up = _copy(weights["feed_forward.up.weight"].flatten(0, 1))
        self.down = _copy(weights["feed_forward.down.weight"])
        self.first, self.second = (_copy(weights[name]) for name in (_NAMES[0], _NAMES[3]))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        many, few = self.heads
        normed = F.rms_norm(x, x.shape[-1:], self.first, self.eps)
        heads = F.linear(normed, self.qkv).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        turned, value = heads.split((many + few, few), 1)
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        query, key = turned.split((many, few), 1)
        how = {"is_causal": True, "enable_gqa": many != few}
        mixed = F.scaled_dot_product_attention(query, key, value, **how)
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), self.out)
        normed = F.rms_norm(x, x.shape[-1:], self.second, self.eps)
        gate, up = F.linear(normed, self.up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)


def _copy(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().clone())
