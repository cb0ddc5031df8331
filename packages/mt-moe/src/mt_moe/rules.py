"""What options of routers and experts exclude each other; read without torch."""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias, get_args

Score: TypeAlias = Literal["softmax", "softmax_of_chosen", "sigmoid", "sqrtsoftplus"]
Gate: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "gelu_quick"]
Activation: TypeAlias = Literal[Gate, "relu", "relu2"]


class Choice(Protocol):
    """How tokens choose, with the fields of `RouterOptions` that are meant here."""

    @property
    def top_k(self) -> int:
        """Experts per token."""
        ...

    @property
    def score(self) -> Score:
        """What becomes of the logits."""
        ...

    @property
    def normalize(self) -> bool:
        """Whether weights are divided by their sum."""
        ...

    @property
    def num_groups(self) -> int:
        """Groups of experts."""
        ...

    @property
    def top_groups(self) -> int:
        """Groups that a token may use."""
        ...

    @property
    def group_top(self) -> int | None:
        """Scores that decide how high a group is."""
        ...

    @property
    def sinkhorn(self) -> int:
        """Iterations of a Sinkhorn normalisation."""
        ...


def scores_per_group(choice: Choice) -> int:
    """How many scores decide how high a group of experts is."""
    return choice.top_k // choice.top_groups if choice.group_top is None else choice.group_top


def check_choice(choice: Choice, *, bias: str | None) -> None:
    """Check fields against each other.

    Args:
        choice: How tokens choose.
        bias: What kind of bias decides with the scores; None is none.

    Raises:
        ValueError: Two exclude each other.
    """
    if choice.score not in get_args(Score):
        raise ValueError(f"score must be one of {get_args(Score)}, got {choice.score!r}")
    constant = choice.normalize or choice.score == "softmax_of_chosen"
    if choice.top_k == 1 and constant:
        raise ValueError(
            f"top_k=1 with score={choice.score!r} and normalize={choice.normalize} gives each "
            "token the weight 1, and the router no gradient; use normalize=False with softmax, "
            "sigmoid or sqrtsoftplus"
        )
    if choice.score == "softmax_of_chosen" and bias == "quantile":
        raise ValueError(
            "score='softmax_of_chosen' chooses by logits, and a bias of kind 'quantile' follows "
            "scores; use kind 'sign', or another score"
        )
    if choice.sinkhorn and (choice.num_groups > 1 or bias is not None):
        raise ValueError(
            f"sinkhorn={choice.sinkhorn} decides the choice alone; use it without num_groups and "
            "without a bias of the choice"
        )
    if choice.top_groups > choice.num_groups:
        raise ValueError(
            f"top_groups={choice.top_groups} of num_groups={choice.num_groups}: choose at most all"
        )
    if choice.num_groups > 1 and scores_per_group(choice) < 1:
        raise ValueError(
            f"group_top={choice.group_top} with top_k={choice.top_k} and top_groups="
            f"{choice.top_groups}: a group is judged by at least 1 of its scores; set group_top"
        )


def check_number(choice: Choice, num_experts: int) -> None:
    """Check that so many experts can serve a choice.

    Raises:
        ValueError: They can't.
    """
    if choice.top_k > num_experts:
        raise ValueError(
            f"top_k={choice.top_k} is more than the {num_experts} experts; use at most these"
        )
    size, rest = divmod(num_experts, choice.num_groups)
    if rest:
        raise ValueError(
            f"num_groups={choice.num_groups} does not divide the {num_experts} experts"
        )
    judges = scores_per_group(choice)
    if choice.num_groups > 1 and (choice.top_groups * size < choice.top_k or judges > size):
        raise ValueError(
            f"top_groups={choice.top_groups} of {size} experts each, judged by {judges} scores, "
            f"can't give each token top_k={choice.top_k}; raise top_groups or lower group_top"
        )


def check_form(activation: str, *, gated: bool, clamp: float | None, up_offset: float) -> None:
    """Check what an expert computes.

    Raises:
        ValueError: There is no such activation, or a gate's fields are given without one.
    """
    known = get_args(Gate if gated else Activation)
    if activation not in known:
        raise ValueError(
            f"activation must be one of {', '.join(known)} with gated={gated}, got {activation!r}"
        )
    if not gated and (clamp is not None or up_offset):
        raise ValueError("clamp and up_offset are those of a gate; use gated=True")
