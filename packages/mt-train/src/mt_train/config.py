"""The run configuration: one small frozen dataclass per section, each validated once.

Every section collects all its problems (`FieldError`), so that a user sees them together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Literal

from mt_files import Checks, FieldError, divisors, multiples_near, shorten
from mt_model import (
    Activation,
    AttentionKernel,
    LayerConfig,
    Norms,
    Positions,
    QKNorm,
    Recompute,
    RecomputePlan,
    RopeConfig,
    ScoreBias,
    Sinks,
)

from mt_train.limits import MAX_STEPS, Dtype, listed
from mt_train.optimizer_section import OptimizerSection
from mt_train.parallel_section import DataParallelSection, ParallelSection, PipelineSection

_MAX_BATCH, _MAX_LENGTH = 10**7, 1 << 27
_MAX_TOKENS = 1 << 32  # of one micro-batch
_MAX_TOKENIZER = 10**7
_BITS = {"fp16": 16, "bf16": 16, "fp32": 32, "fp64": 64}
# What a list of layers says layer by layer.
UNIFORM_FIELDS = ("preset", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_size")
UNIFORM_FIELDS += (
    "activation",
    "gated",
    "rope_theta",
    "rope",
    "qk_norm",
    "bias",
    "attention_dropout",
)
UNIFORM_FIELDS += ("window", "sinks", "softcap", "attention_scale", "clamp", "up_offset")
UNIFORM_FIELDS += ("score_bias", "norms", "parallel", "shared_norm", "residual_scale")
UNIFORM_FIELDS += ("qkv_bias", "out_bias", "output_gate", "causal")
_WITH_FROM = ("from_", "vocab_multiple", "dropout")

_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?(s|min|h)", re.ASCII)
_SECONDS = {"s": 1, "min": 60, "h": 3600}


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The model: a preset, single fields over it, all fields without a preset, or a list of layers.

    A field left at null comes from the preset, or else has the default that is named here.

    Attributes:
        from_: A folder of Hugging Face transformers: the model that its config.json describes, with
            its weights where the run starts anew, and its tokenizer for a corpus. Only
            `vocab_multiple` and `dropout` go with it.
        preset: A named shape of mt-model, such as `gpt2` or `llama3.2-1b`.
        vocab_size: Tokens that the model knows; by default the tokenizer's size, rounded up to a
            multiple of 128.
        vocab_multiple: Embedding and head have rows for a multiple of it, of which those beyond
            the vocabulary are padding and take no part in anything, so that tp ranks can share
            them; 1 by default, and 128 for a model `from` a folder.
        hidden_size: Width of the residual stream.
        num_layers: Number of equal layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads, which divide `num_heads`; by default as many.
        head_dim: Width of one head; by default hidden_size / num_heads.
        ffn_size: Width of the feed-forward; by default 4 x hidden_size, or 8/3 of it rounded up to
            64 when gated.
        activation: Of the feed-forward; `silu` by default. `gelu` is exact, `gelu_tanh` is
            GPT-2's, `gelu_quick` CLIP's, `relu2` the squared ReLU.
        gated: Multiply the activation by a second projection (SwiGLU with `silu`); true by default.
        clamp: Cuts the gate to at most this, and what it multiplies to its size (GPT-OSS); not by
            default.
        up_offset: Is added to what the activation is multiplied by (GPT-OSS: 1); 0 by default.
        norm: `rms` (the default) or `layer`.
        norm_eps: Added to the mean square before the root; 1e-5 by default.
        norm_zero_centered: Weights of norms stand for 1 + w and start at 0 (Gemma); false by
            default.
        norm_rounds_first: Weights of rms norms multiply after the rounding to `precision.dtype`
            (Llama), not before it; false by default.
        norm_weight: Norms have weights; true by default.
        norm_bias: Norms of kind `layer` have biases; true by default.
        norms: Where a layer has them: in front of attention and feed-forward (`pre`, the default),
            of their `output` before it is added (OLMo-2), both (`sandwich`, Gemma 2), or after it
            is added (`post`, BERT).
        parallel: Attention and feed-forward start from the same input (GPT-NeoX); false by
            default.
        shared_norm: With `parallel`, one norm in front of both (GPT-J, Phi); false by default.
        residual_scale: Of their outputs before they are added (Granite); 1 by default.
        final_norm: A norm in front of the head; by default unless `norms` is `post`.
        positions: `rope` (the default), `learned` (a table) or `none`.
        rope_theta: Base of the rotary embedding; 10000 by default.
        rope: All of the rotary embedding, in place of `rope_theta`: mt-model's `RopeConfig`, such
            as `{theta: 1e6, fraction: 0.5, interleaved: true}`.
        qk_norm: RMSNorm on queries and keys: `head` (of each head, before the rotation), `whole`
            (of all heads together), `l2` (of each head, without a weight, after the rotation) or
            `none` (the default).
        bias: A bias on every projection of the layers; false by default.
        qkv_bias: A bias on the projection to queries, keys and values; as `bias` by default.
        out_bias: A bias on the projection behind attention; as `bias` by default.
        output_gate: What attention gives is multiplied by the sigmoid of a gate for each channel;
            false by default.
        causal: A token sees those up to its own, which is all that can be trained here; true by
            default.
        tied: The head is the embedding matrix; true by default.
        embedding_scale: Of the embeddings of tokens (Gemma: the root of `hidden_size`); 1 by
            default.
        embedding_norm: A norm of the sum of all embeddings (BERT); false by default.
        token_types: Kinds of tokens with an embedding each; text here is of kind 0. 0 (none) by
            default.
        head_transform: The activation of a layer with a norm in front of the head (BERT); none by
            default.
        head_bias: A bias for each token of the vocabulary; false by default.
        logit_scale: Of what the head multiplies (Granite; muP: 1 / `optimizer.width_multiplier`);
            1 by default.
        logit_softcap: Logits become `softcap * tanh(logit / softcap)` (Gemma 2); not by default.
        z_loss: Weight of the loss `z`, the squared log-sum-exp of the logits, which keeps them from
            drifting (1e-4 in PaLM); 0 by default.
        dropout: Probability of dropping an element of embedding, attention or feed-forward outputs;
            0 by default.
        attention_dropout: Probability of dropping an attention weight; 0 by default.
        window: Tokens that a query sees, the last of which is itself; all before it by default.
        sinks: A further logit per head in the softmax of attention: `learned`, `zero` or `none`
            (the default).
        softcap: Scores of attention become `softcap * tanh(score / softcap)`; not by default.
        attention_scale: Of the scores of attention; `head_dim ** -0.5` by default.
        score_bias: Added to the scores of attention by distance: `{type: alibi}`, or T5's
            `{type: relative}` with mt-model's `RelativeConfig`; none by default.
        init_std: Standard deviation of the initial weights; 0.02 by default.
        embedding_std: That of embeddings and head; `init_std` by default.
        layers: Layers that differ, in order, instead of `num_layers` equal ones: a list of `{mixer:
            {...}, feed_forward: {...}, repeat: N}` with the fields of mt-model's `AttentionConfig`,
            `MLPConfig` and `LayerConfig`, or with `type: mamba2` or `type: gateddeltanet` in the
            mixer those of `Mamba2Config` or `GatedDeltaNetConfig`. With it go `hidden_size`,
            `vocab_size`, `vocab_multiple`, `positions`, `tied`, `dropout`, `init_std`, and what is
            said of the form of norms, of embeddings, head and logits.
    """

    from_: str | None = None
    preset: str | None = None
    vocab_size: int | None = None
    vocab_multiple: int | None = None
    hidden_size: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    ffn_size: int | None = None
    activation: Activation | None = None
    gated: bool | None = None
    clamp: float | None = None
    up_offset: float | None = None
    norm: Literal["rms", "layer"] | None = None
    norm_eps: float | None = None
    norm_zero_centered: bool | None = None
    norm_rounds_first: bool | None = None
    norm_weight: bool | None = None
    norm_bias: bool | None = None
    norms: Norms | None = None
    parallel: bool | None = None
    shared_norm: bool | None = None
    residual_scale: float | None = None
    final_norm: bool | None = None
    positions: Positions | None = None
    rope_theta: float | None = None
    rope: RopeConfig | None = None
    qk_norm: QKNorm | None = None
    bias: bool | None = None
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    output_gate: bool | None = None
    causal: bool | None = None
    tied: bool | None = None
    embedding_scale: float | None = None
    embedding_norm: bool | None = None
    token_types: int | None = None
    head_transform: Activation | None = None
    head_bias: bool | None = None
    logit_scale: float | None = None
    logit_softcap: float | None = None
    z_loss: float | None = None
    dropout: float | None = None
    attention_dropout: float | None = None
    window: int | None = None
    sinks: Sinks | None = None
    softcap: float | None = None
    attention_scale: float | None = None
    score_bias: ScoreBias | None = None
    init_std: float | None = None
    embedding_std: float | None = None
    layers: tuple[LayerConfig, ...] = ()

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(
            1, "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"
        )
        checks.at_least(1, "ffn_size", "window", "vocab_multiple")
        checks.at_least(0, "token_types", "z_loss")
        checks.above(0, "init_std", "rope_theta", "norm_eps", "softcap", "attention_scale")
        checks.above(0, "clamp", "residual_scale", "embedding_scale", "embedding_std")
        checks.above(0, "logit_scale", "logit_softcap")
        checks.fraction("dropout", "attention_dropout")
        if self.layers and not checks.errors:
            for name in UNIFORM_FIELDS:
                if getattr(self, name) is not None:
                    checks.add(name, "does not go with model.layers; say it in the entries")
        if self.from_ is not None and not checks.errors:
            for item in fields(self):
                if item.name not in _WITH_FROM and getattr(self, item.name) != item.default:
                    checks.add(item.name, "does not go with model.from, whose config.json says it")
        elif self.preset is None:
            needed = ("hidden_size",) if self.layers else ("hidden_size", "num_layers", "num_heads")
            for name in needed:
                if getattr(self, name) is None:
                    checks.add(name, "missing; set it, or name a preset with model.preset")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Where tokens come from: prepared `.bin/.idx` prefixes, or a corpus built on first use.

    Paths in the YAML are relative to its folder, those on the command line to the working
    directory. What a corpus needs is made once, under the run's `data` folder.

    Attributes:
        corpus: `standard-library` (Python's own sources), a folder of text files, a `.jsonl` file
            or a text file.
        glob: Which files of a corpus folder are read.
        max_files: Read at most so many documents of the corpus.
        vocab_size: Tokens of the tokenizer that is trained on the corpus.
        pattern: How that tokenizer cuts text into words: `gpt2`, or `code`, which keeps runs of
            spaces together.
        validation_fraction: Share of the corpus's documents that is held out.
        train: Prefixes of prepared `.bin/.idx` files, instead of `corpus`.
        weights: How much of each entry of `train` is in a batch; by default as many as it has
            tokens.
        validation: Prefix of prepared held-out tokens.
        tokenizer: The tokenizer.json, or sentencepiece model, of `train`, or one to use for
            `corpus`.
        eod: The special token of `tokenizer` that ends a document, such as `<|endoftext|>`; needed
            where the tokenizer has several that may, or none of the usual names.
        packing: A sequence holds documents one after the other. `none` lets a token see all before
            it; `documents` keeps attention within documents: positions begin anew with each, and
            the first token of the next one is no label. Training and evaluation alike.
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
    eod: str | None = None
    packing: Literal["none", "documents"] = "none"

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(2, "max_files")
        checks.at_least(257, "vocab_size")
        checks.at_most(_MAX_TOKENIZER, "vocab_size")
        checks.above(0, "validation_fraction")
        checks.fraction("validation_fraction")
        if not checks.errors:
            self._check_sources(checks)
        checks.done()

    def _check_sources(self, checks: Checks) -> None:
        if (self.corpus is None) == (not self.train):
            checks.add("corpus", "set exactly one of data.corpus and data.train")
        if self.weights and len(self.weights) != len(self.train):
            checks.add(
                "weights",
                f"{len(self.weights)} weights for {len(self.train)} entries of data.train",
            )
        for weight in self.weights:
            if not 0 < weight <= 1e100:
                checks.add("weights", f"{weight}: every weight must be greater than 0")


@dataclass(frozen=True, kw_only=True)
class TrainingSection:
    """Length, batch and numerics of the run.

    Attributes:
        steps: Optimizer steps of the whole run.
        global_batch_size: Sequences per step, over all ranks.
        micro_batch_size: Sequences that one rank takes at a time; lower it to save memory. The
            numbers stay the same up to rounding.
        sequence_length: Tokens per sequence.
        dtype: Of weights and activations. `bf16` and `fp16` keep fp32 master weights; `fp16` needs
            `optimizer.loss_scale`.
        loss_mean: What the objective is a mean of: `tokens` weighs each label of a step alike;
            `micro-batches` each micro-batch, by the mean over its labels, so that the numbers
            depend on `micro_batch_size`. What is reported is the mean over tokens.
        grad_clip: Largest norm of the gradient; a longer one is scaled down.
        seed: Of initial weights, data order and dropout. Seed and step are the whole random state.
        time_budget: Seconds of training after which the run ends, however many steps are done. The
            learning rate follows whichever of steps and time is further, so that a slow machine
            anneals too.
        compile: Compile each stage with torch.compile.
        recompute: What backward makes again to save memory: `none`, `selective` (outputs of norms
            and activations) or `full` (whole layers); or a plan for each layer, mt-model's
            `RecomputePlan`: `{rules: [{first: 4}, {every: 2, modules: [attention]}], offload: {}}`.
            The numbers stay the same.
        attention: What computes attention: `auto` takes the first that can of products of matrices
            (`matmul`, short sequences on a CPU), torch's (`sdpa`), flash-attn (`flash`) and
            Transformer Engine (`te`) where they are installed, torch's `flex`, `tiles` and the
            plain `reference`. One that is named computes all layers, or the run ends and says why.
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
    compile: bool = False
    recompute: Recompute | RecomputePlan = "none"
    attention: AttentionKernel = "auto"

    def __post_init__(self) -> None:
        checks = Checks(self)
        if self.compile and self.recompute != "none":
            shown = repr(self.recompute) if isinstance(self.recompute, str) else "a plan"
            checks.add(
                "recompute",
                f"{shown} does not go with training.compile, whose compiler decides "
                'itself what to compute again; use "none", or compile: false',
            )
        checks.at_least(1, "steps", "global_batch_size", "micro_batch_size", "sequence_length")
        checks.at_most(MAX_STEPS, "steps")
        checks.at_most(_MAX_BATCH, "global_batch_size", "micro_batch_size")
        checks.at_most(_MAX_LENGTH, "sequence_length")
        checks.above(0, "grad_clip", "time_budget")
        checks.at_least(0, "seed")
        if not checks.errors and self.micro_batch_size * self.sequence_length > _MAX_TOKENS:
            checks.add(
                "micro_batch_size",
                f"{self.micro_batch_size} sequences of {self.sequence_length} tokens are more than "
                f"{_MAX_TOKENS} tokens; use {_MAX_TOKENS // self.sequence_length} or less",
            )
        checks.done()


@dataclass(frozen=True, kw_only=True)
class EvaluationSection:
    """Held-out loss and bits per byte, always at the end of a run that has held-out data.

    Attributes:
        every: Steps from one evaluation to the next; null evaluates at the end only.
        micro_batch_size: Sequences at a time; by default `training.micro_batch_size`.
        max_windows: Evaluate on at most so many sequences.
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
    """When to save, how many to keep, and what to start from.

    A run saves at its end, and when it is stopped. Its own folder is always continued.

    Attributes:
        every: From one save to the next: a number of steps, or a time such as `30s`, `10min` or
            `2h`; null saves at the end only.
        keep: How many checkpoints stay. null keeps all that were saved by steps, and the newest two
            of those saved by time.
        load: Another run's folder or step folder to start from.
        load_mode: `continue` goes on where that run was; `weights` takes its model alone, for other
            data, another length or another optimizer, and starts at step 0.
    """

    every: int | str | None = "10min"
    keep: int | None = None
    load: str | None = None
    load_mode: Literal["continue", "weights"] = "continue"

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "keep")
        if isinstance(self.every, int):
            checks.at_least(1, "every")
        elif self.every is not None and not self.every_seconds:
            checks.add(
                "every",
                f"{self.every!r} is no number of steps and no time above 0; use e.g. 500, 30s, "
                "10min or 2h",
            )
        if self.load_mode == "weights" and self.load is None:
            checks.add(
                "load_mode", "weights needs checkpoint.load, the run whose weights are taken"
            )
        checks.done()

    @property
    def every_steps(self) -> int | None:
        """Steps from one save to the next, where `every` counts steps."""
        return self.every if isinstance(self.every, int) else None

    @property
    def every_seconds(self) -> float | None:
        """Seconds from one save to the next, where `every` is a time."""
        match = _TIME.fullmatch(self.every) if isinstance(self.every, str) else None
        return None if match is None else float(match[1]) * _SECONDS[match[2]]

    @property
    def kept(self) -> int | None:
        """How many checkpoints stay; None for all."""
        return 2 if self.keep is None and self.every_seconds is not None else self.keep


