"""Requests with random lengths and arrival times."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from mt_files import Checks

_WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Random requests from a seed.

    Lengths are drawn evenly on a logarithmic scale, so that short and long ones are mixed.

    Attributes:
        requests: Number of requests.
        rate: Mean number of requests a second, which arrive as in a Poisson process; 0 for all at
            once.
        shortest_prompt: Smallest number of words of a prompt.
        longest_prompt: Largest number of words of a prompt.
        shortest_answer: Smallest limit of an answer's tokens.
        longest_answer: Largest limit of an answer's tokens.
        seed: The same seed draws the same requests.
    """

    requests: int = 100
    rate: float = 0.0
    shortest_prompt: int = 16
    longest_prompt: int = 256
    shortest_answer: int = 16
    longest_answer: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "requests", "shortest_prompt", "shortest_answer")
        checks.at_least(0, "rate")
        for kind in ("prompt", "answer"):
            checks.at_least(getattr(self, f"shortest_{kind}"), f"longest_{kind}")
        checks.done()

    def draw(self) -> list[Planned]:
        """Return the requests in the order of their arrival."""
        rng = random.Random(self.seed)  # noqa: S311 - no secret
        planned, at = [], 0.0
        for number in range(self.requests):
            length = _drawn(rng, self.shortest_prompt, self.longest_prompt)
            limit = _drawn(rng, self.shortest_answer, self.longest_answer)
            prompt = f"{number} " + " ".join(rng.choices(_WORDS, k=length - 1))
            planned.append(Planned(at=at, prompt=prompt.strip(), max_tokens=limit))
            at += rng.expovariate(self.rate) if self.rate else 0.0
        return planned


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A request.

    Attributes:
        at: Arrival time in seconds from the beginning.
        prompt: The prompt; no other prompt has the same beginning.
        max_tokens: Largest number of tokens of the answer.
    """

    at: float
    prompt: str
    max_tokens: int


def _drawn(rng: random.Random, low: int, high: int) -> int:
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))
