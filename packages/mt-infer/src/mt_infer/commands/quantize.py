"""The command `mt-infer quantize`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from mt_files import quick_imports

from mt_infer.console import print_text, say

if TYPE_CHECKING:
    from mt_model import GPT
    from mt_quant import Progress, QuantizationConfig, Rule

_USUAL_GROUP = 128


@dataclass(kw_only=True)
class Quantize:
    """Quantise a model to a folder that transformers and mt-infer generate read."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """The --out folder of an mt-train run, a folder of Hugging Face, or a model of the hub in the
    local cache, such as Qwen/Qwen3-0.6B."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """The folder to make; it must not exist, or be empty."""
    recipe: str | None = None
    """A recipe of mt-quant, such as int8, fp8 or int4-gptq; heads and routers stay as they are."""
    group_size: int | None = None
    """Inputs that share a scale, for --recipe of int4; by default the largest of 128, 64 and 32
    that divides a layer's inputs."""
    config: Path | None = None
    """A YAML file with your own rules, instead of --recipe."""
    kv_cache_dtype: Literal["fp8-tensor", "fp8-head", "int8-tensor", "int8-head"] | None = None
    """Format of cached keys and values for generation from the folder, with a scale for each layer
    or head; with --recipe or --config, or alone. Needs --calibration."""
    layout: Literal["compressed-tensors", "modelopt"] = "compressed-tensors"
    """Layout of the folder: transformers and vLLM read compressed-tensors; TensorRT-LLM, vLLM and
    SGLang read modelopt, which has fewer formats."""
    calibration: Path | None = None
    """A text to run the model on, for methods and scales that read activations."""
    samples: int = 128
    """Number of sequences of the text, evenly spread."""
    length: int | None = None
    """Tokens in a sequence; by default 2048, or the model's context if that is shorter."""
    step: int | None = None
    """The checkpoint of this step of a run; by default the latest."""
    download: bool = False
    """Download a model of the hub that is not in the cache."""
    ema: bool = False
    """Use the moving average of the weights, if training kept one (optimizer.ema)."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Dtype of scales and of tensors in full precision; by default as stored."""

    def run_command(self) -> int:
        """Check the command, make the folder, print its sizes and return the exit status."""
        with quick_imports():
            from mt_parallel_state import ParallelLayout, ParallelState, detect_env, joined

            from mt_infer.loading import check_kv_cache, load_weights, open_run
            from mt_infer.quantization import (
                Calibration,
                check_source,
                quantize_model,
                stored_dtype,
            )

        config = _check_options(self)
        env = detect_env()
        if env.world_size > 1:
            raise ValueError(
                f"quantize is one process, and {env.launcher} started {env.world_size}; "
                "start it alone"
            )
        with open_run(self.run, self.step, download=self.download) as run:
            check_source(run, ema=self.ema)
            if self.kv_cache_dtype is not None:
                check_kv_cache(run, self.kv_cache_dtype)
            text = Calibration.of(self.calibration, run, self.samples, self.length)
            with joined(env) as device, ParallelState(ParallelLayout(), device=device) as state:
                dtype = self.dtype or stored_dtype(run)
                model = load_weights(run, state, dtype=dtype, ema=self.ema).model
                if self.recipe is not None and self.group_size is None:
                    _say_groups(model, config)
                how = {"layout": self.layout, "calibration": text, "progress": _tell}
                made = quantize_model(model, run, config, self.out, **how)
        if text is not None and not text.is_read:
            say(f"{text.path} was not needed: no rule reads activations")
        print_text(made)
        return 0


def _check_options(command: Quantize) -> QuantizationConfig:
    """Check the options, and return the rules."""
    from mt_quant import QuantizationConfig

    if command.out.is_symlink() or (
        command.out.exists() and (not command.out.is_dir() or any(command.out.iterdir()))
    ):
        raise ValueError(f"{command.out} exists; name a folder that does not, or is empty")
    for name in ("samples", "length"):
        value = getattr(command, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value}: use 1 or more")
    return QuantizationConfig(rules=(*_kv_rules(command), *_linear_rules(command)))


def _kv_rules(command: Quantize) -> tuple[Rule, ...]:
    """The rules of --kv-cache-dtype, for every kind of attention."""
    from mt_quant import Rule

    form = command.kv_cache_dtype
    if form is None:
        return ()
    latent = form.replace("head", "tensor")  # a latent is one head
    kinds = {"Attention": form, "LatentAttention": latent}
    return tuple(Rule(type=k, kv_cache=each, optional=True) for k, each in kinds.items())


def _linear_rules(command: Quantize) -> tuple[Rule, ...]:
    """The rules of --recipe or --config."""
    from mt_quant import QuantizationConfig

    given = (command.recipe is not None) + (command.config is not None)
    if given == 2 or (not given and command.kv_cache_dtype is None):
        raise ValueError(
            "give one of --recipe NAME and --config FILE, which say how to quantise each layer"
        )
    if command.group_size is not None and command.recipe is None:
        raise ValueError("--group-size is for --recipe; rules of --config name their groups")
    if command.config is not None:
        return QuantizationConfig.from_yaml(command.config).rules
    if command.recipe is None:
        return ()
    try:
        return QuantizationConfig.named(command.recipe, group_size=command.group_size).rules
    except ValueError as error:  # an unknown recipe, or a size that is no group's
        raise ValueError(f"--recipe: {error}") from error


def _say_groups(model: GPT, config: QuantizationConfig) -> None:
    """Say which groups a recipe chose, where they differ from its usual ones."""
    model.unfuse_experts()  # rules name each expert
    chosen = (decision.weight for decision in config.decide(model).values())
    groups = Counter(f.group for f in chosen if f is not None and f.type == "int4")
    if any(group != _USUAL_GROUP for group in groups):
        counts = ", ".join(f"{group} inputs in {n} layers" for group, n in groups.items())
        say(f"groups that divide the layers' inputs: {counts}; --group-size sets one for all")


def _tell(progress: Progress) -> None:
    say(f"{progress.done} of {progress.total} layers: {progress.name}")
