"""Attention within whole sequences, which ranks may share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from mt_context_parallel import (
    Algorithm,
    AttentionMask,
    HierarchicalGroups,
    ReferenceKernel,
    context_parallel_attention,
    positions,
)
from mt_files import divisors
from mt_parallel_state import ParallelState, group_rank, outside_graph
from torch import Tensor

from mt_model.attend.context import AttendingLayer, ForwardContext, Recalled, Recurrence
from mt_model.attend.kernels import attention
from mt_model.attend.scores import Scores


class SequenceAttend:
    """Attention within sequences, which the ranks of a context group may share.

    Whole sequences use the kernels of `ATTENTION`; split ones are computed by tiles
    (`mt_context_parallel`), whose collectives run over the group. The constructor is collective
    over the group.

    Args:
        state: This rank's place.
        algorithm: Algorithm that reaches the keys of other ranks, or a list with one a layer.
        inner_size: Number of ranks that swap tokens for heads, for the hierarchical algorithm.
        layers: Number of layers of the whole model.
        kernel: Kernel of attention; split sequences take fused or plain tiles.
        shared: Ranks of a context group share sequences; False if each has whole ones of its own.

    Attributes:
        group: Ranks that share a sequence, or None.
        size: Number of these ranks.
        algorithms: Algorithm of each of the model's layers.
        kernel: Name of the kernel of attention, or `auto`.

    Raises:
        ValueError: An unknown algorithm, or an inner size that does not divide cp.
    """

    def __init__(
        self,
        state: ParallelState,
        algorithm: Algorithm | Sequence[Algorithm],
        inner_size: int | None,
        *,
        layers: int,
        kernel: str = "auto",
        shared: bool = True,
    ) -> None:
        each = (algorithm,) * layers if isinstance(algorithm, str) else tuple(algorithm)
        if len(each) != layers:
            raise ValueError(
                f"context_algorithm has {len(each)} algorithms, but the model has {layers} "
                "layers. Give one for each, or one for all"
            )
        for name in each:
            if name not in get_args(Algorithm):
                raise ValueError(
                    f"context_algorithm must be one of {get_args(Algorithm)}, got {name!r}"
                )
        self.group, self.size, self.algorithms = None, 1, each
        if shared:
            self.group, self.size = state.group("cp"), state.size("cp")
        self.kernel: str = kernel
        if self.group is not None and kernel not in ("auto", "tiles", "reference"):
            raise ValueError(
                f"kernels.attention: kernel {kernel!r} does not serve: it needs whole sequences, "
                f"and cp={self.size} ranks share them; use auto, tiles or reference, or cp=1"
            )
        self._levels: HierarchicalGroups | None = None
        if self.group is not None and "hierarchical" in each:
            if not inner_size or self.size % inner_size:
                raise ValueError(
                    f"context_inner_size={inner_size} does not divide cp={self.size}, which the "
                    f"hierarchical algorithm needs; use one of {divisors(self.size)}"
                )
            inner, outer = state.level_groups("cp", (inner_size, self.size // inner_size))
            self._levels = HierarchicalGroups(inner=inner, outer=outer)

    def algorithm_of(self, layer: int) -> Algorithm:
        """Return the algorithm of a layer; modules after the last layer use the last one."""
        return self.algorithms[min(layer, len(self.algorithms) - 1)]

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return positions of this rank's tokens in sequences of `length`: [length / size]."""
        return positions(length, ranks=self.size, rank=group_rank(self.group), device=device)

    @property
    def is_whole(self) -> bool:
        """Whether no other rank has a part of the sequences."""
        return self.group is None

    @property
    def is_cached(self) -> bool:
        """Never: nothing is kept."""
        return False

    def latents(
        self,
        layer: AttendingLayer,
        query: Tensor,
        latent: Tensor,
        turned: Tensor,
        shared: ForwardContext,
    ) -> Tensor:
        """Attend to latents; see `Attend`."""
        return self(layer, query, torch.cat((latent, turned), dim=-1), latent, shared)

    def recall(self, layer: int, query: Tensor) -> Sequence[Recalled]:
        """Return nothing: there are no pages."""
        del layer, query
        return ()

    def recur(
        self, layer: int, run: Recurrence, inputs: Sequence[Tensor], shared: ForwardContext
    ) -> Tensor:
        """Run a recurrent layer, which keeps nothing; see `Attend`."""
        del layer
        return run(*inputs, None, shared.documents)[0]

    def __call__(
        self,
        layer: AttendingLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        shared: ForwardContext,
    ) -> Tensor:
        """Attend; see `Attend`."""
        length = query.shape[1] * self.size
        scores = Scores(
            scale=query.shape[-1] ** -0.5 if layer.scale is None else layer.scale,
            causal=layer.causal,
            window=layer.window if layer.window is not None and layer.window < length else None,
            documents=shared.documents_of(layer.chunk, like=query, length=length),
            softcap=layer.softcap,
            bias=layer.bias_by_distance(shared, length),
            sinks=layer.sink_logits(query),
            dropout=layer.weight_dropout(shared),
        )
        if self.is_whole:
            return attention(query, key, value, scores, layer.attending[self.kernel])
        algorithm = layer.algorithm
        return outside_graph(context_parallel_attention)(
            query,
            key,
            value,
            group=self._levels if algorithm == "hierarchical" else self.group,
            algorithm=algorithm,
            mask=AttentionMask(
                causal=scores.causal, window=scores.window, documents=scores.documents
            ),
            sinks=scores.sinks,
            bias=scores.bias,
            dropout=scores.dropout,
            scale=scores.scale,
            softcap=scores.softcap,
            kernels=(ReferenceKernel(),) if self.kernel == "reference" else None,
        )
