"""AdamW whose state has names and full precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from mt_data_parallel import grad_of
from torch import Tensor

# The functional form of torch.optim.AdamW runs the same kernels without importing torch._dynamo
# (seconds, once per process), which the class does when it is constructed.
from torch.optim.adamw import adamw

from mt_optim.group import (
    MASTER_DTYPES,
    OPTIONS,
    DecayFilter,
    check_options,
    read_group,
    read_groups,
)
from mt_optim.saved import read_options, read_state

ENGINES = ("auto", "fused", "foreach")
_FUSED_DEVICES = ("cpu", "cuda", "xpu")


def fused_obstacle(param: Tensor) -> str | None:
    """Say why torch's fused AdamW kernel does not take this parameter; None if it does."""
    if not isinstance(param, Tensor):
        raise TypeError(f"expected a parameter, got {param!r:.60} ({type(param).__name__})")
    kind = param.device.type
    if kind not in _FUSED_DEVICES:
        return f"no fused AdamW kernel for {kind}; there is one for {_FUSED_DEVICES}"
    if not param.is_contiguous():
        return "the fused AdamW kernel reads memory in order, and this one is not contiguous"
    return None


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with fp32 masters and named state.

    A torch.optim.Optimizer with the arguments and defaults of torch.optim.AdamW, so torch's
    schedulers drive it. The arithmetic is torch's as well, called through the functional form: for
    fp32 and fp64 parameters results are bit-equal to torch's in the same mode (fused or foreach).

    bf16 parameters have an fp32 master copy that is updated and rounded back; fp32 and fp64
    parameters are their own master. Moments have the master's dtype and the parameter's shape, so
    they are sharded exactly like the parameter, and are allocated at once: a checkpoint is loaded
    by `load_state_dict`, or by writing into `master`, `exp_avg` and `exp_avg_sq`, setting
    `step_count` and calling `sync_params`. Weights loaded into bf16 parameters themselves are taken
    over by `sync_masters`.

    Gradients are read through `mt_data_parallel.grad_of`; a missing one counts as zero, as it would
    inside a GradBuffer (torch.optim skips such a parameter instead). Parameters with
    `requires_grad=False` are left out.

    Args:
        params: Parameters, pairs of name and parameter, or a list of groups: dicts with `params`
            and their own `lr`, `betas`, `eps` or `weight_decay`. Parameters without names are
            named by their number: `"0"`, `"1"` and so on.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay, multiplied by the learning rate.
        decay_filter: Called with name and parameter, says whether weight decay applies. Those of
            a group that it refuses become a group of their own with weight_decay 0. None: it
            applies to all, as in torch. `default_decay_filter` spares biases and vectors.
        engine: "fused", "foreach", or "auto" for fused wherever `fused_obstacle` says None.

    Attributes:
        param_groups: The groups with their options, which may be changed between steps.

    Raises:
        ValueError: A setting is out of range, a parameter is listed twice or is no leaf, nothing
            is to be trained, or the engine does not run there.
        TypeError: Something is not a parameter, or not bf16, fp32 or fp64.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = AdamW(model.named_parameters(), lr=1e-3)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.step_count, optimizer.exp_avg("weight").shape
        (1, torch.Size([2, 4]))
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decay_filter: DecayFilter | None = None,
        engine: str = "auto",
    ) -> None:
        if engine not in ENGINES:
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}; got {engine!r}")
        if decay_filter is not None and not callable(decay_filter):
            raise TypeError(f"decay_filter must be a function or None, got {decay_filter!r:.60}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_options(defaults)
        self._engine = engine
        self._decays = decay_filter
        self._params: dict[str, Tensor] = {}
        super().__init__(read_groups(params), defaults)
        if not self._params:
            raise ValueError(
                "there is no parameter to train: each has requires_grad=False; set it before"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own, such as layers that are trained from now on.

        Args:
            param_group: `params`, and any of `lr`, `betas`, `eps` and `weight_decay`; the
                optimizer's own are the default.

        Raises:
            ValueError: As from the constructor; also where these have names and the others none.
            TypeError: As from the constructor.
        """
        options, pairs, is_named = read_group(param_group, len(self._params))
        options = {**{what: self.defaults[what] for what in OPTIONS}, **options}
        check_options(options)
        if self.param_groups and is_named != ("param_names" in self.param_groups[0]):
            raise ValueError("some groups have parameters with names and some without: give all")
        pairs = [(name, param) for name, param in pairs if param.requires_grad]
        self._check_new(pairs)
        parts = {True: pairs}
        if self._decays is not None:
            parts = {True: [], False: []}
            for name, param in pairs:
                parts[bool(self._decays(name, param))].append((name, param))
        for decays, part in parts.items():
            if not part and len(parts) > 1:
                continue
            group = {"params": [param for _, param in part], **options}
            if is_named:
                group["param_names"] = [name for name, _ in part]
            self.param_groups.append(group if decays else {**group, "weight_decay": 0.0})
            for name, param in part:
                self._params[name] = param
                self.state[param] = _new_state(param, fused=self._is_fused(param))

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, in the order of the groups."""
        return tuple(self._params)

    @property
    def step_count(self) -> int:
        """Steps taken; set it after loading the moments of a checkpoint."""
        return max(int(self.state[param]["step"]) for param in self._params.values())

    @step_count.setter
    def step_count(self, value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"step_count must be a whole number, got {value!r:.60}")
        if value < 0:
            raise ValueError(f"step_count must be 0 or more, got {value}")
        for param in self._params.values():
            self.state[param]["step"].fill_(float(value))

    def master(self, name: str) -> Tensor:
        """Return the full-precision parameter: the parameter itself, or its fp32 copy for bf16.

        Shape:
            The parameter's. Writing into it changes the state; call `sync_params` afterwards.
        """
        param = self._param(name)
        return self.state[param].get("master", param).detach()

    def exp_avg(self, name: str) -> Tensor:
        """Return the running mean of the gradient.

        Shape:
            The parameter's. Writing into it changes the state.
        """
        return self.state[self._param(name)]["exp_avg"]

    def exp_avg_sq(self, name: str) -> Tensor:
        """Return the running mean of the squared gradient.

        Shape:
            The parameter's. Writing into it changes the state.
        """
        return self.state[self._param(name)]["exp_avg_sq"]

    @torch.no_grad()
    def step(  # pyright: ignore[reportIncompatibleMethodOverride] (torch's has overloads)
        self, closure: Callable[[], Any] | None = None, *, lr: float | None = None
    ) -> Any:
        """Update every parameter from its gradient.

        Args:
            closure: Called first, with gradients enabled, where it is given.
            lr: Learning rate of all groups, from now on; by default each keeps its own.

        Returns:
            What the closure returns.

        Raises:
            ValueError: An option of a group is out of range; no parameter has changed then.
            TypeError: An option is not a number, or the closure not a function.
        """
        if closure is not None and not callable(closure):
            raise TypeError(f"closure must be a function; for a learning rate write lr={closure!r}")
        groups = self.param_groups
        for group in groups:
            check_options(group if lr is None else {**group, "lr": lr})
        for group in groups if lr is not None else ():
            group["lr"] = lr
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in groups:
            by_engine: dict[bool, list[Tensor]] = {}
            for param in group["params"]:
                by_engine.setdefault(self._is_fused(param), []).append(param)
            for fused, params in by_engine.items():
                self._update(params, group, fused=fused)
        self.sync_params()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - as torch has it
        """Forget the gradients.

        A gradient that a GradBuffer holds is set to zero; `GradBuffer.start` does without that.

        Args:
            set_to_none: Whether `.grad` becomes None rather than zero.
        """
        zeroed: list[Tensor] = []
        for param in self._params.values():
            grad = grad_of(param)
            if grad is not None and not (set_to_none and grad is param.grad):
                zeroed.append(grad.detach())
            if set_to_none:
                param.grad = None
        if zeroed:
            torch._foreach_zero_(zeroed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave: moments, masters, steps and the groups' options.

        Values are copied into the tensors that are there, and bf16 parameters become their masters,
        rounded. State of torch.optim.AdamW is taken too, where parameters are their own masters.

        Args:
            state_dict: What `state_dict` of an optimizer with the same groups gave.

        Raises:
            ValueError: It is of other groups, parameters or shapes, or lacks something; nothing has
                changed then.
            TypeError: It is not such a dict.
        """
        given: Any = state_dict
        if not isinstance(given, Mapping) or not {"state", "param_groups"} <= set(given):
            raise TypeError("expected what state_dict() gave: a dict with state and param_groups")
        given = dict(given)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            given = hook(self, given) or given
        options = read_options(given["param_groups"], self.param_groups)
        numbers = chain.from_iterable(group["params"] for group in given["param_groups"])
        names = {param: name for name, param in self._params.items()}
        own = [param for group in self.param_groups for param in group["params"]]
        states = [
            (
                self.state[param],
                read_state(names[param], given["state"].get(number), self.state[param]),
            )
            for param, number in zip(own, numbers, strict=True)
        ]
        with torch.no_grad():
            for state, values in states:
                for key, value in values.items():
                    state[key].copy_(value)
        for group, read in zip(self.param_groups, options, strict=True):
            group.update(read)
        self.sync_params()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    @torch.no_grad()
    def non_finite(self) -> list[str]:
        """Name the parameters whose weights or moments are not all finite.

        Weights that an absurd learning rate made infinite give a loss that is not finite, whatever
        comes later: ask before they are written to disk. It reads the state once and waits for the
        device. It does not communicate: each rank answers for what it holds.

        Returns:
            The names, in order; empty where all is well.
        """
        found: list[tuple[str, Tensor]] = []
        for name, param in self._params.items():
            if param.numel():
                state = self.state[param]
                values = (state.get("master", param), state["exp_avg"], state["exp_avg_sq"])
                # The greatest magnitude is exact in any dtype, and NaN where there is a NaN.
                found += [(name, torch.linalg.vector_norm(v, math.inf).double()) for v in values]
        if not found:
            return []
        largest = torch.stack([value.to(found[0][1].device) for _, value in found]).tolist()
        pairs = zip(found, largest, strict=True)
        return list(dict.fromkeys(name for (name, _), value in pairs if not math.isfinite(value)))

    @torch.no_grad()
    def sync_params(self) -> None:
        """Set every bf16 parameter to its master, rounded to nearest even; others are theirs."""
        copies = self._copies()
        if copies:
            torch._foreach_copy_(list(copies), list(copies.values()))

    @torch.no_grad()
    def sync_masters(self) -> None:
        """Set every master to its bf16 parameter, after weights were loaded into the model."""
        copies = self._copies()
        if copies:
            torch._foreach_copy_(list(copies.values()), list(copies))

    def __getstate__(self) -> dict[str, Any]:
        own = {"_engine": self._engine, "_decays": self._decays, "_params": self._params}
        return {**super().__getstate__(), **own}

    def _update(self, params: list[Tensor], group: Mapping[str, Any], *, fused: bool) -> None:
        states = [self.state[param] for param in params]
        masters = [s.get("master", p) for s, p in zip(states, params, strict=True)]
        adamw(
            masters,
            [_gradient(p, master) for p, master in zip(params, masters, strict=True)],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=not fused,
            fused=fused,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _is_fused(self, param: Tensor) -> bool:
        return self._engine != "foreach" and fused_obstacle(param) is None

    def _copies(self) -> dict[Tensor, Tensor]:
        """Return the parameters that are not their own masters, with these."""
        states = ((param, self.state[param]) for param in self._params.values())
        return {param: state["master"] for param, state in states if "master" in state}

    def _param(self, name: str) -> Tensor:
        try:
            return self._params[name]
        except (KeyError, TypeError):
            raise KeyError(
                f"no parameter {name!r} in this optimizer; it has {', '.join(self._params)}"
            ) from None

    def _check_new(self, pairs: list[tuple[str, Tensor]]) -> None:
        params = dict(self._params)
        names = {param: name for name, param in params.items()}
        for name, param in pairs:
            if name in params or param in names:
                raise ValueError(
                    f"parameter {name!r} is listed twice (first as {names.get(param, name)!r})"
                )
            params[name], names[param] = param, name
            obstacle = fused_obstacle(param)
            if self._engine == "fused" and obstacle is not None:
                raise ValueError(f"engine 'fused' does not run for parameter {name!r}: {obstacle}")


def _new_state(param: Tensor, *, fused: bool) -> dict[str, Tensor]:
    dtype = MASTER_DTYPES[param.dtype]
    master = param if param.dtype == dtype else param.detach().to(dtype)
    state = {
        # Where torch.optim.AdamW keeps it: beside the data for the fused kernel, else on the CPU.
        "step": torch.zeros((), dtype=torch.float32, device=param.device if fused else "cpu"),
        "exp_avg": torch.zeros_like(master, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(master, requires_grad=False),
    }
    return state if master is param else {**state, "master": master}


def _gradient(param: Tensor, master: Tensor) -> Tensor:
    """Return the gradient in the master's dtype, in memory order as the fused kernel reads it."""
    grad = grad_of(param)
    if grad is None:
        return torch.zeros_like(master)
    return grad.to(master.dtype).contiguous()
