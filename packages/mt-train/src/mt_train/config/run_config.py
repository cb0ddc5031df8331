"""The run configuration: one small frozen dataclass per section, each validated once.

Every section collects all its problems (`FieldError`), so that a user sees them together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Literal

from mt_files import Checks, FieldError, divisors, multiples_near, shorten
from mt_model import Recompute, RecomputePlan

from mt_train.config.distillation_section import DistillationSection
from mt_train.config.kinds.section import DataSection
from mt_train.config.limits import MAX_LENGTH, MAX_STEPS, Dtype, listed, path_field
from mt_train.config.lora_section import LoraSection
from mt_train.config.model_section import ModelSection
from mt_train.config.optimizer_section import OptimizerSection
from mt_train.config.parallel_section import DataParallelSection, ParallelSection, PipelineSection
from mt_train.config.precision_section import PrecisionSection
from mt_train.config.profile_section import Profile
from mt_train.config.quantization_section import QuantizationSection

_MAX_BATCH = 10**7
_MAX_TOKENS = 1 << 32  # tokens of one micro-batch
_IN_PARTS = ("zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe", "dualpipe-v")
_BITS = {"fp16": 16, "bf16": 16, "fp32": 32, "fp64": 64}
_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?(s|min|h)", re.ASCII)
_SECONDS = {"s": 1, "min": 60, "h": 3600}


@dataclass(frozen=True, kw_only=True)
class TrainingSection:
    """Length, batch and numerics of the run.

    Attributes:
        steps: Optimizer steps of the whole run.
        global_batch_size: Sequences per step, over all ranks.
        micro_batch_size: Sequences in one forward pass of a rank; a lower number saves memory. The
            numbers stay the same up to rounding.
        sequence_length: Tokens per sequence.
        dtype: Dtype of weights and activations. `bf16` and `fp16` keep fp32 master weights; `fp16`
            needs `optimizer.loss_scale`.
        loss_mean: Mean of the objective: `tokens` weighs all labels of a step alike;
            `micro-batches` weighs all micro-batches alike, by the mean over their labels, so that
            the numbers depend on `micro_batch_size`. Metrics always report the mean over tokens.
        grad_clip: Largest norm of the gradient; a larger gradient is scaled down.
        seed: Seed of initial weights, data order and dropout. Seed and step are the whole random
            state.
        time_budget: Seconds of training after which the run ends, after any number of steps. The
            learning rate follows steps or time, whichever is further, so that a slow machine
            anneals too.
        freeze: Globs of parameters, or of parts of the model, to leave untrained, such as
            `embedding`, `layers.0`, `images.tower` or `*norm.weight`; `*` matches dots too. They
            have no optimizer state, and no gradient unless another parameter needs it.
        compile: Compile layers with torch.compile; equal layers share one compilation.
        cuda_graphs: Capture CUDA graphs: of each `layer`, or in a `step` of a micro-batch's whole
            forward and backward on this rank's stage, and of the optimizer's step. On a CPU they
            run eagerly, and an operation that a graph would compute wrong is an error.
        recompute: Activations that backward recomputes to save memory: `none`, `selective` (outputs
            of norms and activations) or `full` (whole layers); or a plan for each layer, mt-model's
            `RecomputePlan`: `{rules: [{first: 4}, {every: 2, modules: [attention]}], offload: {}}`.
            The numbers stay the same. `compile` takes whole layers only.
        profile: Trace of a few steps, such as `{steps: [10, 12], ranks: [0]}`: each of these ranks
            writes `profile/rank_0_steps_10_to_12.json` into the run folder, for chrome://tracing,
            Perfetto or `mt-train profile`; with a GPU also the history of its memory.
    """

    steps: int
    global_batch_size: int
    micro_batch_size: int
    sequence_length: int
    dtype: Dtype = "bf16"
    loss_mean: Literal["tokens", "micro-batches"] = "tokens"
    grad_clip: float = 1.0
    seed: int = 1234
    time_budget: float | None = None
    freeze: tuple[str, ...] = ()
    compile: bool = False
    cuda_graphs: Literal["none", "layer", "step"] = "none"
    recompute: Recompute | RecomputePlan = "none"
    profile: Profile | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        if self.compile and not RecomputePlan.of(self.recompute).has_only_layers:
            shown = repr(self.recompute) if isinstance(self.recompute, str) else "a plan of modules"
            text = f"{shown} does not go with training.compile, whose compiler decides itself what "
            text += 'of a layer to compute again; use "none", "full" or a plan of whole layers, or '
            checks.add("recompute", text + "compile: false")
        checks.at_least(1, "steps", "global_batch_size", "micro_batch_size", "sequence_length")
        checks.at_most(MAX_STEPS, "steps")
        checks.at_most(_MAX_BATCH, "global_batch_size", "micro_batch_size")
        checks.at_most(MAX_LENGTH, "sequence_length")
        checks.above(0, "grad_clip", "time_budget")
        checks.at_least(0, "seed")
        if not checks.errors and self.profile is not None and self.profile.steps[1] > self.steps:
            text = f"{list(self.profile.steps)} ends after training.steps {self.steps}"
            checks.add("profile", f"steps: {text}; name steps of the run")
        if not checks.errors and self.micro_batch_size * self.sequence_length > _MAX_TOKENS:
            text = f"{self.micro_batch_size} sequences of {self.sequence_length} tokens are more "
            text += f"than {_MAX_TOKENS} tokens; use {_MAX_TOKENS // self.sequence_length} or less"
            checks.add("micro_batch_size", text)
        checks.done()


@dataclass(frozen=True, kw_only=True)
class EvaluationSection:
    """Evaluation on held-out data, which also runs once at the end.

    Attributes:
        every: Steps from one evaluation to the next; null evaluates at the end only.
        micro_batch_size: Sequences in one forward pass; by default `training.micro_batch_size`.
        max_windows: Maximum number of sequences to evaluate.
        stride: Tokens from one window to the next; by default `training.sequence_length`. A smaller
            one gives every token more context, for more work.
    """

    every: int | None = None
    micro_batch_size: int | None = None
    max_windows: int | None = None
    stride: int | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "every", "micro_batch_size", "max_windows", "stride")
        checks.at_most(_MAX_BATCH, "micro_batch_size")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """Saves of a run, the checkpoints to keep, and the checkpoint to start from.

    A run saves at its end, and when it is stopped. Its own folder is always continued.

    Attributes:
        every: Interval between saves: a number of steps, or a time such as `30s`, `10min` or `2h`;
            null saves at the end only.
        keep: Number of checkpoints to keep. null keeps all saves by steps, and the newest two saves
            by time.
        keep_every: Also keep every step divisible by this number, such as 10,000.
        async_: Save in the background: training waits only for a copy of the weights and moments in
            the memory of the host, and a thread writes it. The next save, and the end of the run,
            wait for it.
        copy_every: Number of steps between copies of the state in the memory of this rank's node
            and of the next one. If ranks or a node are lost, the same command goes on from the
            newest copy. null makes none.
        copy_dir: Folder in each node's memory for these copies, which take four times the bytes
            that the node's ranks write to a checkpoint.
        dir: Folder for the checkpoints of this run alone; by default `checkpoints` in its folder.
            It may be a URL of an object store, such as `s3://bucket/my/checkpoints`; everything
            else of the run stays in its folder.
        load: Run folder or step folder of another run to start from; in an object store, the URL of
            its folder of checkpoints or of a step.
        load_mode: `continue` goes on where that run was; `weights` takes only its model, for other
            data, another length or another optimizer, and starts at step 0.
    """

    every: int | str | None = "10min"
    keep: int | None = None
    keep_every: int | None = None
    async_: bool = False
    copy_every: int | None = None
    copy_dir: str = "/dev/shm"  # noqa: S108 - a folder of its own in it, for this user alone
    dir: str | None = path_field(stored=True)
    load: str | None = path_field("", stored=True)
    load_mode: Literal["continue", "weights"] = "continue"

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "keep", "keep_every", "copy_every")
        if self.keep_every is not None and (self.keep is None or self.every_steps is None):
            text = "these stay beside the newest of regular saves; give checkpoint.keep too, and "
            checks.add("keep_every", text + "checkpoint.every as a number of steps")
        if isinstance(self.every, int):
            checks.at_least(1, "every")
        elif self.every is not None and not self.every_seconds:
            text = f"{self.every!r} is no number of steps and no time above 0; use e.g. 500, 30s, "
            checks.add("every", text + "10min or 2h")
        if self.load_mode == "weights" and self.load is None:
            text = "weights needs checkpoint.load, the run whose weights are taken"
            checks.add("load_mode", text)
        checks.done()

    def folder(self, out: Path) -> str | Path:
        """Return the folder of the checkpoints of a run in `out`, or its URL."""
        return out / "checkpoints" if self.dir is None else self.dir

    @property
    def every_steps(self) -> int | None:
        """Steps from one save to the next, if `every` counts steps."""
        return self.every if isinstance(self.every, int) else None

    @property
    def every_seconds(self) -> float | None:
        """Seconds from one save to the next, if `every` is a time."""
        match = _TIME.fullmatch(self.every) if isinstance(self.every, str) else None
        return None if match is None else float(match[1]) * _SECONDS[match[2]]

    @property
    def kept(self) -> int | None:
        """Number of checkpoints to keep; None for all."""
        return 2 if self.keep is None and self.every_seconds is not None else self.keep


@dataclass(frozen=True, kw_only=True)
class ExportSection:
    """Export of the final weights for other programs.

    Attributes:
        hugging_face: Folder for Hugging Face transformers with the weights of the last step; it
            is new or empty, or has an earlier export of this run. The tokenizer and further fields
            of config.json come from the folder of `model.from`, if there is one. Adapters (`lora`)
            are added to the weights of their base.
        adapter: Folder for Hugging Face PEFT with the adapters of the last step, likewise.
        family: Family name in transformers; by default the family of `model.from`, or the first one
            with such a model.
        dtype: Dtype of the exported tensors; by default the dtype of `model.from`, or
            `training.dtype`.
    """

    hugging_face: str | None = path_field()
    adapter: str | None = path_field()
    family: str | None = None
    dtype: Dtype | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        if self.hugging_face is None:
            for name in ("family", "dtype") if self.adapter is None else ("dtype",):
                if getattr(self, name) is not None:
                    checks.add(name, "needs export.hugging_face, the folder to write")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class LoggingSection:
    """Reports beside metrics.jsonl.

    Attributes:
        every: Steps from one line of the console to the next.
        tensorboard: Write event files into the run folder; needs `pip install tensorboard`.
        zeros: Count the gradient's zero elements.
        gradients: Record the norm, the greatest magnitude and the zeros of each layer's gradient,
            as `gradients/layers.0/norm` and so on.
    """

    every: int = 10
    tensorboard: bool = False
    zeros: bool = False
    gradients: bool = False

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "every")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run. Problems between two sections are named by a dotted field.

    Attributes:
        model: The model.
        data: Source of the tokens, and the kind of rows made of them.
        training: Length, batch and numerics.
        precision: Low precision for linear layers.
        quantization: Quantisation-aware training.
        lora: Low-rank adapters; nothing else is trained.
        distillation: Teacher to learn from.
        optimizer: The optimizer and its schedule.
        parallel: Number of ranks along each axis.
        data_parallel: Sharding over data-parallel ranks.
        pipeline: Pipeline schedule.
        evaluation: Held-out loss and bits per byte.
        checkpoint: Saves, and the checkpoint to start from.
        export: Export for other programs.
        logging: Reports.
        plugins: Python files with your own kinds of layers and of rows, such as `[my_mixer.py]`,
            relative to the YAML file. They are executed on every rank.
    """

    model: ModelSection
    data: DataSection
    training: TrainingSection
    precision: PrecisionSection = field(default_factory=PrecisionSection)
    quantization: QuantizationSection = field(default_factory=QuantizationSection)
    lora: LoraSection | None = None
    distillation: DistillationSection = field(default_factory=DistillationSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    data_parallel: DataParallelSection = field(default_factory=DataParallelSection)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    export: ExportSection = field(default_factory=ExportSection)
    logging: LoggingSection = field(default_factory=LoggingSection)
    plugins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        errors: dict[str, str] = {}
        parts = (
            self._sizes,
            self._tokenizers,
            self._precision,
            self._adapters,
            self._sharding,
            self._graphs,
            self._saves,
        )
        for name, text in chain.from_iterable(part() for part in parts):
            errors.setdefault(name, text)
        if errors:
            raise FieldError(errors)

    def _sizes(self) -> Iterator[tuple[str, str]]:
        """Yield lengths and numbers that contradict each other."""
        training, parallel, evaluation = self.training, self.parallel, self.evaluation
        if training.global_batch_size % training.micro_batch_size:
            text = f"{training.micro_batch_size} does not divide training.global_batch_size "
            text += f"{training.global_batch_size}; use one of "
            sizes = listed(divisors(training.global_batch_size))
            yield "training.micro_batch_size", text + sizes
        parts = (2 * parallel.cp if parallel.cp > 1 else 1) * (
            parallel.tp if parallel.sequence_parallel else 1
        )
        length, stages = training.sequence_length, self.pipeline.stages
        if length % parts:
            text = f"{length} is not divisible by {parts}, which parallel.tp {parallel.tp} with "
            text += f"sequence_parallel={str(parallel.sequence_parallel).lower()} and parallel.cp "
            text += f"{parallel.cp} need; use {multiples_near(length, parts)}"
            yield "training.sequence_length", text
        if stages is not None and parallel.pp not in (1, stages):
            text = f"{stages} contradicts parallel.pp {parallel.pp}; leave one of them out"
            yield "pipeline.stages", text
        batch, stride = evaluation.micro_batch_size, evaluation.stride
        if stride is not None and not self.data.overlaps:
            text = f"{stride}: rows of data.kind {self.data.kind} do not overlap; leave it out"
            yield "evaluation.stride", text
        elif stride is not None and stride > length:
            text = f"{stride} is longer than training.sequence_length {length}"
            yield "evaluation.stride", text
        if batch is not None and batch * length > _MAX_TOKENS:
            text = f"{batch} sequences of {length} tokens are more than {_MAX_TOKENS} tokens"
            yield "evaluation.micro_batch_size", text

    def _tokenizers(self) -> Iterator[tuple[str, str]]:
        """Yield settings that need a tokenizer, if there is none."""
        data = self.data
        if data.tokenizer is not None or self.model.from_ is not None:
            return
        if data.train and (self.model.vocab_size is None or data.needs_tokenizer):
            text = "missing; name the tokenizer.json of the tokens of data.train, or for causal "
            text += "language modelling without text set model.vocab_size"
            yield "data.tokenizer", text
        if data.eod is not None:
            text = f"{shorten(data.eod)} is a token of data.tokenizer, which is not set; leave it "
            yield "data.eod", text + "out, or name the tokenizer"

    def _saves(self) -> Iterator[tuple[str, str]]:
        """Yield settings that do not go with saves in the background."""
        if self.checkpoint.async_ and self.parallel.check_timeout is not None:
            text = "saves in the background communicate beside training, and "
            text += (
                "parallel.check_timeout compares all calls in their order; leave one of them out"
            )
            yield "checkpoint.async", text

    def _precision(self) -> Iterator[tuple[str, str]]:
        """Yield formats of numbers that do not go together."""
        dtype, scale = self.training.dtype, self.optimizer.loss_scale
        if dtype == "fp16" and scale is None:
            text = "fp16 needs optimizer.loss_scale, as small gradients are zero without: dynamic, "
            yield "training.dtype", text + "or a number such as 65536; or use dtype bf16"
        if dtype == "bf16" and scale is not None:
            text = f"{scale} does not go with training.dtype bf16, which holds gradients as small "
            yield "optimizer.loss_scale", text + "as fp32 does; leave it out, or use dtype fp16"
        recipe, rules = self.precision.recipe, self.quantization.given
        if recipe is not None and rules is not None:
            text = f"{shorten(rules)} does not go with precision.recipe {recipe}: a layer "
            text += "multiplies what one of them makes of its weight; leave one of them out"
            yield "quantization", text
        if self.training.compile and self._recipe is not None:
            text = f"true does not go with {self._recipe}, whose weights are quantised once a "
            text += "step, outside of any graph; use compile: false, or no recipe"
            yield "training.compile", text
        if self.optimizer.masters != "remainder":
            return
        text = "remainder is what bf16 weights lack, and "
        if dtype != "bf16":
            text += f"training.dtype is {dtype}; use masters full, or dtype bf16"
            yield "optimizer.masters", text
        elif self.precision.primary_weights:
            text += "precision.primary_weights has none of those; use masters full"
            yield "optimizer.masters", text

    def _adapters(self) -> Iterator[tuple[str, str]]:
        """Yield settings that do not go with low-rank adapters."""
        if self.lora is None:
            if self.export.adapter is not None:
                yield "export.adapter", "needs lora, the adapters to write; leave it out"
            return
        if self.model.from_ is None and self.checkpoint.load is None:
            text = "needs trained weights to adapt: name their folder with model.from, or a run "
            yield "lora", text + "with checkpoint.load and load_mode weights"
        if self.quantization.given is not None:
            text = f"{shorten(self.quantization.given)} rounds weights that lora freezes; leave "
            yield "quantization", text + "one of them out"
        if self.precision.primary_weights:
            text = "true needs fp32 masters, which frozen weights of lora lack; leave it out"
            yield "precision.primary_weights", text
        yield from self._base_format()
        recompute = self.training.recompute
        plan = not isinstance(recompute, str) and any(rule.modules for rule in recompute.rules)
        reasons = {
            f"pipeline.schedule {self.pipeline.schedule}, which runs parts of two layers in turn; "
            "use schedule zb-v": self._runs_parts,
            "a recompute plan of modules; use none, selective or full": plan,
            "training.compile; use compile: false": self.training.compile,
            "training.cuda_graphs; use none": self.training.cuda_graphs != "none",
        }
        for text, holds in reasons.items() if self.lora.dropout else ():
            if holds:
                yield "lora.dropout", f"{self.lora.dropout} does not go with {text}, or dropout 0"

    def _base_format(self) -> Iterator[tuple[str, str]]:
        """Yield settings that do not go with frozen weights as codes."""
        if self.lora is None or self.lora.base_format is None:
            return
        why = f"does not go with lora.base_format {self.lora.base_format}, whose "
        if self.precision.recipe is not None:
            text = f"{self.precision.recipe} {why}weights are codes already; leave one of them out"
            yield "precision.recipe", text
        values = f"{why}codes become values anew for each product"
        if self.training.compile:
            yield "training.compile", f"true {values}; use compile: false"
        if self.training.cuda_graphs != "none":
            text = f"{self.training.cuda_graphs} {values}; use cuda_graphs: none"
            yield "training.cuda_graphs", text

    def _sharding(self) -> Iterator[tuple[str, str]]:
        """Yield conflicts with the sharding of parameters."""
        own, dtype, optimizer = self.data_parallel, self.training.dtype, self.optimizer
        schedule, kept = self.pipeline.schedule, own.shard_dtype or dtype
        if kept != dtype and _BITS[kept] <= _BITS[dtype]:
            text = f"{kept} does not hold all that training.dtype {dtype} does; use {dtype}, more "
            yield "data_parallel.shard_dtype", text + "bits, or leave it out"
        elif own.shard_dtype not in (None, "bf16") and optimizer.masters == "remainder":
            text = f"{own.shard_dtype} leaves nothing for optimizer.masters remainder to keep; "
            yield "data_parallel.shard_dtype", text + "leave it out, or use masters full"
        if own.offload and optimizer.offload:
            text = "true has all that is stepped in the host's memory, of which optimizer.offload "
            text += f"{optimizer.offload} would move a share there; leave one of them out"
            yield "data_parallel.offload", text
        if own.strategy == "full" and self._runs_parts:
            text = f"full does not go with pipeline.schedule {schedule}, which runs parts of two "
            text += "layers in turn, as its parameters are whole only while a layer runs; use "
            text += "strategy optimizer_gradients, or schedule zb-v"
            yield "data_parallel.strategy", text
        elif own.prefetch and self.waits_for_whole_parameters:
            text = f"{own.prefetch} has modules wait for their parameters, which the compiled "
            text += f"parts of layers in pipeline.schedule {schedule} do not; use prefetch 0, or "
            yield "data_parallel.prefetch", text + "compile: false"

    @property
    def _recipe(self) -> str | None:
        """The recipe by which weights are quantised, with its key."""
        recipe, rules = self.precision.recipe, self.quantization.given
        if recipe is not None:
            return f"precision.recipe {recipe}"
        return None if rules is None else f"quantization {shorten(rules)}"

    @property
    def _runs_parts(self) -> bool:
        """Whether the schedule runs parts of two layers in turn."""
        return self.pipeline.schedule in ("dualpipe", "dualpipe-v")

    @property
    def waits_for_whole_parameters(self) -> bool:
        """Whether forwards can't begin before all parameters have arrived.

        Each module of a layer waits for its parameters, but not in the graph of a part of a layer.
        """
        return self.training.compile and self._runs_parts

    def _graphs(self) -> Iterator[tuple[str, str]]:
        """Yield settings that do not go with CUDA graphs."""
        training, own, schedule = self.training, self.data_parallel, self.pipeline.schedule
        frees, cp = own.strategy in ("full", "optimizer_gradients"), self.parallel.cp
        reasons = (
            (training.compile, "training.compile, whose code launches few kernels; use false"),
            (
                training.recompute != "none",
                "training.recompute, which saves no memory inside of a graph; use none",
            ),
            (
                self._recipe is not None,
                f"{self._recipe}, whose weights are quantised once a step, outside of any graph; "
                "use no recipe",
            ),
            (
                self.distillation.teacher is not None,
                "distillation.teacher, whose numbers are new in each pass; use no teacher",
            ),
            (
                frees,
                f"data_parallel.strategy {own.strategy}, where gradients have no memory that "
                "stays; use none or optimizer",
            ),
            (own.offload, "data_parallel.offload, where the host waits for gradients; use false"),
            (
                own.prefetch,
                f"data_parallel.prefetch {own.prefetch}, which forwards wait for; use 0",
            ),
            (
                schedule in _IN_PARTS,
                f"pipeline.schedule {schedule}, whose backwards go in parts; use gpipe, 1f1b, "
                "interleaved or bfs",
            ),
            (cp > 1, f"parallel.cp {cp}, whose exchanges the host waits for; use cp 1"),
        )
        why = next((text for holds, text in reasons if holds), None)
        if training.cuda_graphs != "none" and why is not None:
            text = f"{training.cuda_graphs} does not go with {why}, or cuda_graphs: none"
            yield "training.cuda_graphs", text

    @property
    def pp(self) -> int:
        """Number of pipeline ranks, from `parallel` or `pipeline`."""
        return self.pipeline.stages or self.parallel.pp
