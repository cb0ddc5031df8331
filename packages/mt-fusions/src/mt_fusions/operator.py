"""Operators registered with torch: one node in a trace, and one for the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def operator(
    name: str,
    schema: str,
    run: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    setup: Callable[..., None] | None = None,
    gradient: Callable[..., Any] | None = None,
    namespace: str = "mt_fusions",
) -> Callable[..., Any]:
    """Register an operator of torch for all devices, and return it.

    The same as `torch.library.custom_op`, whose first call imports `torch._dynamo`, which takes
    seconds in every process.

    Args:
        name: Name in its namespace.
        schema: Arguments and results.
        run: Computes the results, which share no memory with the arguments.
        fake: Returns results of the right shape, dtype and strides without computing them.
        setup: Saves tensors for the gradient, as in `torch.library.register_autograd`.
        gradient: Computes the gradients of the arguments. None means that the operator is not
            differentiable, and differentiating it raises RuntimeError.
        namespace: Namespace in `torch.ops`, the package's name.
    """
    path = f"{namespace}::{name}"
    run = run if gradient is not None else _without_gradient(path, run)
    torch.library.define(path, schema)
    torch.library.impl(path, "default", run)
    torch.library.register_fake(path, fake)
    if gradient is not None:
        torch.library.register_autograd(path, gradient, setup_context=setup)
    return getattr(getattr(torch.ops, namespace), name).default


def _without_gradient(path: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse to be differentiated, which torch would do through what `run` calls, or leave out."""

    def checked(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            raise RuntimeError(
                f"{path} has no gradient, so what it is the gradient of is differentiated once "
                "only; leave out create_graph=True, or compute in plain torch"
            )
        return run(*args)

    return checked
