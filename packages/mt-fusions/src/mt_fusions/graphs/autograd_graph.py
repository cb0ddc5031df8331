"""A differentiated callable as two CUDA graphs: its forward and its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from mt_files import check_type
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from mt_fusions.graphs.eager_report import EagerReport
from mt_fusions.graphs.graph_pool import GraphPool
from mt_fusions.graphs.held import Held, State, tensors_of
from mt_fusions.graphs.static_tensors import StaticTensors, device_of
from mt_fusions.graphs.tape import GraphError, Script, Tape

P = ParamSpec("P")
R = TypeVar("R")


class AutogradGraph(Generic[P, R]):
    """A differentiable callable as two CUDA graphs, for forward and backward.

    Use it for one layer or one pipeline stage. Gradients flow to the inputs and to the parameters
    of `state`, whose hooks are called as usual. A pass that waits for its backward has a slot with
    its own memory, so that other passes may start before it ends (1F1B). Slots are captured on
    demand and are free again after the backward, or when the pass is dropped. A later pass in the
    same slot overwrites the outputs.

    Like `Graph`, it runs the callable in the first `warmup` calls, watches the next call and its
    backward, and then captures (on a CPU: checks). Without gradients it just calls the callable.
    Side effects of the backward, such as adding to a gradient buffer, are replayed too; Python code
    around them belongs in `around`.

    Args:
        function: Maps nested tensors to nested tensors; other arguments must stay the same.
        state: A module or named tensors that the callable reads; they may receive gradients.
        name: Name of the callable in messages.
        pool: A pool to share with other graphs.
        warmup: Number of calls with gradients before the watched one, at least 1.
        on_eager: As for `Graph`.

    Attributes:
        reason: Why calls run the callable directly, or None.
        replays: Number of replayed forward passes, including stand-ins on a CPU.
        around: A function called with True before each replayed backward and with False after it,
            or None.

    Raises:
        GraphError: As for `Graph`; or a backward comes twice, or after its slot had another pass.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> graph = AutogradGraph(layer, state=layer, warmup=1)
        >>> for _ in range(4):
        ...     graph(torch.ones(1, 2)).sum().backward()
        >>> layer.bias.grad.tolist(), graph.replays
        ([4.0, 4.0], 2)
    """

    def __init__(
        self,
        function: Callable[P, R],
        *,
        state: State = None,
        name: str = "the callable",
        pool: GraphPool | None = None,
        warmup: int = 2,
        on_eager: Callable[[str], object] | None = None,
    ) -> None:
        check_type("warmup", warmup, int)
        if warmup < 1:
            raise ValueError(f"warmup={warmup}: use 1 or more")
        self.reason: str | None = None
        self.replays = 0
        self._function, self._state, self.name = function, state, name
        self.pool, self._warmup = pool or GraphPool(), warmup
        self.around: Callable[[bool], object] = lambda _: None
        self._report = EagerReport(name, on_eager)
        self.held = Held(state, gradients=False)
        self.forward, self.backward = Script(), Script()
        self.is_watched = False
        self._calls = 0
        self._slots: list[_Slot] = []

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Do what the callable does, by replaying it where it was captured."""
        if not torch.is_grad_enabled():
            return self._function(*args, **kwargs)
        leaves, form = tree_flatten((args, kwargs))
        why = self.reason
        if why is None and self._slots:
            why = self._slots[0].inputs.misfit(leaves, form)
            why = why or self.held.moved(self.forward.outside | self.backward.outside)
        if why is not None:
            self._report(why)
            return self._function(*args, **kwargs)
        device = device_of(leaves, tensors_of(self._state))
        self._calls += 1
        waits = device.type == "cuda" and self._slots and not self.is_watched
        if self._calls <= self._warmup or waits:
            with self.pool.aside(device):
                return self._function(*args, **kwargs)
        slot = self._slot(leaves, form, device)
        if slot is None:
            most = self.pool.slots
            self._report(f"more than slots={most} passes wait for their backward; use more slots")
            return self._function(*args, **kwargs)
        return slot.run(leaves)

    def refuse(self, why: str) -> None:
        """Run the callable as it is from now on."""
        self.reason = why
        self._report(why)

    def parameters(self) -> list[Tensor]:
        """Return the tensors of the state that need gradients."""
        return [x for _, x in tensors_of(self._state) if x.requires_grad]

    def call(self, inputs: StaticTensors) -> Any:
        """Run the callable on static inputs."""
        args, kwargs = inputs.arguments()
        return cast("Callable[..., Any]", self._function)(*args, **kwargs)

    def _slot(self, leaves: Sequence[Any], form: TreeSpec, device: torch.device) -> _Slot | None:
        found = next((slot for slot in self._slots if slot.is_free), None)
        if found is None and len(self._slots) < self.pool.slots:
            found = _Slot(self, StaticTensors(leaves, form, device))
            self._slots.append(found)
        return found


