"""The mask of keys that a query sees, by their places."""

from __future__ import annotations

from torch import Tensor


def seen(
    queries: Tensor,
    keys: Tensor,
    window: int | None,
    *,
    chunk: int | None = None,
    causal: bool = True,
) -> Tensor:
    """Return a mask, True where a query sees a key.

    Args:
        queries: Places of the queries.
        keys: Places of the keys.
        window: A query sees keys less than `window` places away; None for all.
        chunk: A query sees keys of its own chunk of this many places; None for all.
        causal: A query sees no key after its own place.

    Shape:
        queries: [..., S]; keys: [..., T]. Returns [..., S, T].
    """
    distance = queries[..., :, None] - keys[..., None, :]
    if not causal:
        distance = distance.abs()
    allowed = distance >= 0
    if chunk is not None:
        first, second = (x.div(chunk, rounding_mode="floor") for x in (queries, keys))
        allowed = allowed & (first[..., :, None] == second[..., None, :])
    return allowed if window is None else allowed & (distance < window)
