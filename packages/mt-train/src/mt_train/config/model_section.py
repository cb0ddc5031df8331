"""The section `model` of a run's configuration: a preset, a folder, or fields of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from mt_files import Checks, bind, did_you_mean, hints_of
from mt_model import FIELDS, SHORT_FORMS, Kernels, KernelSet, MoEConfig, NormConfig, RopeConfig

_WITH_FROM = ("from_", "vocab_multiple", "dropout", "kernels", "retro")
_OWN = ("preset", "vocab_size", "vocab_multiple", "dropout", *SHORT_FORMS)


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The model: a preset, with changed fields or not, all fields without one, or a list of layers.

    Every field of the model, its layers, attention, MLP and norm is a key too and holds for all
    layers. A key left at null comes from the preset, or else has its default.

    Attributes:
        from_: Folder of Hugging Face transformers: the model that its config.json describes, with
            its weights for a new run, and its tokenizer for a corpus. Only `vocab_multiple`,
            `dropout`, `kernels` and `retro`, whose parts are new, go with it.
        preset: Named shape of mt-model, such as `gpt2` or `llama3.2-1b`.
        vocab_size: Number of tokens that the model knows; by default the tokenizer's size, rounded
            up to a multiple of 128.
        vocab_multiple: Multiple that the rows of embedding and head are padded to, so that tp ranks
            can share them; rows beyond the vocabulary take no part in anything. 1 by default, and
            128 for a model `from` a folder.
        dropout: Probability of dropping an element of embedding, attention or feed-forward outputs;
            0 by default, and with `from` the value of config.json.
        num_layers: Number of equal layers.
        layer: One layer, `{mixer: {...}, feed_forward: {...}}`, with other fields of the layer;
            missing fields come from the other keys.
        layers: Layers in order, in place of `num_layers`: a list of mappings like `layer`, each
            with a `repeat`. A mixer of `type: mamba2`, `mla` or `gateddeltanet` has the fields of
            mt-model's `Mamba2Config`, `MLAConfig` or `GatedDeltaNetConfig`.
        rope: Rotary embedding, mt-model's `RopeConfig`, such as `{theta: 1e6, fraction: 0.5}`.
        rope_theta: Base of the rotary embedding alone; 10000 by default.
        bias: Biases of all projections of the layers; `qkv_bias` and `out_bias` follow it. False
            by default.
        moe: Mixture of experts in place of every MLP: mt-model's `MoEConfig`, such as
            `{num_experts: 8, top_k: 2, aux_loss: 0.01}`, with experts as wide as `ffn_size` unless
            it names another width; none by default.
        kernels: Kernels of each operation: `auto` takes the fastest measured one on the device,
            `fused` takes mt-fusions' kernels for norms, residuals, activations, rope and loss,
            `reference` takes plain PyTorch; or a mapping with the fields of mt-model's `Kernels`,
            such as `{attention: sdpa, norm: fused}`. If a named kernel can't serve, the run ends
            with the reason. The numbers stay the same except for rounding, and a run may continue
            with other kernels.
        fields: Other keys, by their names.
    """

    keeps_other_keys: ClassVar[str] = "fields"

    from_: str | None = None
    preset: str | None = None
    vocab_size: int | None = None
    vocab_multiple: int | None = None
    dropout: float | None = None
    num_layers: int | None = None
    layer: Mapping[str, Any] | None = None
    layers: tuple[Mapping[str, Any], ...] | None = None
    rope: RopeConfig | None = None
    rope_theta: float | None = None
    bias: bool | None = None
    moe: MoEConfig | None = None
    kernels: KernelSet | Kernels = "auto"
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "vocab_size", "vocab_multiple", "num_layers")
        checks.fraction("dropout")
        self._bind_fields(checks)
        if self.from_ is not None:
            for name in (*self.given, "preset"):
                if name not in _WITH_FROM and (name != "preset" or self.preset is not None):
                    checks.add(name, "does not go with model.from, whose config.json says it")
        elif self.preset is None and not checks.errors:
            needed = ("hidden_size",) if self.layers else ("hidden_size", "num_layers", "num_heads")
            for name in needed if self.layer is None else needed[:2]:
                if name not in self.given:
                    checks.add(name, "missing; set it, or name a preset with model.preset")
        checks.done()

    def _bind_fields(self, checks: Checks) -> None:
        """Convert the other keys to the types of their fields."""
        values: dict[str, Any] = {}
        for name, value in self.fields.items():
            if name not in FIELDS:
                hint = did_you_mean(name, (*FIELDS, *_OWN, "from", "kernels"), "model")
                checks.add(name, f"unknown key. {hint}")
                continue
            kind, field = FIELDS[name]
            whole = name == "norm" and isinstance(value, Mapping)
            hint = NormConfig if whole else hints_of(kind)[field] | None
            bound = bind(cast("type[Any]", hint), value, name)
            for problem in bound.problems:
                checks.add(problem.path, problem.text)
            if bound.value is not None:
                values[name] = bound.value
        object.__setattr__(self, "fields", values)

    @property
    def given(self) -> dict[str, Any]:
        """The given fields, as arguments of `mt_model.gpt`."""
        own = {name: getattr(self, name) for name in _OWN if name != "preset"}
        said = {name: value for name, value in own.items() if value is not None}
        return {**self.fields, **said}
