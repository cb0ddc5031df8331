"""What a mixture-of-experts layer has beside its sizes."""

from __future__ import annotations

from dataclasses import dataclass, field

from mt_files import check_type

from mt_moe.capacity import Capacity
from mt_moe.expert_options import ExpertOptions
from mt_moe.routing import RouterOptions


@dataclass(frozen=True, kw_only=True)
class MoEOptions:
    """What a mixture-of-experts layer has beside its sizes.

    Attributes:
        router: How tokens choose.
        experts: What experts compute, the shared one too.
        capacity: The most tokens of an expert in training; None drops none.
        shared_size: Width of an expert that serves every token; 0 is none.
        shared_gate: Whether a sigmoid of the token scales that one.
        scale_input: Whether a choice's weight multiplies what its expert is given, and not what it
            gives (Llama 4).
        latent_size: Size to which tokens are projected before the experts, and back after; None is
            their own. The router and the shared expert see the whole.
        dispatcher: "auto", "local", "all_to_all", "all_gather" or "deepep".
    """

    router: RouterOptions = field(default_factory=RouterOptions)
    experts: ExpertOptions = field(default_factory=ExpertOptions)
    capacity: Capacity | None = None
    shared_size: int = 0
    shared_gate: bool = False
    scale_input: bool = False
    latent_size: int | None = None
    dispatcher: str = "auto"

    def __post_init__(self) -> None:
        check_type("router", self.router, RouterOptions)
        check_type("experts", self.experts, ExpertOptions)
        if self.capacity is not None:
            check_type("capacity", self.capacity, Capacity)
        for name, least in (("shared_size", 0), ("latent_size", 1)):
            value = getattr(self, name)
            if value is not None:
                check_type(name, value, int)
                if value < least:
                    raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.shared_gate and not self.shared_size:
            raise ValueError("shared_gate=True is the gate of a shared expert; set shared_size")
