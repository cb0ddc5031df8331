"""Optimizers with the arguments of torch.optim, each a `NamedOptimizer` with its rule."""

from __future__ import annotations

from mt_parallel_state import ParallelState
from torch import Tensor

from mt_optim.optimizer import NamedOptimizer
from mt_optim.parameters.group import DecayFilter, Params
from mt_optim.parameters.matrix import by_matrix
from mt_optim.rules.adamw import AdamWRule
from mt_optim.rules.lion import LionRule
from mt_optim.rules.muon import MuonRule
from mt_optim.rules.orthogonal import Orthogonalization
from mt_optim.rules.sgd import SGDRule
from mt_optim.rules.soap import SOAPRule


class AdamW(NamedOptimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with full-precision masters and named state.

    A `NamedOptimizer` with the arguments and defaults of torch.optim.AdamW. The arithmetic is
    torch's as well, called through the functional form: for fp32 and fp64 parameters results are
    bit-equal to torch's fused kernel (to its foreach one on devices without).

    Args:
        params: Parameters, pairs of name and parameter, or a list of groups: dicts with `params`
            and their own `lr`, `betas`, `eps` or `weight_decay`.
        lr: Learning rate; a tensor of no dims for a step in a CUDA graph.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay, multiplied by the learning rate.
        decay_filter: As of `NamedOptimizer`.

    Raises:
        ValueError: As from `NamedOptimizer`.
        TypeError: As from `NamedOptimizer`.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = AdamW(model.named_parameters(), lr=1e-3)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step().stepped
        True
        >>> optimizer.step_count, optimizer.moment("weight", "exp_avg").shape
        (1, torch.Size([2, 4]))
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decay_filter: DecayFilter | None = None,
    ) -> None:
        rule = AdamWRule(betas=betas, eps=eps)
        super().__init__(params, rule, lr=lr, weight_decay=weight_decay, decay_filter=decay_filter)


class SGD(NamedOptimizer):
    """SGD with masters and named state; equal to torch.optim.SGD in arguments and results.

    Args:
        params: As of `NamedOptimizer`; a group may set `momentum`, `dampening` and `nesterov`.
        lr: Learning rate.
        momentum: Decay rate of the sum of gradients.
        dampening: Dampening of the gradient after the first step.
        weight_decay: Weight decay, added to the gradient.
        nesterov: Whether to use Nesterov momentum.
        decay_filter: As of `NamedOptimizer`.

    Raises:
        ValueError: As from `NamedOptimizer`; also for Nesterov without momentum or with dampening.
        TypeError: As from `NamedOptimizer`.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
        decay_filter: DecayFilter | None = None,
    ) -> None:
        rule = SGDRule(momentum=momentum, dampening=dampening, nesterov=nesterov)
        super().__init__(params, rule, lr=lr, weight_decay=weight_decay, decay_filter=decay_filter)


class Lion(NamedOptimizer):
    """Lion (Chen et al., arXiv 2302.06675) with masters and named state.

    Args:
        params: As of `NamedOptimizer`; a group may set `betas`.
        lr: Learning rate; a third to a tenth of AdamW's.
        betas: Rates of the interpolation and of the moment.
        weight_decay: Decoupled weight decay, multiplied by the learning rate.
        decay_filter: As of `NamedOptimizer`.

    Raises:
        ValueError: As from `NamedOptimizer`.
        TypeError: As from `NamedOptimizer`.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        decay_filter: DecayFilter | None = None,
    ) -> None:
        rule = LionRule(betas=betas)
        super().__init__(params, rule, lr=lr, weight_decay=weight_decay, decay_filter=decay_filter)


class Muon(NamedOptimizer):
    """Muon for the matrices inside of a network, and AdamW for all other parameters.

    With the defaults but `scale="shape_scaling"` matrices are stepped as torch.optim.Muon does.

    Args:
        params: As of `NamedOptimizer`. A group may set `momentum` and `nesterov`, or `betas` and
            `eps` for AdamW's, and `rule`, "muon" or "adamw", for all of its parameters.
        lr: Learning rate of both; a group may have its own.
        weight_decay: Decoupled weight decay of both, multiplied by the learning rate.
        momentum: Decay rate of the mean of gradients.
        orthogonalization: The iterations and the scale; by default updates have the size of
            AdamW's, so one learning rate serves both.
        state: Process groups, where parameters are split over tensor-parallel ranks.
        decay_filter: As of `NamedOptimizer`.

    Raises:
        ValueError: As from `NamedOptimizer`; also if a group of Muon has a parameter that isn't a
            matrix.
        TypeError: As from `NamedOptimizer`.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = Muon(model.named_parameters(), lr=1e-3)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step().stepped
        True
        >>> optimizer.moments("weight"), optimizer.moments("bias")
        (('momentum_buffer',), ('exp_avg', 'exp_avg_sq'))
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        orthogonalization: Orthogonalization | None = None,
        state: ParallelState | None = None,
        decay_filter: DecayFilter | None = None,
    ) -> None:
        rule = MuonRule(
            momentum=momentum,
            orthogonalization=orthogonalization or Orthogonalization(extra_scale=0.2),
            state=state,
        )
        super().__init__(
            params,
            [rule, AdamWRule(betas=(0.9, 0.95))],
            lr=lr,
            weight_decay=weight_decay,
            decay_filter=decay_filter,
            rule_filter=by_matrix("muon", "adamw"),
        )


class SOAP(NamedOptimizer):
    """SOAP for the matrices inside of a network, and AdamW for all other parameters.

    Args:
        params: As of `NamedOptimizer`. A group may set `betas`, `eps`, and `rule`, "soap" or
            "adamw", for all of its parameters.
        lr: Learning rate of both; a group may have its own.
        betas: Decay rates of the moments.
        weight_decay: Decoupled weight decay of both, multiplied by the learning rate.
        frequency: Steps from one refresh of the bases to the next.
        state: Process groups, where parameters are split over tensor-parallel ranks.
        decay_filter: As of `NamedOptimizer`.

    Raises:
        ValueError: As from `NamedOptimizer`; also if a group of SOAP has a parameter that isn't a
            matrix.
        TypeError: As from `NamedOptimizer`.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = SOAP(model.named_parameters(), lr=1e-3)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step().stepped
        True
        >>> list(optimizer.factors("weight"))
        ['mean_rows.0', 'basis_rows.0', 'mean_columns.0', 'basis_columns.0']
    """

    def __init__(
        self,
        params: Params,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        *,
        weight_decay: float = 0.01,
        frequency: int = 10,
        state: ParallelState | None = None,
        decay_filter: DecayFilter | None = None,
    ) -> None:
        rule = SOAPRule(betas=betas, frequency=frequency, state=state)
        super().__init__(
            params,
            [rule, AdamWRule(betas=betas)],
            lr=lr,
            weight_decay=weight_decay,
            decay_filter=decay_filter,
            rule_filter=by_matrix("soap", "adamw"),
        )
