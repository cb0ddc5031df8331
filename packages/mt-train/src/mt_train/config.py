"""The run configuration: one small frozen dataclass per section, each validated once.

Every section collects all its problems (`FieldError`), so that a user sees them together.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
from typing import Literal

from mt_data_parallel import DEFAULT_BUCKET_SIZE
from mt_model import Recompute
from mt_pipeline import GENERATORS

from mt_train.problem import FieldError

Dtype = Literal["fp64", "fp32", "bf16"]
ContextAlgorithm = Literal["ring", "all_gather", "ulysses", "hierarchical"]


class _Checks:
    """Collects what is wrong with a section's fields and raises once."""

    def __init__(self, section: object) -> None:
        self.section = section
        self.errors: dict[str, str] = {}

    def at_least(self, minimum: float, *names: str) -> None:
        for name in names:
            value = getattr(self.section, name)
            if value is not None and value < minimum:
                self.errors[name] = f"{value} is too small; use {minimum} or more"

    def above(self, minimum: float, *names: str) -> None:
        for name in names:
            value = getattr(self.section, name)
            if value is not None and value <= minimum:
                self.errors[name] = f"{value} must be greater than {minimum}"

    def fraction(self, *names: str) -> None:
        for name in names:
            value = getattr(self.section, name)
            if value is not None and not 0 <= value < 1:
                self.errors[name] = f"{value} must be at least 0 and below 1"

    def add(self, name: str, text: str) -> None:
        self.errors.setdefault(name, text)

    def done(self) -> None:
        if self.errors:
            raise FieldError(self.errors)


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The model: a preset, single fields over it, or all fields without a preset.

    A field left at null comes from the preset, or from the builder's default (`mt_model.gpt`).
    `vocab_size: null` takes the tokenizer's size, rounded up to a multiple of 128.
    """

    preset: str | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    ffn_size: int | None = None
    activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] | None = None
    gated: bool | None = None
    norm: Literal["rms", "layer"] | None = None
    positions: Literal["rope", "learned", "none"] | None = None
    rope_theta: float | None = None
    qk_norm: bool | None = None
    bias: bool | None = None
    tied: bool | None = None
    dropout: float | None = None
    attention_dropout: float | None = None
    init_std: float | None = None

    def __post_init__(self) -> None:
        checks = _Checks(self)
        checks.at_least(
            1, "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"
        )
        checks.at_least(1, "ffn_size")
        checks.above(0, "init_std", "rope_theta")
        checks.fraction("dropout", "attention_dropout")
        if self.preset is None:
            for name in ("hidden_size", "num_layers", "num_heads"):
                if getattr(self, name) is None:
                    checks.add(name, "missing; set it, or name a preset with model.preset")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Where tokens come from: prepared `.bin/.idx` prefixes, or a corpus built on first use.

    `corpus` is `standard-library`, a folder of sources, a `.jsonl` file or a text file; its
    tokenizer and token files are made once under the run's `data` folder.
    """

    corpus: str | None = None
    glob: str = "**/*.py"
    max_files: int | None = None
    vocab_size: int = 4096
    pattern: Literal["gpt2", "code"] = "gpt2"
    validation_fraction: float = 0.05
    train: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    validation: str | None = None
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        checks = _Checks(self)
        checks.at_least(2, "max_files")
        checks.at_least(257, "vocab_size")
        checks.above(0, "validation_fraction")
        checks.fraction("validation_fraction")
        if (self.corpus is None) == (not self.train):
            checks.add("corpus", "set exactly one of data.corpus and data.train")
        if self.train and self.tokenizer is None:
            checks.add("tokenizer", "missing; data.train needs the tokenizer.json of its tokens")
        if self.weights and len(self.weights) != len(self.train):
            checks.add(
                "weights",
                f"{len(self.weights)} weights for {len(self.train)} entries of data.train",
            )
        if any(weight <= 0 for weight in self.weights):
            checks.add("weights", f"{list(self.weights)}: every weight must be greater than 0")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class TrainingSection:
    """Length, batch and numerics of the run.

    `time_budget` (seconds) ends training earlier: the learning-rate schedule then follows
    whichever of steps and time is further, so a slow machine still anneals.
    `recompute` saves memory: "selective" makes outputs of norms and activations again in backward,
    "full" whole layers.
    """

    steps: int
    global_batch_size: int
    micro_batch_size: int
    sequence_length: int
    dtype: Dtype = "bf16"
    grad_clip: float = 1.0
    seed: int = 1234
    time_budget: float | None = None
    compile: bool = False
    recompute: Recompute = "none"

    def __post_init__(self) -> None:
        checks = _Checks(self)
        if self.compile and self.recompute != "none":
            checks.add(
                "recompute",
                f"{self.recompute!r} does not go with training.compile, whose compiler decides "
                'itself what to compute again; use "none", or compile: false',
            )
        checks.at_least(1, "steps", "global_batch_size", "micro_batch_size", "sequence_length")
        checks.above(0, "grad_clip", "time_budget")
        checks.at_least(0, "seed")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """AdamW and its learning-rate schedule (in steps)."""

    lr: float = 3e-4
    min_lr: float = 0.0
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    schedule: Literal["constant", "linear", "cosine", "inverse-sqrt", "wsd"] = "cosine"
    warmup: int = 0
    anneal: float = 0.2
    anneal_shape: Literal["linear", "cosine", "exponential", "minus-sqrt"] = "linear"

    def __post_init__(self) -> None:
        checks = _Checks(self)
        checks.above(0, "lr", "eps")
        checks.at_least(0, "min_lr", "weight_decay", "warmup", "anneal")
        if self.anneal > 1:
            checks.add("anneal", f"{self.anneal} is a share of the steps; use 0 to 1")
        if self.min_lr > self.lr:
            checks.add("min_lr", f"{self.min_lr} is above lr {self.lr}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            checks.add("betas", f"{list(self.betas)}: expected two numbers from 0 to below 1")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class ParallelSection:
    """Axis sizes; `dp: null` takes what the processes leave over.

    `cp_algorithm` is how attention reaches the keys of the other cp ranks, one for all layers or a
    list with one for each; "hierarchical" swaps heads among `cp_inner` neighbours.
    `check_timeout` (seconds) compares every collective between its ranks before it starts, which
    names the call and the rank behind a wrong number or a hang; slow.
    """

    tp: int = 1
    pp: int = 1
    dp: int | None = None
    cp: int = 1
    cp_algorithm: ContextAlgorithm | tuple[ContextAlgorithm, ...] = "ring"
    cp_inner: int | None = None
    ep: int = 1
    order: str = "tp-cp-ep-dp-pp"
    sequence_parallel: bool = False
    bucket_size: int = DEFAULT_BUCKET_SIZE
    check_timeout: float | None = None

    def __post_init__(self) -> None:
        checks = _Checks(self)
        checks.at_least(1, "tp", "pp", "dp", "cp", "cp_inner", "ep", "bucket_size")
        checks.above(0, "check_timeout")
        if self.ep > 1:
            checks.add(
                "ep",
                f"{self.ep} is not available in mt-train 0.1, which has no expert parallel layers; "
                "use 1",
            )
        hierarchical = "hierarchical" in self.cp_algorithms(1)
        if hierarchical and (not self.cp_inner or self.cp % self.cp_inner):
            checks.add(
                "cp_inner",
                f"{self.cp_inner} does not divide parallel.cp {self.cp}, which the hierarchical "
                f"algorithm needs; use one of {divisors(self.cp)}",
            )
        checks.done()

    def cp_algorithms(self, num_layers: int) -> tuple[ContextAlgorithm, ...]:
        """The algorithm of each layer."""
        chosen = self.cp_algorithm
        return (chosen,) * num_layers if isinstance(chosen, str) else chosen


@dataclass(frozen=True, kw_only=True)
class PipelineSection:
    """How micro-batches move through the pipeline ranks.

    `schedule` is a name of `mt_pipeline.make_schedule`; `stages` is the number of pipeline ranks
    (`parallel.pp` says the same); `microbatches` is checked against the batch sizes; `layout`
    places layers by hand, as in `Et|tt|tt|tL`; `chunks` and `group` are options of `interleaved`
    and `bfs`.
    """

    schedule: str = "1f1b"
    stages: int | None = None
    microbatches: int | None = None
    layout: str | None = None
    chunks: int | None = None
    group: int | None = None

    def __post_init__(self) -> None:
        checks = _Checks(self)
        checks.at_least(1, "stages", "microbatches", "chunks", "group")
        if self.schedule not in GENERATORS:
            near = difflib.get_close_matches(self.schedule, GENERATORS, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]}? " if near else ""
            checks.add(
                "schedule",
                f"{self.schedule!r} is no schedule. {hint}Known: {', '.join(GENERATORS)}",
            )
        checks.done()


