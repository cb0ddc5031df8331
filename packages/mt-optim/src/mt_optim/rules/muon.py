"""Muon: orthogonalised momentum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch.distributed as dist
from mt_data_parallel import ParamShard
from mt_files import check_type
from mt_parallel_state import MatrixSpec, ParallelState
from torch import Tensor

from mt_optim.checks import check_bool, check_fraction, check_size
from mt_optim.parameters.matrix import TPSplit, check_whole, matrix_spec
from mt_optim.rules.orthogonal import Orthogonalization
from mt_optim.rules.rule import Batch, Rule


class MuonRule(Rule):
    """Jordan et al., kellerjordan.github.io/posts/muon, as torch.optim.Muon has it.

    The matrices of a fused weight (query, key and value; gate and up) are orthogonalised
    separately, as the parameter's `MatrixSpec` says.

    Args:
        momentum: Default decay rate of the mean of gradients.
        nesterov: Whether to use Nesterov momentum by default.
        orthogonalization: The iterations and the scale.
        state: Process groups for parameters split over tensor-parallel ranks.
    """

    name: ClassVar[str] = "muon"
    is_elementwise = False
    moments = ("momentum_buffer",)

    def __init__(
        self,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        orthogonalization: Orthogonalization | None = None,
        state: ParallelState | None = None,
    ) -> None:
        self.options = {"momentum": momentum, "nesterov": nesterov}
        self.orthogonalization = orthogonalization or Orthogonalization()
        check_type("orthogonalization", self.orthogonalization, Orthogonalization)
        self._state = state

    def check(self, group: Mapping[str, Any]) -> None:
        """Check momentum and nesterov."""
        check_fraction("momentum", group["momentum"])
        check_bool("nesterov", group["nesterov"])

    def new_state(self, shard: ParamShard, master: Tensor) -> dict[str, Tensor]:
        """Return the state before the first step.

        Raises:
            ValueError: It is not a whole matrix, or its split needs a missing state.
        """
        check_whole(shard, "Muon")
        matrix_spec(shard.source)
        tp_split = TPSplit(shard.source, self._state)
        if self.orthogonalization.tp == "distributed":
            tp_split.one(1)
        return super().new_state(shard, master)

    def update(self, batch: Batch, group: Mapping[str, Any]) -> None:
        """Update momentum and masters; communicates as the mode of tensor parallelism says."""
        # One by one: the iterations take nearly all of the time, and the update is in the cache.
        for each in zip(batch.shards, batch.masters, batch.grads, batch.states, strict=True):
            shard, master, grad, state = each
            # The matrix to orthogonalise is freed here: the sum reuses memory in the cache.
            parts = self._parts(shard, self._sought(grad, state, group))
            master.mul_(1 - group["lr"] * group["weight_decay"])
            self._step(shard, master, parts, state, group)
        batch.count()

    def _sought(
        self, grad: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]
    ) -> Tensor:
        """Update the momentum, and return the matrix to orthogonalise."""
        mean = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        return grad.lerp(mean, group["momentum"]) if group["nesterov"] else mean

    def _parts(self, shard: ParamShard, sought: Tensor) -> list[tuple[Tensor, float]]:
        spec, tp_split = matrix_spec(shard.source), self._tp_split(shard)
        return orthogonal_parts(sought, spec, self.orthogonalization, tp_split)

    def _step(
        self,
        shard: ParamShard,
        master: Tensor,
        parts: Sequence[tuple[Tensor, float]],
        state: Mapping[str, Tensor],
        group: Mapping[str, Any],
    ) -> None:
        """Take a step of one parameter along orthogonal directions."""
        views = matrix_spec(shard.source).views(master)
        for own, (direction, factor) in zip(views, parts, strict=True):
            own.add_(direction.reshape(own.shape), alpha=-group["lr"] * factor)

    def _tp_split(self, shard: ParamShard) -> TPSplit:
        return TPSplit(shard.source, self._state)


def orthogonal_parts(
    update: Tensor, spec: MatrixSpec, how: Orthogonalization, tp_split: TPSplit
) -> list[tuple[Tensor, float]]:
    """Orthogonalise each matrix of a parameter's update.

    Args:
        update: The update in the shape of this rank's parameter.
        spec: The matrices in the parameter.
        how: The iterations.
        tp_split: The split of the parameter over ranks.

    Returns:
        For each matrix this rank's shard of the direction, and its factor.
    """
    results: list[tuple[Tensor, float]] = []
    if how.tp == "duplicated" and tp_split.groups:
        for part in spec.views(tp_split.gather(update.to(how.dtype))):
            shape = spec.shape(part.shape)
            whole = how.apply(part.reshape(shape)).reshape(part.shape)
            results.append((tp_split.own(whole), how.factor(*shape)))
        return results
    group, split = None, "rows"
    if how.tp == "distributed":
        group, split = tp_split.one(update.dim() - spec.in_dims)
    for part in spec.views(update):
        rows, columns = spec.shape(part.shape)
        direction = how.apply(part.reshape(rows, columns), group=group, split=split)
        ranks = 1 if group is None else dist.get_world_size(group)
        whole = (rows * ranks, columns) if split == "rows" else (rows, columns * ranks)
        results.append((direction, how.factor(*whole)))
    return results


class AdaptiveMuonRule(MuonRule):
    """AdaMuon (Si et al., arXiv 2507.11005): an orthogonal step with second moments.

    The sign of the momentum is orthogonalised to O, and `V = b2 V + (1 - b2) O^2`. The step is
    `O / (sqrt(V) + eps)` brought to the norm 0.2 sqrt(rows x columns), which has the size of an
    AdamW step; scales of the orthogonalisation have no part in it but `extra_scale`.

    Args:
        momentum: As of `MuonRule`.
        beta2: Default decay rate of the second moment.
        eps: Added to its root.
        nesterov: As of `MuonRule`.
        orthogonalization: As of `MuonRule`.
        state: As of `MuonRule`.
    """

    name: ClassVar[str] = "adaptive_muon"
    moments = ("momentum_buffer", "exp_avg_sq")

    def __init__(
        self,
        *,
        momentum: float = 0.95,
        beta2: float = 0.95,
        eps: float = 1e-8,
        nesterov: bool = True,
        orthogonalization: Orthogonalization | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__(
            momentum=momentum, nesterov=nesterov, orthogonalization=orthogonalization, state=state
        )
        self.options = {**self.options, "beta2": beta2, "eps": eps}

    def check(self, group: Mapping[str, Any]) -> None:
        """Check momentum, nesterov, beta2 and eps."""
        super().check(group)
        check_fraction("beta2", group["beta2"])
        check_size("eps", group["eps"])

    def _sought(
        self, grad: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]
    ) -> Tensor:
        return super()._sought(grad, state, group).sign()

    def _step(
        self,
        shard: ParamShard,
        master: Tensor,
        parts: Sequence[tuple[Tensor, float]],
        state: Mapping[str, Tensor],
        group: Mapping[str, Any],
    ) -> None:
        spec, tp_split = matrix_spec(shard.source), self._tp_split(shard)
        how, beta = self.orthogonalization, group["beta2"]
        groups = [] if how.tp == "blockwise" else list(tp_split.groups.values())
        squares = spec.views(state["exp_avg_sq"])
        for own, square, (direction, _) in zip(spec.views(master), squares, parts, strict=True):
            step = direction.reshape(own.shape).to(master.dtype, copy=True)
            square.mul_(beta).addcmul_(step, step, value=1 - beta)
            step.div_(square.sqrt().add_(group["eps"]))
            total, count = step.square().sum(), step.numel()
            for ranks in groups:
                dist.all_reduce(total, group=ranks)
                count *= dist.get_world_size(ranks)
            size = 0.2 * how.extra_scale * math.sqrt(count)
            own.sub_(step.mul_(group["lr"] * size / total.sqrt().clamp(min=group["eps"])))
