"""What a stage is, what it may offer beyond that, and what is said when it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias, TypeGuard, TypeVar, runtime_checkable

from mt_parallel_state import WgradStore
from mt_schedule import Action, Op
from torch import Tensor

from mt_pipeline.transfer import TensorSpec, TransferError

M_contra = TypeVar("M_contra", contravariant=True)
Losses: TypeAlias = dict[str, Tensor]
"""What a stage adds to the objective, by name: each a tensor with one number."""


class Stage(Protocol[M_contra]):
    """What one stage computes: any module or function with this signature."""

    def __call__(self, x: Tensor | None, microbatch: M_contra, /) -> Any:
        """Run the stage forward.

        Args:
            x: The previous stage's output, None on the first stage.
            microbatch: The micro-batch; each stage takes from it what it needs.

        Returns:
            On the last stage anything that the objective understands: a tensor, or a nest of
            dicts, lists and tuples with tensors in it. On others one tensor, as the activation
            spec says; or, with losses of its own, `(tensor, losses)`: a mapping from names to
            numbers, which the objective is called with too.
        """
        ...


@runtime_checkable
class SplitStage(Protocol[M_contra]):
    """A stage that can be run in parts, so that two micro-batches take turns.

    In an overlapped pair of a schedule the parts of a forward and those of another micro-batch's
    backward alternate. A part that ends by starting an all-to-all, whose result the next part
    waits for, has it hidden behind the other micro-batch's part. The same holds backward, where
    the parts run in reverse.

    The parts are called in the place of the stage, so what is wrapped around the whole of it takes
    no part: forward hooks do not fire, and a stage that is itself given to `fully_shard` is
    refused. Hook, compile and shard the submodules that the parts call. A `torch.compile(stage)`
    is called whole.
    """

    def __call__(self, x: Tensor | None, microbatch: M_contra, /) -> Any:
        """Run the whole stage, as `Stage`."""
        ...

    def parts(self, microbatch: M_contra, /) -> Sequence[Callable[[Any], Any]]:
        """The parts of the forward of a micro-batch, in order.

        Returns:
            Functions to call one after the other: the first with the stage's input, each other
            with what the one before it returned; the last one returns what the stage returns.
            What is handed on is a tensor, or a nest of dicts, lists and tuples with tensors in it
            (tensors inside other objects are not found). Gradients flow between parts through
            what is handed on, and through nothing else.
        """
        ...


@runtime_checkable
class DefersWeightGradients(Protocol):
    """A stage whose layers can leave weight gradients for later.

    For a schedule with split backwards. Where a stage does not offer it, its autograd graph is
    cut (`backward_input`), which keeps more memory until W.
    """

    @property
    def wgrad_store(self) -> WgradStore:
        """What its layers were given when they were built; the executor switches it on for I."""
        ...


class StageError(RuntimeError):
    """A stage or a function given to the executor raised. Every rank of the pipeline raises it.

    Attributes:
        stage: The stage that raised.
        microbatch: Index of the micro-batch that it worked on.
        op: What it did: `Op.F`, `Op.B`, `Op.I`, `Op.W`, or a hook.
        rank: The pipeline rank that holds the stage.
        action: These three as an action.
        reason: Type and text of what was raised.
    """

    def __init__(self, action: Action, rank: int, reason: str) -> None:
        self.stage, self.microbatch, self.op = action.stage, action.microbatch, action.op
        self.action, self.rank, self.reason = action, rank, reason
        what = f"the {_CALLED[action.op]}"
        if not action.op.is_hook:
            what += f" of micro-batch {action.microbatch}"
        super().__init__(f"stage {action.stage} on pipeline rank {rank} failed in {what}: {reason}")

    def __reduce__(self) -> tuple[type[StageError], tuple[Action, int, str]]:
        return type(self), (self.action, self.rank, self.reason)


_CALLED = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input backward",
    Op.W: "weight backward",
    Op.GATHER: "parameter gather",
    Op.REDUCE: "gradient reduction",
}


@contextmanager
def naming(action: Action, rank: int, *, where: str = "") -> Iterator[None]:
    """Name the stage and the micro-batch in whatever is raised, and say where, if not there."""
    try:
        yield
    except (StageError, TransferError):
        raise
    except Exception as error:
        raise StageError(action, rank, f"{where}{type(error).__name__}: {error}") from error


def splits(stage: object) -> TypeGuard[SplitStage[Any]]:
    """Whether a stage can be run in parts: it offers them, and was not compiled as a whole."""
    return isinstance(stage, SplitStage) and not is_kind(stage, "OptimizedModule")


def is_kind(stage: object, name: str) -> bool:
    """Whether torch has made a stage into one of its kinds, without importing where it lives."""
    return any(kind.__name__ == name for kind in type(stage).__mro__)


def split_output(output: Any) -> tuple[Any, Losses]:
    """Take what a stage before the last one returned apart: an activation, and its losses.

    Raises:
        TypeError: A loss is no number.
    """
    if not isinstance(output, tuple) or len(output) != 2 or not isinstance(output[1], Mapping):
        return output, {}
    x, losses = output
    for name, loss in losses.items():
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            got = type(loss).__name__
            if isinstance(loss, Tensor):
                got = f"a {tuple(loss.shape)} tensor of {loss.dtype}"
            raise TypeError(
                f"loss {name!r} of a stage must be a tensor with one floating-point number, got "
                f"{got}; sum it over what it was computed from"
            )
    return x, dict(losses)


def require_weighed(goal: Any, losses: Losses) -> Tensor:
    """Return what an objective made of a stage's own losses where it can be, else TypeError."""
    names = ", ".join(map(repr, losses))
    if not isinstance(goal, Tensor) or goal.numel() != 1:
        got = f"a {tuple(goal.shape)} tensor" if isinstance(goal, Tensor) else type(goal).__name__
        raise TypeError(
            f"the objective must return one number for a stage's own losses ({names}), got {got}"
        )
    if not goal.requires_grad and any(loss.requires_grad for loss in losses.values()):
        raise TypeError(
            f"the objective gives a stage's own losses ({names}) no gradient: weigh and add them, "
            "without detach or item"
        )
    return goal


