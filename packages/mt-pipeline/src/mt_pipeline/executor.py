"""The executor of schedules: one loop over the actions of this rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from mt_schedule import (
    Action,
    Op,
    Schedule,
    Span,
    Step,
    check,
    forward_only,
    insert_communication,
    steps,
)
from torch import Tensor
from torch.profiler import record_function

from mt_pipeline.batch import cut_batch
from mt_pipeline.failure import share, share_failure, share_start
from mt_pipeline.run import Place, Run
from mt_pipeline.stage import Losses, Stage, StageError, is_kind, naming, splits
from mt_pipeline.transfer import TensorSpec, TransferError, connect

M = TypeVar("M")
Batch: TypeAlias = Tensor | Mapping[str, Tensor]
"""A whole batch, which the executor cuts into micro-batches."""


class Executor(Generic[M]):
    """Run any schedule that passes `check`, on the ranks of one process group.

    Every rank of the group builds an executor with the same schedule at the same point, because
    the ranks connect there, and calls `run`, `evaluate` and `infer` as often as the other ranks,
    with the same number of micro-batches. Gradients are added to `.grad`, in the order of the
    schedule's backwards.

    Once an activation is sent to the next rank, only its autograd graph is kept, not the tensor.
    Split backwards (I and W) work for every stage (`backward_input`), and keep less memory if the
    stage's layers defer their weight gradients (`DefersWeightGradients`). Overlapped pairs run one
    after the other, or part by part if the stage is a `SplitStage`.

    When a stage raises, every rank raises the same `StageError` at the end of its schedule: the
    rank that failed frees its graphs and goes on receiving, and sending zeros, so that no other
    rank hangs. The gradients are then useless, but the executor can run again. Collectives inside
    a failed stage, with ranks of other pipelines, are no longer joined. A failure before the first
    stage runs (a spec, the number of micro-batches) is raised by all ranks before they send.

    Args:
        schedule: A schedule, with or without communication.
        stage: The stage of this rank; a sequence of stages in ascending order if the schedule
            gives this rank several.
        group: The ranks of the pipeline in the schedule's order; None for a schedule of one rank.
            Messages to lower ranks go through its `mt_parallel_state.twin_group`.
        activation: Function from a micro-batch to the spec of the tensor that a stage sends on.
            Both ends of a message call it, so it may depend on nothing but the micro-batch. Not
            needed if the schedule has one rank.
        device: Device of the activations.
        batch_p2p: Whether the messages of an exchange that go in one direction are one
            `batch_isend_irecv` (see `Mailbox`). None means yes unless the device is a CPU.
        share_failures: Whether ranks agree on failures, by an all-reduce of three numbers before
            each run and of one number after it. Without it, a `StageError` is raised only on the
            rank that failed. Use that for very short steps, under a launcher that ends all ranks
            when one ends.
        stop_at_failure: Whether a rank whose stage raises does so at once and leaves its messages
            unsent. Use it for stages that communicate with ranks of other pipelines (tensor
            parallelism, FSDP); the failed process has to end, which the other ranks notice.

    Raises:
        ValueError: The schedule has violations, or does not fit the group or the
            stages; or a `SplitStage` is itself an FSDP module.
        TypeError: An argument is not a schedule, a group or a function.
        TransferError: Another rank of the group did not take part.
    """

    def __init__(  # noqa: PLR0913 - the executor's own settings, all but two by keyword
        self,
        schedule: Schedule,
        stage: Stage[M] | Sequence[Stage[M]],
        *,
        group: dist.ProcessGroup | None,
        activation: Callable[[M], TensorSpec] | None = None,
        device: torch.device | str = "cpu",
        batch_p2p: bool | None = None,
        share_failures: bool = True,
        stop_at_failure: bool = False,
    ) -> None:
        if not isinstance(schedule, Schedule):
            raise TypeError(f"expected a Schedule, got {schedule!r:.60}; make_schedule makes one")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group must be a ProcessGroup or None (one rank), got {group!r:.60}")
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
                "micro-batch to the TensorSpec of the tensor that stages send on"
            )
        device = torch.device(device)
        stages = _assign(stage, schedule.stages_of(self.rank), self.rank)
        if schedule.pairs:
            _require_own_parts(stages)
        self._activation = activation
        self._share_failures = share_failures
        self._stop_at_failure = stop_at_failure
        self._forward_only: dict[int, Schedule] = {}
        self._spans: list[Span] | None = None
        self._losses: list[Tensor] = []
        self._inner_losses: Mapping[tuple[int, int], Losses] = {}
        links = None
        if group is not None:
            batched = device.type != "cpu" if batch_p2p is None else batch_p2p
            links = connect(self.schedule, group=group, device=device, batched=batched)
        self._place = Place(
            rank=self.rank,
            group=group,
            device=device,
            stages=stages,
            links=links,
        )

    def run(
        self,
        microbatches: Sequence[M] | Batch,
        *,
        objective: Callable[[Any, M], Tensor],
        record: bool = False,
    ) -> list[Any]:
        """Run forward and backward of every micro-batch; gradients are added to `.grad`.

        Args:
            microbatches: The schedule's number of micro-batches; or a whole batch (a tensor or a
                dict of tensors), which is cut along dim 0 as `torch.tensor_split` does. Every rank
                passes its own copy of the same data.
            objective: Function from the last stage's output and the micro-batch to the loss to
                differentiate, a scalar that is not averaged or scaled. It is also called on every
                earlier stage that returns losses, with these losses in place of the output, so
                that one function weighs all losses; the sum of all its return values is
                differentiated.
            record: Whether to keep the times of actions for `timeline`. On an accelerator this
                synchronizes after each action.

        Returns:
            The outputs of the last stage, detached, in micro-batch order; an empty list on other
            ranks. With two directions, each last stage has the outputs of its own micro-batches.
            `losses` has the values of the objective.

        Raises:
            StageError: A stage, the objective or `activation` raised on some rank, or a
                rank was given another number of micro-batches than the schedule's.
            TransferError: Another rank went away.
            ValueError: The number of micro-batches is not the schedule's, and there is one rank.
        """
        parts, specs, _ = self._prepare(microbatches, number=self.schedule.microbatches)
        return self._execute(self.schedule, parts, objective, specs=specs, record=record)

    def evaluate(self, microbatches: Sequence[M] | Batch) -> list[Any]:
        """Run only the forwards, without gradients, for any number of micro-batches.

        The stages keep their training mode: call `.eval()` on them if it matters.

        Args:
            microbatches: Any number of micro-batches, the same on every rank; or a whole batch, as
                for `run`.

        Returns:
            The outputs, as `run` returns them, all on the rank of the (first direction's) last
            stage.

        Raises:
            StageError: A stage failed, as in `run`, or ranks have different numbers of
                micro-batches.
            TransferError: Another rank went away.
        """
        parts, specs, _ = self._prepare(microbatches)
        return self._forwards(parts, specs)

    def infer(
        self, microbatches: Sequence[M] | Batch, *, output: Callable[[M], TensorSpec]
    ) -> list[Tensor]:
        """Run the forwards and broadcast the last stage's outputs: one step of generation.

        State that lasts from step to step, such as the keys and values of each request, belongs to
        the stages, which find it through the micro-batch. Use several micro-batches, one for each
        group of requests, to keep all stages busy.

        Args:
            microbatches: Micro-batches, the same on every rank; or a whole batch, as for `run`.
            output: Function from a micro-batch to the spec of the last stage's output, which is
                one tensor.

        Returns:
            The outputs in the order of the micro-batches, contiguous, equal on all ranks.

        Raises:
            StageError: A stage failed, as in `evaluate`; `output` raised; or the last stage
                returned something else.
            TransferError: Another rank went away.
        """
        parts, activations, specs = self._prepare(microbatches, output=output)
        outputs = self._forwards(parts, activations, specs)
        # Gloo ignores strides: it sends the memory of a tensor as it lies there.
        outputs = [output.contiguous() for output in outputs]
        if not outputs:
            device = self._place.device
            outputs = [torch.empty(s.shape, dtype=s.dtype, device=device) for s in specs or ()]
        if self._place.group is not None:
            source = self.schedule.stage_ranks[self.schedule.depth - 1]
            for tensor in outputs:
                dist.broadcast(tensor, group=self._place.group, group_src=source)
        return outputs

    def _prepare(
        self,
        given: Sequence[M] | Batch,
        *,
        number: int | None = None,
        output: Callable[[M], TensorSpec] | None = None,
    ) -> tuple[Sequence[M], list[TensorSpec] | None, list[TensorSpec] | None]:
        """Cut the batch and collect the specs; all ranks raise if that fails on one of them."""
        self._losses, self._inner_losses = [], {}
        microbatches: Sequence[M] = ()
        activations = outputs = failure = None
        group, first = self._place.group, next(iter(self._place.stages), 0)
        try:
            with nullcontext() if group is None else naming(Action(Op.F, first, 0), self.rank):
                microbatches = cut_batch(given, self.schedule.microbatches)
            got = len(microbatches)
            if number not in (None, got):
                fault = ValueError(
                    f"got {got} micro-batches, but the schedule is for {number}: pass that number, "
                    "or make another schedule"
                )
                if group is None:
                    raise fault
                with naming(Action(Op.F, first, min(got, number)), self.rank):
                    raise fault
            activations = self._ask(self._activation, "activation()", microbatches)
            outputs = self._ask(output, "output()", microbatches)
        except StageError as error:
            failure = error
        if group is not None and self._share_failures:
            failure = share_start(
                failure, len(microbatches), stage=first, group=group, device=self._place.device
            )
        if failure is not None:
            raise failure
        return microbatches, activations, outputs

    def _ask(
        self, spec: Callable[[M], TensorSpec] | None, name: str, microbatches: Sequence[M]
    ) -> list[TensorSpec] | None:
        if spec is None:
            return None
        specs = []
        for index, microbatch in enumerate(microbatches):
            action = Action(Op.F, next(iter(self._place.stages), 0), index)
            with naming(action, self.rank, where=f"{name} raised "):
                specs.append(spec(microbatch))
            with naming(action, self.rank):
                if not isinstance(specs[-1], TensorSpec):
                    got = type(specs[-1]).__name__
                    raise TypeError(f"{name} must return a TensorSpec, got {got}")
        return specs

    def _forwards(
        self,
        microbatches: Sequence[M],
        specs: Sequence[TensorSpec] | None,
        outputs: Sequence[TensorSpec] | None = None,
    ) -> list[Any]:
        if not microbatches:
            return []
        number = len(microbatches)
        if number not in self._forward_only:
            self._forward_only[number] = forward_only(self.schedule, number)
        schedule = self._forward_only[number]
        with torch.no_grad():
            return self._execute(schedule, microbatches, None, specs=specs, outputs=outputs)

    def _execute(
        self,
        schedule: Schedule,
        microbatches: Sequence[M],
        objective: Callable[[Any, M], Tensor] | None,
        *,
        specs: Sequence[TensorSpec] | None,
        outputs: Sequence[TensorSpec] | None = None,
        record: bool = False,
    ) -> list[Any]:
        run = Run(
            self._place,
            schedule,
            microbatches,
            specs=specs,
            output_specs=outputs,
            objective=objective,
            stop_at_failure=self._stop_at_failure,
        )
        run.spans = [] if record else None
        try:
            self._take_steps(run, schedule)
            self._spans = run.spans
            self._losses = [run.losses[index] for index in sorted(run.losses)]
            self._inner_losses = run.inner_losses
            self._raise_failure(run, schedule)
        except TransferError:
            if run.failure is not None:  # probably the reason why the other ranks went away
                raise run.failure from run.failure.__cause__
            raise
        return [run.outputs[index] for index in sorted(run.outputs)]

    def _take_steps(self, run: Run[M], schedule: Schedule) -> None:
        todo = deque(steps(schedule.ranks[self.rank]))
        while todo:
            step = todo.popleft()
            with record_function("messages"):
                run.mail.exchange(step.exchange)
            if step.compute is None:
                continue
            # The two actions of an overlapped pair are computed together, unless a message has to
            # be exchanged between them.
            partner = schedule.pair_of.get(step.compute)
            if todo and partner is not None and todo[0] == Step(exchange=(), compute=partner):
                todo.popleft()
                run.compute([step.compute, partner])
            else:
                run.compute([step.compute])
        run.mail.finish()

    def _raise_failure(self, run: Run[M], schedule: Schedule) -> None:
        failure = run.failure
        if self._place.group is not None and self._share_failures and not self._stop_at_failure:
            failure = share_failure(
                failure, schedule=schedule, group=self._place.group, device=self._place.device
            )
        if failure is not None:
            raise failure

    @property
    def losses(self) -> list[Tensor]:
        """Values of the objective in the latest run, detached, in micro-batch order.

        They cover the stages of this rank: usually only the last stage's rank has some. A rank
        whose earlier stages return losses has their weighed sums, so that the sum over all ranks
        is the differentiated number.
        """
        return self._losses

    @property
    def inner_losses(self) -> Mapping[tuple[int, int], Losses]:
        """Losses that this rank's earlier stages returned in the latest run or evaluation.

        Detached tensors by name, for each pair of micro-batch and stage that returned losses.
        """
        return self._inner_losses

    def timeline(self) -> tuple[tuple[Span, ...], ...]:
        """Return the measured times of all ranks in the latest run; every rank calls it.

        Returns:
            The spans of each rank, in seconds from the first start, in the form of
            `simulate(...).timeline`. An action begins when its input has arrived. Each machine
            uses its own clock.

        Raises:
            ValueError: The latest run was not recorded.
        """
        if self._spans is None:
            raise ValueError("no times were recorded: call run(..., record=True) first")
        spans = [[*span.action, span.start, span.end] for span in self._spans]
        ranks = share(spans, group=self._place.group, device=self._place.device)
        origin = min((span[3] for spans in ranks for span in spans), default=0.0)
        return tuple(
            tuple(
                Span(Action(Op(op), stage, microbatch), start - origin, end - origin)
                for op, stage, microbatch, start, end in spans
            )
            for spans in ranks
        )


def _assign(
    stage: Stage[M] | Sequence[Stage[M]], held: list[int], rank: int
) -> Mapping[int, Stage[M]]:
    given = list(stage) if isinstance(stage, Sequence) else [stage]
    for each in given:
        if not callable(each):
            raise TypeError(
                f"a stage is called with (x, microbatch), but {each!r:.60} is no function"
            )
    if len(given) != len(held):
        raise ValueError(
            f"rank {rank} was given {len(given)} stages, but the schedule gives it stages "
            f"{held}: pass one callable for each, in this order"
        )
    return dict(zip(held, given, strict=True))


def _require_own_parts(stages: Mapping[int, Stage[M]]) -> None:
    for number, stage in stages.items():
        if is_kind(stage, "FSDPModule") and splits(stage):
            raise ValueError(
                f"stage {number} was given to fully_shard as a whole, but overlapped pairs call "
                "its parts and skip the forward that gathers its parameters: call fully_shard on "
                "the submodules that the parts call"
            )
