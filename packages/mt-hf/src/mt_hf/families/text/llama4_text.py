"""Llama 4's text model: chunked attention, layers without rotary embedding, scaled experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

from mt_files import Checks
from mt_model import AttentionConfig, MLPConfig, ModelConfig, MoEConfig, TemperatureConfig

from mt_hf.family.decoder import decoder_config, decoder_links, first_mixer, mlp_links
from mt_hf.family.experts import RoutedFields, expert_fields, experts, experts_of, with_experts
from mt_hf.family.family import Family
from mt_hf.family.link import Link, leaves

_LayerType: TypeAlias = Literal["chunked_attention", "full_attention"]
_CHUNKED: _LayerType = "chunked_attention"
_THETA = 500000.0


@dataclass(frozen=True, kw_only=True)
class Llama4Fields(RoutedFields):
    """The specific fields of a Llama 4's config.json of its text model, with their defaults.

    Layers with 0 in `no_rope_layers`, or by default each `no_rope_layer_interval`-th layer,
    have no rotary embedding and no norms of heads, but a temperature. Layers with a rotary
    embedding attend within their chunk, unless `layer_types` says otherwise. Layers in
    `moe_layers`, or by default each `interleave_moe_layer_step`-th layer, have experts of
    `intermediate_size`; others have an MLP of `intermediate_size_mlp`. As in transformers, nothing
    reads `router_jitter_noise` and `for_llm_compressor`.
    """

    vocab_size: int = 202048
    hidden_size: int = 5120
    intermediate_size: int = 8192
    intermediate_size_mlp: int = 16384
    num_hidden_layers: int = 48
    num_attention_heads: int = 40
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float | None = _THETA
    num_local_experts: int = 16
    num_experts_per_tok: int = 1
    moe_layers: tuple[int, ...] | None = None
    interleave_moe_layer_step: int = 1
    use_qk_norm: bool = True
    no_rope_layers: tuple[int, ...] | None = None
    no_rope_layer_interval: int = 4
    attention_chunk_size: int | None = 8192
    layer_types: tuple[_LayerType, ...] | None = None
    attn_temperature_tuning: bool | int = True
    floor_scale: int = 8192
    attn_scale: float = 0.1
    attention_bias: bool = False
    router_jitter_noise: float = 0.0
    for_llm_compressor: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = Checks(self)
        checks.at_least(1, "intermediate_size_mlp", "interleave_moe_layer_step")
        checks.at_least(1, "no_rope_layer_interval", "attention_chunk_size")
        checks.done()
        count = self.num_hidden_layers
        for name in ("layer_types", "no_rope_layers"):
            listed = getattr(self, name)
            if listed and len(listed) != count:
                checks.add(name, f"{len(listed)} of them for {count} layers")
        if not self.sparse:
            checks.add("moe_layers", "leaves no layer that has experts")
        if self.attention_chunk_size is None and _CHUNKED in self.types:
            text = f"null, and there are layers of {_CHUNKED}; give the tokens of a chunk"
            checks.add("attention_chunk_size", text)
        checks.done()

    @property
    def sparse(self) -> list[int]:
        """The layers with experts."""
        count, step = self.num_hidden_layers, self.interleave_moe_layer_step
        listed = range(step - 1, count, step) if self.moe_layers is None else self.moe_layers
        return [index for index in range(count) if index in listed]

    @property
    def turning(self) -> list[bool]:
        """Whether each layer has a rotary embedding."""
        if self.no_rope_layers:
            return [bool(each) for each in self.no_rope_layers]
        interval = self.no_rope_layer_interval
        return [(index + 1) % interval != 0 for index in range(self.num_hidden_layers)]

    @property
    def types(self) -> list[_LayerType]:
        """The attention type of each layer."""
        if self.layer_types is not None:
            return list(self.layer_types)
        return [_CHUNKED if turns else "full_attention" for turns in self.turning]


def _read(given: Llama4Fields) -> ModelConfig:
    dense = replace(given, intermediate_size=given.intermediate_size_mlp)
    config = decoder_config(dense, bias=given.attention_bias)
    layers = tuple(
        replace(layer, mixer=_mixer(given, first_mixer(config), kind, turns=turns))
        for layer, turns, kind in zip(config.layers, given.turning, given.types, strict=True)
    )
    moe = experts(
        given,
        num_experts=given.num_local_experts,
        score="sigmoid",
        normalize=False,
        scale_input=True,
        shared_size=given.intermediate_size,
    )
    return with_experts(replace(config, layers=layers), moe, given.sparse)


def _mixer(
    given: Llama4Fields, mixer: AttentionConfig, kind: _LayerType, *, turns: bool
) -> AttentionConfig:
    chunk = given.attention_chunk_size if kind == _CHUNKED else None
    if turns:
        rope = replace(given.rope, interleaved=True)
        return replace(mixer, rope=rope, chunk=chunk, qk_norm="l2" if given.use_qk_norm else "none")
    heat = TemperatureConfig(strength=given.attn_scale, interval=given.floor_scale)
    tuned = heat if given.attn_temperature_tuning else None
    return replace(mixer, rope=None, chunk=chunk, temperature=tuned)


def _write(config: ModelConfig) -> Llama4Fields:
    moe, sparse = experts_of(config)
    mixers = [layer.mixer for layer in config.layers]
    known = [mixer for mixer in mixers if isinstance(mixer, AttentionConfig)]
    turning = [mixer for mixer in known if mixer.rope is not None]
    chunk = next((mixer.chunk for mixer in known if mixer.chunk is not None), None)
    heat = next((mixer.temperature for mixer in known if mixer.temperature is not None), None)
    entries = [layer.feed_forward for layer in config.layers]
    dense = next((entry for entry in entries if isinstance(entry, MLPConfig)), None)
    first = turning[0] if turning else first_mixer(config)
    whole = replace(config, layers=(replace(config.layers[0], mixer=first), *config.layers[1:]))
    wide = Llama4Fields.intermediate_size_mlp if dense is None else dense.ffn_size
    found = expert_fields(
        Llama4Fields,
        whole,
        num_local_experts=moe.num_experts,
        moe_layers=tuple(sparse),
        use_qk_norm=first.qk_norm == "l2",
        no_rope_layers=tuple(int(mixer.rope is not None) for mixer in known),
        attention_chunk_size=chunk,
        layer_types=tuple("full_attention" if m.chunk is None else _CHUNKED for m in known),
        attn_temperature_tuning=heat is not None,
        floor_scale=Llama4Fields.floor_scale if heat is None else heat.interval,
        attn_scale=Llama4Fields.attn_scale if heat is None else heat.strength,
        intermediate_size_mlp=wide,
    )
    return replace(found, intermediate_size=moe.width)


def _feed_forward_links(
    source: str, target: str, entry: MLPConfig | MoEConfig, hidden: int
) -> Iterator[Link]:
    """Yield the tensors of an MLP, or the arrays of all experts, whose rows are inputs."""
    source = f"{source.rpartition('.')[0]}.feed_forward"
    if isinstance(entry, MLPConfig):
        yield from mlp_links(source, target, entry, hidden)
        return
    number, ffn = entry.num_experts, entry.width
    yield from leaves(f"{source}.router", f"{target}.router", number, hidden, bias=False)
    mlp = MLPConfig(ffn_size=entry.shared_size, activation=entry.activation)
    yield from mlp_links(f"{source}.shared_expert", f"{target}.shared", mlp, hidden)
    arrays: dict[str, Any] = {
        "gate_up_proj": ("up", (number, hidden, 2 * ffn), (0, 2, 3, 1)),
        "down_proj": ("down", (number, ffn, hidden), (0, 2, 1)),
    }
    for name, (leaf, shape, order) in arrays.items():
        place = f"{target}.experts.{leaf}.weight"
        yield Link(source=f"{source}.experts.{name}", shape=shape, target=place, order=order)


FAMILY = Family(
    name="llama4_text",
    architectures=("Llama4ForCausalLM",),
    fields=Llama4Fields,
    read=_read,
    write=_write,
    links=partial(decoder_links, mlp=_feed_forward_links),
    refused={
        "Llama4ForConditionalGeneration": "images are not; read the folder in transformers with "
        "Llama4ForCausalLM, and save it as the text model"
    },
)
