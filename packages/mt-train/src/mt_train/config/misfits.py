"""Settings of a run that do not fit its model, its batch or the layout."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm
from typing import TYPE_CHECKING

from mt_files import FieldError, divisors
from mt_model import Kernels, ModelConfig, RecomputePlan, validate_context, validate_split

from mt_train.config.limits import listed
from mt_train.config.parallel_section import ParallelSection
from mt_train.config.pipeline_plan import plan_pipeline
from mt_train.config.run_config import RunConfig

if TYPE_CHECKING:  # checking a file takes no torch
    from mt_parallel_state import ParallelLayout

_MAX_SCHEDULE = 1 << 20  # forward passes of one step over all stages
# Forms with a backward of their own, which refuse a compiler.
_EAGER_KERNELS = (("norm", "cpu"), ("activation", "torch"), ("rope", "torch"))
_SHARED_ATTENTION = ("auto", "tiles", "reference")  # for ranks that share sequences


def layout_misfits(
    config: RunConfig, model: ModelConfig, layout: ParallelLayout
) -> Iterator[tuple[str, str]]:
    """Yield (field, text) of each setting that does not fit the layout."""
    training = config.training
    per_step = training.micro_batch_size * layout.dp
    if training.global_batch_size % per_step:
        text = f"{training.global_batch_size} is not divisible by micro_batch_size "
        text += f"{training.micro_batch_size} x dp {layout.dp} = {per_step}; use a multiple of "
        yield "training.global_batch_size", f"{text}{per_step}"
    else:
        microbatches = training.global_batch_size // per_step
        yield from _pipeline_misfits(config, model, layout.pp, microbatches)
    try:
        RecomputePlan.of(training.recompute).check(len(model.all_layers))
    except FieldError as error:
        yield "training.recompute", "; ".join(f"{n}: {text}" for n, text in error.errors.items())
    split = list(_split_misfits(config.data_parallel.replicas, model, layout))
    yield from split
    if any(name.startswith("parallel.") for name, _ in split):
        return
    yield from _context_misfits(config.parallel, model, layout)
    cut = 2 * layout.cp if layout.cp > 1 else 1
    shards = layout.tp if config.parallel.sequence_parallel else 1
    parts = cut * lcm(shards, config.data.unit() if cut > 1 else 1)
    for key, length in config.data.lengths(training.sequence_length).items():
        if length % parts:
            text = f"{length} is not divisible by {parts}, which parallel.tp and cp need; use "
            yield key, text + f"{-(-length // parts) * parts}"
    kernels = Kernels.of(config.model.kernels)
    for name, kernel in _EAGER_KERNELS if training.compile else ():
        if getattr(kernels, name) == kernel:
            text = f"{name} by {kernel} is for eager mode, and training.compile is on; use auto, "
            yield "model.kernels", text + "fused or reference"
    attention = kernels.attention
    if layout.cp > 1 and attention not in _SHARED_ATTENTION:
        text = f"{attention} needs whole sequences, and {layout.cp} ranks share them; use "
        yield "model.kernels", text + f"{' or '.join(_SHARED_ATTENTION)}, or parallel.cp 1"


def _split_misfits(
    replicas: int, model: ModelConfig, layout: ParallelLayout
) -> Iterator[tuple[str, str]]:
    """Yield the sizes that ranks can't share evenly: replicas, experts, tensors."""
    ranks, edp = layout.dp * layout.cp, layout.size("edp")
    if ranks % replicas:
        text = f"{replicas} does not divide parallel.dp {layout.dp} x parallel.cp {layout.cp} = "
        text += f"{ranks}; use one of {listed(divisors(ranks))}"
        yield "data_parallel.replicas", text
    elif model.has_experts and edp % replicas:
        text = f"{replicas} does not divide the {edp} ranks that have the same experts; use one of "
        yield "data_parallel.replicas", text + listed(divisors(edp))
    try:
        model.check_experts(ep=layout.ep, etp=layout.size("etp"))
    except ValueError as error:
        yield "parallel.etp" if "etp=" in str(error) else "parallel.ep", str(error)
    try:
        validate_split(model, layout.tp)
    except ValueError as error:
        yield "parallel.tp", str(error)


def clipped_heads(model: ModelConfig) -> list[int]:
    """Return the number of key heads of each layer; 0 if scores do not grow with the weights."""
    mixers = (layer.mixer for layer in model.all_layers)
    return [0 if mixer is None else mixer.clipped_heads for mixer in mixers]


def _pipeline_misfits(
    config: RunConfig, model: ModelConfig, ranks: int, microbatches: int
) -> Iterator[tuple[str, str]]:
    """Yield the reasons why the schedule can't be made, before making it."""
    training, num_layers = config.training, model.num_layers
    stages = ranks * (config.pipeline.chunks or 1)
    if stages <= num_layers and microbatches * stages > _MAX_SCHEDULE:
        least = -(-microbatches * stages * training.micro_batch_size // _MAX_SCHEDULE)
        text = f"{training.micro_batch_size} cuts the global batch into {microbatches} "
        text += f"micro-batches for {stages} stages, more than {_MAX_SCHEDULE} pieces; use {least} "
        yield "training.micro_batch_size", text + "or more"
        return
    try:
        plan_pipeline(
            config.pipeline,
            ranks=ranks,
            microbatches=microbatches,
            num_layers=num_layers,
            modules=len(model.mtp_layers),
        )
    except FieldError as error:
        yield from error.errors.items()


def _context_misfits(
    parallel: ParallelSection, model: ModelConfig, layout: ParallelLayout
) -> Iterator[tuple[str, str]]:
    """Yield settings that do not fit the ranks that share a sequence."""
    algorithms = parallel.cp_algorithms(model.num_layers)
    if len(algorithms) != model.num_layers:
        text = f"{len(algorithms)} algorithms for {model.num_layers} layers; give one for each"
        yield "parallel.cp_algorithm", text
        return
    inner = parallel.cp_inner or 1
    try:
        validate_context(model, algorithms, cp=layout.cp, inner=inner, tp=layout.tp)
    except ValueError as error:
        yield "parallel.cp_algorithm", str(error)
