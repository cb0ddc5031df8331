"""Rows of LLaVA: decoders and encoders of several families, with texts that have images."""

from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

import pytest
import torch
from family_row import Row, WideTorch, decoder
from mt_model import expand_image_tokens

IMAGE = 39  # the token that stands for images
_NAMES = {
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.language_model.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
_ENCODER = {
    "image_size": 8,
    "patch_size": 4,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
# Of each draw the decoder, the encoder, what differs in them, and what the model has of its own.
DRAWS = [
    ("llama", "clip_vision_model", {}, {"hidden_size": 12, "projection_dim": 5}, {}),
    (
        "qwen2",
        "siglip_vision_model",
        {"tie_word_embeddings": True},
        {"hidden_size": 16, "image_size": 12},
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    (
        "mistral",
        "siglip_vision_model",
        {"sliding_window": 5},
        {"hidden_size": 8, "vision_use_head": False, "num_channels": 1},
        {"vision_feature_layer": 2, "projector_hidden_act": "quick_gelu"},
    ),
    (
        "qwen3",
        "clip_vision_model",
        {"head_dim": 6},
        {"hidden_size": 8, "hidden_act": "gelu"},
        {
            "vision_feature_layer": [-3, 3],
            "multimodal_projector_bias": False,
            "vision_feature_select_strategy": "full",
            "tie_word_embeddings": True,
        },
    ),
]


def draw(index, drawn):
    """Arguments of `LlavaConfig`."""
    kind, tower, text, vision, own = DRAWS[index]
    return {
        "text_config": {"model_type": kind, **decoder(drawn, vocab_size=40, **text)},
        "vision_config": {"model_type": tower, **_ENCODER, **vision},
        "image_token_index": IMAGE,
        **own,
    }


@dataclass(frozen=True, kw_only=True)
class LlavaRow(Row):
    """A row whose names in memory are others, and whose parts have modules of their own."""

    def in_memory(self, stored):
        first = next(name for name in _NAMES if stored.startswith(name))
        return _NAMES[first] + stored.removeprefix(first)

    def build(self, index):
        """As for all, but that the image token is never the most likely one."""
        model = super().build(index)
        with torch.no_grad():
            model.lm_head.weight[IMAGE] = 0
        return model

    @contextmanager
    def in_fp64(self):
        kinds = ("llama", "mistral", "qwen2", "qwen3", "clip", "siglip")
        with super().in_fp64(), pytest.MonkeyPatch.context() as patch:
            for kind in kinds:
                name = f"transformers.models.{kind}.modeling_{kind}"
                patch.setattr(import_module(name), "torch", WideTorch())
            yield


ROW = LlavaRow(name="llava", model="LlavaForConditionalGeneration", draw=draw, draws=len(DRAWS))


def batch_of(config, rows=3):
    """Texts of equal length of which the first has two images, the second one, others none."""
    generator, images = torch.Generator().manual_seed(5), config.images
    length = 2 * images.num_tokens + 6
    tokens = torch.randint(0, IMAGE, (rows, length), generator=generator).tolist()
    for row, count in zip(tokens, (2, 1), strict=False):
        for place in range(count):
            row[1 + 3 * place] = IMAGE
        row[:] = expand_image_tokens(row, images, num_images=count)[:length]
    shape = sum((2, 1)[:rows]), images.tower.num_channels, *images.tower.image_size
    pixels = torch.randn(shape, generator=generator)
    return {"tokens": torch.tensor(tokens), "pixel_values": pixels}
