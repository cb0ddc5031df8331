"""AdamW whose state has names and full precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from mt_data_parallel import grad_of
from torch import Tensor

# The functional form of torch.optim.AdamW: the class imports torch._dynamo when it is constructed
# (seconds, once per process), the function runs the same kernels without it.
from torch.optim.adamw import adamw

ENGINES = ("auto", "fused", "foreach")
_FUSED_DEVICES = ("cpu", "cuda", "xpu")
_MASTER_DTYPES = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
}

DecayFilter = Callable[[str, Tensor], bool]


def default_decay_filter(name: str, param: Tensor) -> bool:
    """Say whether weight decay applies to a parameter: not to biases, norms and other vectors.

    Args:
        name: The parameter's name.
        param: The parameter; a shard has as many dimensions as the whole.

    Returns:
        False for names ending in "bias" (whatever their shape) and for tensors of fewer than two
        dimensions, else True.
    """
    return param.ndim >= 2 and not name.endswith("bias")


def supports_fused(param: Tensor) -> tuple[bool, str]:
    """Say whether torch's fused AdamW kernel takes this parameter's master, with the reason.

    Args:
        param: A parameter.

    Returns:
        Whether it does, and one sentence why.
    """
    kind = param.device.type
    if kind not in _FUSED_DEVICES:
        return False, f"no fused AdamW kernel for {kind}; there is one for {_FUSED_DEVICES}"
    if not param.is_contiguous():
        return False, "the fused AdamW kernel reads memory in order, and this one is not contiguous"
    return True, f"torch has a fused AdamW kernel for {kind}"


@dataclass(slots=True, eq=False)
class _State:
    """One parameter and its optimizer state, all of the parameter's shape."""

    name: str
    param: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor


class AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with fp32 masters and named state.

    bf16 parameters have an fp32 master copy that is updated and rounded back; fp32 and fp64
    parameters are their own master. Moments have the master's dtype and the parameter's shape, so
    they are sharded exactly like the parameter, and are allocated at once: a checkpoint is loaded
    by writing into `master`, `exp_avg` and `exp_avg_sq`, setting `step_count` and calling
    `sync_params`; weights loaded into the parameters themselves are taken over by `sync_masters`.
    Gradients are read through `mt_data_parallel.grad_of`; a missing one counts as zero, as it would
    inside a GradBuffer (torch.optim skips such a parameter instead).

    The arithmetic is that of torch.optim.AdamW, called through torch's functional form: for fp32
    and fp64 parameters results are bit-equal to torch's in the same mode (fused or foreach).

    Args:
        named_params: Pairs of name and parameter; those with ``requires_grad=False`` are left out.
        lr: Learning rate, until `step` is given another one.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay, multiplied by the learning rate.
        decay_filter: Called with name and parameter, says whether weight decay applies;
            `default_decay_filter` if None.
        engine: "fused", "foreach", or "auto" for fused wherever `supports_fused` says yes.

    Raises:
        ValueError: A setting is out of range, a parameter is listed twice, or the engine does not
            run there.
        TypeError: A parameter is not bf16, fp32 or fp64.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = AdamW(model.named_parameters(), lr=1e-3)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step(lr=5e-4)
        >>> optimizer.step_count, optimizer.exp_avg("weight").shape
        (1, torch.Size([2, 4]))
    """

    def __init__(
        self,
        named_params: Iterable[tuple[str, Tensor]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        decay_filter: DecayFilter | None = None,
        engine: str = "auto",
    ) -> None:
        _check_settings(betas, eps, weight_decay)
        if engine not in ENGINES:
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}; got {engine!r}")
        self.lr = _checked_lr(lr)
        self._betas = betas
        self._eps = eps
        decays = decay_filter or default_decay_filter
        self._states: dict[str, _State] = {}
        self._groups: dict[tuple[float, bool], list[_State]] = {}
        seen: dict[int, str] = {}
        for name, param in named_params:
            if not param.requires_grad:
                continue
            if name in self._states or id(param) in seen:
                raise ValueError(
                    f"parameter {name!r} is listed twice (first as {seen.get(id(param), name)!r})"
                )
            seen[id(param)] = name
            fused = _choose_fused(name, param, engine)
            state = self._states[name] = _new_state(name, param, fused=fused)
            decay = weight_decay if decays(name, param) else 0.0
            self._groups.setdefault((decay, fused), []).append(state)
        self._step_count = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, in the order given."""
        return tuple(self._states)

    @property
    def step_count(self) -> int:
        """Steps taken; set it after loading the moments of a checkpoint."""
        return self._step_count

    @step_count.setter
    def step_count(self, value: int) -> None:
        if value < 0:
            raise ValueError(f"step_count must be 0 or more, got {value}")
        self._step_count = value
        for state in self._states.values():
            state.step.fill_(float(value))

    def master(self, name: str) -> Tensor:
        """Return the full-precision parameter: the parameter itself, or its fp32 copy for bf16.

        Shape:
            The parameter's. Writing into it changes the state; call `sync_params` afterwards.
        """
        return self._state(name).master.detach()

    def exp_avg(self, name: str) -> Tensor:
        """Return the running mean of the gradient.

        Shape:
            The parameter's. Writing into it changes the state.
        """
        return self._state(name).exp_avg

    def exp_avg_sq(self, name: str) -> Tensor:
        """Return the running mean of the squared gradient.

        Shape:
            The parameter's. Writing into it changes the state.
        """
        return self._state(name).exp_avg_sq

    @torch.no_grad()
    def step(self, lr: float | None = None) -> None:
        """Update every parameter from its gradient.

        Args:
            lr: Learning rate of this step; by default that of the last one.

        Raises:
            ValueError: `lr` is negative or not finite.
        """
        if lr is not None:
            self.lr = _checked_lr(lr)
        self._step_count += 1
        for (decay, fused), states in self._groups.items():
            adamw(
                [s.master for s in states],
                [_gradient(s) for s in states],
                [s.exp_avg for s in states],
                [s.exp_avg_sq for s in states],
                [],
                [s.step for s in states],
                foreach=not fused,
                fused=fused,
                amsgrad=False,
                beta1=self._betas[0],
                beta2=self._betas[1],
                lr=self.lr,
                weight_decay=decay,
                eps=self._eps,
                maximize=False,
            )
        self.sync_params()

    @torch.no_grad()
    def sync_params(self) -> None:
        """Set every bf16 parameter to its master, rounded to nearest even; others are theirs."""
        copies = [s for s in self._states.values() if s.master is not s.param]
        if copies:
            torch._foreach_copy_([s.param for s in copies], [s.master for s in copies])

    @torch.no_grad()
    def sync_masters(self) -> None:
        """Set every master to its bf16 parameter, after weights were loaded into the model."""
        copies = [s for s in self._states.values() if s.master is not s.param]
        if copies:
            torch._foreach_copy_([s.master for s in copies], [s.param for s in copies])

    def _state(self, name: str) -> _State:
        try:
            return self._states[name]
        except KeyError:
            raise KeyError(
                f"no parameter {name!r} in this optimizer; it has {', '.join(self._states)}"
            ) from None


