"""The section `optimizer` of a run's configuration: the rule, its schedule and its precision."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mt_files import Checks, shorten
from mt_optim import GroupOverride, LossScale, NormGroup, QKClip

from mt_train.config.limits import MAX_STEPS, path_field

OptimizerName: TypeAlias = Literal["adamw", "adam", "sgd", "lion", "muon", "adaptive_muon", "soap"]

_MAX_RATE = 3.4e38  # more is infinite in fp32, and with one step every weight is
_MAX_SCALE = 2.0**127  # the largest power of two in fp32

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
        moments_dtype: Storage format of the moments between steps: `full` (as the master weights),
            `fp32`, `bf16`, or `fp16` or `fp8` with a scale for each 256 elements.
        masters: Form of the fp32 master weights beside bf16 weights: `full` (a copy of 32 bits), or
            `remainder`, the 17 bits that the bf16 weight lacks. The numbers are the same.
        offload: Share of master weights and moments, 0 to 1, that stays in host memory, where the
            CPU steps it; each rank chooses whole parameters.
        offload_dir: Folder on a fast local disk for the offloaded state; by default it stays in
            memory. The files have no names and end with the run.
        muon_coefficients: Coefficients of the iterations that make a matrix orthogonal: `simple` or
            `quintic`.
        muon_scale: Factor of an orthogonal matrix with `o` rows and `i` columns: `spectral` 0.2
            sqrt(max(o, i)), which matches the size of AdamW's steps, `unit_rms_norm` sqrt(o / i),
            or `shape_scaling` sqrt(max(1, o / i)).
        muon_tp: How tensor-parallel ranks step a matrix they share: `duplicated` (each gathers
            it), `distributed` (they iterate on their parts) or `blockwise` (each part is a matrix
            of its own, which is faster, and not the same optimizer).
        soap_frequency: Steps from one refresh of soap's bases to the next.
        soap_max_dim: Largest side of a matrix with a basis in soap; longer sides get none, as a
            basis takes memory with the square of the side and time with its cube.
        weight_decay: Weight decay per step, times the learning rate; biases and norms have none.
        weight_decay_schedule: Schedule of the weight decay from `weight_decay` at the start to
            `weight_decay_end` at the end: `constant`, `linear` or `cosine`.
        weight_decay_end: Weight decay at the end; by default `weight_decay`.
        ema: Decay of a moving average of the weights, such as 0.999; smaller in the first steps.
            Checkpoints hold the average, and `mt-infer generate --ema` uses it. A continued run may
            start or stop it.
        qk_clip: QK-clip, such as `{threshold: 100, alpha: 0.5}`: after a step whose largest
            attention score exceeds `threshold`, the weights of queries and keys are scaled down to
            it, queries by the power `alpha` and keys by the rest. It works on each head, or each
            group of heads that shares a key.
        overrides: Other values for some parameters, such as `[{names: "embedding.*", lr_scale:
            0.1}]`: a list of `names` (a glob over names of parameters as the checkpoint has them,
            where `*` stands for dots too) with `lr_scale`, `wd_scale`, `eps_scale` or `betas`.
            Several entries may match one parameter; contradictions are an error.
        width_multiplier: Ratio of the model's width to the width at which the rate was tuned.
            Matrices between embedding and head then divide the rate and `eps` by it (muP); with sgd
            all other parameters multiply the rate by it.
        skip_above: Gradient norm above which a step is skipped and the largest gradients are named;
            by default no limit.
        max_value: Largest magnitude of a gradient element, after `training.grad_clip`; by default
            no limit.
        schedule: Schedule of the learning rate after the warm-up. `wsd` stays at `lr` and then
            anneals.
        warmup: Steps in which the rate rises to `lr`; the first step has lr / warmup.
        anneal: Share of the steps at the end in which `wsd` falls from `lr` to `min_lr`, 0 to 1.
        anneal_shape: Shape of the `wsd` anneal: `linear`, `cosine`, `exponential`, or `minus-sqrt`
            (1 - the square root of the completed share).
        loss_scale: Factor of the loss before backward, which keeps small fp16 gradients from
            becoming zero: `dynamic`, a constant number, or the settings of a dynamic scale
            (mt-optim's `LossScale`), such as `{initial: 65536, growth_interval: 1000}`.
            All ranks skip a step whose gradient is not finite, and the learning rate does not
            advance.
        norm_groups: Groups of parameters to clip apart from `training.grad_clip`: a list of
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
    offload_dir: str | None = path_field("")
    muon_coefficients: Literal["simple", "quintic"] = "simple"
    muon_scale: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    muon_tp: Literal["duplicated", "distributed", "blockwise"] = "duplicated"
    soap_frequency: int = 10
    soap_max_dim: int = 8192
    weight_decay: float = 0.1
    weight_decay_schedule: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay_end: float | None = None
    ema: float | None = None
    qk_clip: QKClip | None = None
    overrides: tuple[GroupOverride, ...] = ()
    width_multiplier: float = 1.0
    skip_above: float | None = None
    max_value: float | None = None
    schedule: Literal["constant", "linear", "cosine", "inverse-sqrt", "wsd"] = "cosine"
    warmup: int = 0
    anneal: float = 0.2
    anneal_shape: Literal["linear", "cosine", "exponential", "minus-sqrt"] = "linear"
    loss_scale: Literal["dynamic"] | float | LossScale | None = None
    norm_groups: tuple[NormGroup, ...] = ()

    def __post_init__(self) -> None:
        checks = Checks(self)
        if isinstance(self.loss_scale, int | float):
            checks.above(0, "loss_scale")
            checks.at_most(_MAX_SCALE, "loss_scale")
        checks.above(0, "lr", "eps", "width_multiplier", "skip_above", "max_value")
        checks.at_least(0, "min_lr", "weight_decay", "weight_decay_end", "warmup", "anneal")
        checks.at_least(1, "soap_frequency", "soap_max_dim")
        checks.at_most(MAX_STEPS, "warmup", "soap_frequency", "soap_max_dim")
        checks.at_most(_MAX_RATE, "lr", "eps", "weight_decay", "weight_decay_end")
        checks.at_most(_MAX_RATE, "width_multiplier")
        checks.at_least(0, "offload")
        checks.at_most(1, "offload", "anneal")
        checks.fraction("ema", "momentum")
        if self.offload_dir is not None and not self.offload:
            text = f"{shorten(self.offload_dir)} stays empty with optimizer.offload 0; set offload "
            checks.add("offload_dir", text + "to a share above 0, or leave offload_dir out")
        if not checks.errors:
            if self.min_lr > self.lr:
                text = f"{self.min_lr} is above optimizer.lr {self.lr}; use that or less"
                checks.add("min_lr", text)
            if not all(0 <= beta < 1 for beta in self.betas):
                checks.add("betas", f"{list(self.betas)}: expected two numbers from 0 to below 1")
            self._check_decay(checks)
        for key, (decides, names) in _ONLY_FOR.items():
            value, chosen = getattr(self, key), getattr(self, decides)
            if chosen not in names and value != type(self).__dataclass_fields__[key].default:
                text = value if isinstance(value, str) else json.dumps(value)
                text += f" does not go with optimizer.{decides} {chosen}; leave it out, or use "
                checks.add(key, text + " or ".join(names))
        if self.name == "sgd" and self.nesterov and self.momentum == 0:
            checks.add("nesterov", "true needs an optimizer.momentum above 0")
        if self.name == "sgd" and self.momentum == 0 and self.moments_dtype != "full":
            text = f"{self.moments_dtype} has nothing to keep with optimizer.momentum 0; leave it "
            checks.add("moments_dtype", text + "out, or use a momentum above 0")
        checks.done()

    def _check_decay(self, checks: Checks) -> None:
        is_constant = self.weight_decay_schedule == "constant"
        if is_constant and self.weight_decay_end not in (None, self.weight_decay):
            text = f"{self.weight_decay_end} is not optimizer.weight_decay {self.weight_decay}, "
            text += "and optimizer.weight_decay_schedule is constant; use linear or cosine"
            checks.add("weight_decay_end", text)
        elif not is_constant and self.weight_decay_end is None:
            text = "missing; optimizer.weight_decay_schedule goes there"
            checks.add("weight_decay_end", f"{text}, or leave that out")
