"""The run configuration: one small frozen dataclass per section, each validated once.

Every section collects all its problems (`FieldError`), so that a user sees them together. Sizes
have largest values, so that nothing is built from a slip of the keyboard.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from mt_files import Checks, FieldError, did_you_mean, divisors, multiples_near, shorten
from mt_model import Activation, LayerConfig, Positions, Recompute, RopeConfig, ScoreBias
from mt_schedule import SCHEDULES

OptimizerName: TypeAlias = Literal["adamw", "adam", "sgd", "lion", "muon", "adaptive_muon", "soap"]
Dtype: TypeAlias = Literal["fp64", "fp32", "bf16", "fp16"]
ContextAlgorithm: TypeAlias = Literal["ring", "all_gather", "ulysses", "hierarchical"]

# Beyond what anybody trains, and small enough that products of them stay plain 64-bit numbers.
_MAX_STEPS, _MAX_BATCH, _MAX_LENGTH, _MAX_RANKS = 10**9, 10**7, 1 << 27, 1 << 20
_MAX_TOKENS = 1 << 32  # of one micro-batch
_MAX_TOKENIZER = 10**7
_MAX_RATE = 3.4e38  # more is infinite in fp32, and with one step every weight is
_MAX_SCALE = 2.0**127  # the largest power of two in fp32
_MAX_PREFETCH = 4096  # as many as a model has layers
_BITS = {"fp16": 16, "bf16": 16, "fp32": 32, "fp64": 64}
# What a list of layers says layer by layer.
_UNIFORM = ("preset", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_size")
_UNIFORM += ("activation", "gated", "rope_theta", "rope", "qk_norm", "bias", "attention_dropout")
_UNIFORM += ("window", "sinks", "softcap", "attention_scale", "score_bias")

_SCALES = ("lr_scale", "wd_scale", "eps_scale")  # of an override

# Settings of some optimizers, or of some schedules, only.
_MUON = ("muon", "adaptive_muon")
_ONLY_FOR = {
    "betas": ("name", ("adamw", "adam", "lion", "soap", *_MUON)),
    "eps": ("name", ("adamw", "adam", "soap", *_MUON)),
    "momentum": ("name", ("sgd", *_MUON)),
    "nesterov": ("name", ("sgd", *_MUON)),
    "muon_coefficients": ("name", _MUON),
    "muon_scale": ("name", ("muon",)),
    "muon_tp": ("name", _MUON),
    "min_lr": ("schedule", ("linear", "cosine", "inverse-sqrt", "wsd")),
    "anneal": ("schedule", ("wsd",)),
    "anneal_shape": ("schedule", ("wsd",)),
    "soap_frequency": ("name", ("soap",)),
    "soap_max_dim": ("name", ("soap",)),
    "width_multiplier": ("name", ("adamw", "adam", "sgd", "lion")),
}

_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?(s|min|h)", re.ASCII)
_SECONDS = {"s": 1, "min": 60, "h": 3600}


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The model: a preset, single fields over it, all fields without a preset, or a list of layers.

    A field left at null comes from the preset, or else has the default that is named here.

    Attributes:
        preset: A named shape of mt-model, such as `gpt2-124m` or `llama-3.2-1b`.
        vocab_size: Rows of the embedding; by default the tokenizer's size, rounded up to a multiple
            of 128.
        hidden_size: Width of the residual stream.
        num_layers: Number of equal layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads, which divide `num_heads`; by default as many.
        head_dim: Width of one head; by default hidden_size / num_heads.
        ffn_size: Width of the feed-forward; by default 4 x hidden_size, or 8/3 of it rounded up to
            64 when gated.
        activation: Of the feed-forward; `silu` by default. `gelu` is exact, `gelu_tanh` is
            GPT-2's, `relu2` the squared ReLU.
        gated: Multiply the activation by a second projection (SwiGLU with `silu`); true by default.
        norm: `rms` (the default) or `layer`.
        norm_eps: Added to the mean square before the root; 1e-5 by default.
        positions: `rope` (the default), `learned` (a table) or `none`.
        rope_theta: Base of the rotary embedding; 10000 by default.
        rope: All of the rotary embedding, in place of `rope_theta`: mt-model's `RopeConfig`, such
            as `{theta: 1e6, fraction: 0.5, interleaved: true}`.
        qk_norm: RMSNorm on queries and keys; false by default.
        bias: A bias on every projection of the layers; false by default.
        tied: The head is the embedding matrix; true by default.
        dropout: Probability of dropping an element of embedding, attention or feed-forward outputs;
            0 by default.
        attention_dropout: Probability of dropping an attention weight; 0 by default.
        window: Tokens that a query sees, the last of which is itself; all before it by default.
        sinks: A learned logit per head in the softmax of attention; false by default.
        softcap: Scores of attention become `softcap * tanh(score / softcap)`; not by default.
        attention_scale: Of the scores of attention; `head_dim ** -0.5` by default.
        score_bias: Added to the scores of attention by distance: `{type: alibi}`, or T5's
            `{type: relative}` with mt-model's `RelativeConfig`; none by default.
        init_std: Standard deviation of the initial weights; 0.02 by default.
        layers: Layers that differ, in order, instead of `num_layers` equal ones: a list of
            `{mixer: {...}, feed_forward: {...}, repeat: N}` with the fields of mt-model's
            `AttentionConfig` and `MLPConfig`. Only `hidden_size`, `vocab_size`, `norm`,
            `norm_eps`, `positions`, `tied`, `dropout` and `init_std` go with it.
    """

    preset: str | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    ffn_size: int | None = None
    activation: Activation | None = None
    gated: bool | None = None
    norm: Literal["rms", "layer"] | None = None
    norm_eps: float | None = None
    positions: Positions | None = None
    rope_theta: float | None = None
    rope: RopeConfig | None = None
    qk_norm: bool | None = None
    bias: bool | None = None
    tied: bool | None = None
    dropout: float | None = None
    attention_dropout: float | None = None
    window: int | None = None
    sinks: bool | None = None
    softcap: float | None = None
    attention_scale: float | None = None
    score_bias: ScoreBias | None = None
    init_std: float | None = None
    layers: tuple[LayerConfig, ...] = ()

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(
            1, "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"
        )
        checks.at_least(1, "ffn_size", "window")
        checks.above(0, "init_std", "rope_theta", "norm_eps", "softcap", "attention_scale")
        checks.fraction("dropout", "attention_dropout")
        if self.layers and not checks.errors:
            for name in _UNIFORM:
                if getattr(self, name) is not None:
                    checks.add(name, "does not go with model.layers; say it in the entries")
        if self.preset is None:
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
        if self.train and self.tokenizer is None:
            checks.add("tokenizer", "missing; data.train needs the tokenizer.json of its tokens")
        if self.eod is not None and self.tokenizer is None:
            text = (
                f"{shorten(self.eod)} is a token of data.tokenizer, which is not set; leave it out"
            )
            checks.add("eod", f"{text}, or name the tokenizer")
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
        grad_clip: Largest norm of the gradient; a longer one is scaled down.
        seed: Of initial weights, data order and dropout. Seed and step are the whole random state.
        time_budget: Seconds of training after which the run ends, however many steps are done. The
            learning rate follows whichever of steps and time is further, so that a slow machine
            anneals too.
        compile: Compile each stage with torch.compile.
        recompute: What backward makes again to save memory: `none`, `selective` (outputs of norms
            and activations) or `full` (whole layers). The numbers stay the same.
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
        checks = Checks(self)
        if self.compile and self.recompute != "none":
            checks.add(
                "recompute",
                f"{self.recompute!r} does not go with training.compile, whose compiler decides "
                'itself what to compute again; use "none", or compile: false',
            )
        checks.at_least(1, "steps", "global_batch_size", "micro_batch_size", "sequence_length")
        checks.at_most(_MAX_STEPS, "steps")
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
class OverrideEntry:
    """What some parameters have in place of the optimizer's own settings.

    Attributes:
        names: A glob over the names of parameters, as the checkpoint has them, such as
            `embedding.*` or `*.mixer.qkv.*`; `*` stands for dots too.
        lr_scale: Times the learning rate, all along the schedule.
        wd_scale: Times the weight decay; 0 for none.
        eps_scale: Times `optimizer.eps`.
        betas: In place of `optimizer.betas`.
    """

    names: str
    lr_scale: float | None = None
    wd_scale: float | None = None
    eps_scale: float | None = None
    betas: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(0, *_SCALES)
        checks.at_most(_MAX_RATE, *_SCALES)
        if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
            checks.add("betas", f"{list(self.betas)}: expected two numbers from 0 to below 1")
        if all(getattr(self, name) is None for name in (*_SCALES, "betas")):
            checks.add("names", f"nothing is other; set one of {', '.join(_SCALES)}, betas")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class QKClipEntry:
    """When queries and keys are scaled back after a step.

    Attributes:
        threshold: The largest attention score that is left alone.
        alpha: How much of the scaling the queries take, 0 to 1; the keys take the rest.
    """

    threshold: float = 100.0
    alpha: float = 0.5

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.above(0, "threshold")
        checks.at_most(_MAX_RATE, "threshold")
        if not 0 <= self.alpha <= 1:
            checks.add("alpha", f"{self.alpha}: expected a number from 0 to 1")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class NormGroupEntry:
    """Parameters whose gradient is clipped alone.

    Attributes:
        names: A glob over the parameters' names, such as `layers.*.mixer.*`; `*` stands for dots
            too.
        max_norm: The largest norm of their gradient; a longer one is scaled down.
    """

    names: str
    max_norm: float

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.above(0, "max_norm")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """The optimizer and its learning-rate schedule.

    Attributes:
        name: `adamw`, `adam` (weight decay is added to the gradient), `sgd` with momentum, `lion`,
            `muon`, `adaptive_muon` or `soap`; these three step the matrices between embedding and
            head, and adamw the rest.
        lr: The largest learning rate. Muon's steps are as large as AdamW's, so it takes the same;
            lion takes a third to a tenth.
        min_lr: The rate that the decay reaches one step after the last.
        betas: Decay per step of the two moments; of lion, the rates of its step and of its moment.
        eps: Added to the root of the second moment.
        momentum: Decay per step of the momentum of sgd (by default 0.9) and muon (0.95).
        nesterov: Whether sgd (by default not) and muon (by default) look a step ahead.
        moments_dtype: What the moments are kept in between steps: `full` (as the master weights),
            `fp32`, `bf16`, or `fp16` or `fp8` with a scale for each 256 elements.
        masters: What is kept of the fp32 master weights beside bf16 ones: `full` (a copy of 32
            bits), or `remainder`, the 17 bits that the bf16 weight lacks. The numbers are the same.
        offload: Share of master weights and moments, 0 to 1, that lives in the host's memory and is
            stepped by the CPU; each rank decides for whole parameters.
        offload_dir: A folder on a fast local disk for files that hold these; by default they are in
            memory. The files have no names and end with the run.
        muon_coefficients: Of the iterations that make a matrix orthogonal: `simple` or `quintic`.
        muon_scale: What an orthogonal matrix of `o` rows and `i` columns is multiplied with:
            `spectral` 0.2 sqrt(max(o, i)), which makes it as large as a step of AdamW,
            `unit_rms_norm` sqrt(o / i), or `shape_scaling` sqrt(max(1, o / i)).
        muon_tp: How tensor-parallel ranks step a matrix they share: `duplicated` (each gathers
            it), `distributed` (they iterate on their parts) or `blockwise` (each part is a matrix
            of its own, which is faster, and not the same optimizer).
        soap_frequency: Steps from one refresh of the bases of soap to the next.
        soap_max_dim: A side of a matrix that is longer has no basis in soap, as a basis takes
            memory and time with the square and the cube of it.
        weight_decay: Taken off the weights per step, times the rate; biases and norms have none.
        weight_decay_schedule: How weight decay goes from `weight_decay` at the start to
            `weight_decay_end` at the end: `constant`, `linear` or `cosine`.
        weight_decay_end: Weight decay at the end; by default `weight_decay`.
        ema: Keep an average of the weights: the share of the old one in each step, such as 0.999,
            and less in the first steps. It is saved beside the weights, and `mt-infer generate
            --ema` uses it. A run that is continued may begin or end it.
        qk_clip: Where the largest attention score of a step is above `threshold` (100), the weights
            of queries and keys are scaled back to it, those of queries by `alpha` (0.5) of the
            way: `{threshold: 100, alpha: 0.5}`. By head, or by the heads that share a key.
        overrides: What some parameters have in place of that, such as
            `[{names: "embedding.*", lr_scale: 0.1}]`: a list of `names` with `lr_scale`,
            `wd_scale`, `eps_scale` or `betas`. A parameter that several match gets it all; if they
            contradict each other, that is an error.
        width_multiplier: The model's width over that of the one whose rate was tuned; matrices
            between embedding and head then have the rate and `eps` over it (muP), or with sgd all
            others the rate times it.
        skip_above: A step whose gradient has a larger norm is skipped, and the largest gradients
            are named; by default none is.
        max_value: Largest magnitude of an element of the gradient, after `training.grad_clip`; by
            default any.
        schedule: How the rate goes after the warm-up. `wsd` stays at `lr` and then anneals.
        warmup: Steps in which the rate rises to `lr`; the first has lr / warmup.
        anneal: Share of the steps at the end in which `wsd` falls from `lr` to `min_lr`, 0 to 1.
        anneal_shape: How `wsd` falls: `linear`, `cosine`, `exponential`, or `minus-sqrt` (1 - the
            root of the share that is done).
        loss_scale: What the loss is multiplied with before backward, so that small gradients are
            no zeros in fp16: `dynamic`, or a number that stays. A step whose gradient is not finite
            is skipped on all ranks; the learning rate does not move on then.
        initial_loss_scale: The first scale of `dynamic`; 2^32 by default.
        min_loss_scale: The smallest scale of `dynamic`; 1 by default.
        loss_scale_window: Steps without an overflow after which `dynamic` doubles; 1000 by default.
        hysteresis: The how-manieth overflow halves the scale of `dynamic`, and from there on each
            until the scale has grown again; 2 by default.
        norm_groups: Parameters that are clipped alone, apart from `training.grad_clip`: a list of
            `{names: GLOB, max_norm: X}`.
    """

    name: OptimizerName = "adamw"
    lr: float = 3e-4
    min_lr: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float | None = None
    nesterov: bool | None = None
    moments_dtype: Literal["full", "fp32", "bf16", "fp16", "fp8"] = "full"
    masters: Literal["full", "remainder"] = "full"
    offload: float = 0.0
    offload_dir: str | None = None
    muon_coefficients: Literal["simple", "quintic"] = "simple"
    muon_scale: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    muon_tp: Literal["duplicated", "distributed", "blockwise"] = "duplicated"
    soap_frequency: int = 10
    soap_max_dim: int = 8192
    weight_decay: float = 0.1
    weight_decay_schedule: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay_end: float | None = None
    ema: float | None = None
    qk_clip: QKClipEntry | None = None
    overrides: tuple[OverrideEntry, ...] = ()
    width_multiplier: float = 1.0
    skip_above: float | None = None
    max_value: float | None = None
    schedule: Literal["constant", "linear", "cosine", "inverse-sqrt", "wsd"] = "cosine"
    warmup: int = 0
    anneal: float = 0.2
    anneal_shape: Literal["linear", "cosine", "exponential", "minus-sqrt"] = "linear"
    loss_scale: Literal["dynamic"] | float | None = None
    initial_loss_scale: float | None = None
    min_loss_scale: float | None = None
    loss_scale_window: int | None = None
    hysteresis: int | None = None
    norm_groups: tuple[NormGroupEntry, ...] = ()

    def __post_init__(self) -> None:
        checks = Checks(self)
        self._check_scale(checks)
        checks.above(0, "lr", "eps", "width_multiplier", "skip_above", "max_value")
        checks.at_least(0, "min_lr", "weight_decay", "weight_decay_end", "warmup", "anneal")
        checks.at_least(1, "soap_frequency", "soap_max_dim")
        checks.at_most(_MAX_STEPS, "warmup", "soap_frequency", "soap_max_dim")
        checks.at_most(_MAX_RATE, "lr", "eps", "weight_decay", "weight_decay_end")
        checks.at_most(_MAX_RATE, "width_multiplier")
        checks.at_least(0, "offload")
        checks.at_most(1, "offload")
        if self.offload_dir is not None and not self.offload:
            checks.add(
                "offload_dir",
                f"{shorten(self.offload_dir)} stays empty with optimizer.offload 0; set offload to "
                "a share above 0, or leave offload_dir out",
            )
        if not checks.errors:
            if self.anneal > 1:
                checks.add("anneal", f"{self.anneal} is a share of the steps; use 0 to 1")
            if self.min_lr > self.lr:
                checks.add(
                    "min_lr", f"{self.min_lr} is above optimizer.lr {self.lr}; use that or less"
                )
            if not all(0 <= beta < 1 for beta in self.betas):
                checks.add("betas", f"{list(self.betas)}: expected two numbers from 0 to below 1")
            if self.ema is not None and not 0 <= self.ema < 1:
                checks.add("ema", f"{self.ema}: expected a number from 0 to below 1, or null")
            self._check_decay(checks)
        for key, (decides, names) in _ONLY_FOR.items():
            value, chosen = getattr(self, key), getattr(self, decides)
            if chosen not in names and value != type(self).__dataclass_fields__[key].default:
                text = value if isinstance(value, str) else json.dumps(value)
                checks.add(
                    key,
                    f"{text} does not go with optimizer.{decides} {chosen}; leave it out, or use "
                    f"{' or '.join(names)}",
                )
        if self.momentum is not None and not 0 <= self.momentum < 1:
            checks.add("momentum", f"{self.momentum}: expected a number from 0 to below 1")
        elif self.name == "sgd" and self.nesterov and self.momentum == 0:
            checks.add("nesterov", "true needs an optimizer.momentum above 0")
        if self.name == "sgd" and self.momentum == 0 and self.moments_dtype != "full":
            checks.add(
                "moments_dtype",
                f"{self.moments_dtype} has nothing to keep with optimizer.momentum 0; leave it "
                "out, or use a momentum above 0",
            )
        checks.done()

    def _check_decay(self, checks: Checks) -> None:
        is_constant = self.weight_decay_schedule == "constant"
        if is_constant and self.weight_decay_end not in (None, self.weight_decay):
            checks.add(
                "weight_decay_end",
                f"{self.weight_decay_end} is not optimizer.weight_decay {self.weight_decay}, "
                "and optimizer.weight_decay_schedule is constant; use linear or cosine",
            )
        elif not is_constant and self.weight_decay_end is None:
            text = "missing; optimizer.weight_decay_schedule goes there"
            checks.add("weight_decay_end", f"{text}, or leave that out")

    def _check_scale(self, checks: Checks) -> None:
        """Check the loss scale; all but the first key are for a dynamic one."""
        sizes = ("initial_loss_scale", "min_loss_scale")
        if self.loss_scale != "dynamic":
            checks.above(0, "loss_scale")
            checks.at_most(_MAX_SCALE, "loss_scale")
        checks.above(0, *sizes)
        checks.at_most(_MAX_SCALE, *sizes)
        checks.at_least(1, "loss_scale_window", "hysteresis")
        for key in (*sizes, "loss_scale_window", "hysteresis"):
            if getattr(self, key) is not None and self.loss_scale != "dynamic":
                checks.add(
                    key,
                    f"{getattr(self, key)} is for optimizer.loss_scale dynamic, which is "
                    f"{'null' if self.loss_scale is None else self.loss_scale}; leave it out, or "
                    "use dynamic",
                )
        first, least = self.initial_loss_scale, self.min_loss_scale
        if not checks.errors and first is not None and least is not None and first < least:
            checks.add("initial_loss_scale", f"{first} is below optimizer.min_loss_scale {least}")


