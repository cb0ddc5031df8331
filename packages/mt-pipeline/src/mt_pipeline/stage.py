"""Protocols of stages, checks of their return values, and the error of a failed stage."""

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
"""Losses of a stage by name, each a tensor with one number."""


class Stage(Protocol[M_contra]):
    """One stage of a model: any module or function with this signature."""

    def __call__(self, x: Tensor | None, microbatch: M_contra, /) -> Any:
        """Run the stage forward.

        Args:
            x: Output of the previous stage; None on the first stage.
            microbatch: The micro-batch, from which each stage takes its fields.

        Returns:
            On the last stage, anything that the objective understands: a tensor, or nested dicts,
            lists and tuples of tensors. On other stages, one tensor that fits the activation spec,
            or `(tensor, losses)` with a mapping from names to losses, which are passed to the
            objective.
        """
        ...


@runtime_checkable
class SplitStage(Protocol[M_contra]):
    """A stage that can be run in parts, so that two micro-batches alternate.

    In an overlapped pair of a schedule, the parts of one micro-batch's forward alternate with the
    parts of another micro-batch's backward. If a part ends by starting an all-to-all whose result
    the next part needs, the other micro-batch's part hides it. The backward runs the parts in
    reverse, and the same holds there.

    The parts are called instead of the stage, so wrappers of the whole stage have no effect:
    forward hooks do not fire, and a stage wrapped by `fully_shard` is refused. Hook, compile and
    shard the submodules that the parts call. A `torch.compile(stage)` is called as a whole.
    """

    def __call__(self, x: Tensor | None, microbatch: M_contra, /) -> Any:
        """Run the whole stage, as in `Stage`."""
        ...

    def parts(self, microbatch: M_contra, /) -> Sequence[Callable[[Any], Any]]:
        """Return the parts of a micro-batch's forward, in order.

        Returns:
            Functions to call one after the other: the first with the stage's input, each later
            one with the previous return value; the last one returns the stage's output. Between
            parts there is a tensor, or nested dicts, lists and tuples of tensors (tensors inside
            other objects are not found). Gradients flow between parts only through these tensors.
        """
        ...


@runtime_checkable
class DefersWeightGradients(Protocol):
    """A stage whose layers can compute weight gradients later.

    It is used by schedules with split backwards. Otherwise the executor cuts the stage's autograd
    graph (`backward_input`), which keeps more memory until W.
    """

    @property
    def wgrad_store(self) -> WgradStore:
        """The store that its layers were built with; the executor switches it on for I."""
        ...


class StageError(RuntimeError):
    """A stage or a function given to the executor raised. Every rank of the pipeline raises it.

    Attributes:
        stage: The stage that raised.
        microbatch: Index of the micro-batch.
        op: The operation: `Op.F`, `Op.B`, `Op.I` or `Op.W`.
        rank: The pipeline rank that holds the stage.
        action: Operation, stage and micro-batch as an action.
        reason: Type and text of the exception.
    """

    def __init__(self, action: Action, rank: int, reason: str) -> None:
        self.stage, self.microbatch, self.op = action.stage, action.microbatch, action.op
        self.action, self.rank, self.reason = action, rank, reason
        what = f"the {_CALLED[action.op]} of micro-batch {action.microbatch}"
        super().__init__(f"stage {action.stage} on pipeline rank {rank} failed in {what}: {reason}")

    def __reduce__(self) -> tuple[type[StageError], tuple[Action, int, str]]:
        return type(self), (self.action, self.rank, self.reason)


_CALLED = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input backward",
    Op.W: "weight backward",
}


@contextmanager
def naming(action: Action, rank: int, *, where: str = "") -> Iterator[None]:
    """Turn an exception into a `StageError` that names the action and, with `where`, its place."""
    try:
        yield
    except (StageError, TransferError):
        raise
    except Exception as error:
        raise StageError(action, rank, f"{where}{type(error).__name__}: {error}") from error


def splits(stage: object) -> TypeGuard[SplitStage[Any]]:
    """Return whether a stage can be run in parts: it has parts, and is not compiled as a whole."""
    return isinstance(stage, SplitStage) and not is_kind(stage, "OptimizedModule")


def is_kind(stage: object, name: str) -> bool:
    """Return whether a stage is an instance of a class of torch, by name, without importing it."""
    return any(kind.__name__ == name for kind in type(stage).__mro__)


def split_output(output: Any) -> tuple[Any, Losses]:
    """Split the return value of a stage before the last one into activation and losses.

    Raises:
        TypeError: A loss is not a number.
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
                f"{got}; sum it over the tokens or rows"
            )
    return x, dict(losses)


def require_weighed(goal: Any, losses: Losses) -> Tensor:
    """Check the value that an objective returned for the losses of an earlier stage."""
    names = ", ".join(map(repr, losses))
    if not isinstance(goal, Tensor) or goal.numel() != 1:
        got = f"a {tuple(goal.shape)} tensor" if isinstance(goal, Tensor) else type(goal).__name__
        raise TypeError(
            f"the objective must return one number for a stage's own losses ({names}), got {got}"
        )
    if not goal.requires_grad and any(loss.requires_grad for loss in losses.values()):
        raise TypeError(
            f"the objective's value for a stage's own losses ({names}) has no gradient: weigh and "
            "add them, without detach or item"
        )
    return goal


def require_scalar(loss: Any) -> Tensor:
    """Check the value that an objective returned for the last stage's output."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = type(loss).__name__
        if isinstance(loss, Tensor):
            got = f"a {tuple(loss.shape)} tensor with requires_grad={loss.requires_grad}"
        raise TypeError(f"the objective must return one number that has a gradient, got {got}")
    return loss


def require_activation(
    output: Any, spec: TensorSpec | None, *, said_by: str = "activation()"
) -> Tensor:
    """Check that a stage's output is one tensor and fits its spec."""
    if not isinstance(output, Tensor):
        which = "a stage before the last one" if said_by == "activation()" else "the last stage"
        raise TypeError(f"{which} must return one tensor, got {type(output).__name__}")
    if spec is not None:
        got = TensorSpec(tuple(output.shape), output.dtype)
        if got != TensorSpec(tuple(spec.shape), spec.dtype):
            raise ValueError(f"the stage returned {got}, but {said_by} says {spec}")
    return output


def detached(output: Any) -> Any:
    """Return the same nested structure with all tensors detached."""
    return mapped(output, Tensor.detach)


def mapped(output: Any, change: Callable[[Tensor], Any]) -> Any:
    """Apply a function to every tensor of nested dicts, lists and tuples, in order."""
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
