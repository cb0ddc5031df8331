"""Multi-token prediction, as a frozen value."""

from __future__ import annotations

from dataclasses import dataclass

from mt_files import Checks

from mt_model.stack.layer_config import LayerConfig

MAX_DEPTHS = 64


@dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """Modules behind the last layer that predict further tokens (DeepSeek-V3, section 2.2).

    The model predicts the next token after each, module k the one k further on, from what the
    module before it made and the token k further on. They share the model's embedding and head,
    and serve training alone: scores and generation are those of a model without them.

    Attributes:
        depths: modules, one after the other.
        layer: what each is made of; the model's last layer where None.
        weight: of the mean over the modules of their mean cross entropies, in the objective
            (Megatron-LM: 0.1; DeepSeek-V3: 0.3, at the end 0.1).
    """

    depths: int = 1
    layer: LayerConfig | None = None
    weight: float = 0.1

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "depths")
        checks.at_most(MAX_DEPTHS, "depths")
        checks.above(0, "weight")
        checks.done()
        if self.layer is not None and self.layer.repeat > 1:
            text = f"has repeat={self.layer.repeat}; a module has one layer, so leave it out"
            checks.add("layer", text)
        checks.done()
