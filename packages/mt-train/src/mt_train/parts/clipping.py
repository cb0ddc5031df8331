"""QK-clip: from the scores that the stages saw to the factors of their weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
from mt_optim import DistributedOptimizer
from torch import Tensor

from mt_train.agreement import WORLD
from mt_train.config.misfits import clipped_heads
from mt_train.config.run_config import RunConfig
from mt_train.parts.part import Setup, TrainerPart


class LogitClip(TrainerPart):
    """The largest score of each head in a step over all ranks, and the factors that reduce it."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        clip = setup.config.optimizer.qk_clip
        assert clip is not None, "is_wanted looked"  # noqa: S101
        self._clip, self._stages, self._state = clip, setup.stages, setup.state
        self._kv_heads = clipped_heads(setup.model)

    @staticmethod
    def is_wanted(config: RunConfig) -> bool:
        """Return whether scores are to be clipped."""
        return config.optimizer.qk_clip is not None

    def optimizer_ready(self, optimizer: DistributedOptimizer) -> None:
        """Watch the scores, and have the optimizer scale weights by them."""
        for stage in self._stages:
            stage.watch_logits()
        optimizer.inner.rescale = self.factors

    def begin_step(self, step: int) -> None:
        """Forget the scores of a step that was not taken."""
        del step
        for stage in self._stages:
            stage.max_logits()

    def factors(self) -> dict[str, Tensor]:
        """Return the factors of this rank's parameters by name; every rank calls it.

        One all-reduce over all ranks: ranks that share a sequence, have other batches or a stage in
        the other direction saw other scores of the same heads.
        """
        found = [stage.max_logits() for stage in self._stages]
        wide = torch.float32
        for logits in (logits for own in found for logits in own.values()):
            wide = torch.promote_types(wide, logits.dtype)
        size = len(self._kv_heads), max(self._kv_heads)
        table = torch.full(size, -torch.inf, dtype=wide, device=self._state.device)
        for own in found:
            for layer, logits in own.items():
                row = table[layer, : len(logits)]
                torch.maximum(row, logits, out=row)
        group = self._state.group(WORLD)
        if group is not None:
            dist.all_reduce(table, op=dist.ReduceOp.MAX, group=group)
        query, key = self._clip.scales(table)
        rows = [slice(heads) for heads in self._kv_heads]
        queries = {i: query[i, own] for i, own in enumerate(rows)}
        keys = {i: key[i, own] for i, own in enumerate(rows)}
        return {
            name: factor
            for stage in self._stages
            for name, factor in stage.logit_factors(queries, keys).items()
        }
