"""The command `mt-infer quantize`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from mt_files import quick_imports

from mt_infer.console import print_text, say

if TYPE_CHECKING:
    from mt_quant import Progress, QuantizationConfig, Rule


@dataclass(kw_only=True)
class Quantize:
    """Store a model in low precision, as a folder that transformers and mt-infer generate read."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """The --out folder of an mt-train run, or a folder of Hugging Face."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """The folder that is made; does not exist, or is empty."""
    recipe: str | None = None
    """A recipe of mt-quant, such as int8, fp8 or int4-gptq; heads and routers stay as they are."""
    config: Path | None = None
    """A YAML file with rules of your own, in place of --recipe."""
    kv_cache_dtype: Literal["fp8-tensor", "fp8-head", "int8-tensor", "int8-head"] | None = None
    """What all attention keeps its keys and values in when the folder generates, with a scale for
    each layer or head; beside --recipe or --config, or alone. Needs --calibration."""
    layout: Literal["compressed-tensors", "modelopt"] = "compressed-tensors"
    """Of the folder: transformers and vLLM read compressed-tensors, TensorRT-LLM, vLLM and SGLang
    what ModelOpt writes, which has fewer formats."""
    calibration: Path | None = None
    """A text on which the model computes, for what needs to see its activations."""
    samples: int = 128
    """Sequences taken from it, evenly spread."""
    length: int | None = None
    """Tokens of each; by default 2048, or the model's context where that is shorter."""
    step: int | None = None
    """The checkpoint of this step of a run; by default the latest."""
    ema: bool = False
    """Use the average of the weights over the steps, where training kept one (optimizer.ema)."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Of scales and of what stays in full precision; by default as it is stored."""


def run_quantize(command: Quantize) -> int:
    """Check the command, make the folder and print its sizes; returns the exit status."""
    with quick_imports():
        from mt_parallel_state import ParallelLayout, ParallelState, detect_env, joined

        from mt_infer.loading import check_kv_cache, load_weights, open_run
        from mt_infer.quantization import Calibration, check_source, quantize_model, stored_dtype

    config = _check_options(command)
    env = detect_env()
    if env.world_size > 1:
        raise ValueError(
            f"quantize is one process, and {env.launcher} started {env.world_size}; start it alone"
        )
    with open_run(command.run, command.step) as run:
        check_source(run, ema=command.ema)
        if command.kv_cache_dtype is not None:
            check_kv_cache(run, command.kv_cache_dtype)
        text = Calibration.of(command.calibration, run, command.samples, command.length)
        with joined(env) as device, ParallelState(ParallelLayout(), device=device) as state:
            dtype = command.dtype or stored_dtype(run)
            model = load_weights(run, state, dtype=dtype, ema=command.ema).model
            how = {"layout": command.layout, "calibration": text, "progress": _tell}
            made = quantize_model(model, run, config, command.out, **how)
    if text is not None and not text.is_read:
        say(f"{text.path} was not needed: no rule sees activations")
    print_text(made)
    return 0


def _check_options(command: Quantize) -> QuantizationConfig:
    """Find every mistake that shows in the command itself."""
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
    from mt_quant import QuantizationConfig, QuantizationError

    given = (command.recipe is not None) + (command.config is not None)
    if given == 2 or (not given and command.kv_cache_dtype is None):
        raise ValueError("give one of --recipe NAME and --config FILE: which layers become what")
    if command.config is not None:
        return QuantizationConfig.from_yaml(command.config).rules
    try:
        return QuantizationConfig.named(command.recipe).rules if command.recipe else ()
    except QuantizationError as error:
        raise ValueError(f"--recipe: {error}") from error


def _tell(progress: Progress) -> None:
    say(f"{progress.done} of {progress.total} layers: {progress.name}")
