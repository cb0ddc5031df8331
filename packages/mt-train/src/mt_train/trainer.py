"""The trainer: one step is forward and backward of all micro-batches, reduce, clip, update."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from mt_data import BatchSampler, MicroBatch
from mt_data_parallel import GradBuffer, reduce_partial_grads
from mt_model import DTYPES, ModelConfig, flops_per_token
from mt_optim import AdamW, LRSchedule, clip_grad_norm, default_decay_filter
from mt_parallel_state import ParallelState, global_shape_of, sharding_of
from mt_pipeline import Executor, TensorSpec

from mt_train.config import RunConfig
from mt_train.hardware import memory_bytes, peak_flops
from mt_train.metrics import Record
from mt_train.pipeline import (
    backwards_per_step,
    build_stages,
    named_parameters,
    plan_pipeline,
)
from mt_train.stopping import StopRequest

Batch = Mapping[str, torch.Tensor]


class NonFiniteLossError(RuntimeError):
    """Loss or gradient became NaN or infinite; no rank applied the step."""


@dataclass(kw_only=True)
class Progress:
    """What a checkpoint must remember beside tensors.

    Attributes:
        step: Completed steps.
        elapsed: Seconds spent in training steps, over all continuations of the run.
    """

    step: int = 0
    elapsed: float = 0.0


class Trainer:
    """Trains one model on one layout; every rank holds one.

    Args:
        config: The run.
        model_config: The layer list.
        state: This rank's place in the layout.
        sampler: Gives the micro-batches of any step.
        stop: Looked at after every step; a request on one rank stops all.
        on_event: Called with the name of each point reached (fault injection, profiling).
    """

    def __init__(
        self,
        config: RunConfig,
        model_config: ModelConfig,
        state: ParallelState,
        *,
        sampler: BatchSampler,
        stop: StopRequest | None = None,
        on_event: Callable[[str], None] | None = None,
    ) -> None:
        training, parallel = config.training, config.parallel
        self.config, self.state, self.sampler = config, state, sampler
        self.progress = Progress()
        self.on_event = on_event or (lambda name: None)
        self.dtype = DTYPES[training.dtype]
        self._hidden_size = model_config.hidden_size
        plan = plan_pipeline(
            config.pipeline,
            ranks=state.size("pp"),
            microbatches=sampler.num_microbatches,
            num_layers=model_config.num_layers,
        )
        self.stages = build_stages(
            plan,
            model_config,
            state,
            sequence_parallel=parallel.sequence_parallel,
            context_algorithm=parallel.cp_algorithm,
            context_inner_size=parallel.cp_inner,
            recompute=training.recompute,
            seed=training.seed,
            dtype=self.dtype,
            device=state.device,
        )
        self.named_parameters = list(named_parameters(self.stages).items())
        self._backwards = backwards_per_step(plan.schedule, state.index("pp"), self.stages)
        self.buffer = GradBuffer(
            self.named_parameters, group=state.group("dp-cp"), bucket_size=parallel.bucket_size
        )
        for stage in self.stages:
            stage.sum_weight_gradients(self.buffer.sink)
        optimizer = config.optimizer
        self.optimizer = AdamW(
            self.named_parameters,
            lr=optimizer.lr,
            betas=(optimizer.betas[0], optimizer.betas[1]),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            decay_filter=default_decay_filter,
        )
        self.schedule = learning_rates(config)
        self.executor = Executor(
            plan.schedule,
            [torch.compile(stage) if training.compile else stage for stage in self.stages],
            group=state.group("pp"),
            activation=self._activation,
            device=state.device,
        )
        self._flops = flops_per_token(model_config, training.sequence_length)
        self._peak = peak_flops(state.device, self.dtype)
        self._stop = stop or StopRequest()
        self._update_seconds = 0.0

    def _activation(self, batch: Batch) -> TensorSpec:
        """Say what one stage hands to the next for a micro-batch."""
        rows, length = batch["tokens"].shape
        sharded = self.state.size("cp")
        if self.config.parallel.sequence_parallel:
            sharded *= self.state.size("tp")
        return TensorSpec((rows, length // sharded, self._hidden_size), self.dtype)

    def count_parameters(self) -> int:
        """Count the whole model's parameters, each logical one once; every rank calls it."""
        layout = self.state.layout
        own = sum(
            math.prod(global_shape_of(param, layout))
            for _, param in self.named_parameters
            if not sharding_of(param).is_copy
        )
        count = torch.tensor(own, device=self.state.device)
        group = self.state.group("pp")
        if group is not None:
            dist.all_reduce(count, group=group)
        return int(count)

    @property
    def finished(self) -> bool:
        """Tell whether the steps, or the time budget, are used up."""
        return self.schedule_position >= self.config.training.steps

    @property
    def schedule_position(self) -> float:
        """Return how far the run is, in steps; the time budget may run ahead of the steps."""
        training, progress = self.config.training, self.progress
        if training.time_budget is None:
            return progress.step
        by_time = progress.elapsed / training.time_budget * training.steps
        return max(progress.step, by_time)

    def train_step(self) -> tuple[Record, bool]:
        """Run one optimizer step.

        Returns:
            The step's metrics and whether a stop was requested on any rank; both are equal on
            all ranks.

        Raises:
            NonFiniteLossError: On every rank, before any parameter has changed.
        """
        started = time.perf_counter()
        lr = self._learning_rate()
        batches = to_device(self.sampler.step(self.progress.step), self.state.device)
        self.on_event("train.forward_backward")
        self.buffer.start(self._backwards)
        total = self._global_tokens(batches)
        outputs = self.executor.run(batches, objective=lambda output, _: output["lm"] / total)
        self.buffer.finish()
        self.on_event("train.reduce")
        reduce_partial_grads(self.named_parameters, self.state)
        norm = clip_grad_norm(self.named_parameters, self.state, self.config.training.grad_clip)
        # The update of the step before belongs to the rate too, but comes after its clock stops.
        loss_sum, stop, elapsed = self._agree(outputs, started - self._update_seconds)
        updating = time.perf_counter()
        loss, norm = loss_sum / total, float(norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFiniteLossError(
                f"step {self.progress.step + 1}: loss {loss}, gradient norm {norm}. The step was "
                "not applied, and what is saved is as before; lower optimizer.lr, lengthen "
                "optimizer.warmup or lower training.grad_clip, then run the same command again"
            )
        self.on_event("train.update")
        self.optimizer.step(lr=lr)
        self._update_seconds = time.perf_counter() - updating
        self.progress.step += 1
        self.progress.elapsed += elapsed
        return self._record(loss, norm, lr, total, elapsed), stop

    def train(self, *, training: bool) -> None:
        """Switch dropout on or off."""
        for stage in self.stages:
            stage.train(training)

    def stop_requested(self) -> bool:
        """Tell whether any rank was asked to stop; every rank calls it and gets one answer."""
        group = self.state.group("tp-cp-dp-pp")
        if group is None:
            return self._stop.made
        flag = torch.tensor(float(self._stop.made), device=self.state.device)
        dist.all_reduce(flag, group=group)
        return bool(flag)

    def _learning_rate(self) -> float:
        """Return the next step's rate; time may shorten the run but never the warm-up."""
        lr = self.schedule.at(self.schedule_position + 1)
        step = self.progress.step + 1
        return min(lr, self.schedule.at(step)) if step <= self.schedule.warmup else lr

    def _global_tokens(self, batches: Sequence[Batch]) -> float:
        """Count the labelled tokens of the global batch; the loss is their mean."""
        count = torch.tensor(
            sum(int((batch["labels"] >= 0).sum()) for batch in batches), dtype=torch.float64
        )
        group = self.state.group("dp")  # context-parallel ranks hold the same batch, whole
        if group is not None:
            count = count.to(self.state.device)
            dist.all_reduce(count, group=group)
        return max(float(count), 1.0)

    def _agree(self, outputs: list[Any], started: float) -> tuple[float, bool, float]:
        """Sum the loss over ranks, and agree on a stop request and on the time."""
        # The rank that holds the last stage has the outputs; tensor-parallel ranks have the same.
        counts = self.state.index("tp") == 0
        loss = sum(float(output["lm"]) for output in outputs) if counts else 0.0
        elapsed = time.perf_counter() - started if self.state.rank == 0 else 0.0
        shared = torch.tensor([loss, float(self._stop.made), elapsed], dtype=torch.float64)
        group = self.state.group("tp-cp-dp-pp")
        if group is not None:
            shared = shared.to(self.state.device)
            dist.all_reduce(shared, group=group)
        loss, stop, elapsed = shared.tolist()
        return loss, stop > 0, elapsed

    def _record(self, loss: float, norm: float, lr: float, tokens: float, seconds: float) -> Record:
        training = self.config.training
        rate = tokens / seconds
        tflops = rate * self._flops / 1e12
        position = self.schedule_position
        left = max(training.steps - position, 0.0)
        world = self.state.layout.world_size
        return {
            "step": self.progress.step,
            "loss": loss,
            "lr": lr,
            "grad_norm": norm,
            "tokens_per_second": rate,
            "tflops_per_second": tflops,
            "mfu": None if self._peak is None else tflops * 1e12 / (self._peak * world),
            "memory_bytes": memory_bytes(self.state.device),
            "seconds": seconds,
            "progress": min(position / training.steps, 1.0),
            "eta_seconds": self.progress.elapsed * left / max(position, 1e-9),
        }


def learning_rates(config: RunConfig) -> LRSchedule:
    """Build the learning-rate schedule of a run, in steps."""
    optimizer, steps = config.optimizer, config.training.steps
    decay = max(steps + 1, optimizer.warmup)  # the last step still has a rate
    return LRSchedule(
        kind=optimizer.schedule,
        max_lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        warmup=optimizer.warmup,
        decay=decay,
        wsd_anneal=min(round(optimizer.anneal * steps), decay - optimizer.warmup),
        wsd_shape=optimizer.anneal_shape,
    )


def to_device(batches: Sequence[MicroBatch], device: torch.device) -> list[Batch]:
    """Copy micro-batches of numpy arrays to this rank's device."""
    names = ("tokens", "labels", "sample_ids")
    return [{name: torch.from_numpy(batch[name]).to(device) for name in names} for batch in batches]
