"""Weight gradients that autograd adds later."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from mt_parallel_state import WgradStore
from torch import Tensor


def defer(store: WgradStore, weight: Tensor, compute: Callable[[], Tensor]) -> None:
    """Defer the gradient of `weight`, a parameter or a view of one.

    Autograd adds it later, so hooks on the parameter fire as usual.

    Raises:
        ValueError: `weight` is a result of other tensors, whose backward cannot wait.
    """
    source = weight if weight._base is None else weight._base
    if not source.is_leaf:
        made_by = "" if source.grad_fn is None else f" by {source.grad_fn.name()}"
        raise ValueError(
            f"the gradient of a weight of shape {tuple(weight.shape)} cannot wait in a store: it "
            f"was computed{made_by}, and backward goes through that only once; give the layer a "
            "parameter or a view of one, or no wgrad_store"
        )
    store.put(partial(_accumulate, weight, compute))


def _accumulate(weight: Tensor, compute: Callable[[], Tensor]) -> None:
    with torch.no_grad():
        grad = compute()
    weight.backward(grad.to(weight.dtype))  # which differs under autocast
