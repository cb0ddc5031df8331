"""One run of a schedule on one rank: its computations, and the graphs that live between them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from mt_schedule import Action, Op, Schedule, Span
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.profiler import record_function

from mt_pipeline.backward import Pending, backward, backward_input
from mt_pipeline.stage import (
    DefersWeightGradients,
    Losses,
    Stage,
    StageError,
    detached,
    mapped,
    naming,
    require_activation,
    require_scalar,
    require_weighed,
    split_output,
    splits,
)
from mt_pipeline.transfer import Links, Mailbox, TensorSpec

M = TypeVar("M")
Work = Generator[None, None, None]
"""A computation that pauses where another may take its turn."""
End: TypeAlias = tuple[Tensor, Tensor | None]
"""A tensor that the backward of a stage starts from, with its gradient; None if the next stage
sends it."""


@dataclass(frozen=True, kw_only=True)
class Place(Generic[M]):
    """Everything about a rank that all its runs share.

    Attributes:
        rank: Index of the pipeline rank.
        group: The ranks of the pipeline.
        device: Device of the activations.
        stages: The stages of this rank by number.
        links: Connections to the other ranks; None if there is one rank.
    """

    rank: int
    group: dist.ProcessGroup | None
    device: torch.device
    stages: Mapping[int, Stage[M]]
    links: Links | None


@dataclass(kw_only=True)
class _Part:
    """The autograd graph of one part of a stage: the leaves it starts from, the edges it ends in.

    An edge is None if the graph ends there in a tensor that requires no gradient.
    """

    leaves: list[Tensor]
    edges: Sequence[GradientEdge | None]


@dataclass(kw_only=True)
class _Kept:
    """The graphs that a forward keeps for its backward."""

    x: Tensor | None  # the stage's input
    parts: list[_Part] = field(default_factory=list)
    # Gradients of the edges that the last part ends in, as in `End`.
    seeds: list[Tensor | None] = field(default_factory=list)


class Run(Generic[M]):
    """One run of one rank.

    A failure is kept, and from then on this rank only receives, and sends zeros in place of
    results. So the other ranks reach the end of their lists and learn of the failure there.

    Attributes:
        outputs: Outputs of the last stage, detached, by micro-batch.
        losses: Sums of the objective's values on this rank, detached, by micro-batch.
        inner_losses: Losses of stages before the last one, detached, by micro-batch and stage.
        spans: Times of actions; None if they are not recorded.
        failure: The failure of this rank.
        mail: The messages of this run.

    Args:
        place: Everything about this rank that all runs share.
        schedule: A schedule with communication.
        microbatches: The schedule's number of micro-batches.
        specs: Activation spec of each micro-batch; None if the pipeline has one rank.
        output_specs: Spec of the last stage's output for each micro-batch; None allows anything.
        objective: Function that returns the loss; None to run only forwards, without gradients.
        stop_at_failure: Whether to raise a failure at once instead.
    """

    def __init__(
        self,
        place: Place[M],
        schedule: Schedule,
        microbatches: Sequence[M],
        *,
        specs: Sequence[TensorSpec] | None,
        output_specs: Sequence[TensorSpec] | None,
        objective: Callable[[Any, M], Tensor] | None,
        stop_at_failure: bool,
    ) -> None:
        self.outputs: dict[int, Any] = {}
        self.losses: dict[int, Tensor] = {}
        self.inner_losses: dict[tuple[int, int], Losses] = {}
        self.spans: list[Span] | None = None
        self.failure: StageError | None = None
        self.mail = Mailbox(schedule, links=place.links, device=place.device, specs=specs)
        self._place = place
        self._schedule = schedule
        self._microbatches = microbatches
        self._specs = specs
        self._output_specs = output_specs
        self._objective = objective
        self._stop_at_failure = stop_at_failure
        self._in_parts = bool(schedule.pairs)
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._starts: dict[Action, float] = {}
        self._weights: dict[tuple[int, int], list[Pending]] = {}

    def compute(self, actions: Sequence[Action]) -> None:
        """Compute one action, or two actions whose parts alternate; a profiler sees which."""
        turns = deque((action, self._do(action)) for action in actions)
        while turns:
            action, work = turns.popleft()
            with record_function("forward" if action.op is Op.F else "backward"):
                is_done = next(work, self) is self
            if not is_done:
                turns.append((action, work))

    def _do(self, action: Action) -> Work:
        if self.failure is None:
            try:
                with naming(action, self._place.rank):
                    for _ in self._work(action):
                        yield
                        if self.failure is not None:  # its partner's
                            break
            except StageError as error:
                if self._stop_at_failure:
                    raise
                self.failure = error
                # Gradients are worthless now, and memory may be what failed.
                self._kept.clear()
                self._weights.clear()
            if self.spans is not None:
                end = self._now()
                self.spans.append(Span(action, self._starts.pop(action, end), end))
        if self.failure is not None:
            self._go_without(action)

    def _start(self, action: Action) -> None:
        """Record when an action begins, once its input has arrived."""
        if self.spans is not None:
            self._starts[action] = self._now()

    def _now(self) -> float:
        if self._place.device.type == "cuda":
            torch.cuda.synchronize(self._place.device)
        return time.time()

    def _work(self, action: Action) -> Work:
        if action.op is Op.F:
            return self._forward(action)
        if action.op in (Op.B, Op.I):
            return self._backward(action)
        return self._weight_gradients(action)

    def _weight_gradients(self, action: Action) -> Work:
        self._start(action)
        for weights in self._weights.pop(action[1:]):
            weights()
        yield from ()

    def _go_without(self, action: Action) -> None:
        """Receive the input of an action and send zeros, so that other ranks don't hang."""
        if action.op not in (Op.F, Op.B, Op.I):
            return
        forward = action.op is Op.F
        take, give = (Op.RECV_F, Op.SEND_F) if forward else (Op.RECV_B, Op.SEND_B)
        self.mail.take(Action(take, *action[1:]))
        self.mail.put_zeros(Action(give, *action[1:]))

    def _forward(self, action: Action) -> Work:
        kept = _Kept(x=None)
        if self._schedule.previous_stage(action.stage) is not None:
            kept.x = self.mail.take(Action(Op.RECV_F, *action[1:]))
            assert kept.x is not None, f"{action} has no input"  # noqa: S101 (was checked)
        self._start(action)
        output = yield from self._through(action, kept)
        if self._schedule.next_stage(action.stage) is None:
            self.outputs[action.microbatch] = detached(output)
        else:
            self.mail.put(Action(Op.SEND_F, *action[1:]), output.detach())
        if self._objective is not None:
            self._kept[action[1:]] = kept

    def _through(self, action: Action, kept: _Kept) -> Generator[None, None, Any]:
        """Run a stage part by part; in training, keep the graph of each part."""
        microbatch = self._microbatches[action.microbatch]
        stage = self._place.stages[action.stage]
        if self._in_parts and splits(stage):
            parts = stage.parts(microbatch)
        else:
            parts = [lambda x: stage(x, microbatch)]
        state: Any = kept.x
        learns = self._objective is not None
        leaves: list[Tensor] = []
        if learns and kept.x is not None and _is_differentiable(kept.x):
            state = kept.x.requires_grad_()
            leaves = [kept.x]
        for number, part in enumerate(parts):
            if number:
                edges, state, following = _cut(state)
                kept.parts.append(_Part(leaves=leaves, edges=edges))
                leaves = following
                yield
            state = part(state)
        if self._schedule.next_stage(action.stage) is None:
            ends = self._end_last(action, state)
        else:
            state, ends = self._end_inner(action, state)
        if learns:
            # The edge leads to the graph without keeping the output itself: the memory of what
            # has been sent is free as soon as nothing in the graph needs it.
            edges = [get_gradient_edge(t) if t.requires_grad else None for t, _ in ends]
            kept.parts.append(_Part(leaves=leaves, edges=edges))
            kept.seeds = [seed for _, seed in ends]
        return state

    def _end_inner(self, action: Action, output: Any) -> tuple[Tensor, list[End]]:
        """Separate a stage's activation from its losses; the backward begins at both."""
        remote = self._schedule.peer(Action(Op.SEND_F, *action[1:])) is not None
        spec = self._specs[action.microbatch] if remote and self._specs else None
        x, losses = split_output(output)
        ends: list[End] = [(require_activation(x, spec), None)]
        if losses:
            self.inner_losses[action.microbatch, action.stage] = detached(losses)
        if losses and self._objective is not None:
            where = f"the objective, called with the losses {', '.join(losses)} of this stage, "
            with naming(action, self._place.rank, where=f"{where}raised "):
                goal = self._objective(losses, self._microbatches[action.microbatch])
            ends.append(self._loss_end(action, require_weighed(goal, losses)))
        return x, ends

    def _end_last(self, action: Action, output: Any) -> list[End]:
        """Call the objective; the backward begins at the loss."""
        if self._output_specs is not None:
            require_activation(output, self._output_specs[action.microbatch], said_by="output()")
        if self._objective is None:
            return []
        loss = self._objective(output, self._microbatches[action.microbatch])
        return [self._loss_end(action, require_scalar(loss))]

    def _loss_end(self, action: Action, loss: Tensor) -> End:
        """Record a loss, and start the backward there."""
        before = self.losses.get(action.microbatch)
        value = loss.detach()
        self.losses[action.microbatch] = value if before is None else before + value
        return loss, torch.ones_like(loss)

    def _backward(self, action: Action) -> Work:
        key = action[1:]
        is_last = self._schedule.next_stage(action.stage) is None
        grad = None if is_last else self.mail.take(Action(Op.RECV_B, *key))
        self._start(action)
        kept = self._kept.pop(key)
        grads = [grad if seed is None else seed for seed in kept.seeds]
        weights: list[Pending] = []
        while kept.parts:
            part = kept.parts.pop()
            pairs = zip(part.edges, grads, strict=True)
            given = [(e, g) for e, g in pairs if e is not None and g is not None]
            if given:
                roots, incoming = map(list, zip(*given, strict=True))
                weights += self._differentiate(action, roots, incoming, part.leaves)
            grads = [leaf.grad for leaf in part.leaves]
            if kept.parts:
                yield
        if action.op is Op.I:
            self._weights[key] = weights
        x = kept.x
        if x is not None and _is_differentiable(x):
            self.mail.put(
                Action(Op.SEND_B, *key), torch.zeros_like(x) if x.grad is None else x.grad
            )

    def _differentiate(
        self,
        action: Action,
        roots: list[GradientEdge],
        grads: list[Tensor | None],
        leaves: list[Tensor],
    ) -> list[Pending]:
        """Run the backward of one part, and return the weight gradients left for W."""
        stage = self._place.stages[action.stage]
        if action.op is Op.B:
            backward(roots, grads)
            return []
        if isinstance(stage, DefersWeightGradients):
            with stage.wgrad_store.deferring() as compute:
                backward(roots, grads)
            return [compute]
        pending = backward_input(roots, grads, leaves)
        return [] if pending is None else [pending]


def _is_differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _cut(state: Any) -> tuple[list[GradientEdge], Any, list[Tensor]]:
    """End one graph and begin another.

    Returns:
        The edges at which gradients enter the first graph, the state with the leaves of the second
        graph, and these leaves in the order of the edges.
    """
    edges: list[GradientEdge] = []
    leaves: list[Tensor] = []

    def cut(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        edges.append(get_gradient_edge(tensor))
        leaves.append(tensor.detach().requires_grad_())
        return leaves[-1]

    return edges, mapped(state, cut), leaves
