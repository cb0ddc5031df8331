"""QK-clip: from the scores that the stages saw to the factors of their weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from mt_model import GPT
from mt_optim import qk_clip_scales
from mt_parallel_state import ParallelState
from torch import Tensor

from mt_train.agreement import WORLD
from mt_train.config.optimizer_section import QKClipEntry


class LogitClip:
    """Finds each head's largest score of a step over all ranks, and what scales it back.

    Args:
        section: Threshold and share.
        stages: What this rank holds of the model.
        state: Its place.
        kv_heads: Key heads of each layer of the whole model that are to be clipped.
    """

    def __init__(
        self,
        section: QKClipEntry,
        stages: Sequence[GPT],
        state: ParallelState,
        kv_heads: Sequence[int],
    ) -> None:
        self._section, self._stages, self._state = section, stages, state
        self._kv_heads = list(kv_heads)
        for stage in stages:
            stage.watch_logits()

    def start(self) -> None:
        """Forget the scores of a step that was not taken."""
        for stage in self._stages:
            stage.max_logits()

    def factors(self) -> dict[str, Tensor]:
        """Return by name what this rank's parameters are multiplied with; every rank calls it.

        One all-reduce over all ranks: those that share a sequence, other batches or a stage in the
        other direction saw other scores of the same heads.
        """
        found = [stage.max_logits() for stage in self._stages]
        wide = torch.float32
        for logits in (logits for own in found for logits in own.values()):
            wide = torch.promote_types(wide, logits.dtype)
        table = torch.full(
            (len(self._kv_heads), max(self._kv_heads)),
            -torch.inf,
            dtype=wide,
            device=self._state.device,
        )
        for own in found:
            for layer, logits in own.items():
                row = table[layer, : len(logits)]
                torch.maximum(row, logits, out=row)
        group = self._state.group(WORLD)
        if group is not None:
            dist.all_reduce(table, op=dist.ReduceOp.MAX, group=group)
        section = self._section
        query, key = qk_clip_scales(table, threshold=section.threshold, alpha=section.alpha)
        rows = [slice(heads) for heads in self._kv_heads]
        queries = {i: query[i, own] for i, own in enumerate(rows)}
        keys = {i: key[i, own] for i, own in enumerate(rows)}
        return {
            name: factor
            for stage in self._stages
            for name, factor in stage.logit_factors(queries, keys).items()
        }
