"""Mamba-2: layers with only a state space model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import Any, TypeAlias, cast

from mt_files import Checks, shorten
from mt_model import MAX_LAYERS, LayerConfig, Mamba2Config, ModelConfig, NormConfig

from mt_hf.family.decoder import end_links
from mt_hf.family.family import Family
from mt_hf.family.link import Link, leaves
from mt_hf.family.table import Names, model_fields, model_values, read_values, write_values

Limit: TypeAlias = float | Mapping[str, Any]
"""A number; transformers writes infinity as `{"__float__": "Infinity"}`."""

# Fields of the mixer that a Nemotron-H has too.
STATE_SPACE: Names = MappingProxyType(
    {
        "n_groups": "num_groups",
        "conv_kernel": "conv_size",
        "use_conv_bias": "conv_bias",
        "use_bias": "bias",
        "chunk_size": "chunk_size",
        "time_step_min": "init_dt_min",
        "time_step_max": "init_dt_max",
        "time_step_floor": "init_dt_floor",
    }
)
_MIXER: Names = {
    **STATE_SPACE,
    "num_heads": "num_heads",
    "head_dim": "head_dim",
    "state_size": "state_size",
}
_UNBOUNDED = 1 << 20  # tokens of a sequence, where config.json names no largest number


def infinity() -> dict[str, str]:
    """Return infinity as transformers writes it."""
    return {"__float__": "Infinity"}


def no_limit() -> tuple[float, Limit]:
    """Return the default limits of step sizes."""
    return 0.0, infinity()


@dataclass(frozen=True, kw_only=True)
class Mamba2Fields:
    """The fields of a Mamba-2's config.json, with the defaults of transformers.

    `residual_in_fp32` changes where the residual stream of a bf16 model is rounded, and nothing
    reads `time_step_rank`.
    """

    num_heads: int = 128
    head_dim: int = 64
    vocab_size: int = 32768
    hidden_size: int = 4096
    state_size: int = 128
    num_hidden_layers: int = 64
    layer_norm_epsilon: float = 1e-5
    expand: int = 2
    conv_kernel: int = 4
    n_groups: int = 8
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    initializer_range: float = 0.1
    residual_in_fp32: bool = True
    rescale_prenorm_residual: bool = False
    time_step_rank: int | str = "auto"
    time_step_min: float = 0.001
    time_step_max: float = 0.1
    time_step_floor: float = 1e-4
    time_step_limit: tuple[float, Limit] = field(default_factory=no_limit)
    chunk_size: int = 256
    tie_word_embeddings: bool = False
    max_position_embeddings: int = _UNBOUNDED

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "num_hidden_layers")
        checks.at_most(MAX_LAYERS, "num_hidden_layers")
        checks.done()
        check_silu(checks, "hidden_act", self.hidden_act)
        check_limit(checks, self.time_step_limit[1])
        if self.expand * self.hidden_size != self.num_heads * self.head_dim:
            checks.add(
                "expand",
                f"{self.expand} times hidden_size={self.hidden_size} is not num_heads x head_dim = "
                f"{self.num_heads * self.head_dim}",
            )
        checks.done()


def check_silu(checks: Checks, name: str, activation: str) -> None:
    """Report an unsupported activation after the convolution."""
    if activation not in ("silu", "swish"):
        checks.add(name, f"{shorten(activation)} is not built; silu is")


def check_limit(checks: Checks, high: Limit) -> None:
    """Report a largest step size that is not a number."""
    if isinstance(high, Mapping) and high != infinity():
        checks.add("time_step_limit", f"{shorten(high)} is no number")


def _read(given: Mamba2Fields) -> ModelConfig:
    low, high = given.time_step_limit
    highest = None if isinstance(high, Mapping) or high == inf else high
    mixer = Mamba2Config(**read_values(given, _MIXER), min_dt=low, max_dt=highest)
    return ModelConfig(
        **model_values(given),
        layers=(LayerConfig(mixer=mixer, repeat=given.num_hidden_layers),),
        norm=NormConfig(eps=given.layer_norm_epsilon),
        positions="none",
    )


def _write(config: ModelConfig) -> Mamba2Fields:
    mixer = config.layers[0].mixer
    if not isinstance(mixer, Mamba2Config):
        raise ValueError(f"layer 0 is {type(mixer).__name__}, and not Mamba2Config")  # noqa: TRY004
    return Mamba2Fields(
        **model_fields(config),
        **write_values(mixer, _MIXER),
        layer_norm_epsilon=config.norm.eps,
        expand=max(1, mixer.inner_size // config.hidden_size),
        time_step_limit=(mixer.min_dt, infinity() if mixer.max_dt is None else mixer.max_dt),
    )


def _links(config: ModelConfig) -> Iterator[Link]:
    hidden = config.hidden_size
    yield from end_links(config, "backbone.embeddings", "backbone.norm_f")
    for index, layer in enumerate(config.layers):
        source, target = f"backbone.layers.{index}", f"layers.{index}"
        yield from leaves(f"{source}.norm", f"{target}.mixer_norm", hidden, bias=False)
        mixer = cast("Mamba2Config", layer.mixer)
        yield from mamba2_links(f"{source}.mixer", f"{target}.mixer", mixer, hidden)


def mamba2_links(source: str, target: str, mixer: Mamba2Config, hidden: int) -> Iterator[Link]:
    """Yield the tensors of one mixer; the source has z, x, B, C and dt as rows of one projection.

    Args:
        source: Prefix of the tensors.
        target: Prefix of the parameters.
        mixer: The mixer.
        hidden: Width of the residual stream.
    """
    inner, shared = mixer.inner_size, 2 * mixer.num_groups * mixer.state_size
    ends = (0, 2 * inner, 2 * inner + shared, 2 * inner + shared + mixer.num_heads)
    for leaf, rest in {"weight": (hidden,), **({"bias": ()} if mixer.bias else {})}.items():
        for number, part in enumerate(("zx", "bc", "dt")):
            yield Link(
                source=f"{source}.in_proj.{leaf}",
                shape=(ends[-1], *rest),
                part={0: (ends[number], ends[number + 1])},
                target=f"{target}.{part}.{leaf}",
            )
    taps = (1, mixer.conv_size)
    for leaf, rest in {"weight": taps, **({"bias": ()} if mixer.conv_bias else {})}.items():
        for part, rows in (("conv_x", (0, inner)), ("conv_bc", (inner, inner + shared))):
            yield Link(
                source=f"{source}.conv1d.{leaf}",
                shape=(inner + shared, *rest),
                part={0: rows},
                target=f"{target}.{part}.{leaf}",
            )
    for name in ("A_log", "D", "dt_bias"):
        shape = (mixer.num_heads,)
        yield Link(source=f"{source}.{name}", shape=shape, target=f"{target}.{name}")
    yield from leaves(f"{source}.norm", f"{target}.norm", inner, bias=False)
    yield from leaves(f"{source}.out_proj", f"{target}.out", hidden, inner, bias=mixer.bias)


FAMILY = Family(
    name="mamba2",
    architectures=("Mamba2ForCausalLM",),
    fields=Mamba2Fields,
    read=_read,
    write=_write,
    links=_links,
    copies=(("lm_head.weight", "backbone.embeddings.weight"),),
)