@dataclass(frozen=True, kw_only=True)
class ParallelSection:
    """How many ranks share what. Their product is the number of processes.

    Attributes:
        tp: Tensor parallel: ranks that share each layer's weights.
        pp: Pipeline parallel: ranks that hold different layers.
        dp: Data parallel: ranks with batches of their own; by default what the processes leave
            over.
        cp: Context parallel: ranks that share each sequence.
        cp_algorithm: How attention reaches the keys of the other cp ranks: `ring`, `all_gather`,
            `ulysses` (swaps heads) or `hierarchical` (swaps heads among `cp_inner` neighbours, ring
            between them). One for all layers, or a list with one for each.
        cp_inner: Neighbours of the hierarchical algorithm; divides `cp`.
        ep: Expert parallel; must be 1, there are no expert layers yet.
        order: Which axes have neighbouring ranks, the first most.
        sequence_parallel: Split the activations between the tensor-parallel regions over the
            sequence; saves memory for the same traffic.
        bucket_size: Elements of a gradient bucket; each is reduced as soon as it is full.
        check_timeout: Seconds. Compares every collective between its ranks before it starts, which
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
    bucket_size: int = 25 * 2**20 // 4
    check_timeout: float | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        axes = ("tp", "pp", "dp", "cp", "cp_inner", "ep")
        checks.at_least(1, *axes, "bucket_size")
        checks.at_most(_MAX_RANKS, *axes)
        checks.at_most(1 << 40, "bucket_size")
        checks.above(0, "check_timeout")
        checks.at_most(10**6, "check_timeout")
        if self.ep != 1:
            checks.add(
                "ep", f"{self.ep} is not available, as there are no expert layers yet; use 1"
            )
        hierarchical = not checks.errors and "hierarchical" in self.cp_algorithms(1)
        if hierarchical and (not self.cp_inner or self.cp % self.cp_inner):
            checks.add(
                "cp_inner",
                f"{self.cp_inner} does not divide parallel.cp {self.cp}, which the hierarchical "
                f"algorithm needs; use one of {listed(divisors(self.cp))}",
            )
        checks.done()

    def cp_algorithms(self, num_layers: int) -> tuple[ContextAlgorithm, ...]:
        """Return the algorithm of each layer."""
        chosen = self.cp_algorithm
        return (chosen,) * num_layers if isinstance(chosen, str) else chosen


@dataclass(frozen=True, kw_only=True)
class DataParallelSection:
    """What data- and context-parallel ranks share out of what each would have to hold.

    Attributes:
        strategy: `none` (everything is on every rank), `optimizer` (ZeRO-1: each rank has its
            part of the optimizer's state and masters, and steps that), `optimizer_gradients`
            (ZeRO-2: of the gradients too, with a reduction per micro-batch) or `full` (ZeRO-3: of
            the parameters too, which are fetched layer by layer). The numbers stay the same.
        replicas: Parts are shared out among the ranks of one of so many groups, and the groups
            are copies of each other: less to fetch from far away, for more memory. Divides
            `parallel.dp` x `parallel.cp`.
        overlap: Sum gradients while backward still runs. The numbers stay the same.
        prefetch: With strategy `full`, layers whose parameters are fetched while the one before
            them runs. With `optimizer` and `optimizer_gradients`, 0 waits for the parameters after
            a step; above 0 each layer's forward waits for its own. By default 1, or 0 with
            `training.compile`.
        grad_dtype: What gradients are added up in on each rank; by default fp32 (fp64 for fp64).
        reduce_dtype: What they are sent as between ranks; by default `grad_dtype`.
        local_sum: Send each rank the addends of its part, which it adds in fp32, rather than have
            them added on the way: one rounding to `reduce_dtype` however many ranks there are.
        pad_for_bandwidth: Pad every collective to a multiple of 65536 elements, as some networks
            like it.
        shard_dtype: What a rank keeps of the parameters and steps: `fp32` with `training.dtype`
            bf16 makes its part its master weights, without another copy. By default
            `training.dtype`. Not with strategy `none`.
        offload: Keep that part, and its gradients, in the host's memory, where they are stepped.
            Not with strategy `none`.
        unused: What happens to parameters that no micro-batch of a rank gave a gradient: `error`
            names them, `zero` takes it as zero.
    """

    strategy: Literal["none", "optimizer", "optimizer_gradients", "full"] = "none"
    replicas: int = 1
    overlap: bool = True
    prefetch: int | None = None
    grad_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    local_sum: bool = False
    pad_for_bandwidth: bool = False
    shard_dtype: Dtype | None = None
    offload: bool = False
    unused: Literal["error", "zero"] = "error"

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "replicas")
        checks.at_most(_MAX_RANKS, "replicas")
        if self.replicas > 1 and self.strategy == "none":
            checks.add(
                "replicas",
                f"{self.replicas} groups have nothing to share out with data_parallel.strategy "
                "none; leave it out, or use strategy optimizer, optimizer_gradients or full",
            )
        checks.at_least(0, "prefetch")
        checks.at_most(_MAX_PREFETCH, "prefetch")
        for name in ("prefetch", "shard_dtype", "offload"):
            value = getattr(self, name)
            if value and self.strategy == "none":
                checks.add(
                    name,
                    f"{str(value).lower()} is about what is shared out, and data_parallel.strategy "
                    "is none; leave it out, or use strategy optimizer, optimizer_gradients or full",
                )
        checks.done()


@dataclass(frozen=True, kw_only=True)
class PipelineSection:
    """How micro-batches move through the pipeline ranks.

    Attributes:
        schedule: A schedule of mt-schedule: gpipe, 1f1b, interleaved, bfs, zb-h1, zb-h2, zb-v,
            v-half, v-min, dualpipe or dualpipe-v.
        stages: Pipeline ranks; `parallel.pp` says the same.
        microbatches: Micro-batches per step and rank; only checked against the batch sizes.
        layout: Places the layers by hand, as in `Et|tt|tt|tL`: `E` the embedding, `t` a layer, `L`
            the head and the loss.
        chunks: Stages on each rank, of `interleaved` and `bfs`.
        group: Micro-batches that pass one stage before the rank turns to its next, of
            `interleaved`.
    """

    schedule: str = "1f1b"
    stages: int | None = None
    microbatches: int | None = None
    layout: str | None = None
    chunks: int | None = None
    group: int | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "stages", "microbatches", "chunks", "group")
        checks.at_most(_MAX_RANKS, "stages", "chunks", "group")
        if self.schedule not in SCHEDULES:
            hint = did_you_mean(self.schedule, SCHEDULES)
            checks.add("schedule", f"{shorten(self.schedule)} is no schedule. {hint}")
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
        errors |= self._precision_errors()
        errors |= self._sharding_errors()
        errors |= self._evaluation_errors()
        if errors:
            raise FieldError(errors)

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


def listed(numbers: list[int]) -> str:
    """Write numbers for a message, the twelve smallest if there are more."""
    return ", ".join(map(str, numbers[:12])) + (" ..." if len(numbers) > 12 else "")
