"""Which options of a router exclude each other, checked without importing torch."""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias, get_args

Score: TypeAlias = Literal["softmax", "softmax_of_chosen", "sigmoid", "sqrtsoftplus"]


class Choice(Protocol):
    """A router's options, as far as they are checked here."""

    @property
    def top_k(self) -> int:
        """Number of experts per token."""
        ...

    @property
    def score(self) -> Score:
        """Function from logits to scores."""
        ...

    @property
    def normalize(self) -> bool:
        """Whether weights are divided by their sum."""
        ...

    @property
    def num_groups(self) -> int:
        """Number of groups of experts."""
        ...

    @property
    def top_groups(self) -> int:
        """Number of groups that a token may use."""
        ...

    @property
    def group_top(self) -> int | None:
        """Number of scores summed to a group's score."""
        ...

    @property
    def sinkhorn(self) -> int:
        """Number of Sinkhorn iterations."""
        ...


def scores_per_group(choice: Choice) -> int:
    """Return the number of scores summed to a group's score."""
    return choice.top_k // choice.top_groups if choice.group_top is None else choice.group_top


def training_obstacle(choice: Choice) -> str | None:
    """Return why a router with these options can't be trained; None if it can."""
    constant = choice.normalize or choice.score == "softmax_of_chosen"
    if choice.top_k > 1 or not constant:
        return None
    return (
        f"top_k=1 with score={choice.score!r} and normalize={choice.normalize} gives each token "
        "the weight 1, and the router no gradient; use normalize=False with softmax, sigmoid or "
        "sqrtsoftplus"
    )


def check_choice(choice: Choice, *, bias: str | None) -> None:
    """Check the fields of a router's options against each other.

    Args:
        choice: The options.
        bias: Kind of the expert bias; None is no bias.

    Raises:
        ValueError: Two fields exclude each other.
    """
    if choice.score not in get_args(Score):
        raise ValueError(f"score must be one of {get_args(Score)}, got {choice.score!r}")
    if choice.score == "softmax_of_chosen" and bias == "quantile":
        raise ValueError(
            "score='softmax_of_chosen' chooses by logits, and a bias of kind 'quantile' follows "
            "scores; use kind 'sign', or another score"
        )
    if choice.sinkhorn and (choice.num_groups > 1 or bias is not None):
        raise ValueError(
            f"sinkhorn={choice.sinkhorn} decides the choice alone; use it without num_groups and "
            "without an expert bias"
        )
    if choice.top_groups > choice.num_groups:
        raise ValueError(
            f"top_groups={choice.top_groups} is more than num_groups={choice.num_groups}"
        )
    if choice.num_groups > 1 and scores_per_group(choice) < 1:
        raise ValueError(
            f"group_top={choice.group_top} with top_k={choice.top_k} and top_groups="
            f"{choice.top_groups}: a group's score needs at least 1 expert; set group_top"
        )


def check_number(choice: Choice, num_experts: int) -> None:
    """Check a router's options against the number of experts.

    Raises:
        ValueError: They don't fit.
    """
    if choice.top_k > num_experts:
        raise ValueError(f"top_k={choice.top_k} is more than the {num_experts} experts")
    size, rest = divmod(num_experts, choice.num_groups)
    if rest:
        raise ValueError(
            f"num_groups={choice.num_groups} does not divide the {num_experts} experts"
        )
    summed = scores_per_group(choice)
    if choice.num_groups > 1 and (choice.top_groups * size < choice.top_k or summed > size):
        raise ValueError(
            f"top_groups={choice.top_groups} of {size} experts each, group scores of {summed}, "
            f"can't give each token top_k={choice.top_k}; raise top_groups or lower group_top"
        )
