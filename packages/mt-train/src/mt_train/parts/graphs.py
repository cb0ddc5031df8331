"""What the layers of a rank's stages run through in training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from mt_data_parallel import GradBuffer
from mt_fusions import GraphPool
from mt_model import GPT, GraphOptions, graph_stage
from mt_optim import DistributedOptimizer, device_step_obstacle
from mt_parallel_state import ParallelState

from mt_train.config.run_config import TrainingSection
from mt_train.parts.captured_step import CapturedStep
from mt_train.parts.graph_sinks import GraphSinks
from mt_train.reporting.metrics import Record


def wrap_stages(
    stages: Sequence[GPT],
    training: TrainingSection,
    buffer: GradBuffer,
    *,
    microbatches: int,
    on_eager: Callable[[str], object],
) -> tuple[list[Callable[..., Any]], GraphPool | None]:
    """Put around what each layer or stage computes what the configuration asks for.

    Linear layers are told where their weights' gradients go.

    Args:
        stages: Of this rank.
        training: Says what.
        buffer: Where gradients go.
        microbatches: Of a step; as many passes run before graphs are captured.
        on_eager: Told of each reason why something is not captured.

    Returns:
        What the pipeline calls in place of the stages, and the pool of their graphs, if any.
    """
    if training.compile:
        for stage in stages:
            stage.wrap_layers(torch.compile)
    if training.cuda_graphs == "none":
        for stage in stages:
            stage.sum_weight_gradients(buffer.sink)
        return [*stages], None
    sinks = GraphSinks(buffer.sink)
    for stage in stages:
        stage.sum_weight_gradients(sinks.sink)
    options = GraphOptions(
        warmup=microbatches, slots=microbatches, around=sinks.around, on_eager=on_eager
    )
    unit = "layer" if training.cuda_graphs == "layer" else "stage"
    return [graph_stage(stage, unit, options) for stage in stages], options.pool


def captured_step(
    optimizer: DistributedOptimizer,
    state: ParallelState,
    training: TrainingSection,
    pool: GraphPool | None,
    on_eager: Callable[[str], object],
) -> CapturedStep | None:
    """Return the optimizer's step as a graph where that is asked for and can be; else None."""
    if pool is None or training.cuda_graphs != "step":
        return None
    why = device_step_obstacle(optimizer)
    if why is not None:
        on_eager(f"the optimizer's step runs eagerly: {why}")
        return None
    return CapturedStep(optimizer, state, pool=pool, on_eager=on_eager)


def graph_lines(training: TrainingSection, device: torch.device, *, step: bool) -> list[str]:
    """Say what is captured, where that was asked for; `step`: the optimizer's step too."""
    if training.cuda_graphs == "none":
        return []
    what = "each layer" if training.cuda_graphs == "layer" else "each stage"
    what += ", and the optimizer's step" if step else ""
    first = f"cuda_graphs: forward and backward of {what}, from the second step on"
    if device.type != "cuda":
        first += f"; on a {device.type.upper()} they run eagerly, held to the rules of a graph"
    if training.cuda_graphs == "layer":
        return [first, "cuda_graphs: the optimizer's step runs eagerly; step captures it"]
    return [first]


def describe(record: Record) -> str | None:
    """Say how long a run that compiles took for its first step; None for other steps."""
    if "first_step_seconds" not in record:
        return None
    return f"the first step took {record['first_step_seconds']:.1f} s, with compilation"
