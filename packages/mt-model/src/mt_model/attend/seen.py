"""Which keys a query sees by their places."""

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
    """True where a query sees a key.

    Args:
        queries: Places of the queries.
        keys: Places of the keys.
        window: Keys less than so many places away are seen; None for all.
        chunk: Keys of the same so many places are seen; None for all.
        causal: None after the query's own place is.

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
