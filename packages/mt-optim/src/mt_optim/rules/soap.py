"""SOAP: Adam in the eigenbasis of Shampoo's preconditioners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from mt_data_parallel import ParamShard
from mt_parallel_state import ParallelState
from torch import Tensor

from mt_optim.checks import check_betas, check_count, check_size
from mt_optim.parameters.matrix import TPSplit, check_whole, matrix_spec
from mt_optim.rules.rule import Batch, Rule

# Share of the mean eigenvalue that is added to all. It keeps the order of the eigenvectors. In
# directions without a gradient so far, the basis then doesn't depend on rounding.
_DAMPING = 1e-3
_SIDES = ("rows", "columns")


class SOAPRule(Rule):
    """Vyas et al., arXiv 2409.11321.

    For a matrix with gradient G the rule keeps means of `G G^T` and `G^T G` and an orthogonal basis
    of each, `Q` and `P`. Adam's second moment is taken of `Q^T G P`, its first moment M of G, and
    the step is Adam's for `Q^T M P`, turned back. Every `frequency` steps, and in the first,
    a basis is brought nearer to the eigenvectors of its mean C by one step of orthogonal iteration,
    `Q = qr(C Q)`. It starts as the identity, not with eigenvectors of the first gradient, which
    has fewer directions than a long side needs, and bases are refreshed before they are used: so
    no step is left out, and the layout of the ranks does not choose between equal directions.
    Signs of a basis have no effect.

    The matrices of a fused weight have separate bases, as the parameter's `MatrixSpec` says. If
    tensor parallelism splits a weight, every rank gathers gradient and moments, keeps whole means
    and bases, and takes its part of the step.

    Args:
        betas: Default decay rates of the first moment, and of the second one and the two means.
        eps: Default of the number added to the root of the second moment.
        frequency: Steps from one refresh of the bases to the next.
        max_dim: Longest side of a matrix with a mean and a basis.
        state: Process groups for parameters split over tensor-parallel ranks.
    """

    name: ClassVar[str] = "soap"
    is_elementwise = False
    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        *,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        frequency: int = 10,
        max_dim: int = 8192,
        state: ParallelState | None = None,
    ) -> None:
        self.options = {"betas": betas, "eps": eps}
        self.frequency = check_count("frequency", frequency)
        self.max_dim = check_count("max_dim", max_dim)
        self._state = state

    def check(self, group: Mapping[str, Any]) -> None:
        """Check betas and eps."""
        check_betas(group["betas"])
        check_size("eps", group["eps"])

    def new_state(self, shard: ParamShard, master: Tensor) -> dict[str, Tensor]:
        """Return the state before the first step: moments, and per matrix means and bases.

        Raises:
            ValueError: It is not a whole matrix, or its split needs a missing state.
        """
        check_whole(shard, "SOAP")
        spec, tp_split = matrix_spec(shard.source), TPSplit(shard.source, self._state)
        state = super().new_state(shard, master)
        whole = torch.empty(tp_split.whole_shape(shard.source.shape), device="meta")
        for index, part in enumerate(spec.views(whole)):
            for side, size in zip(_SIDES, spec.shape(part.shape), strict=True):
                if size <= self.max_dim:
                    state[f"mean_{side}.{index}"] = master.new_zeros(size, size)
                    basis = torch.eye(size, dtype=master.dtype, device=master.device)
                    state[f"basis_{side}.{index}"] = basis
        return state

    def factors(self, state: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Name means and bases."""
        return tuple(key for key in state if key.startswith(("mean_", "basis_")))

    def update(self, batch: Batch, group: Mapping[str, Any]) -> None:
        """Update means, bases, moments and masters; gathers what tensor parallelism splits."""
        torch._foreach_lerp_(batch.moment("exp_avg"), batch.grads, 1 - group["betas"][0])
        torch._foreach_mul_(batch.masters, 1 - group["lr"] * group["weight_decay"])
        for each in zip(batch.shards, batch.masters, batch.grads, batch.states, strict=True):
            self._step(*each, group)
        batch.count()

    def _step(
        self,
        shard: ParamShard,
        master: Tensor,
        grad: Tensor,
        state: dict[str, Tensor],
        group: Mapping[str, Any],
    ) -> None:
        """Take a step of one parameter."""
        spec, tp_split = matrix_spec(shard.source), TPSplit(shard.source, self._state)
        done, (beta1, beta2) = int(state["step"]), group["betas"]
        keys = ("exp_avg", "exp_avg_sq")
        wholes = [grad, *(state[key] for key in keys)]
        parts = zip(*(spec.views(tp_split.gather(whole)) for whole in wholes), strict=True)
        owns = zip(spec.views(master), spec.views(state["exp_avg_sq"]), strict=True)
        # Every rank computes the whole step of a split weight and keeps its own part.
        for index, ((own, own_square), part) in enumerate(zip(owns, parts, strict=True)):
            shape = part[0].shape
            gradient, moment, square = (x.reshape(spec.shape(shape)) for x in part)
            bases = self._bases(state, index, gradient, beta2, is_due=done % self.frequency == 0)
            turned = _turn(gradient, *bases)
            square = square.mul(beta2).addcmul_(turned, turned, value=1 - beta2)
            root = (square / (1 - beta2 ** (done + 1))).sqrt_().add_(group["eps"])
            step = _turn(moment, *bases).div_(root)
            rows, columns = (None if basis is None else basis.T for basis in bases)
            step = _turn(step, rows, columns).reshape(shape)
            own.sub_(tp_split.own(step), alpha=group["lr"] / (1 - beta1 ** (done + 1)))
            own_square.copy_(tp_split.own(square.reshape(shape)))

    def _bases(
        self,
        state: Mapping[str, Tensor],
        index: int,
        gradient: Tensor,
        beta: float,
        *,
        is_due: bool,
    ) -> list[Tensor | None]:
        """Update the means of a matrix, and its bases if they are due; None for a long side."""
        bases: list[Tensor | None] = []
        for side, own in zip(_SIDES, (gradient, gradient.T), strict=True):
            basis = state.get(f"basis_{side}.{index}")
            if basis is not None:
                mean = state[f"mean_{side}.{index}"]
                mean.addmm_(own, own.T, beta=beta, alpha=1 - beta)
                if is_due:
                    damping = _DAMPING * mean.diagonal().mean()
                    basis.copy_(torch.linalg.qr(mean @ basis + damping * basis).Q)
            bases.append(basis)
        return bases


def _turn(x: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """Return `rows^T x columns`, a copy also without either."""
    x = x.clone() if rows is None else rows.T @ x
    return x if columns is None else x @ columns