def _new_state(name: str, param: Tensor, *, fused: bool) -> _State:
    dtype = _MASTER_DTYPES[param.dtype]
    own = param.dtype == dtype
    master = param if own else param.detach().to(dtype)
    return _State(
        name=name,
        param=param,
        master=master,
        exp_avg=torch.zeros_like(master, requires_grad=False),
        exp_avg_sq=torch.zeros_like(master, requires_grad=False),
        # Where torch.optim.AdamW keeps it: beside the data for the fused kernel, else on the CPU.
        step=torch.zeros((), dtype=torch.float32, device=param.device if fused else "cpu"),
    )


def _gradient(state: _State) -> Tensor:
    """Return the gradient in the master's dtype, in memory order as the fused kernel reads it."""
    grad = grad_of(state.param)
    if grad is None:
        return torch.zeros_like(state.master)
    return grad.to(state.master.dtype).contiguous()


def _choose_fused(name: str, param: Tensor, engine: str) -> bool:
    if param.dtype not in _MASTER_DTYPES:
        allowed = ", ".join(str(dtype) for dtype in _MASTER_DTYPES)
        raise TypeError(f"parameter {name!r} is {param.dtype}; AdamW takes {allowed}")
    supported, reason = supports_fused(param)
    if engine == "fused" and not supported:
        raise ValueError(f"engine 'fused' does not run for parameter {name!r}: {reason}")
    return supported and engine != "foreach"


def _checked_lr(lr: float) -> float:
    if not (math.isfinite(lr) and lr >= 0):
        raise ValueError(f"lr must be 0 or more and finite, got {lr}")
    return float(lr)


def _check_settings(betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")
    if not eps >= 0:
        raise ValueError(f"eps must be 0 or more, got {eps}")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must be 0 or more, got {weight_decay}")
