"""Between reduced gradients and the update: measure, decide, unscale and clip."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from mt_data_parallel import ParamShard, grad_of, param_shards
from mt_files import check_type
from mt_parallel_state import ParallelState, share_json
from torch import Tensor, nn

from mt_optim.checks import check_function
from mt_optim.gradients.bad import find_bad
from mt_optim.gradients.clip import check_once, clip_factor
from mt_optim.gradients.limits import GradLimits
from mt_optim.gradients.result import StepResult
from mt_optim.gradients.scaler import GradScaler, LossScale
from mt_optim.gradients.scaling import clamp_, multiply_, root
from mt_optim.gradients.statistics import WORLD, GradMeter, GradStatistics, Measured, joined

_Key = tuple[str, str]  # norm group, group of the statistics


class _Verdict(NamedTuple):
    """A decision as the host has read it: see `StepGuard.decide`."""

    skipped: bool
    factors: list[float]
    measured: dict[_Key, Measured]


class StepGuard:
    """Decides, with one answer on all ranks, whether a step is taken, and clips gradients.

    The decision depends on the norm of the whole model's gradient, of which every rank gets the
    same bits. It is made on the device, before anything changes; the host reads it afterwards.
    Gradients are looked at one by one only if a step is skipped, to name those at fault.

    Args:
        named_params: This rank's names and parameters, or the shards that it steps.
        state: Process groups and this rank's place in them.
        limits: Limits on the size of gradients.
        loss_scale: The factor of the losses, by which gradients are divided: "dynamic", a number,
            a `LossScale` or None.
        zeros: Whether zeros are counted.
        statistics: A function from a parameter's name to the name of the group in which its
            gradient is described, such as `by_layer`; None for no description.

    Attributes:
        scaler: The current loss scale; None if losses are not scaled.

    Raises:
        ValueError: A parameter is listed twice, or is in several norm groups.
        TypeError: An argument has the wrong type.
    """

    def __init__(
        self,
        named_params: Iterable[tuple[str, nn.Parameter] | ParamShard],
        state: ParallelState,
        *,
        limits: GradLimits | None = None,
        loss_scale: LossScale | float | str | None = None,
        zeros: bool = False,
        statistics: Callable[[str], str] | None = None,
    ) -> None:
        limits = GradLimits() if limits is None else limits
        check_type("state", state, ParallelState)
        check_type("limits", limits, GradLimits)
        check_function("statistics", statistics, optional=True)
        self._shards, self._state, self._limits = param_shards(named_params), state, limits
        check_once(self._shards)
        self._zeros, self._by = zeros, statistics
        how = LossScale.of(loss_scale)
        self.scaler = None if how is None else GradScaler(how)
        self._of: dict[str, list[ParamShard]] = {name: [] for name in limits.max_norms}
        for shard in self._shards:
            if shard.param.numel():  # a rank may have a parameter and step no element of it
                self._of[limits.group_of(shard)].append(shard)
        self._meter: tuple[list[_Key], GradMeter] | None = None
        self._decision: Tensor | None = None
        self._verdict: _Verdict | None = None
        self._wide: dict[Tensor, Tensor] = {}

    @property
    def scale(self) -> float:
        """The loss scale, by which gradients are divided."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def prepare(self) -> None:
        """Agree with all ranks on the groups to measure; communicate the first time only."""
        if self._meter is None:
            self._meter = self._make_meter()

    @torch.no_grad()
    def decide(self, scale: Tensor, also: Tensor | None = None) -> Tensor:
        """Measure the gradients and decide whether the step is taken, without waiting.

        The step is skipped if the norm of the whole model is not finite or too large, or if a sum
        of `also` is not finite.

        Args:
            scale: The loss scale, fp64 without dims.
            also: Numbers of this rank, such as losses, to sum over all ranks in the same message;
                on the device, in any dtype that fp64 holds.

        Returns:
            The decision, with the same bits on all ranks, for `restrain` and `read`.

        Shape:
            One dim of fp64: 1 if the step is taken, else 0; the factor of each norm group; and
            the sums of `GradMeter.sums`.
        """
        self.prepare()
        keys, meter = self._agreed
        sums = meter.sums(also)
        extra = sums.numel() - meter.width
        # `also` comes first, then the squares of each part.
        squares = dict(zip(keys, sums[extra : extra + len(keys)].unbind(), strict=True))
        whole = root(reduce(torch.add, squares.values())) / scale
        limit = math.inf if self._limits.skip_above is None else self._limits.skip_above
        taken = torch.isfinite(whole) & (whole <= limit) & torch.isfinite(sums[:extra]).all()
        one, factors = torch.ones_like(whole), list[Tensor]()
        for name, most in self._limits.max_norms.items():
            own = [square for (group, _), square in squares.items() if group == name]
            clipped = one
            if own and most is not None:
                clipped = clip_factor(root(reduce(torch.add, own)) / scale, most)
            factors.append(torch.where(taken, clipped / scale, one))
        return torch.cat([torch.stack([taken.double(), *factors]), sums])

    @torch.no_grad()
    def restrain(self, decision: Tensor) -> None:
        """Unscale and clip the gradients, or leave them alone if the step is skipped."""
        taken, *factors = decision[: 1 + len(self._of)].unbind()
        for number, (shards, factor) in enumerate(zip(self._of.values(), factors, strict=True)):
            # The factor of a captured graph is another one in each replay. Where the host has
            # read it, gradients that it leaves alone need no pass over memory.
            known = 0.0 if self._verdict is None else self._verdict.factors[number]
            grads = self._grads(shards)
            if known != 1:
                multiply_(grads, factor)
            if self._limits.max_value is not None:
                most = torch.full_like(factor, self._limits.max_value)
                clamp_(grads, torch.where(taken > 0, most, torch.full_like(most, math.inf)))

    def read(self, found: Sequence[float]) -> list[float]:
        """Record a decision after the host has read it, and return the sums of `also`."""
        keys, meter = self._agreed
        count = 1 + len(self._of)
        measured, others = meter.read(found[count:])
        of_key = dict(zip(keys, measured, strict=True))
        self._verdict = _Verdict(not found[0], list(found[1:count]), of_key)
        return others

    def measure(self, also: Tensor | None = None) -> list[float]:
        """Decide on the next step and wait for the decision; `admit` then does neither.

        Args:
            also: As for `decide`.

        Returns:
            The sums of `also`, with the same bits on all ranks.
        """
        scale = torch.full((), self.scale, dtype=torch.float64, device=self._state.device)
        self._decision = self.decide(scale, also)
        return self.read(self._decision.tolist())

    def admit(self) -> StepResult:
        """Decide on a step and, if it is taken, unscale and clip the gradients.

        It communicates once, twice with statistics, and waits for the device once; after `measure`
        it does neither.

        Returns:
            The decision and the measurements. If the step is skipped, the gradients are unchanged.
            The scaler has been updated.
        """
        if self._decision is None:
            self.measure()
        decision, self._decision = self._decision, None
        # The host knows the decision, so a skipped step runs no kernel at all.
        if decision is not None and self._verdict is not None and not self._verdict.skipped:
            self.restrain(decision)
        return self.conclude()

    def conclude(self) -> StepResult:
        """Return the result of the step whose decision was read, and update the scaler.

        It communicates only if the step was skipped, to name the gradients at fault.
        """
        verdict, self._verdict = self._verdict, None
        assert verdict is not None, "read() makes it"  # noqa: S101
        scale, parts = self.scale, verdict.measured
        # The same additions as in `decide`, so the reported norm is the one that decided.
        whole = joined(parts.values(), scale=scale)
        norms = {name: self._joined(parts, 0, name, scale).norm for name in self._of}
        if self.scaler is not None:
            self.scaler.update(overflow=not math.isfinite(whole.norm))
        bad, num_bad = (), 0
        if verdict.skipped:
            bad, num_bad = find_bad(self._shards, self._state, scale=scale)
        described = [] if self._by is None else dict.fromkeys(name for _, name in parts)
        return StepResult(
            stepped=not verdict.skipped,
            grad_norm=whole.norm,
            norms=norms if len(norms) > 1 else {},
            zeros=whole.zeros if self._zeros else None,
            loss_scale=scale,
            bad=bad,
            num_bad=num_bad,
            statistics={name: self._joined(parts, 1, name, scale) for name in described},
        )

    def gradient(self, param: Tensor) -> Tensor | None:
        """Return the gradient that a parameter is stepped with.

        An fp16 parameter outside of a GradBuffer has an fp16 gradient, which would underflow when
        it is unscaled; `restrain` has made an fp32 copy of it.
        """
        wide = self._wide.get(param)
        return grad_of(param) if wide is None else wide

    def forget(self) -> None:
        """Free the step's fp32 copies of gradients."""
        self._wide.clear()

    def _make_meter(self) -> tuple[list[_Key], GradMeter]:
        """Agree with all ranks on the parts; with pipeline stages they differ."""
        parts: dict[_Key, list[ParamShard]] = {}
        by = self._by or (lambda name: "")
        for group, shards in self._of.items():
            for shard in shards:
                parts.setdefault((group, str(by(shard.name))), []).append(shard)
        described = self._by is not None
        keys = [(group, "") for group in self._of]
        if described:
            group, device = self._state.group(WORLD), self._state.device
            every = share_json([list(key) for key in parts], group, device=device)
            keys = list(dict.fromkeys((group, name) for own in every for group, name in own))
        meter = GradMeter(
            [parts.get(key, []) for key in keys],
            self._state,
            zeros=self._zeros or described,
            largest=described,
        )
        return keys, meter

    @property
    def _agreed(self) -> tuple[list[_Key], GradMeter]:
        assert self._meter is not None, "prepare() makes it"  # noqa: S101
        return self._meter

    def _joined(
        self, parts: dict[_Key, Measured], place: int, name: str, scale: float
    ) -> GradStatistics:
        """Join the parts whose key has a name at a place: 0 for norm groups, 1 for statistics."""
        return joined((part for key, part in parts.items() if key[place] == name), scale=scale)

    def _grads(self, shards: Sequence[ParamShard]) -> list[Tensor]:
        """Return the gradients to change; fp16 gradients are copied to fp32."""
        grads: list[Tensor] = []
        for shard in shards:
            grad = shard.grad
            # Unscaled in fp16, small gradients would underflow.
            if grad is not None and grad.dtype == torch.float16:
                grad = self._wide[shard.param] = grad.float()
            grads += [] if grad is None else [grad]
        return grads