class _Lease:
    """A pass in a slot; the slot is free when it ends, or is dropped."""

    def __init__(self, slot: _Slot) -> None:
        self.slot = slot
        slot.is_free = False
        slot.turn += 1
        self._turn = slot.turn

    def end(self) -> None:
        if self.is_current:
            self.slot.is_free = True
            self.slot.turn += 1

    @property
    def is_current(self) -> bool:
        return self.slot.turn == self._turn

    def __del__(self) -> None:
        self.end()


class _Slot:
    """Memory of one pass: inputs, outputs, saved tensors and gradients."""

    def __init__(self, owner: AutogradGraph[..., Any], inputs: StaticTensors) -> None:
        self.owner, self.inputs = owner, inputs
        self.is_free, self.turn = True, 0
        self._graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None
        self._kept: list[Any] = []  # outputs with their graph
        self._tape_before: Tape | None = None  # of the forward
        self._form: TreeSpec | None = None
        self._outputs: list[Any] = []
        self._grads: list[Tensor | None] = []  # of outputs
        self._results: list[Tensor | None] = []  # gradients of what is differentiated
        self._keeps: list[bool] = []

    def run(self, leaves: Sequence[Any]) -> Any:
        """Do one pass."""
        self.inputs.take(leaves)
        tensors = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        # Who keeps a gradient as it came, as `.grad` of a leaf does, must not have ours.
        self._keeps = [x.is_leaf for x in tensors]
        outputs = list(_Pass.apply(_Lease(self), *tensors, *self.owner.parameters()))
        return tree_unflatten(outputs, cast("TreeSpec", self._form))

    def forward(self) -> list[Any]:
        """Compute the outputs, where they always are."""
        owner = self.owner
        if self.inputs.device.type == "cuda" and owner.is_watched:
            self._capture()
        if self._graphs is not None:
            self._graphs[0].replay()
            owner.replays += 1
            return self._outputs
        is_first = not owner.forward.operations
        if is_first:
            owner.held.note()
        tape = self._tape(owner.forward, checks=not is_first)
        with owner.pool.aside(self.inputs.device), torch.enable_grad(), tape.running():
            output = owner.call(self.inputs)
        self._tape_before = tape
        self._keep(output)
        if is_first and owner.forward.obstacle is not None:
            owner.refuse(owner.forward.obstacle)
        owner.replays += not is_first
        return self._outputs

    def backward(self, lease: _Lease, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Compute the gradients of the inputs and parameters."""
        owner = self.owner
        if not lease.is_current:
            raise GraphError(
                f"{owner.name}: a backward came twice, or after another pass had its memory; keep "
                "no graph (retain_graph), and go backward once"
            )
        for own, new in zip(self._grads, grads, strict=True):
            if own is not None:
                own.zero_() if new is None else own.copy_(new)
        owner.around(True)  # noqa: FBT003
        if self._graphs is not None:
            self._graphs[1].replay()
        else:
            self._stand_in()
        owner.around(False)  # noqa: FBT003
        keeps = [*self._keeps, *(True for _ in owner.parameters())]
        pairs = zip(self._results, keeps, strict=True)
        return [x if x is None else x.clone() if keep else x.detach() for x, keep in pairs]

    def _stand_in(self) -> None:
        owner = self.owner
        is_first = not owner.backward.operations
        tape = self._tape(owner.backward, checks=not is_first)
        if self._tape_before is not None:
            tape.follow(self._tape_before)
        with owner.pool.aside(self.inputs.device), tape.running():
            found = self._differentiate(self._kept, self._grads)
        self._hold(found)
        self._kept = []
        if is_first and owner.backward.obstacle is not None:
            owner.refuse(owner.backward.obstacle)
        owner.is_watched = owner.reason is None

    @property
    def differentiable(self) -> list[bool]:
        """Whether each output has a gradient."""
        return [x is not None for x in self._grads]

    def _sources(self) -> list[Tensor]:
        leaves = (x for x in self.inputs.leaves if isinstance(x, Tensor) and x.requires_grad)
        return [*leaves, *self.owner.parameters()]

    def _tape(self, script: Script, *, checks: bool) -> Tape:
        sources = self.owner.held.names() | self.inputs.names()
        grads = ((i, x) for i, x in enumerate(self._grads) if x is not None)
        sources |= {x.data_ptr(): f"the gradient of output {i}" for i, x in grads}
        device = self.inputs.device.type
        return Tape(script, name=self.owner.name, sources=sources, device=device, checks=checks)

    def _capture(self) -> None:
        """Capture both, where that has not happened; kernels run when they are replayed."""
        if self._graphs is not None:
            return
        device, pool = self.inputs.device, self.owner.pool
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        try:
            with torch.enable_grad(), pool.capturing(forward, device):
                output = self.owner.call(self.inputs)
            kept, form = tree_flatten(output)
            outputs = [y.detach() if isinstance(y, Tensor) else y for y in kept]
            grads = _gradients_like(kept)
            with pool.capturing(backward, device):
                # Kept, so that no other graph of the pool is given the memory of what is saved.
                found = self._differentiate(kept, grads, again=True)
        except RuntimeError as error:
            self.owner.refuse(f"the capture failed: {error}")
            return
        self._kept, self._form, self._outputs, self._grads = kept, form, outputs, grads
        self._results, self._graphs = found, (forward, backward)

    def _differentiate(
        self, kept: Sequence[Any], grads: Sequence[Tensor | None], *, again: bool = False
    ) -> list[Tensor | None]:
        pairs = [(y, g) for y, g in zip(kept, grads, strict=True) if g is not None]
        if not pairs:
            return [None] * len(self._sources())
        ends, incoming = map(list, zip(*pairs, strict=True))
        how: Any = {"allow_unused": True, "retain_graph": again}
        return list(torch.autograd.grad(ends, self._sources(), incoming, **how))

    def _keep(self, output: Any) -> None:
        """Leave the outputs where they always are, and keep the graph."""
        self._kept, form = tree_flatten(output)
        if self._form is None:
            self._form = form
            self._outputs = [y.detach().clone() if isinstance(y, Tensor) else y for y in self._kept]
            self._grads = _gradients_like(self._kept)
            return
        if form != self._form:
            raise GraphError(f"{self.owner.name} returned {form}, and {self._form} at first")
        for own, new in zip(self._outputs, self._kept, strict=True):
            if isinstance(own, Tensor):
                own.copy_(new.detach())
            elif own != new:
                raise GraphError(f"{self.owner.name} returned {new!r}, and {own!r} at first")

    def _hold(self, found: list[Tensor | None]) -> None:
        """Leave the gradients where they always are."""
        if not self._results:
            self._results = [None if x is None else x.clone() for x in found]
            return
        for own, new in zip(self._results, found, strict=True):
            if own is not None and new is not None:
                own.copy_(new)


class _Pass(torch.autograd.Function):
    """One pass in a slot, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, lease: _Lease, *tensors: Tensor) -> tuple[Any, ...]:
        ctx.lease, ctx.number = lease, len(tensors)
        ctx.set_materialize_grads(False)
        slot = lease.slot
        outputs = [y.detach() if isinstance(y, Tensor) else y for y in slot.forward()]
        plain = zip(outputs, slot.differentiable, strict=True)
        ctx.mark_non_differentiable(*(y for y, d in plain if isinstance(y, Tensor) and not d))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        lease: _Lease = ctx.lease
        found = lease.slot.backward(lease, grads)
        lease.end()
        return None, *found


def _gradients_like(outputs: Sequence[Any]) -> list[Tensor | None]:
    """Return memory for the gradient of each differentiable output."""
    return [
        torch.zeros_like(y) if isinstance(y, Tensor) and y.requires_grad else None for y in outputs
    ]
