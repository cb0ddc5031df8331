"""The normalisation of a model, as a frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mt_files import Checks


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """A norm over the last dim.

    Attributes:
        kind: `rms` (weight only) or `layer` (weight and bias).
        eps: Number added to the mean square or variance before the inverse root.
        zero_centered: The weight w multiplies as 1 + w and starts at 0 (Gemma, Qwen3-Next,
            Nemotron).
        rounds_first: The normalised value is rounded to its dtype before the weight multiplies
            (Llama, Mistral, Qwen, Phi-3), not after (Gemma, OLMo-2, GPT-OSS). The same in fp32.
        weight: Whether there is a weight; without one there is no bias either (OLMo).
        bias: Whether a `layer` norm has a bias (not in Cohere).
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-5
    zero_centered: bool = False
    rounds_first: bool = False
    weight: bool = True
    bias: bool = True

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.above(0, "eps")
        checks.done()
        if self.rounds_first and (self.kind == "layer" or not self.weight or self.zero_centered):
            checks.add(
                "rounds_first",
                "True, which says when the plain weight of an rms norm multiplies. Leave it out, "
                "or use kind='rms', weight=True and zero_centered=False.",
            )
        if self.zero_centered and not self.weight:
            checks.add("zero_centered", "True, but there is no weight. Leave one of them out.")
        checks.done()

    @property
    def has_bias(self) -> bool:
        """Whether it adds a bias."""
        return self.kind == "layer" and self.weight and self.bias

    def num_parameters(self, size: int) -> int:
        """Count the parameters of one norm over `size` elements."""
        return size * (self.weight + self.has_bias)
