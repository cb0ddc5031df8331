"""Which stages of the model this rank holds, under any pipeline schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mt_files import FieldError
from mt_model import GPT, ModelConfig, initializer
from mt_parallel_state import ParallelState, shard_param, sharding_of
from mt_schedule import Schedule, make_schedule, parse_layout, split_layers
from torch import Tensor, nn

from mt_train.parallel_section import PipelineSection

_MAX_MICROBATCHES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """A schedule, and the layers of each stage of the model.

    Attributes:
        schedule: For this number of ranks and micro-batches.
        layers: Global layer indices of each stage, in the order the data takes.
    """

    schedule: Schedule
    layers: tuple[range, ...]


def plan_pipeline(
    section: PipelineSection, *, ranks: int, microbatches: int, num_layers: int, modules: int = 0
) -> PipelinePlan:
    """Make the schedule and place the layers.

    Args:
        section: What is said of the pipeline.
        ranks: That share the layers.
        microbatches: Of a step, on each of them.
        num_layers: Of the model.
        modules: Those that predict further tokens, on the last stage.

    Raises:
        FieldError: The schedule can't take these sizes, or the layers do not fit its stages.
    """
    if section.microbatches not in (None, microbatches):
        text = (
            f"{section.microbatches}, but training.global_batch_size / (micro_batch_size x dp) "
            f"gives {microbatches}; change one of them, or leave this out"
        )
        raise FieldError({"pipeline.microbatches": text})
    _check_size(section, ranks, microbatches, num_layers)
    options = {
        name: value for name in ("chunks", "group") if (value := getattr(section, name)) is not None
    }
    try:
        schedule = make_schedule(section.schedule, ranks, microbatches, **options)
    except ValueError as error:
        raise FieldError({"pipeline.schedule": str(error)}) from error
    if section.layout is None:
        if num_layers < schedule.depth:
            text = (
                f"{section.schedule!r} over {ranks} ranks has {schedule.depth} stages for "
                f"{num_layers} layers; every stage needs a layer, so use fewer ranks or chunks"
            )
            raise FieldError({"pipeline.schedule": text})
        return PipelinePlan(
            schedule=schedule, layers=tuple(split_layers(num_layers, schedule.depth))
        )
    try:
        contents = parse_layout(section.layout, num_layers=num_layers, stages=schedule.depth)
    except ValueError as error:
        raise FieldError({"pipeline.layout": str(error)}) from error
    for stage, content in enumerate(contents):
        allowed = (0, modules if content is contents[-1] else 0)  # they are there without m, too
        text = f"stage {stage} has {content.mtp} modules that predict further tokens (m), and "
        if content.mtp not in allowed:
            text += f"model.mtp gives {modules} to the last stage; write as many there, or no m"
        elif not content.layers:
            text = f"stage {stage} has no layer; in mt-train every stage has one layer (t) or more"
        else:
            continue
        raise FieldError({"pipeline.layout": text})
    return PipelinePlan(schedule=schedule, layers=tuple(content.layers for content in contents))


def _check_size(section: PipelineSection, ranks: int, microbatches: int, num_layers: int) -> None:
    """Refuse, before a schedule is made, what would have more actions than anybody runs."""
    field, text = "", ""
    if ranks > num_layers:
        field = "parallel.pp" if section.stages is None else "pipeline.stages"
        text = f"{ranks} stages for {num_layers} layers; use at most one per layer"
    elif section.chunks is not None and section.chunks * ranks > num_layers:
        field = "pipeline.chunks"
        text = f"{section.chunks} x {ranks} ranks are more stages than the {num_layers} layers; "
        text += f"use {num_layers // ranks} or less"
    elif microbatches > _MAX_MICROBATCHES:
        field = "training.global_batch_size"
        text = (
            f"it gives each rank {microbatches} micro-batches a step; at most "
            f"{_MAX_MICROBATCHES} are planned, so raise training.micro_batch_size or parallel.dp, "
            "or lower it"
        )
    if field:
        raise FieldError({field: text})


def build_stages(
    plan: PipelinePlan, config: ModelConfig, state: ParallelState, **options: Any
) -> list[GPT]:
    """Build the stages that the schedule gives this rank, in its order.

    An embedding whose two ends are on one rank is one parameter, and so are the tables that
    all stages hold. With two directions every
    stage is on two ranks: the second is a copy, and both have partial gradients over "mirror".
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
        cast(
            "GPT",
            config.build(
                state, layers=plan.layers[stage % schedule.depth], device="meta", **options
            ),
        )
        for stage in held
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


def initial_values(
    stages: Sequence[GPT], config: ModelConfig, state: ParallelState, *, seed: int
) -> Callable[[str, Tensor], None]:
    """Return what fills the parameters of stages on the meta device, by their global names."""
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
    """Every parameter of a rank's stages once, by its global name, in the order of the model.

    Two ranks that hold the same stages, one for each direction, list them alike: what is cut into
    ranges is cut at the same places then.
    """
    held = zip(schedule.stages_of(rank), stages, strict=True)
    ordered = sorted(held, key=lambda pair: pair[0] % schedule.depth)
    return {name: param for _, stage in ordered for name, param in stage.named_parameters()}


def backwards_per_step(schedule: Schedule, rank: int, stages: Sequence[GPT]) -> dict[str, int]:
    """How many backward passes of a step give a gradient to each parameter of a rank."""
    counts: Counter[str] = Counter()
    for number, stage in zip(schedule.stages_of(rank), stages, strict=True):
        for name, _ in stage.named_parameters():
            counts[name] += len(schedule.microbatches_of(number))
    return dict(counts)
