"""The section `lora` of a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass

from mt_model import LoraConfig

from mt_train.config.limits import path_field


@dataclass(frozen=True, kw_only=True)
class LoraSection(LoraConfig):
    """Low-rank adapters (LoRA; Hu et al., 2021) on linear layers of blocks, which are frozen.

    A fused layer has an adapter for each matrix in it, such as `mixer.qkv.query` and
    `feed_forward.up.gate`, like the separate layers of other libraries. A layer of experts has one
    for each expert.

    Attributes:
        from_: Folder of Hugging Face PEFT with adapters of the same rank and layers, from which a
            new run starts; by default B is zero.
    """

    from_: str | None = path_field("/adapter_config.json")
