"""The schedule of a run's pipeline, and the layers of each stage."""

from __future__ import annotations

from dataclasses import dataclass

from mt_files import FieldError
from mt_schedule import Schedule, make_schedule, parse_layout, split_layers

from mt_train.config.parallel_section import PipelineSection

_MAX_MICROBATCHES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """A schedule, and the layers of each stage of the model.

    Attributes:
        schedule: Schedule for this number of ranks and micro-batches.
        layers: Global layer indices of each stage, in the order of the data's path.
    """

    schedule: Schedule
    layers: tuple[range, ...]

    def layers_of(self, rank: int) -> list[range]:
        """Return the layers of each stage that a rank of the pipeline has, in its order."""
        return [self.layers[n % self.schedule.depth] for n in self.schedule.stages_of(rank)]


def plan_pipeline(
    section: PipelineSection, *, ranks: int, microbatches: int, num_layers: int, modules: int = 0
) -> PipelinePlan:
    """Make the schedule and place the layers.

    Args:
        section: Section `pipeline` of the configuration.
        ranks: Number of pipeline ranks.
        microbatches: Number of micro-batches in a step on each rank.
        num_layers: Number of layers in the model.
        modules: Number of modules for multi-token prediction, on the last stage.

    Raises:
        FieldError: The schedule can't take these sizes, or the layers do not fit its stages.
    """
    if section.microbatches not in (None, microbatches):
        text = f"{section.microbatches}, but training.global_batch_size / (micro_batch_size x dp) "
        text += f"gives {microbatches}; change one of them, or leave this out"
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
            text = f"{section.schedule!r} over {ranks} ranks has {schedule.depth} stages for "
            text += f"{num_layers} layers; every stage needs a layer, so use fewer ranks or chunks"
            raise FieldError({"pipeline.schedule": text})
        layers = tuple(split_layers(num_layers, schedule.depth))
        return PipelinePlan(schedule=schedule, layers=layers)
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
    """Refuse unrealistically many actions before a schedule is made."""
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
        text = f"it gives each rank {microbatches} micro-batches a step; at most "
        text += f"{_MAX_MICROBATCHES} are planned, so raise training.micro_batch_size or "
        text += "parallel.dp, or lower it"
    if field:
        raise FieldError({field: text})