@dataclass(frozen=True, kw_only=True)
class EvaluationSection:
    """Held-out loss and bits per byte; `every: null` evaluates at the end only."""

    every: int | None = None
    micro_batch_size: int | None = None
    max_windows: int | None = None
    stride: int | None = None

    def __post_init__(self) -> None:
        checks = _Checks(self)
        checks.at_least(1, "every", "micro_batch_size", "max_windows", "stride")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """When to save, how many to keep, and what to start from.

    `load` names another run's folder or step folder to start from; a run's own folder is always
    continued.
    """

    every: int | None = None
    keep: int | None = None
    load: str | None = None

    def __post_init__(self) -> None:
        checks = _Checks(self)
        checks.at_least(1, "every", "keep")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class LoggingSection:
    """What is reported besides metrics.jsonl."""

    every: int = 10
    tensorboard: bool = False

    def __post_init__(self) -> None:
        checks = _Checks(self)
        checks.at_least(1, "every")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run. Problems that join two sections are named by their dotted field."""

    model: ModelSection
    data: DataSection
    training: TrainingSection
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    logging: LoggingSection = field(default_factory=LoggingSection)

    def __post_init__(self) -> None:
        errors: dict[str, str] = {}
        training, parallel = self.training, self.parallel
        if training.global_batch_size % training.micro_batch_size:
            errors["training.micro_batch_size"] = (
                f"{training.micro_batch_size} does not divide training.global_batch_size "
                f"{training.global_batch_size}; use one of {divisors(training.global_batch_size)}"
            )
        parts = (2 * parallel.cp if parallel.cp > 1 else 1) * (
            parallel.tp if parallel.sequence_parallel else 1
        )
        if training.sequence_length % parts:
            errors["training.sequence_length"] = (
                f"{training.sequence_length} is not divisible by {parts}, which parallel.tp "
                f"{parallel.tp} with sequence_parallel={str(parallel.sequence_parallel).lower()} "
                f"and parallel.cp {parallel.cp} need; use "
                f"{_nearest(training.sequence_length, parts)}"
            )
        stages = self.pipeline.stages
        if stages is not None and parallel.pp not in (1, stages):
            errors["pipeline.stages"] = (
                f"{stages} contradicts parallel.pp {parallel.pp}; leave one of them out"
            )
        stride = self.evaluation.stride
        if stride is not None and stride > training.sequence_length:
            errors["evaluation.stride"] = (
                f"{stride} is longer than training.sequence_length {training.sequence_length}"
            )
        if errors:
            raise FieldError(errors)

    @property
    def pp(self) -> int:
        """Pipeline ranks, from whichever section names them."""
        return self.pipeline.stages or self.parallel.pp


def divisors(number: int) -> str:
    """List the divisors of a size for a message, the twelve smallest if there are more."""
    small = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    found = sorted({*small, *(number // value for value in small)})
    return ", ".join(str(value) for value in found[:12]) + (" ..." if len(found) > 12 else "")


def _nearest(value: int, multiple: int) -> str:
    below = value // multiple * multiple
    return f"{below} or {below + multiple}" if below else f"{multiple}"
