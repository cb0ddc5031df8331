"""The trainer: one step is forward and backward of all micro-batches, reduce, clip, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from mt_data import BatchSampler
from mt_data_parallel import reduce_partial_grads, shard
from mt_files import UserError
from mt_model import DTYPES, ModelConfig, balance_experts
from mt_optim import DistributedOptimizer, StepResult, build_optimizer
from mt_parallel_state import ParallelState, StopSignals, global_shape_of, sharding_of
from mt_pipeline import Executor, TensorSpec
from torch import Tensor

from mt_train.agreement import summed, uploaded
from mt_train.config.misfits import clipped_heads
from mt_train.config.pipeline_plan import plan_pipeline
from mt_train.config.run_config import RunConfig
from mt_train.data.loader import Batch, prefetched, rows_of, to_device
from mt_train.parts.activations import ActivationWatch
from mt_train.parts.clipping import LogitClip
from mt_train.parts.distillation import Distillation
from mt_train.parts.experts import ExpertLoads
from mt_train.parts.graphs import captured_step, wrap_stages
from mt_train.parts.precision import LowPrecision, primary_weights
from mt_train.parts.quantization import FakeQuantization
from mt_train.reporting.metrics import Record
from mt_train.training.data_parallel import reduction, shard_options
from mt_train.training.hardware import memory_bytes, peak_flops
from mt_train.training.losses import loss_record, totals, weighed
from mt_train.training.optimization import kept_whole, optimizer_config
from mt_train.training.progress import Course, Progress, StepMeter
from mt_train.training.stages import (
    backwards_per_step,
    build_stages,
    initial_values,
    named_parameters,
)

# From its start a dynamic loss scale takes some 30 steps to fit; more than this is no accident.
_MOST_SKIPPED = 100


class NonFiniteLossError(UserError, RuntimeError):
    """Loss or gradient became NaN or infinite; no rank applied the step."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step as all ranks see it.

    Attributes:
        record: Its metrics.
        stop: Whether a stop was requested on any rank.
        save: Whether any rank asked for a checkpoint.
    """

    record: Record
    stop: bool
    save: bool


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
        stop: StopSignals | None = None,
        on_event: Callable[[str], None] | None = None,
    ) -> None:
        training, parallel = config.training, config.parallel
        self.config, self.state = config, state
        self.progress, self.course, self._meter = Progress(), Course(config), StepMeter()
        self.on_event = on_event or (lambda name: None)
        self.dtype = DTYPES[training.dtype]
        plan = plan_pipeline(
            config.pipeline,
            ranks=state.size("pp"),
            microbatches=sampler.num_microbatches,
            num_layers=model_config.num_layers,
            modules=len(model_config.mtp_layers),
        )
        self.stages = build_stages(
            plan,
            model_config,
            state,
            sequence_parallel=parallel.sequence_parallel,
            context_algorithm=parallel.cp_algorithm,
            context_inner_size=parallel.cp_inner,
            kernels=config.model.kernels,
            recompute=training.recompute,
            seed=training.seed,
            dtype=self.dtype,
        )
        self.rows = rows_of(
            state,
            training.sequence_length,
            packing=config.data.packing,
            reads=any(stage.has_embedding or stage.has_head for stage in self.stages),
        )
        self.sampler = sampler.with_rows(self.rows)
        self.distillation = Distillation(
            config, model_config, state, microbatches=sampler.num_microbatches
        )
        self._hidden_size = model_config.hidden_size + self.distillation.hidden_size
        self.loss_weights = self.distillation.weights(model_config.loss_weights)
        self.loss_counts = self.distillation.counts(model_config.loss_counts)
        self.counts = tuple(dict.fromkeys(self.loss_counts.values()))
        self._loader = prefetched(self.sampler, state.device, counts=self.counts)
        here = (plan.schedule, state.index("pp"), self.stages)
        self._backwards = backwards_per_step(*here)
        primary = primary_weights(config, self.stages)
        self.buffer = shard(
            torch.nn.ModuleList(self.stages),
            config.data_parallel.strategy,
            group=reduction(config.data_parallel, state),
            named_params=named_parameters(*here).items(),
            init=initial_values(self.stages, model_config, state, seed=training.seed),
            device=state.device,
            whole=kept_whole(config),
            encoding=primary,
            **shard_options(config),
        )
        self.named_parameters = list(named_parameters(*here).items())
        self.precision = LowPrecision(config, self.stages, state, primary=primary)
        if primary is not None:
            self.buffer.gather_params()
        self.quantization = FakeQuantization(config, self.stages, state)
        self._experts = ExpertLoads(self.stages, state, every=config.logging.every)
        self.optimizer = DistributedOptimizer(
            self.buffer, lambda pieces: build_optimizer(pieces, optimizer_config(config), state)
        )
        self.reasons: list[str] = []  # why something is not captured; who tells them empties it
        runs, pool = wrap_stages(
            self.stages,
            training,
            self.buffer,
            microbatches=sampler.num_microbatches,
            on_eager=self.reasons.append,
        )
        self._clip: LogitClip | None = None
        if config.optimizer.qk_clip is not None:
            self._clip = LogitClip(
                config.optimizer.qk_clip, self.stages, state, clipped_heads(model_config)
            )
            self.optimizer.inner.rescale = self._clip.factors
        self.captured = captured_step(
            self.optimizer, state, training, pool, on_eager=self.reasons.append
        )
        self.executor = Executor(
            plan.schedule,
            self.distillation.around(runs, self.stages),
            group=state.group("pp"),
            activation=self._activation,
            device=state.device,
            # Ranks of other pipelines would wait for the layers that a failed one skips.
            stop_at_failure=state.layout.world_size > state.size("pp"),
        )
        self._flops = model_config.flops_per_token(training.sequence_length)
        self._peak = peak_flops(state.device, self.dtype)
        self._stop = stop or StopSignals()
        self._skipped_in_a_row, self._is_first = 0, True
        self._activations = ActivationWatch(config, self.stages, state)

    def _activation(self, batch: Batch) -> TensorSpec:
        """Say what one stage hands to the next for a micro-batch."""
        rows, length = batch["tokens"].shape
        length += batch["encoder_tokens"].shape[1] if "encoder_tokens" in batch else 0
        shards = self.state.size("tp") if self.config.parallel.sequence_parallel else 1
        return TensorSpec((rows, length // shards, self._hidden_size), self.dtype)

    def count_parameters(self) -> int:
        """Count the whole model's parameters, each logical one once; every rank calls it."""
        layout = self.state.layout
        own = sum(
            math.prod(global_shape_of(param, layout))
            for _, param in self.named_parameters
            if not sharding_of(param).is_copy
        )
        return int(summed(self.state, own, axes="pp")[0])

    @property
    def finished(self) -> bool:
        """Tell whether the steps, or the time budget, are used up."""
        return self.course.finished(self.progress)

    def train_step(self, *, save: bool = False) -> Step:
        """Run one optimizer step.

        Args:
            save: Whether this rank finds that it is time for a checkpoint.

        Raises:
            NonFiniteLossError: On every rank, before any parameter has changed.
        """
        self._meter.start()
        lr = self.course.learning_rate(self.progress)
        weight_decay = self.course.weight_decay(self.progress)
        self.precision.begin_step(self.progress.step)
        ready = self._loader.step(self.progress.step)
        batches = to_device(ready.batches, self.state.device)
        labels = map(sum, zip(*ready.labels, strict=True))
        total = [max(n, 1.0) for n in summed(self.state, *labels, axes="dp-cp")]
        outputs = self._run_passes(batches, self._divisors(ready.labels, total))
        own = self._own_numbers(outputs, save=save)
        rates, result = {"lr": lr, "weight_decay": weight_decay}, None
        if self.captured is None:
            sums = self.optimizer.measure(own)
        else:
            sums, result = self.captured(own, **rates)
        losses, loads, stop, save, seconds = self._told(sums, total)
        self._check_finite(losses)
        self._end_passes()
        result = self.optimizer.step(**rates) if result is None else result
        if not result.stepped:
            result = replace(result, step=self.progress.step + 1)  # skipped ones count here
            self._check_skipped(losses, result)
        self._meter.stop()
        self._skipped_in_a_row = 0 if result.stepped else self._skipped_in_a_row + 1
        self.progress = Progress(
            step=self.progress.step + 1,
            samples=self.progress.samples + self.sampler.global_batch_size,
            elapsed=self.progress.elapsed + seconds,
            skipped=self.progress.skipped + (not result.stepped),
        )
        tokens = total[0]
        if self.config.data.objective == "mlm":  # of which a few are labels
            tokens = self.sampler.global_batch_size * self.config.training.sequence_length
        record = self._record(losses, lr, tokens, seconds) | loads | self._activations.record()
        if self.config.training.compile and self._is_first:
            record["first_step_seconds"] = seconds
        self._is_first = False
        return Step(record=record | self._found(result), stop=stop, save=save)

    def _run_passes(self, batches: list[Batch], divisors: list[dict[str, float]]) -> list[Any]:
        """Run forward and backward of all micro-batches, sum the gradients, return the losses.

        Args:
            batches: On this rank's device.
            divisors: Of each one's losses, as `_divisors` gives them.
        """
        self.on_event("train.forward_backward")
        if self._clip is not None:
            self._clip.start()
        self.buffer.start(self._backwards)
        scale, losses_of = self.optimizer.loss_scale, (self.loss_weights, self.loss_counts)
        by_batch = dict(zip(map(id, batches), divisors, strict=True))
        with self._activations.first_step():
            outputs = self.executor.run(
                batches,
                objective=lambda own, batch: weighed(own, *losses_of, by_batch[id(batch)]) * scale,
            )
        outputs += self.executor.inner_losses.values()
        self.buffer.finish()
        self.on_event("train.reduce")
        if self.captured is None:
            reduce_partial_grads(self.optimizer.pieces, self.state)
        self.on_event("train.update")
        return outputs

    def _end_passes(self) -> None:
        """Tell what has a state of its own that the passes of a step are done."""
        self.precision.end_step()
        self.quantization.forget_weights()
        balance_experts(self.stages)

    def _divisors(self, labels: list[list[int]], total: list[float]) -> list[dict[str, float]]:
        """Say by what the losses of each micro-batch are divided, for the mean that is trained on.

        Args:
            labels: Of each of this rank's micro-batches, as in `HostStep`.
            total: Of the step.

        Returns:
            By the name of the count.
        """
        if self.config.training.loss_mean == "tokens":
            return [dict(zip(self.counts, total, strict=True))] * len(labels)
        flat = chain.from_iterable(labels)
        shared = iter(summed(self.state, *flat, axes="cp"))  # who shares sequences shares batches
        parts = len(labels) * self.state.size("dp")
        return [{name: max(next(shared), 1.0) * parts for name in self.counts} for _ in labels]

    def _check_finite(self, losses: Mapping[str, float]) -> None:
        """Raise on every rank alike; a smaller loss scale is no help, so no step is skipped."""
        if not all(map(math.isfinite, losses.values())):
            raise _not_applied(f"step {self.progress.step + 1}: {_named(losses)}")

    def _check_skipped(self, losses: Mapping[str, float], result: StepResult) -> None:
        """Raise on every rank alike where a step may not be skipped, or too many are."""
        what = f"{result.why_skipped()}; {_named(losses)}"
        if result.is_finite or self.optimizer.scaler is not None:
            if self._skipped_in_a_row + 1 < _MOST_SKIPPED:
                return
            what += f"; {_MOST_SKIPPED} steps were skipped one after another"
        raise _not_applied(what)

    def close(self) -> None:
        """End the thread that reads ahead, and let go of the gradients and their groups.

        The hooks of a buffer hold it by the parameters, which no garbage collection sees.
        """
        self._loader.close()
        self.buffer.close()

    def train(self, *, training: bool) -> None:
        """Switch dropout on or off."""
        for stage in self.stages:
            stage.train(training)

    def stop_requested(self) -> bool:
        """Tell whether any rank was asked to stop; every rank calls it and gets one answer."""
        return summed(self.state, self._stop.requested)[0] > 0

    def _own_numbers(self, outputs: list[Any], *, save: bool) -> Tensor:
        """Return what is summed over ranks with the norm, so that the host waits once in a step."""
        device = self.state.device
        # Each rank has what its own stages return; tensor-parallel ranks have the same.
        own = totals(outputs if self.state.index("tp") == 0 else [], self.loss_weights, device)
        lap = self._meter.lap()
        seconds = lap if self.state.rank == 0 else 0.0
        flags = uploaded([self._stop.requested, save, seconds], device)
        return torch.cat([own, self._experts.own(), flags])

    def _told(
        self, sums: list[float], total: list[float]
    ) -> tuple[Record, Record, bool, bool, float]:
        """Read the sums over ranks: losses, loads, stop and checkpoint, and the time."""
        *sums, stop, save, seconds = sums
        divisors = dict(zip(self.counts, total, strict=True))
        losses, loads = sums[: len(self.loss_weights)], sums[len(self.loss_weights) :]
        pairs = zip(self.loss_weights, losses, strict=True)
        means = {name: value / divisors[self.loss_counts[name]] for name, value in pairs}
        record = loss_record(means, self.loss_weights, "")
        found = self._experts.record(loads, self.progress.step + 1)
        return record, found, stop > 0, save > 0, seconds

    def _record(self, losses: Record, lr: float, tokens: float, seconds: float) -> Record:
        rate = tokens / seconds
        flops = rate * self._flops
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
        """Return what the optimizer found in the gradient."""
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