def require_scalar(loss: Any) -> Tensor:
    """Return an objective's value where it can be one, else raise TypeError."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = type(loss).__name__
        if isinstance(loss, Tensor):
            got = f"a {tuple(loss.shape)} tensor with requires_grad={loss.requires_grad}"
        raise TypeError(
            "the objective must return one number that has a gradient, or a function that gives "
            f"the output's gradient, got {got}"
        )
    return loss


def require_activation(
    output: Any, spec: TensorSpec | None, *, said_by: str = "activation()"
) -> Tensor:
    """Return a stage's output where it can be handed on, else raise TypeError or ValueError."""
    if not isinstance(output, Tensor):
        which = "a stage before the last one" if said_by == "activation()" else "the last stage"
        raise TypeError(f"{which} must return one tensor, got {type(output).__name__}")
    if spec is not None:
        got = TensorSpec(tuple(output.shape), output.dtype)
        if got != TensorSpec(tuple(spec.shape), spec.dtype):
            raise ValueError(f"the stage returned {got}, but {said_by} says {spec}")
    return output


def detached(output: Any) -> Any:
    """The same nest with its tensors outside of any graph."""
    return mapped(output, Tensor.detach)


def mapped(output: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same nest of dicts, lists and tuples with its tensors changed, in order."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, Mapping):
        return {name: mapped(value, change) for name, value in output.items()}
    if isinstance(output, list | tuple):
        values = [mapped(value, change) for value in output]
        if hasattr(output, "_fields"):  # a named tuple takes its fields one by one
            return type(output)(*values)
        return type(output)(values)
    return output
