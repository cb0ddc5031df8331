"""What happens between reduced gradients and the update: measure, decide, unscale, clip."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from mt_data_parallel import Piece, grad_of, pieces_of
from mt_files import check_type
from mt_parallel_state import ParallelState, share_json
from torch import Tensor, nn

from mt_optim.bad import find_bad
from mt_optim.clip import REST, NormGroup, check_once, check_positive, clip_factor, norm_group_of
from mt_optim.result import StepResult
from mt_optim.scaler import GradScaler
from mt_optim.scaling import clamp_, multiply_, root
from mt_optim.statistics import WORLD, GradMeter, GradStatistics, Measured, joined

_Key = tuple[str, str]  # norm group, group of the statistics


@dataclass(frozen=True, kw_only=True)
class GradLimits:
    """How large gradients may be.

    Attributes:
        max_norm: Largest norm to let through, of what is in no group of its own; None never clips.
        norm_groups: Parameters that are clipped alone.
        max_value: Largest magnitude of a gradient's element, clipped after the norm; None for any.
        skip_above: A step is skipped if the norm of the whole model is above; None skips only what
            is not finite.

    Raises:
        ValueError: A threshold is not positive.
        TypeError: A field is of another type.
    """

    max_norm: float | None = None
    norm_groups: tuple[NormGroup, ...] = ()
    max_value: float | None = None
    skip_above: float | None = None

    def __post_init__(self) -> None:
        for what in ("max_norm", "max_value", "skip_above"):
            limit = getattr(self, what)
            if limit is not None:
                check_positive(what, limit)
        groups: object = self.norm_groups
        if not isinstance(groups, tuple) or not all(isinstance(g, NormGroup) for g in groups):
            raise TypeError(f"norm_groups must be NormGroups, got {self.norm_groups!r:.60}")
        names = [REST, *map(str, self.norm_groups)]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"norm_groups has {twice[0]!r} twice, or that is the rest's name")


class StepGuard:
    """Decides, with one answer on all ranks, whether a step is applied, and clips gradients.

    The decision is taken from the norm of the whole model's gradient, which every rank gets with
    the same bits: before anything changes, and for every optimizer alike. Only if a step is not
    taken, gradients are looked at one by one, to name those at fault.

    Args:
        named_params: This rank's names and parameters, or pieces.
        state: Process groups and this rank's place in them.
        limits: How large gradients may be.
        scaler: What the losses are multiplied with; gradients are divided by that.
        zeros: Whether zeros are counted.
        statistics: A function of a parameter's name that says with which others its gradient is
            described, such as `by_layer`; None for no description.

    Attributes:
        scaler: The scaler; None where there is none.

    Raises:
        ValueError: A parameter is listed twice, or is in several norm groups.
        TypeError: An argument is of another type.
    """

    def __init__(
        self,
        named_params: Iterable[tuple[str, nn.Parameter] | Piece],
        state: ParallelState,
        *,
        limits: GradLimits | None = None,
        scaler: GradScaler | None = None,
        zeros: bool = False,
        statistics: Callable[[str], str] | None = None,
    ) -> None:
        limits = GradLimits() if limits is None else limits
        check_type("state", state, ParallelState)
        check_type("limits", limits, GradLimits)
        if scaler is not None:
            check_type("scaler", scaler, GradScaler)
        if statistics is not None and not callable(statistics):
            raise TypeError(f"statistics must be a function or None, got {statistics!r:.60}")
        self._pieces, self._state, self._limits = pieces_of(named_params), state, limits
        check_once(self._pieces)
        self.scaler, self._zeros, self._by = scaler, zeros, statistics
        self._of: dict[str, list[Piece]] = {REST: [], **{str(g): [] for g in limits.norm_groups}}
        for piece in self._pieces:
            if piece.param.numel():  # a rank may step nothing and have a parameter all the same
                self._of[norm_group_of(piece, limits.norm_groups)].append(piece)
        self._meter: tuple[list[_Key], GradMeter] | None = None
        self._measured: dict[_Key, Measured] | None = None
        self._wide: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def measure(self, also: Tensor | None = None) -> list[float]:
        """Measure the gradients for the next `admit`, which then neither communicates nor waits.

        Args:
            also: Numbers of this rank that are summed over all ranks in the same message, such as
                losses; on the device, in any dtype that fp64 holds.

        Returns:
            The sums, with the same bits on all ranks.
        """
        return self.take(self.sums(also).tolist())

    def sums(self, also: Tensor | None = None) -> Tensor:
        """Measure as `measure` does, and leave the numbers on the device, for `restrain`.

        Shape:
            One dim of fp64, the sums of `also` in front.
        """
        self.prepare()
        return self._agreed[1].sums(also)

    def prepare(self) -> None:
        """Agree with all ranks on what is measured, the first time; it communicates then."""
        if self._meter is None:
            self._meter = self._make_meter()

    @torch.no_grad()
    def restrain(self, sums: Tensor, scale: Tensor) -> Tensor:
        """Decide on the device whether the step is taken, and unscale and clip if it is.

        It is not where `admit` would not take it, or a sum of `also` is not finite. The gradients
        of a step that is not taken are as they were. Nothing waits; `take` and `conclude` follow
        where the host has the numbers.

        Args:
            sums: Of this step.
            scale: What gradients are divided by, fp64 without dims.

        Returns:
            fp64 without dims: 1 where the step is not taken, else 0.
        """
        keys, meter = self._agreed
        extra = sums.numel() - meter.width
        squares = dict(zip(keys, sums[extra : extra + len(keys)].unbind(), strict=True))
        whole = _norm(squares.values(), scale)
        limit = math.inf if self._limits.skip_above is None else self._limits.skip_above
        taken = torch.isfinite(whole) & (whole <= limit) & torch.isfinite(sums[:extra]).all()
        for name, pieces in self._of.items():
            own = [square for (group, _), square in squares.items() if group == name]
            grads = [grad for piece in pieces if (grad := piece.grad) is not None]
            most = self._most(name)
            if grads and (most is not None or self.scaler is not None):
                factor = torch.ones_like(whole) if most is None else _factor(own, scale, most)
                multiply_(grads, torch.where(taken, factor / scale, torch.ones_like(whole)))
            if self._limits.max_value is not None:
                most = torch.full_like(whole, self._limits.max_value)
                clamp_(grads, torch.where(taken, most, torch.full_like(whole, math.inf)))
        return 1 - taken.double()

    def take(self, found: Sequence[float]) -> list[float]:
        """Take note of the numbers of `sums`, and return those of `also`."""
        keys, meter = self._agreed
        measured, others = meter.read(found)
        self._measured = dict(zip(keys, measured, strict=True))
        return others

    @torch.no_grad()
    def admit(self) -> StepResult:
        """Measure the gradients and, if the step is taken, divide by the scale and clip.

        It communicates once, twice with statistics, and waits for the device once; not at all after
        `measure`.

        Returns:
            Whether to step, and what was measured. The gradients of a step that is not taken are as
            they were; the scaler has taken note of it.
        """
        scale = self.scale
        if self._measured is None:
            self.measure()
        norm = joined((self._measured or {}).values(), scale=scale).norm
        limit = math.inf if self._limits.skip_above is None else self._limits.skip_above
        admitted = math.isfinite(norm) and norm <= limit
        if admitted:
            self._apply(self._norms(scale), scale)
        return self.conclude(admitted=admitted)

    @property
    def scale(self) -> float:
        """What gradients are divided by."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @torch.no_grad()
    def conclude(self, *, admitted: bool) -> StepResult:
        """Return what a step was whose numbers `measure` or `take` has; the scaler takes note.

        It communicates only if the step was not taken, to name the gradients at fault.
        """
        scale, norms = self.scale, self._norms(self.scale)
        parts, self._measured = self._measured or {}, None
        whole = joined(parts.values(), scale=scale)
        if self.scaler is not None:
            self.scaler.update(overflow=not math.isfinite(whole.norm))
        bad, num_bad = (), 0
        if not admitted:
            bad, num_bad = find_bad(self._pieces, self._state, scale=scale)
        return StepResult(
            stepped=admitted,
            grad_norm=whole.norm,
            norms=norms if len(norms) > 1 else {},
            zeros=whole.zeros if self._zeros else None,
            loss_scale=scale,
            bad=bad,
            num_bad=num_bad,
            statistics=self._described(parts, scale),
        )

    def gradient(self, param: Tensor) -> Tensor | None:
        """Return the gradient that a parameter is stepped with.

        That of an fp16 parameter outside of a GradBuffer is fp16 too, too narrow for what is left
        of it without the loss's scale: it was widened.
        """
        wide = self._wide.get(param)
        return grad_of(param) if wide is None else wide

    def forget(self) -> None:
        """Free what was widened for a step."""
        self._wide.clear()

    def _make_meter(self) -> tuple[list[_Key], GradMeter]:
        """Agree with all ranks on the parts; with pipeline stages they differ."""
        parts: dict[_Key, list[Piece]] = {}
        by = self._by or (lambda name: "")
        for group, pieces in self._of.items():
            for piece in pieces:
                parts.setdefault((group, str(by(piece.name))), []).append(piece)
        if self._by is None:
            keys = [(group, "") for group in self._of]
        else:
            group, device = self._state.group(WORLD), self._state.device
            every = share_json([list(key) for key in parts], group, device=device)
            keys = list(dict.fromkeys((group, name) for own in every for group, name in own))
        described = self._by is not None
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

    def _norms(self, scale: float) -> dict[str, float]:
        """Return the norm of each group, of gradients divided by `scale`."""
        parts = self._measured or {}
        return {
            name: joined(
                (part for (group, _), part in parts.items() if group == name), scale=scale
            ).norm
            for name in self._of
        }

    def _most(self, name: str) -> float | None:
        """Return the largest norm of a group."""
        most: dict[str, float | None] = {REST: self._limits.max_norm}
        return (most | {str(group): group.max_norm for group in self._limits.norm_groups})[name]

    def _described(self, parts: dict[_Key, Measured], scale: float) -> dict[str, GradStatistics]:
        if self._by is None:
            return {}
        names = dict.fromkeys(name for _, name in parts)
        return {
            name: joined((part for (_, own), part in parts.items() if own == name), scale=scale)
            for name in names
        }

    def _apply(self, norms: dict[str, float], scale: float) -> None:
        """Divide gradients by the scale, and clip them by their group's norm and by value."""
        for name, pieces in self._of.items():
            factor = clip_factor(norms[name], self._most(name)) / scale
            grads = self._grads(pieces)
            if grads and factor != 1:
                torch._foreach_mul_(grads, factor)
            if grads and self._limits.max_value is not None:
                torch._foreach_clamp_min_(grads, -self._limits.max_value)
                torch._foreach_clamp_max_(grads, self._limits.max_value)

    def _grads(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Return the gradients to change, those that are too narrow for it as copies."""
        grads: list[Tensor] = []
        for piece in pieces:
            grad = piece.grad
            if grad is not None and grad.dtype == torch.float16:
                grad = self._wide[piece.param] = grad.float()
            grads += [] if grad is None else [grad]
        return grads


def _norm(squares: Iterable[Tensor], scale: Tensor) -> Tensor:
    """Return on the device what `joined` does on the host."""
    return root(reduce(torch.add, squares)) / scale


def _factor(squares: Sequence[Tensor], scale: Tensor, max_norm: float) -> Tensor:
    """Return on the device what `clip_factor` does on the host."""
    norm = _norm(squares, scale)
    return (torch.full_like(norm, max_norm) / (norm + 1e-6)).clamp(max=1.0)
