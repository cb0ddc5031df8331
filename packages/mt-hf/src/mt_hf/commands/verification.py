"""Comparison of our results for a folder with the results of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from mt_model import GPT, EncoderDecoder, ModelConfig, Stack, VisionConfig, VisionEncoder
from torch import Tensor

from mt_hf.family.error import ExchangeError
from mt_hf.reading.loading import from_pretrained
from mt_hf.reading.pretrained import Pretrained


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Differences between our logits or image features and transformers'.

    Attributes:
        difference: Largest absolute difference.
        largest: Largest magnitude in transformers' result.
        same: Number of positions whose largest value has the same index.
        positions: Number of compared positions.
    """

    difference: float
    largest: float
    same: int
    positions: int

    @property
    def relative(self) -> float:
        """Difference relative to the largest magnitude."""
        return self.difference / max(self.largest, 1e-30)


@torch.inference_mode()
def compare(folder: Path, *, length: int, seed: int = 0) -> Comparison:
    """Compare logits of random tokens in fp32, one model in memory after the other.

    For an image encoder, compare the first output of transformers' model for a random image. A
    model with images gets one before the tokens; encoder and decoder each get tokens.

    Args:
        folder: A folder with config.json and safetensors files.
        length: Length of the sequence.
        seed: Seed of the tokens, or of the image.

    Raises:
        ExchangeError: `from_pretrained`, ours or transformers', refuses the folder.
    """
    ours, kind = from_pretrained(folder, dtype=torch.float32), "AutoModelForCausalLM"
    generator = torch.Generator().manual_seed(seed)
    if isinstance(ours, VisionEncoder):
        given, kind = {"pixel_values": _image(ours.config, generator)}, _architecture(ours)
        found = cast("Tensor", ours(given["pixel_values"]))
    elif isinstance(ours, EncoderDecoder):
        first, second = (_text(ours.config, length, generator)["input_ids"] for _ in range(2))
        given, kind = {"input_ids": first, "decoder_input_ids": second}, "AutoModelForSeq2SeqLM"
        found = ours.logits(second, encoder_tokens=first)
    else:
        ours = cast("GPT", ours)
        given = _text(ours.config, length, generator)
        found = ours.logits(given["input_ids"], pixel_values=given.get("pixel_values"))
        both_ways = any(not m.is_causal for m in ours.config.mixers.values())
        if both_ways or ours.config.images is not None:
            kind = _architecture(ours)
    del ours
    import transformers

    # The folder may be hostile: no hub, no code from the folder, no pickle.
    outside = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    chosen: Any = getattr(transformers, kind)
    try:
        theirs = chosen.from_pretrained(folder, dtype=torch.float32, **outside).eval()
    except Exception as error:  # of any kind, as for a quantised folder without its library
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise ExchangeError(f"transformers can't load {folder}: {why}") from error
    expected = theirs(**given)[0]
    same = found.argmax(-1) == expected.argmax(-1)
    return Comparison(
        difference=float((found - expected).abs().max()),
        largest=float(expected.abs().max()),
        same=int(same.sum()),
        positions=same.numel(),
    )


def _image(config: VisionConfig, generator: torch.Generator) -> Tensor:
    return torch.randn(1, config.num_channels, *config.image_size, generator=generator)


def _text(config: ModelConfig, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return random tokens (after an image, for a model with images) by transformers' names."""
    images, longest = config.images, config.max_sequence_length
    if images is None:
        shape = 1, min(length, longest)
        return {"input_ids": torch.randint(0, config.vocab_size, shape, generator=generator)}
    first = torch.full((1, images.num_tokens), images.token_id)
    shape = 1, max(min(length, longest - images.num_tokens), 0)
    text = torch.randint(0, config.vocab_size - 1, shape, generator=generator)
    text += text >= images.token_id  # any other token
    return {
        "input_ids": torch.cat((first, text), 1),
        "pixel_values": _image(images.tower, generator),
    }


def _architecture(model: Stack[Any]) -> str:
    """Return the class of transformers for a model's architecture."""
    origin = cast("Pretrained", model.origin)
    named = origin.given.get("architectures") or origin.family.architectures
    return next(name for name in named if name in origin.family.architectures)
