"""Mixtures of experts, shared by several families: their layers and tensor names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mt_files import Checks
from mt_model import MLPConfig, ModelConfig, MoEConfig

from mt_hf.family.decoder import (
    ACTIVATIONS,
    DecoderFields,
    FieldsT,
    decoder_fields,
    decoder_links,
    mlp_links,
)
from mt_hf.family.link import Link, leaves


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """Names of the tensors of a mixture of experts.

    Attributes:
        block: Feed-forward of a layer with experts.
        gate: Projection of an expert to which the activation applies.
        up: Projection whose output multiplies the gate.
        down: Output projection of an expert.
        shared: Expert that serves every token.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"


NAMES = ExpertNames()


@dataclass(frozen=True, kw_only=True)
class RoutedFields(DecoderFields):
    """Fields of a config.json about the router of experts.

    The loss of `router_aux_loss_coef` counts in training here regardless of
    `output_router_logits`; it changes no logit.
    """

    num_experts_per_tok: int
    router_aux_loss_coef: float = 0.001
    output_router_logits: bool = False


def experts(given: RoutedFields, **rest: Any) -> MoEConfig:
    """Return the experts of a config.json.

    Args:
        given: Fields of the config.json.
        rest: Further fields of the experts, which replace the usual ones.
    """
    usual = {
        "ffn_size": given.intermediate_size,
        "top_k": given.num_experts_per_tok,
        "activation": ACTIVATIONS[given.hidden_act],
        "aux_loss": given.router_aux_loss_coef,
    }
    return MoEConfig(**usual | rest)


def with_experts(
    config: ModelConfig, moe: MoEConfig, layers: Collection[int] | None = None
) -> ModelConfig:
    """Return a model with experts instead of the feed-forwards of some layers, or of all."""
    changed = (
        replace(layer, feed_forward=moe) if layers is None or index in layers else layer
        for index, layer in enumerate(config.layers)
    )
    return replace(config, layers=tuple(changed))


def experts_of(config: ModelConfig) -> tuple[MoEConfig, list[int]]:
    """Return the experts of a model, and the indices of their layers.

    Raises:
        ValueError: No layer has experts.
    """
    entries = [layer.feed_forward for layer in config.layers]
    found = {i: entry for i, entry in enumerate(entries) if isinstance(entry, MoEConfig)}
    if not found:
        raise ValueError("no layer has experts")
    return next(iter(found.values())), list(found)


def expert_fields(kind: type[FieldsT], config: ModelConfig, **rest: Any) -> FieldsT:
    """Return the fields of a model with experts; the caller compares all layers.

    Args:
        kind: Class of the fields.
        config: The model. If no layer has an MLP, the MLP's fields get the experts' width.
        rest: Further fields of the family.

    Raises:
        ValueError: No layer has experts, or the first one has no attention.
    """
    moe, _ = experts_of(config)
    dense = dense_of(config, moe)
    layers = tuple(replace(layer, feed_forward=dense) for layer in config.layers)
    rest |= {"num_experts_per_tok": moe.top_k, "router_aux_loss_coef": moe.aux_loss}
    return decoder_fields(kind, replace(config, layers=layers), **rest)


def dense_of(config: ModelConfig, moe: MoEConfig) -> MLPConfig:
    """Return the MLP of a layer without experts, or an MLP like an expert if there is none."""
    entries = [layer.feed_forward for layer in config.layers]
    alike = MLPConfig(ffn_size=moe.width, activation=moe.activation, gated=moe.gated, bias=moe.bias)
    return next((each for each in entries if isinstance(each, MLPConfig)), alike)


@dataclass(frozen=True, kw_only=True)
class SparseFields(RoutedFields):
    """Fields of a Qwen's config.json about experts.

    Layers in `mlp_only_layers`, and those whose number from 1 is no multiple of
    `decoder_sparse_step`, have an MLP of `intermediate_size`.
    """

    vocab_size: int = 151936
    hidden_size: int = 2048
    max_position_embeddings: int = 32768
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] | None = None
    moe_intermediate_size: int = 768
    num_experts: int = 128
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = Checks(self)
        checks.at_least(1, "decoder_sparse_step", "moe_intermediate_size", "num_experts")
        checks.done()
        if not self.sparse:
            checks.add("mlp_only_layers", "leaves no layer that has experts")
        checks.done()

    @property
    def sparse(self) -> list[int]:
        """Indices of the layers with experts."""
        every, plain = self.decoder_sparse_step, self.mlp_only_layers or ()
        return [i for i in range(every - 1, self.num_hidden_layers, every) if i not in plain]

    @property
    def moe(self) -> MoEConfig:
        """Config of the experts."""
        return experts(
            self,
            num_experts=self.num_experts,
            ffn_size=self.moe_intermediate_size,
            normalize=self.norm_topk_prob,
        )


def sparse_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of `SparseFields`: the layers with experts, and the experts."""
    moe, layers = experts_of(config)
    return {
        "mlp_only_layers": tuple(i for i in range(config.num_layers) if i not in layers),
        "moe_intermediate_size": moe.width,
        "num_experts": moe.num_experts,
        "norm_topk_prob": moe.normalize,
    }


def linked_experts(names: ExpertNames = NAMES) -> Callable[[ModelConfig], Iterator[Link]]:
    """Return the links of a decoder with experts in some layers."""
    return partial(decoder_links, mlp=partial(feed_forward_links, names=names))


def feed_forward_links(
    source: str,
    target: str,
    entry: MLPConfig | MoEConfig,
    hidden: int,
    *,
    names: ExpertNames = NAMES,
) -> Iterator[Link]:
    """Yield the links of one layer's MLP or experts.

    Args:
        source: Prefix of the tensors of an MLP.
        target: Prefix of the parameters.
        entry: The feed-forward.
        hidden: Width of the residual stream.
        names: Names of the experts' tensors.
    """
    if isinstance(entry, MLPConfig):
        yield from mlp_links(source, target, entry, hidden)
        return
    source = f"{source.rpartition('.')[0]}.{names.block}"
    rows = entry.num_experts, hidden
    yield from leaves(f"{source}.gate", f"{target}.router", *rows, bias=False)
    for expert in range(entry.num_experts):
        prefix = f"{source}.experts.{expert}"
        yield from _expert_links(prefix, target, entry, hidden, expert, names)
    if entry.shared_size:
        mlp = MLPConfig(ffn_size=entry.shared_size, activation=entry.activation)
        yield from mlp_links(f"{source}.{names.shared}", f"{target}.shared", mlp, hidden)
    if entry.shared_gate:
        name = f"{source}.{names.shared}_gate.weight"
        yield Link(source=name, shape=(1, hidden), target=f"{target}.shared.gate")


def _expert_links(
    source: str, target: str, moe: MoEConfig, hidden: int, expert: int, names: ExpertNames
) -> Iterator[Link]:
    """Yield the links of one expert's tensors, each a row of an array of all experts."""
    ffn, row = moe.width, {0: (expert, expert + 1)}
    for name, shape, leaf, box in (
        (names.gate, (ffn, hidden), "up", {**row, 1: (0, 1)}),
        (names.up, (ffn, hidden), "up", {**row, 1: (1, 2)}),
        (names.down, (hidden, ffn), "down", row),
    ):
        yield Link(
            source=f"{source}.{name}.weight",
            shape=shape,
            target=f"{target}.experts.{leaf}.weight",
            box=box,
        )
