"""Attention over kept keys and values, after writing the keys and values of the new tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from mt_kernels import AUTO, Selector
from torch import Tensor

from mt_model.attend.context import AttendingLayer, ForwardContext, Recalled
from mt_model.attend.distance import spread
from mt_model.attend.kernels import attention
from mt_model.attend.scores import Scores
from mt_model.attend.slots import Group


class View(NamedTuple):
    """Queries of a pass, and the kept tokens that they may see.

    Attributes:
        group: The requests of the queries; None for all queries as they are.
        kept: Places or blocks that the cache reads for them; None for all.
        allowed: True where a query sees a key.
        queries: Places of the queries in their texts.
        keys: Places of the keys in their texts.
        sees_all: Whether the queries are a whole text, or each sees all keys, so that plain
            attention needs no mask.

    Shape:
        queries: [S] or [R, S]; keys: [K] or [R, K]; allowed broadcasts to [R, N, S, K].
    """

    group: Group | None
    kept: Tensor | slice | None
    allowed: Tensor
    queries: Tensor
    keys: Tensor
    sees_all: bool = False


class KeptAttend(ABC):
    """Causal attention over the kept tokens and the tokens of this pass."""

    @property
    def is_whole(self) -> bool:
        """Never: the keys are of other tokens too."""
        return False

    @property
    def is_cached(self) -> bool:
        """Always."""
        return True

    @property
    @abstractmethod
    def room(self) -> int:
        """Number of tokens that a text has room for."""

    @abstractmethod
    def views(self, window: int | None, chunk: int | None) -> Iterable[View]:
        """Return which kept tokens the queries see in a layer with a window or chunks."""

    def selector(self, layer: AttendingLayer) -> Selector[Any]:
        """Return the choice of a kernel."""
        return layer.attending[AUTO]

    def recall(self, layer: int, query: Tensor) -> Sequence[Recalled]:
        """Return nothing: there are no pages."""
        del layer, query
        return ()

    @abstractmethod
    def put(self, layer: int, new: Mapping[str, Tensor]) -> None:
        """Store a layer's tensors for the new tokens.

        Args:
            layer: Layer index in the whole model.
            new: Tensors by the names of the mixer's `token_cache`.

        Shape:
            new: [B, S, heads, D].
        """

    @abstractmethod
    def read(self, layer: int, name: str, dtype: torch.dtype, view: View) -> Tensor:
        """Return a layer's kept tensor for a view, [R, K, heads, D]."""

    def __call__(
        self,
        layer: AttendingLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        shared: ForwardContext,
    ) -> Tensor:
        """Attend; see `Attend`."""
        new = {"key": key, "value": value}
        return self._over(layer, query, new, lambda kept: (kept["key"], kept["value"]), shared)

    def latents(
        self,
        layer: AttendingLayer,
        query: Tensor,
        latent: Tensor,
        turned: Tensor,
        shared: ForwardContext,
    ) -> Tensor:
        """Attend to latents; see `Attend`."""

        def joined(kept: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            return torch.cat((kept["latent"], kept["turned"]), dim=-1), kept["latent"]

        return self._over(layer, query, {"latent": latent, "turned": turned}, joined, shared)

    def _over(
        self,
        layer: AttendingLayer,
        query: Tensor,
        new: Mapping[str, Tensor],
        join: Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]],
        shared: ForwardContext,
    ) -> Tensor:
        """Store the new tokens' tensors, and attend to the keys and values made of all kept."""
        index, found = layer.index, None
        self.put(index, new)
        by_distance = layer.bias_by_distance(shared, self.room)
        sinks, selector = layer.sink_logits(query), self.selector(layer)
        is_plain = selector.name == AUTO and by_distance is sinks is layer.softcap is None
        for view in self.views(layer.window, layer.chunk):
            bias = None if by_distance is None else spread(by_distance, view.queries, view.keys)
            scores = Scores(
                scale=query.shape[-1] ** -0.5 if layer.scale is None else layer.scale,
                allowed=None if is_plain and view.sees_all else view.allowed,
                softcap=layer.softcap,
                bias=bias,
                sinks=sinks,
            )
            kept = {name: self.read(index, name, x.dtype, view) for name, x in new.items()}
            own = query if view.group is None else view.group.take(query)
            out = attention(own, *join(kept), scores, selector)
            found = out if view.group is None else view.group.put(out, found)
        assert found is not None, "a pass has tokens"  # noqa: S101
        return found
