"""The stages of the model on this rank, under any pipeline schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

from mt_files import Stage
from mt_model import DTYPES, GPT, ModelConfig, initializer
from mt_parallel_state import ParallelState, shard_param, sharding_of
from mt_schedule import Schedule
from torch import Tensor, nn

from mt_train.config.pipeline_plan import PipelinePlan
from mt_train.config.run_config import RunConfig


def build_stages(
    plan: PipelinePlan, config: ModelConfig, state: ParallelState, **options: Any
) -> list[GPT]:
    """Build the stages that the schedule gives this rank, in its order.

    An embedding whose two ends are on one rank is one parameter, and so are the tables that all
    stages hold. With two directions every stage is on two ranks: the second is a copy, and both
    have partial gradients over "mirror".
    Parameters are on the meta device, for `shard` to give them memory.

    Args:
        plan: The schedule and the layers.
        config: The model.
        state: This rank's place.
        **options: Further arguments of `GPT`.
    """
    schedule = plan.schedule
    held = schedule.stages_of(state.index("pp"))
    stages = [
        cast("GPT", config.build(state, layers=layers, device="meta", **options))
        for layers in plan.layers_of(state.index("pp"))
    ]
    if schedule.directions == 2:
        for number, stage in zip(held, stages, strict=True):
            for param in stage.parameters():
                partial = set(sharding_of(param).partial_grad) - {"embedding"}
                _mark(param, (*sorted(partial), "mirror"), is_copy=number >= schedule.depth)
    if config.shares_embedding:
        _share_embedding(stages)
    _share_tables(stages, owns=0 in held)
    return stages


def ends_of(stages: Sequence[GPT]) -> tuple[Stage, ...]:
    """Return the place of a rank's stages in the pipeline: its ends, or its middle."""
    first = any(stage.has_embedding for stage in stages)
    last = any(stage.has_head for stage in stages)
    if first and last:
        return ("first", "middle", "last") if len(stages) == 1 else ("first", "last")
    return ("first",) if first else ("last",) if last else ("middle",)


def stage_options(config: RunConfig) -> dict[str, Any]:
    """Return the arguments of `ModelConfig.build` that a run's configuration names."""
    parallel, training = config.parallel, config.training
    return {
        "sequence_parallel": parallel.sequence_parallel,
        "context_algorithm": parallel.cp_algorithm,
        "context_inner_size": parallel.cp_inner,
        "kernels": config.model.kernels,
        "recompute": training.recompute,
        "seed": training.seed,
        "lora": config.lora,
        "dtype": DTYPES[training.dtype],
    }


def initial_values(
    stages: Sequence[GPT], config: ModelConfig, state: ParallelState, *, seed: int
) -> Callable[[str, Tensor], None]:
    """Return a function that fills the parameters of stages, given their global names."""
    fills: dict[str, Callable[[str, nn.Parameter], None]] = {}
    for stage in stages:
        fill = initializer(stage, config, state, seed=seed)
        fills |= dict.fromkeys((name for name, _ in stage.named_parameters()), fill)
    return lambda name, param: fills[name](name, cast("nn.Parameter", param))


def _share_embedding(stages: Sequence[GPT]) -> None:
    first = next((stage for stage in stages if stage.has_embedding), None)
    last = next((stage for stage in stages if stage.has_head), None)
    if first is None or last is None or first is last:
        return
    last.embedding.weight = first.embedding.weight
    partial = set(sharding_of(first.embedding.weight).partial_grad) - {"embedding"}
    is_copy = sharding_of(first.embedding.weight).is_copy
    _mark(first.embedding.weight, tuple(sorted(partial)), is_copy=is_copy)


def _share_tables(stages: Sequence[GPT], *, owns: bool) -> None:
    """Make the tables that all stages hold one parameter on this rank."""
    if stages[0].config.num_layers == len(stages[0].layer_range):
        return
    for name, table in stages[0].score_tables.items():
        for stage in stages[1:]:
            stage.score_tables[name] = table
        weight = cast("nn.Parameter", table.weight)
        _mark(weight, ("pp",), is_copy=not owns)


def _mark(param: nn.Parameter, partial: tuple[str, ...], *, is_copy: bool) -> None:
    shard_param(param, sharding_of(param).spec, partial_grad=partial, is_copy=is_copy)


def named_parameters(
    schedule: Schedule, rank: int, stages: Sequence[GPT]
) -> dict[str, nn.Parameter]:
    """Return each parameter of a rank's stages once, by its global name, in the model's order.

    Two ranks with the same stages, one for each direction, list them in the same order, so that
    ZeRO cuts them at the same places.
    """
    held = zip(schedule.stages_of(rank), stages, strict=True)
    ordered = sorted(held, key=lambda pair: pair[0] % schedule.depth)
    return {name: param for _, stage in ordered for name, param in stage.named_parameters()}


def backwards_per_step(schedule: Schedule, rank: int, stages: Sequence[GPT]) -> dict[str, int]:
    """Return the number of backward passes of a step with a gradient of each parameter."""
    counts: Counter[str] = Counter()
    for number, stage in zip(schedule.stages_of(rank), stages, strict=True):
        for name, _ in stage.named_parameters():
            counts[name] += len(schedule.microbatches_of(number))
    return dict(counts)
