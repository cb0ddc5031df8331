"""LLaVA: a decoder of another family that takes images through an encoder of CLIP or SigLIP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from mt_files import Checks, shorten
from mt_model import ImageInputConfig, ModelConfig, StackConfig, VisionConfig

from mt_hf.families.image import clip_vision, siglip_vision
from mt_hf.family.decoder import ACTIVATION_NAMES, ACTIVATIONS, check_activation
from mt_hf.family.family import Family
from mt_hf.family.link import Link, leaves

_NAME = "llava"
Families: TypeAlias = Callable[[], Sequence[Family]]

_ENCODERS = (clip_vision.FAMILY, siglip_vision.FAMILY)
_TEXT, _TOWER, _PROJECTOR = "language_model.", "vision_tower.", "multi_modal_projector."
_PLAIN: Mapping[str, Any] = {
    "embedding_scale": 1.0,
    "logit_scale": 1.0,
    "logit_softcap": None,
    "head_bias": False,
}


@dataclass(frozen=True, kw_only=True)
class LlavaFields:
    """The fields of a LLaVA's config.json, with the defaults of transformers.

    `text_config` and `vision_config` belong to other families, named by their `model_type`. Nothing
    reads `image_seq_length`, and only older files have `vocab_size`.
    """

    text_config: Mapping[str, Any]
    vision_config: Mapping[str, Any]
    image_token_index: int = 32000
    image_seq_length: int = 576
    projector_hidden_act: str = "gelu"
    vision_feature_select_strategy: Literal["default", "full"] = "default"
    vision_feature_layer: int | tuple[int, ...] = -2
    multimodal_projector_bias: bool = True
    tie_word_embeddings: bool = False
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        check_activation(checks, "projector_hidden_act", self.projector_hidden_act)
        if 0 in self.layers:
            checks.add("vision_feature_layer", "0 is what enters the first layer; use 1 or more")
        checks.done()

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of features: 1 is the first, -1 the last."""
        given = self.vision_feature_layer
        return (given,) if isinstance(given, int) else given


def _read(given: LlavaFields, *, decoders: Families) -> ModelConfig:
    text = _text(given.text_config, decoders())
    family = _tower_of(given.vision_config)
    rest = {name: value for name, value in given.vision_config.items() if name != "vocab_size"}
    tower = family.config_of(_own(rest), Path("vision_config"))
    images = ImageInputConfig(
        tower=cast("VisionConfig", tower),
        token_id=given.image_token_index,
        feature_layers=tuple(index - 1 if index > 0 else index for index in given.layers),
        drop_first=given.vision_feature_select_strategy == "default",
        activation=ACTIVATIONS[given.projector_hidden_act],
        bias=given.multimodal_projector_bias,
    )
    return replace(text, images=images, tied=text.tied or given.tie_word_embeddings)


def _text(given: Mapping[str, Any], known: Sequence[Family]) -> ModelConfig:
    """Return the language model alone.

    Raises:
        ValueError: Its family does not use Llama's names, or it has a feature that no LLaVA has.
    """
    named = _text_of(given, known)
    text = cast("ModelConfig", named.config_of(_own(given), Path("text_config")))
    family, _ = _text_family(text, known)
    if list(family.links(text)) != list(named.links(text)):
        raise ValueError(f"text_config: the tensors of {named.name} are not called as Llama's")
    return text


def _parts(given: Mapping[str, Any], *, decoders: Families) -> dict[str, Family]:
    """Return the families of the language model and of the encoder."""
    text, tower = given["text_config"], given["vision_config"]
    return {"text_config": _text_of(text, decoders()), "vision_config": _tower_of(tower)}


def _text_of(given: Mapping[str, Any], known: Sequence[Family]) -> Family:
    return _family_of(given, "text_config", "llama", known)


def _tower_of(given: Mapping[str, Any]) -> Family:
    return _family_of(given, "vision_config", "clip_vision_model", _ENCODERS)


def _family_of(
    given: Mapping[str, Any], part: str, usual: str, families: Sequence[Family]
) -> Family:
    """Return the family of a part of a config.json by its model_type."""
    by_type = {kind: each for each in families for kind in each.model_types}
    kind = given.get("model_type", usual)
    if not isinstance(kind, str) or kind not in by_type:
        known = ", ".join(sorted(by_type))
        raise ValueError(f"{part}.model_type: {shorten(kind)} is not known; known are {known}")
    return by_type[kind]


