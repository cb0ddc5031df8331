"""The choice of experts and weights, as a pure function of the router's logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from mt_files import check_type
from mt_fusions import invariant_sigmoid, invariant_softplus
from torch import Tensor

from mt_moe.routing.expert_bias import BiasOptions
from mt_moe.routing.rules import Score, check_choice, check_number, scores_per_group

LOSSES = ("aux", "sequence_aux", "global_aux", "z")
_TINY = 1e-20  # DeepSeek-V3's guard of the sum


@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """The options of a router.

    Attributes:
        top_k: Number of experts per token.
        score: Function from logits to scores: `softmax` over all experts (Mixtral, Qwen),
            `softmax_of_chosen` over the k highest logits (GPT-OSS), `sigmoid` (DeepSeek-V3) or
            `sqrtsoftplus`, which is `sqrt(softplus(z))`.
        normalize: Divide the k weights by their sum.
        scale: Factor of the weights, after normalisation.
        dtype: Dtype of the scores, float32 or float64. Logits have it too, or the dtype of the
            hidden states if that is wider.
        num_groups: Number of groups into which neighbouring experts are divided.
        top_groups: Number of groups that a token may use, those with the highest group scores.
        group_top: Number of highest scores summed to a group's score; None is
            `top_k // top_groups`. DeepSeek-V3 has 2, DeepSeek-V2 1.
        sinkhorn: Number of iterations of a Sinkhorn normalisation that decides the choice in
            training; 0 is none. The weights still come from the scores.
        jitter: Largest relative change of the router's input in training.
        linear_bias: Give the logits a trained bias (GPT-OSS).
        expert_bias: Options of a bias that only affects the choice and has no gradient; None is no
            such bias.
        losses: Coefficients of balancing losses by name: `aux` over a micro-batch, `sequence_aux`
            over each sequence, `global_aux` over the step so far, and `z`.
        invariant: Whether a token's scores have the same bits beside any other tokens.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A field is out of range, or two fields exclude each other.
    """

    top_k: int = 2
    score: Score = "softmax"
    normalize: bool = True
    scale: float = 1.0
    dtype: torch.dtype = torch.float32
    num_groups: int = 1
    top_groups: int = 1
    group_top: int | None = None
    sinkhorn: int = 0
    jitter: float = 0.0
    linear_bias: bool = False
    expert_bias: BiasOptions | None = None
    losses: Mapping[str, float] = field(default_factory=dict[str, float])
    invariant: bool = False

    def __post_init__(self) -> None:
        for name in ("top_k", "num_groups", "top_groups", "sinkhorn"):
            check_type(name, getattr(self, name), int)
            value, least = getattr(self, name), int(name != "sinkhorn")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype must be torch.float32 or torch.float64, got {self.dtype}")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter must be from 0 to below 1, got {self.jitter}")
        if not math.isfinite(self.scale) or self.scale <= 0:
            raise ValueError(f"scale must be finite and above 0, got {self.scale}")
        check_choice(self, bias=None if self.expert_bias is None else self.expert_bias.kind)
        self._check_losses()

    def _check_losses(self) -> None:
        check_type("losses", self.losses, Mapping)
        for name, coefficient in self.losses.items():
            if name not in LOSSES:
                raise ValueError(f"losses has {name!r}; the known ones are {', '.join(LOSSES)}")
            if not math.isfinite(coefficient):
                raise ValueError(f"the coefficient of loss {name!r} is {coefficient}, not finite")


class Routing(NamedTuple):
    """The experts that tokens chose.

    Attributes:
        weights: Weight of each chosen expert, in the dtype of the scores.
        experts: Indices of the chosen experts.
        scores: Scores of all experts; for `softmax_of_chosen` the softmax over all.

    Shape:
        weights, experts: [T, k]; scores: [T, E].
    """

    weights: Tensor
    experts: Tensor
    scores: Tensor


def route(
    logits: Tensor,
    options: RouterOptions,
    *,
    bias: Tensor | None = None,
    experts: Tensor | None = None,
) -> Routing:
    """Choose experts and weights for each token.

    Ties are broken as `torch.topk` does. The bias affects the choice, but neither the weights nor
    their gradients. An expert outside the chosen groups is never taken.

    Args:
        logits: Logits of the router.
        options: See `RouterOptions`.
        bias: Added to the scores (for `softmax_of_chosen`, to the logits) for the choice.
        experts: Experts to use instead of choosing (replay); weights still come from `logits`.

    Shape:
        logits: [T, E]; bias: [E]; experts: [T, k].

    Raises:
        TypeError: The logits are not a floating [T, E] tensor.
        ValueError: The shapes don't fit the options.
    """
    check_type("logits", logits, Tensor)
    if not logits.is_floating_point() or logits.dim() != 2:
        raise TypeError(
            f"logits must be a floating [T, E] tensor, got {logits.dtype} {tuple(logits.shape)}"
        )
    check_number(options, logits.shape[1])
    scores = scores_of(logits, options)
    if experts is None:
        experts = _choose(logits.detach(), scores.detach(), options, bias)
    elif experts.shape != (logits.shape[0], options.top_k):
        raise ValueError(
            f"experts {tuple(experts.shape)} must be [{logits.shape[0]}, {options.top_k}]: they "
            "were recorded with other tokens"
        )
    if options.score == "softmax_of_chosen":
        weights = F.softmax(logits.gather(1, experts), -1, dtype=options.dtype)
    else:
        weights = scores.gather(1, experts)
        if options.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    if options.scale != 1:
        weights = weights * options.scale
    return Routing(weights, experts, scores)


def scores_of(logits: Tensor, options: RouterOptions) -> Tensor:
    """Return the score of every expert.

    Shape:
        logits: [T, E]. Returns [T, E].
    """
    wide = logits.to(options.dtype)
    match options.score:
        case "sigmoid":
            return invariant_sigmoid(wide) if options.invariant else wide.sigmoid()
        case "sqrtsoftplus":
            # The square root has an infinite gradient at 0, and softplus of a low logit is 0.
            softplus = invariant_softplus if options.invariant else F.softplus
            return softplus(wide).clamp(min=torch.finfo(wide.dtype).tiny).sqrt()
        case _:
            return wide.softmax(-1)


@torch.no_grad()
def _choose(logits: Tensor, scores: Tensor, options: RouterOptions, bias: Tensor | None) -> Tensor:
    key = logits.to(options.dtype) if options.score == "softmax_of_chosen" else scores
    if bias is not None:
        key = key + bias
    if options.num_groups > 1:
        key = _mask_low_groups(key, options)
    return key.topk(options.top_k, -1).indices


def _mask_low_groups(key: Tensor, options: RouterOptions) -> Tensor:
    """Set the scores of experts outside each token's best groups to minus infinity."""
    grouped = key.unflatten(1, (options.num_groups, -1))
    height = grouped.topk(scores_per_group(options), -1).values.sum(-1)
    best = height.topk(options.top_groups, -1).indices
    outside = torch.ones_like(height, dtype=torch.bool).scatter_(1, best, value=False)
    return grouped.masked_fill(outside.unsqueeze(2), -math.inf).flatten(1)
