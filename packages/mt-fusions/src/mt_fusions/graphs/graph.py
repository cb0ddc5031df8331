"""A callable as a CUDA graph: captured once with static inputs, then replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from mt_files import check_type
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from mt_fusions.graphs.eager_report import EagerReport
from mt_fusions.graphs.graph_pool import GraphPool
from mt_fusions.graphs.held import Held, State, tensors_of
from mt_fusions.graphs.static_tensors import StaticTensors, device_of
from mt_fusions.graphs.tape import GraphError, Script, Tape

P = ParamSpec("P")
R = TypeVar("R")


class Graph(Generic[P, R]):
    """A callable as a CUDA graph; on a CPU the callable itself, with the same rules checked.

    Use it for a complete piece of work: forward and backward of a micro-batch with `.backward()`
    inside, a training step with its optimizer, a decoding step. For a layer inside a larger
    differentiated function use `AutogradGraph`.

    The first `warmup` calls run the callable on a side stream, and the last of them is recorded.
    The next call captures the graph. Later calls copy their tensors into the static inputs, replay,
    and return the static outputs, which the next call overwrites. Every call does its work exactly
    once, so side effects (parameters, moments, a cache) are right from the first call on. The
    Python code inside runs until the capture and never again.

    On a CPU every call runs the callable and is compared with the recording: the same operations,
    with the same numbers, on the same memory. Anything that a graph would silently get wrong raises
    `GraphError`: a Python number that changes, a branch in Python, memory that moved. The results
    are bit-equal to the callable's.

    Random numbers must come from input counters (`mt_parallel_state.random_uniform`). A callable
    with a random generator is not captured.

    Args:
        function: Maps nested tensors to nested tensors. Other arguments must stay the same.
        state: A module or named tensors that the callable reads and writes beside its inputs. Their
            addresses are checked before each replay; unnamed memory is checked on a CPU only.
        name: Name of the callable in messages.
        pool: A pool to share with other graphs.
        warmup: Number of calls before the capture, at least 1.
        on_eager: A function such as `print`, called once with each reason why calls are not
            replayed. None raises an error instead.

    Attributes:
        reason: Why calls run the callable directly, or None.
        replays: Number of replayed calls, including stand-ins on a CPU.

    Raises:
        GraphError: In a call, without `on_eager`: the callable can't be captured, or a call does
            not fit the capture. With it too, on a CPU: a replay would differ from the callable.

    Example:
        >>> weight = torch.ones(3)
        >>> scaled = Graph(lambda x: x * weight, state={"weight": weight}, warmup=1)
        >>> [scaled(torch.full((3,), float(n))).tolist()[0] for n in range(3)]
        [0.0, 1.0, 2.0]
        >>> scaled.replays
        2
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
            raise ValueError(f"warmup={warmup} calls: use 1 or more, as the capture follows one")
        self.reason: str | None = None
        self.replays = 0
        self._function, self._state, self._name = function, state, name
        self._pool, self._warmup = pool or GraphPool(), warmup
        self._report = EagerReport(name, on_eager)
        self._held, self._script = Held(state, gradients=True), Script()
        self._calls = 0
        self._inputs: StaticTensors | None = None
        self._outputs: tuple[list[Any], TreeSpec] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Do what the callable does, by replaying it where it was captured."""
        leaves, form = tree_flatten((args, kwargs))
        if self._inputs is None:
            self._inputs = StaticTensors(leaves, form, device_of(leaves, tensors_of(self._state)))
        why = self.reason or self._inputs.misfit(leaves, form)
        if why is None and self._outputs is not None:
            why = self._held.moved(self._script.outside)
        if why is not None:
            self._report(why)
            return self._function(*args, **kwargs)
        self._inputs.take(leaves)
        self._calls += 1
        if self._calls < self._warmup:
            with self._pool.aside(self._inputs.device):
                return self._run()
        return cast("R", self._replayed())

    def _run(self) -> R:
        args, kwargs = cast("StaticTensors", self._inputs).arguments()
        return self._function(*args, **kwargs)

    def _replayed(self) -> Any:
        device = cast("StaticTensors", self._inputs).device
        if self._calls == self._warmup:
            return self._watched()
        self.replays += 1
        if device.type != "cuda":
            return self._stand_in()
        if self._graph is None:
            try:
                self._capture(device)
            except RuntimeError as error:
                self.replays -= 1
                self.reason = f"the capture failed: {error}"
                self._report(self.reason)
                return self._run()
        cast("torch.cuda.CUDAGraph", self._graph).replay()
        self._held.restore_gradients()
        return self._returned()

    def _tape(self, *, checks: bool) -> Tape:
        inputs = cast("StaticTensors", self._inputs)
        sources = self._held.names() | inputs.names()
        return Tape(
            self._script, name=self._name, sources=sources, device=inputs.device.type, checks=checks
        )

    def _watched(self) -> Any:
        device = cast("StaticTensors", self._inputs).device
        self._held.note()
        tape = self._tape(checks=False)
        with self._pool.aside(device), tape.running():
            output = self._run()
        self.reason = self._script.obstacle
        if self.reason is not None:
            self._report(self.reason)
            return output
        if device.type != "cuda":
            self._held.note_gradients()
            self._outputs = tree_flatten(detached(output))
        return output

    def _capture(self, device: torch.device) -> None:
        graph = torch.cuda.CUDAGraph()
        self._held.note()
        with self._pool.capturing(graph, device):
            output = self._run()
        self._held.note_gradients()
        self._outputs, self._graph = tree_flatten(detached(output)), graph

    def _stand_in(self) -> Any:
        """Run the callable, and leave its results where a replay would."""
        tape = self._tape(checks=True)
        with tape.running():
            output = self._run()
        leaves, form = tree_flatten(output)
        held, then = cast("tuple[list[Any], TreeSpec]", self._outputs)
        if form != then:
            raise GraphError(f"{self._name} returned {form}, and {then} at capture")
        for old, new in zip(held, leaves, strict=True):
            if isinstance(new, Tensor) and tape.has_made(new):
                with torch.no_grad():
                    old.copy_(new)
            elif not isinstance(new, Tensor) and new != old:
                raise GraphError(f"{self._name} returned {new!r}, and {old!r} at capture")
        self._held.restore_gradients(tape)
        return self._returned()

    def _returned(self) -> Any:
        return tree_unflatten(*cast("tuple[list[Any], TreeSpec]", self._outputs))


def detached(output: Any) -> Any:
    """Return an output without its autograd graph."""
    return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, output)
