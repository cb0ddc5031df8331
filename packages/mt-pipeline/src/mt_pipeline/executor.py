"""Runs a schedule: one loop over the actions of this rank."""

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

from mt_pipeline.batch import cut_batch
from mt_pipeline.failure import share, share_failure, share_start
from mt_pipeline.run import Goal, Place, Run
from mt_pipeline.stage import Losses, Stage, StageError, is_kind, naming, splits
from mt_pipeline.transfer import TensorSpec, TransferError, connect

M = TypeVar("M")
Batch: TypeAlias = Tensor | Mapping[str, Tensor]
"""A whole batch, which is cut into micro-batches."""


class Executor(Generic[M]):
    """Runs any schedule that `check` finds right, on the ranks of one process group.

    Every rank of the group makes one with the same schedule, at the same point, as they connect
    then; and calls `run`, `evaluate` and `infer` as often as the others, with as many
    micro-batches. Gradients are added to `.grad`, in the order of the schedule's backwards.

    Of an activation that went to the next rank only the autograd graph is kept, not the output
    itself. Split backwards (I and W) work for every stage (`backward_input`), and keep less where
    the stage's layers defer their weight gradients (`DefersWeightGradients`). Overlapped pairs run
    one after the other, or part by part where the stage can be split (`SplitStage`).

    When a stage raises, every rank raises the same `StageError`, after its part of the schedule:
    the rank that failed lets go of its graphs, and goes on sending (zeros) and receiving for the
    others' sake. Gradients are then worthless, but the pipeline can go on. Collectives inside a
    stage, with ranks of other pipelines, are not joined any more. What fails before the first
    stage runs (a spec, a number of micro-batches) is raised by all ranks before they send.

    Args:
        schedule: With or without communication.
        stage: What this rank computes; where the schedule gives this rank several stages, all of
            them in ascending order.
        group: The ranks of the pipeline in the schedule's order; None for a schedule of one rank.
            Messages to lower ranks go through its `mt_parallel_state.twin_group`.
        activation: The spec of what stages hand on for a micro-batch. It may differ between
            micro-batches (then it depends on nothing but the micro-batch, as both ends ask for
            it). Not needed when the schedule has one rank.
        device: Where activations live.
        batch_p2p: Whether the messages of an exchange that go one way are one
            `batch_isend_irecv` (see `Mailbox`). None: where the device is not a CPU.
        hooks: For `Op.GATHER` and `Op.REDUCE`, where the schedule has them (`insert_hooks`), what
            is called with the number of the stage: both by `run`, GATHER by `evaluate` and `infer`
            too. It may start a collective; whoever needs the result waits.
        share_failures: Whether ranks agree, by an all-reduce of three numbers before each run and
            of one after it, on what failed where. Without it a `StageError` is raised on its own
            rank alone: for steps so short that two more messages count, under a launcher that
            ends all ranks with one.
        stop_at_failure: Whether a rank whose stage raises does so at once, and leaves its messages
            undone: for stages that meet ranks of other pipelines (tensor parallelism, parameters
            that are fetched). Its process has to end then, which the others see.

    Raises:
        ValueError: The schedule has violations, or does not fit the group, the stages or the
            hooks given; or a stage to be run in parts is an FSDP module itself.
        TypeError: Something is no schedule, group or function.
        TransferError: Another rank of the group did not come.
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
        hooks: Mapping[Op, Callable[[int], object]] | None = None,
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
                "micro-batch to the TensorSpec of what stages hand on"
            )
        _require_hooks(schedule, self.rank, hooks or {})
        device = torch.device(device)
        stages = _assign(stage, schedule.stages_of(self.rank), self.rank)
        if schedule.pairs:
            _require_own_parts(stages)
        self._activation = activation
        self._share_failures = share_failures
        self._stop_at_failure = stop_at_failure
        self._forward_only: dict[int, Schedule] = {}
        self._spans: list[Span] | None = None
        self._losses: Mapping[tuple[int, int], Losses] = {}
        links = None
        if group is not None:
            batched = device.type != "cpu" if batch_p2p is None else batch_p2p
            links = connect(self.schedule, group=group, device=device, batched=batched)
        self._place = Place(
            rank=self.rank,
            group=group,
            device=device,
            stages=stages,
            hooks=dict(hooks or {}),
            links=links,
        )

    def run(
        self,
        microbatches: Sequence[M] | Batch,
        *,
        objective: Callable[[Any, M], Goal],
        record: bool = False,
    ) -> list[Any]:
        """Run forward and backward of every micro-batch; gradients are added to `.grad`.

        Args:
            microbatches: As many as the schedule has; or a whole batch, a tensor or a dict of
                tensors, which is cut along dim 0 into as many, as equal as can be (the first ones
                get a row more). Every rank passes its own copy of the same.
            objective: From the last stage's output and the micro-batch to the scalar whose
                gradient is taken. It is not averaged or scaled. Called on the last stage; and on
                another for each micro-batch for which that returned losses of its own, with these
                in place of the output, so that one function weighs all losses, wherever they
                arise: what is differentiated is the sum of what it returns.
                Where the gradient comes from elsewhere (over a `Bridge`), it returns a function
                instead: called without arguments when the micro-batch goes backward, that
                returns the gradient of the output, which then is one tensor.
            record: Whether to keep the times of actions for `timeline`. On an accelerator each
                action is then waited for.

        Returns:
            On the rank of the last stage the outputs, detached, in micro-batch order; elsewhere
            an empty list. With two directions each last stage has the outputs of its own
            micro-batches.

        Raises:
            StageError: A stage, the objective, a hook or `activation` raised on some rank, or a
                rank was given another number of micro-batches than the schedule's.
            TransferError: Another rank went away.
            ValueError: The number of micro-batches is not the schedule's, and there is one rank.
        """
        parts, specs, _ = self._prepare(microbatches, number=self.schedule.microbatches)
        return self._execute(self.schedule, parts, objective, specs=specs, record=record)

    def evaluate(self, microbatches: Sequence[M] | Batch) -> list[Any]:
        """Run the forwards only, without gradients and in any number.

        The stages' training mode is left as it is: call `.eval()` on them where it matters.

        Args:
            microbatches: Any number of them, the same on every rank; or a whole batch, as for
                `run`.

        Returns:
            As from `run`, all from the rank of the (first direction's) last stage.

        Raises:
            StageError: As from `run`; also where ranks have different numbers of micro-batches.
            TransferError: Another rank went away.
        """
        parts, specs, _ = self._prepare(microbatches)
        return self._forwards(parts, specs)

    def infer(
        self, microbatches: Sequence[M] | Batch, *, output: Callable[[M], TensorSpec]
    ) -> list[Tensor]:
        """Run the forwards, and give every rank the last stage's outputs: a step of generation.

        What lasts from step to step, such as the keys and values of each request, is the stages'
        own, found by what the micro-batch says. Several micro-batches fill the pipeline: one for
        each group of requests.

        Args:
            microbatches: The same on every rank; or a whole batch, as for `run`.
            output: The spec of what the last stage returns for a micro-batch: one tensor.

        Returns:
            The outputs, in the order of the micro-batches, contiguous, equal on all ranks.

        Raises:
            StageError: As from `evaluate`; also where `output` raises or the last stage returns
                something else.
            TransferError: Another rank went away.
        """
        parts, activations, specs = self._prepare(microbatches, output=output)
        outputs = self._forwards(parts, activations, specs)
        # Gloo sends the memory of a tensor as it lies there, whatever its strides are.
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
        """Cut the batch and ask for the specs; all ranks raise if that fails on one."""
        self._losses = {}
        microbatches: Sequence[M] = ()
        activations = outputs = failure = None
        group, first = self._place.group, next(iter(self._place.stages), 0)
        try:
            with nullcontext() if group is None else naming(Action(Op.F, first), self.rank):
                microbatches = cut_batch(given, self.schedule.microbatches)
            got = len(microbatches)
            if number not in (None, got):
                fault = ValueError(
                    f"got {got} micro-batches, but the schedule is for {number}: pass as many, or "
                    "make a schedule for this number"
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
        objective: Callable[[Any, M], Goal] | None,
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
            self._losses = run.losses
            self._raise_failure(run, schedule)
        except TransferError:
            if run.failure is not None:  # what failed here may be why the others went away
                raise run.failure from run.failure.__cause__
            raise
        return [run.outputs[index] for index in sorted(run.outputs)]

    def _take_steps(self, run: Run[M], schedule: Schedule) -> None:
        todo = deque(steps(schedule.ranks[self.rank]))
        while todo:
            step = todo.popleft()
            run.mail.exchange(step.exchange)
            if step.compute is None:
                continue
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
    def inner_losses(self) -> Mapping[tuple[int, int], Losses]:
        """The losses of this rank's stages before the last one in the latest run or evaluation.

        By micro-batch and stage, for those that returned some, by name; detached.
        """
        return self._losses

    def timeline(self) -> tuple[tuple[Span, ...], ...]:
        """When each rank took its actions in the latest run; every rank of the group calls it.

        Returns:
            For each rank its spans, in seconds from the first start: what `simulate` returns as
            `timeline`, measured. An action begins when its input has arrived. Clocks are the
            machines' own.

        Raises:
            ValueError: The latest run did not record them.
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


def _require_hooks(
    schedule: Schedule, rank: int, hooks: Mapping[Op, Callable[[int], object]]
) -> None:
    called = {action.op for _, _, action in schedule}
    for op in hooks:
        if op not in (Op.GATHER, Op.REDUCE):
            raise ValueError(f"hooks has {op!r}: only Op.GATHER and Op.REDUCE call a hook")
        if op not in called:
            raise ValueError(
                f"hooks has Op.{op.name}, but schedule {schedule.name!r} has no {op.name} that "
                "would call it: pass insert_hooks(schedule)"
            )
    for action in schedule.ranks[rank]:
        if action.op.is_hook and action.op not in hooks:
            raise ValueError(
                f"the schedule has {action}, but hooks has no Op.{action.op.name}: pass "
                f"hooks={{Op.{action.op.name}: function of a stage number}}"
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
            f"rank {rank} was given {len(given)} stages, but the schedule has it hold stages "
            f"{held}: pass one callable for each, in this order"
        )
    return dict(zip(held, given, strict=True))


def _require_own_parts(stages: Mapping[int, Stage[M]]) -> None:
    for number, stage in stages.items():
        if is_kind(stage, "FSDPModule") and splits(stage):
            raise ValueError(
                f"stage {number} was given to fully_shard as a whole, but overlapped pairs call "
                "its parts, around the forward that gathers its parameters: call fully_shard on "
                "the submodules that the parts call"
            )
