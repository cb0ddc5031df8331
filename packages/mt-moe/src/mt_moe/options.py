"""The options of a mixture-of-experts layer."""

from __future__ import annotations

from dataclasses import dataclass, field

from mt_files import check_type

from mt_moe.experts.options import ExpertOptions
from mt_moe.routing.capacity import Capacity
from mt_moe.routing.choice import RouterOptions


@dataclass(frozen=True, kw_only=True)
class MoEOptions:
    """The options of a mixture-of-experts layer; its sizes are arguments.

    Attributes:
        router: Options of the router.
        experts: Options of the experts, including the shared one.
        capacity: Limit of each expert's tokens in training; None drops none.
        shared_size: Width of a shared expert that serves every token; 0 is none.
        shared_gate: Scale the shared expert by a sigmoid of the token.
        scale_input: Multiply an expert's input by the weight of the choice, not its output
            (Llama 4).
        latent_size: Size to which tokens are projected for the experts; None does not project. The
            router and the shared expert see the whole token.
        dispatcher: "auto", "local", "all_to_all", "all_gather", "deepep" or the name of another
            package's (entry point `mt.kernels`, `dispatcher.<name>`).
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