def _own(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a part, without the name of its class."""
    return {name: value for name, value in given.items() if name != "architectures"}


def _text_family(text: ModelConfig, families: Iterable[Family]) -> tuple[Family, dict[str, Any]]:
    """Return the first Llama-like family that fits a language model, and its fields.

    Raises:
        ValueError: There is none, or the model has a feature that no LLaVA has.
    """
    for name, plain in _PLAIN.items():
        if getattr(text, name) != plain:
            raise ValueError(f"{name} is {getattr(text, name)}, and a LLaVA has {plain}")
    for family in families:
        try:
            fields = family.fields_of(text)
        except ValueError:
            continue
        if all(link.source.startswith(("model.", "lm_head.")) for link in family.links(text)):
            return family, fields
    raise ValueError("its language model is of no known family with Llama's names")


def _tower_family(tower: VisionConfig) -> tuple[Family, dict[str, Any]]:
    """Return the family of an encoder of images, and its fields.

    Raises:
        ValueError: It belongs to neither family; the message has both reasons.
    """
    reasons = []
    for family in _ENCODERS:
        try:
            return family, family.fields_of(tower)
        except ValueError as error:
            reasons.append(f"{family.name}: {error}")
    raise ValueError("images.tower: " + "; ".join(reasons))


def _images(config: ModelConfig) -> ImageInputConfig:
    if config.images is None:
        raise ValueError("it takes no images")
    return config.images


def _write(config: ModelConfig, *, decoders: Families) -> LlavaFields:
    images = _images(config)
    text, text_fields = _text_family(replace(config, images=None), decoders())
    tower, tower_fields = _tower_family(images.tower)
    layers = tuple(index + 1 if index >= 0 else index for index in images.feature_layers)
    return LlavaFields(
        text_config={"model_type": text.model_types[0], **_own(text_fields)},
        vision_config={"model_type": tower.model_types[0], **_own(tower_fields)},
        image_token_index=images.token_id,
        image_seq_length=images.num_tokens,
        projector_hidden_act=ACTIVATION_NAMES[images.activation],
        vision_feature_select_strategy="default" if images.drop_first else "full",
        vision_feature_layer=layers[0] if len(layers) == 1 else layers,
        multimodal_projector_bias=images.bias,
        tie_word_embeddings=config.tied,
        vocab_size=config.vocab_size,
    )


def _links(config: ModelConfig, *, decoders: Families) -> Iterator[Link]:
    images, text = _images(config), replace(config, images=None)
    yield from _inside(_text_family(text, decoders())[0], text, _TEXT, "")
    yield from _inside(_tower_family(images.tower)[0], images.tower, _TOWER, "images.tower.")
    hidden, target = config.hidden_size, "images.projector"
    for name, ours, size in (("1", "up", images.feature_size), ("2", "down", hidden)):
        source = f"{_PROJECTOR}linear_{name}"
        yield from leaves(source, f"{target}.{ours}", hidden, size, bias=images.bias)


def _inside(family: Family, config: StackConfig, source: str, target: str) -> Iterator[Link]:
    """Yield the links of a part, with the prefixes of source and target names."""
    for link in family.links(config):
        yield replace(link, source=source + link.source, target=target + link.target)


def llava(decoders: Families) -> Family:
    """Return the family of LLaVA, whose language model belongs to another family.

    Args:
        decoders: Function that returns the families of language models without images.
    """
    return Family(
        name=_NAME,
        architectures=("LlavaForConditionalGeneration",),
        fields=LlavaFields,
        read=partial(_read, decoders=decoders),
        write=partial(_write, decoders=decoders),
        links=partial(_links, decoders=decoders),
        ignored=(".rotary_emb.inv_freq", ".embeddings.position_ids"),
        parts=partial(_parts, decoders=decoders),
        copies=((f"{_TEXT}lm_head.weight", f"{_TEXT}model.embed_tokens.weight"),),
        renames=(
            ("model.language_model.", f"{_TEXT}model."),
            ("lm_head.", f"{_TEXT}lm_head."),
            ("model.vision_tower.", _TOWER),
            ("model.multi_modal_projector.", _PROJECTOR),
            (f"{_TOWER}vision_model.", _TOWER),
        ),
    )
