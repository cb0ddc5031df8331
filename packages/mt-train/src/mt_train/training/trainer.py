"""The trainer: one step is forward and backward of all micro-batches, reduce, clip, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from mt_data import BatchSampler
from mt_data_parallel import GradBuffer, shard
from mt_files import UserError
from mt_model import DTYPES, ModelConfig
from mt_optim import DistributedOptimizer, StepResult, build_optimizer
from mt_parallel_state import ParallelState, StopSignals, sharding_of
from mt_pipeline import Executor, TensorSpec
from mt_schedule import Schedule
from torch import Tensor
from torch.nn import Parameter
from torch.profiler import record_function

from mt_train.agreement import summed, uploaded
from mt_train.config.pipeline_plan import plan_pipeline
from mt_train.config.run_config import RunConfig
from mt_train.data.loader import Batch, prefetched, rows_of, to_device
from mt_train.parts.objective import Objective, totals
from mt_train.parts.part import Run, Setup
from mt_train.parts.registry import wanted_parts
from mt_train.parts.update import Update
from mt_train.reporting.metrics import Record
from mt_train.training.base_codes import codes_of, is_code
from mt_train.training.data_parallel import reduction, shard_options
from mt_train.training.freezing import freeze
from mt_train.training.hardware import memory_bytes, peak_flops
from mt_train.training.optimization import kept_whole, optimizer_config
from mt_train.training.progress import Course, Progress, StepMeter
from mt_train.training.stages import (
    backwards_per_step,
    build_stages,
    ends_of,
    initial_values,
    named_parameters,
    stage_options,
)

# From its start a dynamic loss scale takes some 30 steps to fit; more than this is no accident.
_MOST_SKIPPED = 100


class NonFiniteLossError(UserError, RuntimeError):
    """Loss or gradient became NaN or infinite; no rank applied the step."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """The result of a step, equal on all ranks.

    Attributes:
        record: Its metrics.
        stop: Whether a stop was requested on any rank.
        save: Whether any rank asked for a checkpoint.
    """

    record: Record
    stop: bool
    save: bool


class Trainer:
    """The trainer of one model on one layout; every rank has one.

    Args:
        config: The run.
        model_config: The layer list.
        state: This rank's place in the layout.
        sampler: Source of the micro-batches of any step.
        stop: Stop request, checked after every step; a request on one rank stops all.
        on_event: Function to call with the name of each point reached (fault injection).
        folder: Folder for files that parts write beside checkpoints.
    """

    def __init__(
        self,
        config: RunConfig,
        model_config: ModelConfig,
        state: ParallelState,
        *,
        sampler: BatchSampler,
        stop: StopSignals | None = None,
        on_event: Callable[[str], None] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.config, self.state = config, state
        self.progress, self.course, self._meter = Progress(), Course(config), StepMeter()
        self.on_event = on_event or (lambda name: None)
        self._stop = stop or StopSignals()
        self._skipped_in_a_row = 0
        self.dtype = DTYPES[config.training.dtype]
        self._flops = model_config.flops_per_token(config.training.sequence_length)
        self._peak = peak_flops(state.device, self.dtype)
        plan = plan_pipeline(
            config.pipeline,
            ranks=state.size("pp"),
            microbatches=sampler.num_microbatches,
            num_layers=model_config.num_layers,
            modules=len(model_config.mtp_layers),
        )
        options = stage_options(config)
        self.stages = build_stages(plan, model_config, state, **options)
        freeze(self.stages, config.training.freeze)
        self._takes_images = model_config.images is not None
        # Ranks that share rows have the same images, and the first stage encodes them.
        counts = not any(map(state.index, ("tp", "cp", "pp")))
        inputs = [stage.images for stage in self.stages if counts and stage.images is not None]
        self._flops_per_image = sum(each.flops_per_image for each in inputs)
        setup = Setup(
            config=config,
            model=model_config,
            state=state,
            stages=self.stages,
            stage_options=options,
            microbatches=sampler.num_microbatches,
            folder=folder or Path(),
        )
        self.parts = [part(setup) for part in wanted_parts(config)]
        self.objective = Objective(
            weights=model_config.loss_weights, count_of=model_config.loss_counts
        )
        for part in self.parts:
            self.objective = part.objective(self.objective)
        length, ends = config.training.sequence_length, ends_of(self.stages)
        self.sampler = sampler.with_rows(rows_of(state, length, sampler.rows, ends))
        self._loader = prefetched(self.sampler, state.device, counts=self.objective.counts)
        here = (plan.schedule, state.index("pp"), self.stages)
        self._backwards = backwards_per_step(*here)
        self.buffer = self._allocate(model_config, named_parameters(*here))
        self.named_parameters = list(named_parameters(*here).items())  # `shard` makes new ones
        self.optimizer = DistributedOptimizer(
            self.buffer, lambda shards: build_optimizer(shards, optimizer_config(config), state)
        )
        self.executor, self._update = self._assemble(plan.schedule, model_config)

    def _allocate(self, model: ModelConfig, named: Mapping[str, Parameter]) -> GradBuffer:
        """Give the parameters their memory and initial values, and the gradients their buckets."""
        config, state = self.config, self.state
        options = shard_options(config)
        for part in self.parts:
            options |= part.shard_options()
        buffer = shard(
            torch.nn.ModuleList(self.stages),
            config.data_parallel.strategy,
            group=reduction(config.data_parallel, state),
            named_params=named.items(),
            init=initial_values(self.stages, model, state, seed=config.training.seed),
            device=state.device,
            whole=kept_whole(config),
            **options,
        )
        for stage in self.stages:
            stage.sum_weight_gradients(buffer.sink)
        for part in self.parts:
            part.parameters_ready(buffer)
        return buffer

    def _assemble(self, schedule: Schedule, model: ModelConfig) -> tuple[Executor, Update]:
        """Put the parts around the stages and around the optimizer's step."""
        state, update = self.state, Update(self.optimizer, self.state)
        runs: list[Run] = [*self.stages]
        for part in self.parts:
            runs = part.wrap(runs)
        for part in self.parts:
            part.optimizer_ready(self.optimizer)
        for part in self.parts:  # last: what a part asks of the optimizer decides who can step it
            update = part.wrap_update(update)
        shards = state.size("tp") if self.config.parallel.sequence_parallel else 1
        width = model.hidden_size + sum(part.extra_hidden_size for part in self.parts)

        def activation(batch: Batch) -> TensorSpec:
            """Return the shape of the tensor between two stages for a micro-batch."""
            rows, length = len(batch["tokens"]), model.handed_tokens(batch)
            return TensorSpec((rows, length // shards, width), self.dtype)

        executor = Executor(
            schedule,
            runs,
            group=state.group("pp"),
            activation=activation,
            device=state.device,
            # Ranks of other pipelines would wait for the layers that a failed one skips.
            stop_at_failure=state.layout.world_size > state.size("pp"),
        )
        return executor, update

    def count_parameters(self) -> tuple[int, int]:
        """Count the whole model's parameters, each logical one once; every rank calls it.

        Returns:
            The numbers of all parameters and of trained ones.
        """
        layout, counts, codes = self.state.layout, [0, 0], codes_of(self.stages)
        for name, param in self.named_parameters:
            record, shape, coded = sharding_of(param), tuple(param.shape), codes.get(name)
            spec = record.spec
            if coded is not None:  # several to a byte
                spec, shape = coded.record.spec, coded.full_shape
            if not record.is_copy and (coded is not None or not is_code(name, codes)):
                own = math.prod(spec.global_shape(shape, layout))
                counts[0] += own
                counts[1] += own * param.requires_grad
        every, trained = summed(self.state, *counts, axes="pp")
        return int(every), int(trained)

    @property
    def finished(self) -> bool:
        """Return whether the steps, or the time budget, are used up."""
        return self.course.finished(self.progress)

    def train_step(self, *, save: bool = False) -> Step:
        """Run one optimizer step.

        Args:
            save: Whether this rank requests a checkpoint.

        Raises:
            NonFiniteLossError: On every rank, before any parameter has changed.
        """
        self._meter.start()
        rates = {
            "lr": self.course.learning_rate(self.progress),
            "weight_decay": self.course.weight_decay(self.progress),
        }
        for part in self.parts:
            part.begin_step(self.progress.step)
        with record_function("data"):
            ready = self._loader.step(self.progress.step)
            batches = to_device(ready.batches, self.state.device)
        labels = map(sum, zip(*ready.labels, strict=True))
        total = [max(n, 1.0) for n in summed(self.state, *labels, axes="dp-cp")]
        outputs = self._run_passes(batches, self._divisors(ready.labels, total))
        images = sum(len(batch.get("pixel_values", ())) for batch in batches)
        numbers = self._own_numbers(outputs, images, save=save)
        # The step's only wait for the device: everything that ranks agree on comes with it.
        with record_function("agreement"):
            sums = self._update.measure(torch.cat(numbers), **rates)
        losses, *of_parts, others = _split(sums, [len(x) for x in numbers])
        stop, wants_save, seconds, *of_images = others
        divisors = dict(zip(self.objective.counts, total, strict=True))
        means = self.objective.record(losses, divisors)
        self._check_finite(means)
        for part in self.parts:
            part.end_passes()
        with record_function("optimizer"):
            result = self._update.finish(**rates)
        if not result.stepped:
            result = replace(result, step=self.progress.step + 1)  # skipped ones count here
            self._check_skipped(means, result)
        self._meter.stop()
        self._advance(seconds, stepped=result.stepped)
        record = self._record(means, rates["lr"], total[0], seconds, sum(of_images))
        for part, own in zip(self.parts, of_parts, strict=True):
            record |= part.record(own, record)
        return Step(record=record | self._found(result), stop=stop > 0, save=wants_save > 0)

    def _advance(self, seconds: float, *, stepped: bool) -> None:
        self._skipped_in_a_row = 0 if stepped else self._skipped_in_a_row + 1
        self.progress = Progress(
            step=self.progress.step + 1,
            samples=self.progress.samples + self.sampler.global_batch_size,
            elapsed=self.progress.elapsed + seconds,
            skipped=self.progress.skipped + (not stepped),
        )

    def _run_passes(self, batches: list[Batch], divisors: list[dict[str, float]]) -> list[Any]:
        """Run forward and backward of all micro-batches, sum the gradients, return the losses.

        Args:
            batches: Micro-batches on this rank's device.
            divisors: Divisors of each micro-batch's losses, from `_divisors`.
        """
        self.on_event("train.forward_backward")
        self.buffer.start(self._backwards)
        scale, objective = self.optimizer.loss_scale, self.objective
        by_batch = dict(zip(map(id, batches), divisors, strict=True))
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.passes())
            outputs = self.executor.run(
                batches,
                objective=lambda own, batch: objective(own, by_batch[id(batch)]) * scale,
            )
        outputs += self.executor.inner_losses.values()
        with record_function("gradients"):
            self.buffer.finish()
            self.on_event("train.reduce")
            self._update.reduce()
        self.on_event("train.update")
        return outputs

    def _divisors(self, labels: list[list[int]], total: list[float]) -> list[dict[str, float]]:
        """Return the divisors of each micro-batch's losses, by `training.loss_mean`.

        Args:
            labels: Counts of each of this rank's micro-batches, as in `HostStep`.
            total: Counts of the whole step.

        Returns:
            Divisor of each count, by name.
        """
        if self.config.training.loss_mean == "tokens":
            return [dict(zip(self.objective.counts, total, strict=True))] * len(labels)
        flat, names = chain.from_iterable(labels), self.objective.counts
        shared = iter(summed(self.state, *flat, axes="cp"))  # who shares sequences shares batches
        parts = len(labels) * self.state.size("dp")
        return [{name: max(next(shared), 1.0) * parts for name in names} for _ in labels]

    def _check_finite(self, losses: Mapping[str, float]) -> None:
        """Raise on every rank; a smaller loss scale would not help, so no step is skipped."""
        if not all(map(math.isfinite, losses.values())):
            raise _not_applied(f"step {self.progress.step + 1}: {_named(losses)}")

    def _check_skipped(self, losses: Mapping[str, float], result: StepResult) -> None:
        """Raise on every rank if a step may not be skipped, or too many are skipped."""
        what = f"{result.why_skipped()}; {_named(losses)}"
        if result.is_finite or self.optimizer.scaler is not None:
            if self._skipped_in_a_row + 1 < _MOST_SKIPPED:
                return
            what += f"; {_MOST_SKIPPED} steps were skipped one after another"
        raise _not_applied(what)

    def close(self) -> None:
        """Close the parts, end the thread that reads ahead, and release gradients and groups.

        The parameters' hooks keep the buffer alive, in a cycle that garbage collection can't see.
        """
        for part in self.parts:
            part.close()
        self._loader.close()
        self.buffer.close()

    def train(self, *, training: bool) -> None:
        """Switch dropout on or off."""
        for stage in self.stages:
            stage.train(training)

    def stop_requested(self) -> bool:
        """Return whether any rank was asked to stop; every rank calls it and gets one answer."""
        return summed(self.state, self._stop.requested)[0] > 0

    def weights_loaded(self) -> None:
        """Copy loaded masters into the weights, and notify the parts; every rank calls it."""
        for part in self.parts:  # first: primary weights are encoded by the scales that were loaded
            part.weights_loaded()
        self.optimizer.sync_params()

    def _own_numbers(self, outputs: list[Any], images: int, *, save: bool) -> list[Tensor]:
        """Return the numbers that ranks sum with the norm: losses, numbers of parts, and flags."""
        device = self.state.device
        # Each rank has what its own stages return; tensor-parallel ranks have the same.
        outputs = outputs if self.state.index("tp") == 0 else []
        losses = totals(outputs, self.objective.weights, device)
        lap = self._meter.lap()
        seconds = lap if self.state.rank == 0 else 0.0
        of_images = [images * self._flops_per_image] if self._takes_images else []
        others = uploaded([self._stop.requested, save, seconds, *of_images], device)
        return [losses, *(part.own_numbers() for part in self.parts), others]

    def _record(
        self, losses: Record, lr: float, tokens: float, seconds: float, of_images: float
    ) -> Record:
        if self.config.data.has_few_labels:
            tokens = self.sampler.global_batch_size * self.config.training.sequence_length
        rate = tokens / seconds
        flops = rate * self._flops + of_images / seconds
        world = self.state.layout.world_size
        return {
            "step": self.progress.step,
            **losses,
            "lr": lr,
            "skipped_steps": self.progress.skipped,
            "tokens_per_second": rate,
            "tflops_per_second": flops / 1e12,
            "mfu": None if self._peak is None else flops / (self._peak * world),
            "memory_bytes": memory_bytes(self.state.device),
            "seconds": seconds,
            "progress": self.course.share(self.progress),
            "eta_seconds": self.course.seconds_left(self.progress),
        }

    def _found(self, result: StepResult) -> Record:
        """Return the optimizer's measurements of the gradient."""
        found: Record = {"grad_norm": result.grad_norm or 0.0}
        found |= {f"grad_norm/{name}": norm for name, norm in result.norms.items()}
        if result.zeros is not None:
            found["zeros"] = result.zeros
        if self.optimizer.scaler is not None:
            found["loss_scale"] = result.loss_scale
        for name, own in result.statistics.items():
            values = {"norm": own.norm, "largest": own.largest, "zeros": own.zeros}
            found |= {f"gradients/{name}/{what}": value for what, value in values.items()}
        if not result.stepped:
            found["skipped"] = result.why_skipped()
        return found


def _named(losses: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {loss}" for name, loss in losses.items())


def _not_applied(what: str) -> NonFiniteLossError:
    return NonFiniteLossError(
        f"{what}. The step was not applied, and what is saved is as before; lower optimizer.lr, "
        "lengthen optimizer.warmup or lower training.grad_clip, then run the same command again"
    )


def _split(numbers: list[float], sizes: list[int]) -> list[list[float]]:
    """Cut numbers into consecutive lists of these sizes."""
    rest = iter(numbers)
    return [list(islice(rest, size)) for size in sizes]
