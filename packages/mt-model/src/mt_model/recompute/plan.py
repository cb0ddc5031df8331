"""The plan of recomputation and offloading, by layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from mt_files import Checks, FieldError, shorten

from mt_model.kernels.words import Recompute

WORDS = ("layer", "norm", "activation", "attention")
"""What `modules` may name beside modules of a layer."""


@dataclass(frozen=True, kw_only=True)
class LayerChoice:
    """A choice of layers by at most one field; all layers without one.

    Attributes:
        layers: Layer indices in the whole model.
        first: Number of layers, from layer 0 on.
        every: Step k of the layers 0, k, 2 k and on.
    """

    layers: tuple[int, ...] | None = None
    first: int | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "first", "every")
        given = [name for name in ("layers", "first", "every") if getattr(self, name) is not None]
        if len(given) > 1:
            checks.add(given[1], f"does not go with {given[0]}; give one of them, or none for all")
        if "layers" not in checks.errors and self.layers is not None and not self.layers:
            checks.add("layers", "an empty list; name layers, or leave it out for all of them")
        if "layers" not in checks.errors and any(index < 0 for index in self.layers or ()):
            checks.add("layers", f"{shorten(list(self.layers or ()))}; use indices of 0 or more")
        self._check(checks)
        checks.done()

    def _check(self, checks: Checks) -> None:
        """Add the problems of the fields that a subclass adds."""

    @property
    def has_all(self) -> bool:
        """Whether it covers all layers, however many there are."""
        return self.layers is None and self.first is None and self.every in (None, 1)

    def has(self, index: int) -> bool:
        """Return whether the choice includes a layer."""
        if self.layers is not None:
            return index in self.layers
        if self.first is not None:
            return index < self.first
        return self.every is None or index % self.every == 0


@dataclass(frozen=True, kw_only=True)
class RecomputeRule(LayerChoice):
    """The modules that some layers recompute.

    Attributes:
        modules: `layer`, which keeps only its input; `norm` and `activation`, whose outputs are
            freed once the following product has read them; `attention`, everything between the
            projections; and names of modules in a layer, such as `mixer`, `feed_forward` or
            `mixer.q_*` with `*`, `?` and `[...]` as in file names, which keep their inputs.
    """

    modules: tuple[str, ...] = ("layer",)

    def _check(self, checks: Checks) -> None:
        if "modules" not in checks.errors and not all(self.modules or ("",)):
            found = shorten(list(self.modules)) if self.modules else "an empty list"
            text = f"{found}; give one or more of {', '.join(WORDS)}"
            checks.add("modules", f"{text}, or names of modules in a layer")


@dataclass(frozen=True, kw_only=True)
class OffloadConfig(LayerChoice):
    """Activations that wait for backward in the host's memory.

    Attributes:
        min_bytes: Smallest size in bytes of an offloaded tensor.
    """

    min_bytes: int = 1 << 20

    def _check(self, checks: Checks) -> None:
        checks.at_least(0, "min_bytes")


@dataclass(frozen=True, kw_only=True)
class RecomputePlan:
    """The recomputation of each layer in backward, and the offloading of its activations.

    A layer follows all rules that include it; `layer` makes the other rules moot.

    Attributes:
        rules: Rules of recomputation.
        offload: Activations that wait in the host's memory; None for none. It does not go with
            `norm` and `activation` in the same layer, whose outputs are freed instead.

    Example:
        >>> plan = RecomputePlan(rules=(RecomputeRule(first=2), RecomputeRule(modules=("norm",))))
        >>> [sorted(plan.modules(index)) for index in range(3)]
        [['layer'], ['layer'], ['norm']]
    """

    rules: tuple[RecomputeRule, ...] = ()
    offload: OffloadConfig | None = None

    def __post_init__(self) -> None:
        Checks(self).done()

    @classmethod
    def of(cls, value: Recompute | RecomputePlan) -> RecomputePlan:
        """Return the plan that a word stands for, or the plan itself.

        Raises:
            ValueError: The word is not known.
        """
        if isinstance(value, RecomputePlan):
            return value
        rules = {
            "none": (),
            "selective": (RecomputeRule(modules=("norm", "activation")),),
            "full": (RecomputeRule(),),
        }
        if not isinstance(value, str) or value not in rules:
            raise ValueError(
                f"recompute must be one of {get_args(Recompute)}, or a RecomputePlan, got {value!r}"
            )
        return cls(rules=rules[value])

    @property
    def is_empty(self) -> bool:
        """Whether nothing is recomputed or offloaded."""
        return not self.rules and self.offload is None

    @property
    def has_only_layers(self) -> bool:
        """Whether it only chooses layers that keep just their input."""
        return self.offload is None and all(r.modules == ("layer",) for r in self.rules)

    @property
    def of_all_layers(self) -> RecomputePlan:
        """The words of the rules for every layer, which hold for another model's layers too."""
        rules = tuple(r for r in self.rules if r.has_all and set(r.modules) <= set(WORDS))
        offload = self.offload if self.offload is not None and self.offload.has_all else None
        return RecomputePlan(rules=rules, offload=offload)

    def modules(self, index: int) -> frozenset[str]:
        """Return the modules that a layer recomputes."""
        found = {name for rule in self.rules if rule.has(index) for name in rule.modules}
        return frozenset({"layer"} if "layer" in found else found)

    def offloads(self, index: int) -> bool:
        """Return whether a layer's activations wait in the host's memory."""
        return self.offload is not None and self.offload.has(index)

    def check(self, num_layers: int) -> None:
        """Check that a model with this number of layers can follow the plan.

        Raises:
            FieldError: A layer is missing, or its rules conflict.
        """
        choices: Iterable[LayerChoice | None] = (*self.rules, self.offload)
        named = {index for choice in choices if choice for index in choice.layers or ()}
        if named and max(named) >= num_layers:
            text = f"{max(named)} is no layer; the model has layers 0 to {num_layers - 1}"
            raise FieldError({"layers": text}, "RecomputePlan")
        for index in filter(self.offloads, range(num_layers)):
            freed = sorted(self.modules(index) & {"norm", "activation"})
            if freed:
                text = (
                    f"layer {index} frees its {freed[0]} outputs and makes them again, so they "
                    "are not to be copied; offload other layers, or make other modules again"
                )
                raise FieldError({"offload": text}, "RecomputePlan")
