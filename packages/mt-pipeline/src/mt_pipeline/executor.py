"""Runs a schedule: one loop over the actions of this rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mt_pipeline.checker import check
from mt_pipeline.communication import Step, forward_only, insert_communication, steps
from mt_pipeline.ir import Action, Op, Schedule
from mt_pipeline.transfer import Mailbox, TensorSpec, TransferError, connect

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)


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
            spec says.
        """
        ...


class StageError(RuntimeError):
    """A stage, or the objective, raised.

    Attributes:
        stage: The stage that raised.
        microbatch: Index of the micro-batch that it worked on.
        op: Whether it was going forward (`Op.F`) or backward (`Op.B`).
    """

    def __init__(self, action: Action, error: Exception) -> None:
        self.stage, self.microbatch, self.op = action.stage, action.microbatch, action.op
        direction = "forward" if action.op is Op.F else "backward"
        super().__init__(
            f"stage {action.stage} failed in the {direction} of micro-batch {action.microbatch}: "
            f"{type(error).__name__}: {error}"
        )


class Executor(Generic[M]):
    """Runs any schedule that `check` finds right, on the ranks of one process group.

    Every rank of the group makes one with the same schedule, at the same point, as they connect
    then; and calls `run` and `evaluate` as often as the others, with as many micro-batches.
    Gradients are added to `.grad`, in the order of the schedule's backwards, which for 1F1B is the
    order of the micro-batches.

    Of an activation that went to the next rank only the autograd graph is kept, not the output
    itself. When a stage raises, the other ranks are left waiting for it until their process group
    times out or its process ends; the run cannot be continued.

    Args:
        schedule: With or without communication.
        stage: What this rank computes; where the schedule gives this rank several stages, all of
            them in ascending order.
        group: The ranks of the pipeline in the schedule's order; None for a schedule of one rank.
        activation: The spec of what stages hand on for a micro-batch. It may differ between
            micro-batches (then it depends on nothing but the micro-batch, as both ends ask for
            it). Not needed when the schedule has one rank.
        device: Where activations live.
        batch_p2p: Whether an exchange is one `batch_isend_irecv` (see `Mailbox`). None: where
            the device is not a CPU.

    Raises:
        ValueError: The schedule has violations, or does not fit the group or the stages given.
        TransferError: Another rank of the group did not come.
    """

    def __init__(
        self,
        schedule: Schedule,
        stage: Stage[M] | Sequence[Stage[M]],
        *,
        group: dist.ProcessGroup | None,
        activation: Callable[[M], TensorSpec] | None = None,
        device: torch.device | str = "cpu",
        batch_p2p: bool | None = None,
    ) -> None:
        size = 1 if group is None else dist.get_world_size(group)
        if size != len(schedule.ranks):
            raise ValueError(
                f"the schedule has {len(schedule.ranks)} ranks but the group has {size}: "
                "pass the pipeline's process group (None is one rank)"
            )
        violations = check(schedule)
        if violations:
            shown = "; ".join(str(violation) for violation in violations[:3])
            raise ValueError(
                f"schedule {schedule.name!r} has {len(violations)} violations: {shown}"
            )
        self.schedule = insert_communication(schedule)
        self.rank = 0 if group is None else dist.get_rank(group)
        if activation is None and size > 1:
            raise ValueError(
                f"activation is None but the schedule has {size} ranks: pass a function from a "
                "micro-batch to the TensorSpec of what stages hand on"
            )
        self._stages = _assign(stage, schedule.stages_of(self.rank), self.rank)
        self._group = group
        self._activation = activation
        self._device = torch.device(device)
        self._batched = self._device.type != "cpu" if batch_p2p is None else batch_p2p
        if group is not None:
            connect(self.schedule, group=group, device=self._device, batched=self._batched)

    def run(self, microbatches: Sequence[M], *, objective: Callable[[Any, M], Tensor]) -> list[Any]:
        """Run forward and backward of every micro-batch; gradients are added to `.grad`.

        Args:
            microbatches: As many as the schedule has. Every rank passes its own list of the same
                micro-batches.
            objective: From the last stage's output and the micro-batch to the scalar whose
                gradient is taken. Called on the last stage only. It is not averaged or scaled.

        Returns:
            On the rank of the last stage the outputs, detached, in micro-batch order; elsewhere
            an empty list.

        Raises:
            StageError: A stage of this rank or the objective raised.
            TransferError: Another rank went away.
            ValueError: The number of micro-batches is not the schedule's.
        """
        if len(microbatches) != self.schedule.microbatches:
            raise ValueError(
                f"got {len(microbatches)} micro-batches, but the schedule is for "
                f"{self.schedule.microbatches}: pass as many, or make a schedule for this number"
            )
        return self._execute(self.schedule, microbatches, objective)

    def evaluate(self, microbatches: Sequence[M]) -> list[Any]:
        """Run the forwards only, without gradients and in any number.

        The stages' training mode is left as it is: call `.eval()` on them where it matters.

        Args:
            microbatches: Any number of them, the same on every rank.

        Returns:
            As from `run`.
        """
        if not microbatches:
            return []
        schedule = forward_only(self.schedule, len(microbatches))
        with torch.no_grad():
            return self._execute(schedule, microbatches, None)

    def _execute(
        self,
        schedule: Schedule,
        microbatches: Sequence[M],
        objective: Callable[[Any, M], Tensor] | None,
    ) -> list[Any]:
        run = _Run(self, schedule, microbatches, objective)
        todo = steps(schedule.ranks[self.rank])
        end = Step(exchange=(), compute=None)
        for step, following in itertools.pairwise([*todo, end]):
            run.mail.exchange(step.exchange, following.exchange)
            if step.compute is not None:
                run.compute(step.compute)
        run.mail.finish()
        return [run.outputs[index] for index in sorted(run.outputs)]


