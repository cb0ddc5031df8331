"""Routing replay: record the experts that routers choose, and use the same ones again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from mt_files import check_type
from torch import Tensor, nn

from mt_moe.error import RoutingError
from mt_moe.routing.record import RoutingRecord
from mt_moe.routing.router import Router


@contextmanager
def recorded_routes(module: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Record the choices of all routers inside `module`.

    Yields:
        The chosen experts of each forward, [T, k], by the router's name.
    """
    records = {name: RoutingRecord() for name in _routers(module)}
    with _recording(module, records):
        yield {name: record.choices for name, record in records.items()}


@contextmanager
def replayed_routes(module: nn.Module, routes: Mapping[str, Sequence[Tensor]]) -> Iterator[None]:
    """Let the routers inside `module` use recorded choices; the weights are still their own.

    Args:
        module: The model.
        routes: Choices of `recorded_routes`, for the same tokens in the same order.

    Raises:
        RoutingError: The names of routers and records differ.
    """
    routers = _routers(module)
    if set(routers) != set(routes):
        raise RoutingError(
            f"routes has {sorted(routes)}, but the model's routers are {sorted(routers)}; record "
            "them with the same model"
        )
    with _recording(module, {name: RoutingRecord(routes[name]) for name in routers}):
        yield


@contextmanager
def _recording(module: nn.Module, records: Mapping[str, RoutingRecord]) -> Iterator[None]:
    routers = _routers(module)
    for name, router in routers.items():
        router.record = records[name]
    try:
        yield
    finally:
        for router in routers.values():
            router.record = None


def _routers(module: nn.Module) -> dict[str, Router]:
    check_type("module", module, nn.Module)
    return {name: each for name, each in module.named_modules() if isinstance(each, Router)}
