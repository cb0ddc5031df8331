"""Configuration of low-rank adapters on a model's linear layers."""

from __future__ import annotations

from dataclasses import dataclass

from mt_files import Checks


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (LoRA; Hu et al., 2021) on linear layers of blocks, which are frozen.

    A fused layer has an adapter for each matrix in it, such as `mixer.qkv.query` and
    `feed_forward.up.gate`, as the separate layers of other libraries have. A layer of experts has
    one for each expert.

    Attributes:
        rank: Rank of the adapters.
        alpha: Products are scaled by `alpha / rank`; `rank` by default.
        dropout: Probability of dropping an element of an adapter's input in training.
        layers: Globs of the layers with adapters, such as `*.mixer.qkv` or `layers.3.*`, or of
            matrices in them, such as `*.mixer.qkv.value`; `*` matches dots too. By default all
            linear layers of blocks but routed experts, for which name `*.experts.*`.
        base_format: Format of mt-quant in which the frozen weights of linear layers are kept, such
            as `int8`, `int4-g64` or `mxfp4`, with adapters or without, experts' too (QLoRA;
            Dettmers et al., 2023); by default they are as they are.
    """

    rank: int
    alpha: float | None = None
    dropout: float = 0.0
    layers: tuple[str, ...] | None = None
    base_format: str | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "rank")
        checks.above(0, "alpha")
        checks.fraction("dropout")
        if self.layers is not None and not self.layers:
            checks.add("layers", "an empty list; name layers, or leave it out for all of them")
        checks.done()