@dataclass(frozen=True, kw_only=True)
class ExportSection:
    """What is written at the end of the run for other programs.

    Attributes:
        hugging_face: A folder that Hugging Face transformers loads, with the weights of the last
            step; it must not exist, or be empty. The tokenizer and what config.json says beside
            the model come from the folder of `model.from`, where there is one.
        family: Name of the family in transformers; by default that of `model.from`, or the first
            that has such a model.
        dtype: Of its tensors; by default that of `model.from`, or `training.dtype`.
    """

    hugging_face: str | None = None
    family: str | None = None
    dtype: Dtype | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        if self.hugging_face is None:
            for name in ("family", "dtype"):
                if getattr(self, name) is not None:
                    checks.add(name, "needs export.hugging_face, the folder to write")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class LoggingSection:
    """What is reported besides metrics.jsonl.

    Attributes:
        every: Steps from one line of the console to the next.
        tensorboard: Write event files into the run folder; needs `mt-train[tensorboard]`.
        zeros: Count the elements of the gradient that are zero.
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
    """A whole run. Problems that join two sections are named by their dotted field.

    Attributes:
        model: The model.
        data: Where tokens come from.
        training: Length, batch and numerics.
        optimizer: The optimizer and its schedule.
        parallel: How many ranks share what.
        data_parallel: What data-parallel ranks share out.
        pipeline: How micro-batches move through the pipeline ranks.
        evaluation: Held-out loss and bits per byte.
        checkpoint: When to save, and what to start from.
        export: What is written at the end for other programs.
        logging: What is reported.
    """

    model: ModelSection
    data: DataSection
    training: TrainingSection
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    data_parallel: DataParallelSection = field(default_factory=DataParallelSection)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    export: ExportSection = field(default_factory=ExportSection)
    logging: LoggingSection = field(default_factory=LoggingSection)

    def __post_init__(self) -> None:
        errors: dict[str, str] = {}
        training, parallel = self.training, self.parallel
        if training.global_batch_size % training.micro_batch_size:
            sizes = listed(divisors(training.global_batch_size))
            errors["training.micro_batch_size"] = (
                f"{training.micro_batch_size} does not divide training.global_batch_size "
                f"{training.global_batch_size}; use one of {sizes}"
            )
        parts = (2 * parallel.cp if parallel.cp > 1 else 1) * (
            parallel.tp if parallel.sequence_parallel else 1
        )
        if training.sequence_length % parts:
            errors["training.sequence_length"] = (
                f"{training.sequence_length} is not divisible by {parts}, which parallel.tp "
                f"{parallel.tp} with sequence_parallel={str(parallel.sequence_parallel).lower()} "
                f"and parallel.cp {parallel.cp} need; use "
                f"{multiples_near(training.sequence_length, parts)}"
            )
        stages = self.pipeline.stages
        if stages is not None and parallel.pp not in (1, stages):
            errors["pipeline.stages"] = (
                f"{stages} contradicts parallel.pp {parallel.pp}; leave one of them out"
            )
        if self.optimizer.masters == "remainder" and training.dtype != "bf16":
            errors["optimizer.masters"] = (
                f"remainder is what bf16 weights lack, and training.dtype is {training.dtype}; use "
                "masters full, or dtype bf16"
            )
        errors |= self._tokenizer_errors()
        errors |= self._precision_errors()
        errors |= self._sharding_errors()
        errors |= self._evaluation_errors()
        if errors:
            raise FieldError(errors)

    def _tokenizer_errors(self) -> dict[str, str]:
        data, errors = self.data, {}
        if data.tokenizer is not None or self.model.from_ is not None:
            return {}
        if data.train:
            errors["data.tokenizer"] = "missing; data.train needs the tokenizer.json of its tokens"
        if data.eod is not None:
            text = (
                f"{shorten(data.eod)} is a token of data.tokenizer, which is not set; leave it out"
            )
            errors["data.eod"] = f"{text}, or name the tokenizer"
        return errors

    def _precision_errors(self) -> dict[str, str]:
        """Say where a loss scale is missing or of no use."""
        dtype, scale = self.training.dtype, self.optimizer.loss_scale
        if dtype == "fp16" and scale is None:
            return {
                "training.dtype": "fp16 needs optimizer.loss_scale, as small gradients are zero "
                "without: dynamic, or a number such as 65536; or use dtype bf16"
            }
        if dtype == "bf16" and scale is not None:
            return {
                "optimizer.loss_scale": f"{scale} does not go with training.dtype bf16, which "
                "holds gradients as small as fp32 does; leave it out, or use dtype fp16"
            }
        return {}

    def _sharding_errors(self) -> dict[str, str]:
        """Say what does not go with how parameters are shared out."""
        own, dtype, optimizer = self.data_parallel, self.training.dtype, self.optimizer
        errors: dict[str, str] = {}
        kept = own.shard_dtype or dtype
        if kept != dtype and _BITS[kept] <= _BITS[dtype]:
            errors["shard_dtype"] = (
                f"{kept} does not hold all that training.dtype {dtype} does; use {dtype}, more "
                "bits, or leave it out"
            )
        elif own.shard_dtype not in (None, "bf16") and optimizer.masters == "remainder":
            errors["shard_dtype"] = (
                f"{own.shard_dtype} leaves nothing for optimizer.masters remainder to keep; leave "
                "it out, or use masters full"
            )
        if own.offload and optimizer.offload:
            errors["offload"] = (
                "true has all that is stepped in the host's memory, of which optimizer.offload "
                f"{optimizer.offload} would move a share there; leave one of them out"
            )
        if own.strategy == "full":
            errors |= self._full_errors()
        elif own.prefetch and self.training.compile:
            errors["prefetch"] = (
                f"{own.prefetch} has forwards wait for parameters, which does not go with "
                "training.compile; use prefetch 0, or compile: false"
            )
        return {f"data_parallel.{name}": text for name, text in errors.items()}

    def _full_errors(self) -> dict[str, str]:
        """Say what does not go with parameters that are whole only while a layer runs."""
        why = (
            "as its parameters are whole only while a layer runs; use strategy optimizer_gradients"
        )
        schedule = self.pipeline.schedule
        if self.training.compile:
            return {"strategy": f"full does not go with training.compile, {why}, or compile: false"}
        if schedule in ("dualpipe", "dualpipe-v"):
            return {
                "strategy": f"full does not go with pipeline.schedule {schedule}, which runs parts "
                f"of two layers in turn, {why}, or schedule zb-v"
            }
        return {}

    def _evaluation_errors(self) -> dict[str, str]:
        length, batch = self.training.sequence_length, self.evaluation.micro_batch_size
        stride = self.evaluation.stride
        if stride is not None and stride > length:
            text = f"{stride} is longer than training.sequence_length {length}"
            return {"evaluation.stride": text}
        if batch is not None and batch * length > _MAX_TOKENS:
            text = f"{batch} sequences of {length} tokens are more than {_MAX_TOKENS} tokens"
            return {"evaluation.micro_batch_size": text}
        return {}

    @property
    def pp(self) -> int:
        """Pipeline ranks, from whichever section names them."""
        return self.pipeline.stages or self.parallel.pp
