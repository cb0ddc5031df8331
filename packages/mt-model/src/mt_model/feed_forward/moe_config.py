"""A mixture of experts, as a frozen value."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from mt_files import Checks, FieldError
from mt_moe import check_choice, check_form, check_number, training_obstacle

from mt_model.block.entry import FeedForwardConfig
from mt_model.block.sizes import MAX_CLAMP, MAX_WIDTH
from mt_model.kernels.words import Activation

if TYPE_CHECKING:
    from torch import nn

    from mt_model.block.shard_context import ShardContext
    from mt_model.block.stream import StreamConfig

MAX_EXPERTS = 1 << 16
BIAS_RATE = 0.001  # of DeepSeek-V3
_LOSSES = ("aux_loss", "sequence_aux_loss", "global_aux_loss", "router_z_loss")
_OF_NAMES = string.ascii_lowercase + "_"


@dataclass(frozen=True, kw_only=True)
class MoEConfig(FeedForwardConfig):
    """A router that sends each token to some of many feed-forwards (Fedus et al., 2022).

    Attributes:
        num_experts: Number of experts.
        top_k: Number of experts that serve a token.
        ffn_size: Width of each expert; `gpt` fills it in where None.
        activation: Activation of the experts, as in an MLP.
        gated: Experts multiply the activation by a second projection.
        bias: Biases of both projections of the experts.
        clamp: Gated only: bound of the gate and of the other factor (GPT-OSS: 7).
        up_offset: Gated only: number added to the factor of the activation (GPT-OSS: 1).
        score: Function of the router's logits: `softmax` of all (Mixtral, Qwen),
            `softmax_of_chosen` (GPT-OSS), `sigmoid` (DeepSeek-V3) or `sqrtsoftplus`.
        normalize: Divide the weights of the chosen experts by their sum.
        scale: Factor of the weights, after the division.
        score_dtype: Dtype of logits and scores; a wider model uses its own.
        num_groups: Number of groups of neighbouring experts.
        top_groups: Largest number of groups that a token uses, the highest ones.
        group_top: Number of highest scores whose sum ranks a group; `top_k // top_groups` where
            None.
        sinkhorn: Iterations of a Sinkhorn normalisation that decides the choice in training.
        jitter: Largest relative change of the router's input in training.
        router_bias: Trained bias of the logits (GPT-OSS).
        bias_rate: Rate of a bias that decides only the choice and is updated after each step; 0
            for no bias.
        bias_kind: `sign`: the bias rises for experts with less than the mean load and falls for
            others (DeepSeek-V3, with a rate of 0.001); `quantile`: it moves to where each expert
            has its fair share.
        aux_loss: Weight of the loss `aux`, which keeps the load even over a micro-batch.
        sequence_aux_loss: Weight of `sequence_aux`, over each sequence.
        global_aux_loss: Weight of `global_aux`, over the micro-batches of a step so far.
        router_z_loss: Weight of `router_z`, the squared log-sum-exp of the router's logits.
        capacity_factor: Largest load of an expert in training, in fair shares of a micro-batch's
            tokens; None drops none.
        drop: Order in which a full expert drops tokens: least `probability`, or last `position`.
        shared_size: Width of a further expert that serves every token; 0 for none.
        shared_gate: A sigmoid of the token scales the shared expert (Qwen2-MoE).
        scale_input: The weight of a choice multiplies its expert's input, not the output (Llama 4).
        latent_size: Width that tokens are projected to before the experts, and back from after.
        dispatcher: Exchange of tokens between ranks of experts: `auto`, `all_to_all`,
            `all_gather`, `deepep` (the package DeepEP, in bf16 on NVIDIA Hopper), or `local` on
            one rank.
    """

    num_experts: int
    ffn_size: int | None = None
    top_k: int = 2
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    clamp: float | None = None
    up_offset: float = 0.0
    score: Literal["softmax", "softmax_of_chosen", "sigmoid", "sqrtsoftplus"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    score_dtype: Literal["fp32", "fp64"] = "fp32"
    num_groups: int = 1
    top_groups: int = 1
    group_top: int | None = None
    sinkhorn: int = 0
    jitter: float = 0.0
    router_bias: bool = False
    bias_rate: float = 0.0
    bias_kind: Literal["sign", "quantile"] = "sign"
    aux_loss: float = 0.0
    sequence_aux_loss: float = 0.0
    global_aux_loss: float = 0.0
    router_z_loss: float = 0.0
    capacity_factor: float | None = None
    drop: Literal["probability", "position"] = "probability"
    shared_size: int = 0
    shared_gate: bool = False
    scale_input: bool = False
    latent_size: int | None = None
    dispatcher: Literal["auto", "local", "all_to_all", "all_gather", "deepep"] = "auto"

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "num_experts", "ffn_size", "top_k", "num_groups", "top_groups")
        checks.at_least(1, "group_top", "latent_size")
        checks.at_least(0, "shared_size", "bias_rate", "sinkhorn", "aux_loss", "sequence_aux_loss")
        checks.at_least(0, "global_aux_loss", "router_z_loss")
        checks.at_most(MAX_EXPERTS, "num_experts")
        checks.at_most(MAX_WIDTH, "ffn_size", "shared_size", "latent_size")
        checks.at_most(1, "bias_rate")
        checks.above(0, "clamp", "scale", "capacity_factor")
        checks.at_most(MAX_CLAMP, "clamp")
        checks.at_most(MAX_EXPERTS, "capacity_factor")  # beyond, nothing is ever dropped
        checks.fraction("jitter")
        checks.done()
        for check in (self._check_choice, self._check_form):
            try:
                check()
            except ValueError as error:
                text = str(error)
                checks.add(text[: len(text) - len(text.lstrip(_OF_NAMES))], text)
        if self.shared_gate and not self.shared_size:
            checks.add("shared_gate", "True, and shared_size is 0; set it, or leave the gate out")
        checks.done()

    def _check_choice(self) -> None:
        check_choice(self, bias=self.bias_kind if self.bias_rate else None)
        check_number(self, self.num_experts)

    def _check_form(self) -> None:
        check_form(self.activation, gated=self.gated, clamp=self.clamp, up_offset=self.up_offset)

    @property
    def training_obstacle(self) -> str | None:
        """Why the router can't be trained; None if it can."""
        return training_obstacle(self)

    @property
    def width(self) -> int:
        """Width of each expert, which is known in a model.

        Raises:
            FieldError: It is not.
        """
        if self.ffn_size is None:
            raise FieldError({"ffn_size": "missing; give the width of each expert"}, "MoEConfig")
        return self.ffn_size

    def build(self, stream: StreamConfig, *, layer: int, shard: ShardContext) -> nn.Module:
        """Build a `MoE`."""
        from mt_model.feed_forward.moe import MoE

        return MoE(self, stream, layer=layer, shard=shard)

    @property
    def loss_weights(self) -> Mapping[str, float]:
        """Weights of the losses that keep the load even and the logits small."""
        weights = {
            "aux": self.aux_loss,
            "sequence_aux": self.sequence_aux_loss,
            "global_aux": self.global_aux_loss,
            "router_z": self.router_z_loss,
        }
        return {name: weight for name, weight in weights.items() if weight}

    @property
    def evaluated(self) -> MoEConfig:
        """The same without what only training has."""
        return replace(
            self,
            **dict.fromkeys((*_LOSSES, "jitter", "sinkhorn"), 0),
            bias_rate=BIAS_RATE if self.bias_rate else 0.0,
            bias_kind="sign",
            capacity_factor=None,
            drop="probability",
            dispatcher="auto",
        )

    @property
    def drops(self) -> bool:
        """Whether it needs to tell tokens apart: for noise, or for which come first."""
        return self.jitter > 0 or self.capacity_factor is not None

    def num_parameters(self, hidden_size: int) -> int:
        """Count router, all experts, the shared one and projections."""
        inner = hidden_size if self.latent_size is None else self.latent_size
        total = self.num_experts * (hidden_size + self.router_bias)
        total += self.num_experts * self._parameters(inner, self.width)
        if self.shared_size:
            total += (
                self._parameters(hidden_size, self.shared_size) + hidden_size * self.shared_gate
            )
        return total if self.latent_size is None else total + 2 * hidden_size * inner

    @property
    def num_buffers(self) -> int:
        """The bias that balances experts."""
        return self.num_experts if self.bias_rate else 0

    def flops_per_token(self, hidden_size: int, sequence_length: int) -> int:
        """Count the router, the experts that serve a token, and what serves every token."""
        del sequence_length
        inner = hidden_size if self.latent_size is None else self.latent_size
        products = 3 if self.gated else 2
        weights = hidden_size * self.num_experts + products * inner * self.width * self.top_k
        weights += products * hidden_size * self.shared_size + hidden_size * self.shared_gate
        weights += 0 if self.latent_size is None else 2 * hidden_size * inner
        return 6 * weights

    def split_sizes(self, tp: int) -> Iterator[tuple[str, int]]:
        """Give the width of the shared expert; experts are shared by ranks of their own."""
        del tp
        if self.shared_size:
            yield "shared_size", self.shared_size

    def expert_sizes(self) -> Iterator[tuple[str, int, str]]:
        """Give the number of experts and their width."""
        yield "num_experts", self.num_experts, "ep"
        yield "ffn_size", self.width, "etp"

    def _parameters(self, width: int, ffn_size: int) -> int:
        up = ffn_size * (2 if self.gated else 1)
        return up * (width + self.bias) + width * (ffn_size + self.bias)
