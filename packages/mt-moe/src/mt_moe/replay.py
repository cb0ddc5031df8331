"""Choices of experts that are recorded once and taken again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from mt_files import check_type
from torch import Tensor, nn

from mt_moe.error import RoutingError
from mt_moe.record import RoutingRecord
from mt_moe.router import Router


@contextmanager
def recorded_routes(module: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Record what the routers inside `module` choose.

    Yields:
        By name of the router, the experts of each forward, [T, k].
    """
    check_type("module", module, nn.Module)
    routers = {name: r for name, r in module.named_modules() if isinstance(r, Router)}
    for router in routers.values():
        router.record = RoutingRecord()
    try:
        yield {name: r.record.choices for name, r in routers.items() if r.record is not None}
    finally:
        for router in routers.values():
            router.record = None


@contextmanager
def replayed_routes(module: nn.Module, routes: Mapping[str, Sequence[Tensor]]) -> Iterator[None]:
    """Have the routers inside `module` take recorded choices; weights are still their own.

    Args:
        module: The model.
        routes: Of `recorded_routes`, of the same tokens in the same order.

    Raises:
        RoutingError: A router has no record, or a record no router.
    """
    check_type("module", module, nn.Module)
    routers = {name: r for name, r in module.named_modules() if isinstance(r, Router)}
    if set(routers) != set(routes):
        raise RoutingError(
            f"routes has {sorted(routes)}, but the model's routers are {sorted(routers)}; record "
            "them with the same model"
        )
    for name, router in routers.items():
        router.record = RoutingRecord(routes[name])
    try:
        yield
    finally:
        for router in routers.values():
            router.record = None