class _Run(Generic[M]):
    """What lives during one run: inputs and graphs between F and B, and the outputs."""

    def __init__(
        self,
        executor: Executor[M],
        schedule: Schedule,
        microbatches: Sequence[M],
        objective: Callable[[Any, M], Tensor] | None,
    ) -> None:
        self._schedule = schedule
        self._stages = executor._stages
        self._activation = executor._activation
        self._microbatches = microbatches
        self._objective = objective
        self._inputs: dict[tuple[int, int], Tensor] = {}
        self._graphs: dict[tuple[int, int], Tensor | GradientEdge | None] = {}
        self.outputs: dict[int, Any] = {}
        self.mail = Mailbox(
            schedule,
            group=executor._group,
            device=executor._device,
            spec=self._spec,
            batched=executor._batched,
        )

    def compute(self, action: Action) -> None:
        """Do one F or B."""
        (self._forward if action.op is Op.F else self._backward)(action)

    def _spec(self, index: int) -> TensorSpec:
        assert self._activation is not None, "asked for by transfers only"  # noqa: S101
        return self._activation(self._microbatches[index])

    def _forward(self, action: Action) -> None:
        key = (action.stage, action.microbatch)
        microbatch = self._microbatches[action.microbatch]
        x = None
        if self._schedule.previous_stage(action.stage) is not None:
            x = self.mail.take(Action(Op.RECV_F, *key))
            assert x is not None, f"{action} has no input"  # noqa: S101 (the schedule was checked)
            if self._objective is not None:
                if x.is_floating_point() or x.is_complex():
                    x.requires_grad_()
                self._inputs[key] = x
        is_last = self._schedule.next_stage(action.stage) is None
        with _naming(action):
            output = self._stages[action.stage](x, microbatch)
            if is_last:
                if self._objective is not None:
                    self._graphs[key] = _scalar(self._objective(output, microbatch))
                self.outputs[action.microbatch] = _detached(output)
                return
            send = Action(Op.SEND_F, *key)
            _require_activation(
                output, None if self._schedule.peer(send) is None else self._spec(key[1])
            )
        # The edge leads to the graph without keeping the output itself: the memory of what has
        # been sent is free as soon as nothing in the graph needs it.
        if self._objective is not None:
            self._graphs[key] = get_gradient_edge(output) if output.requires_grad else None
        self.mail.put(send, output.detach())

    def _backward(self, action: Action) -> None:
        key = (action.stage, action.microbatch)
        graph, grad = self._graphs.pop(key), None
        if self._schedule.next_stage(action.stage) is not None:
            grad = self.mail.take(Action(Op.RECV_B, *key))
        with _naming(action):
            if graph is not None:
                torch.autograd.backward([graph], [grad])  # pyright: ignore[reportArgumentType]
        x = self._inputs.pop(key, None)
        if x is not None and x.requires_grad:
            gradient = torch.zeros_like(x) if x.grad is None else x.grad
            self.mail.put(Action(Op.SEND_B, *key), gradient)


def _assign(
    stage: Stage[M] | Sequence[Stage[M]], held: list[int], rank: int
) -> Mapping[int, Stage[M]]:
    given = list(stage) if isinstance(stage, Sequence) else [stage]
    if len(given) != len(held):
        raise ValueError(
            f"rank {rank} was given {len(given)} stages, but the schedule has it hold stages "
            f"{held}: pass one callable for each, in this order"
        )
    return dict(zip(held, given, strict=True))


@contextmanager
def _naming(action: Action) -> Iterator[None]:
    """Name the stage and the micro-batch in whatever is raised."""
    try:
        yield
    except (StageError, TransferError):
        raise
    except Exception as error:
        raise StageError(action, error) from error


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = type(loss).__name__
        if isinstance(loss, Tensor):
            got = f"a {tuple(loss.shape)} tensor with requires_grad={loss.requires_grad}"
        raise TypeError(f"the objective must return one number that has a gradient, got {got}")
    return loss


def _require_activation(output: Any, spec: TensorSpec | None) -> None:
    if not isinstance(output, Tensor):
        raise TypeError(
            f"a stage before the last one must return one tensor, got {type(output).__name__}"
        )
    if spec is None:
        return
    got = TensorSpec(tuple(output.shape), output.dtype)
    if got != TensorSpec(tuple(spec.shape), spec.dtype):
        raise ValueError(f"the stage returned {got}, but activation() says {spec}")


def _detached(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.detach()
    if isinstance(output, Mapping):
        return {name: _detached(value) for name, value in output.items()}
    if isinstance(output, list | tuple):
        values = [_detached(value) for value in output]
        if hasattr(output, "_fields"):  # a named tuple takes its fields one by one
            return type(output)(*values)
        return type(output)(values)
    return output
