"""Whether a folder computes here what it computes in Hugging Face transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from mt_model import GPT, EncoderDecoder, ModelConfig, Stack, VisionConfig, VisionEncoder
from torch import Tensor

from mt_hf.reading.loading import from_pretrained
from mt_hf.reading.pretrained import Pretrained


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Logits of the same tokens, or features of the same image, here and there.

    Attributes:
        difference: The largest.
        largest: Size of the largest number there.
        same: Positions at which the largest number is at the same place.
        positions: How many were compared.
    """

    difference: float
    largest: float
    same: int
    positions: int

    @property
    def relative(self) -> float:
        """The difference relative to the largest number."""
        return self.difference / max(self.largest, 1e-30)


@torch.inference_mode()
def compare(folder: Path, *, length: int, seed: int = 0) -> Comparison:
    """Compare logits of random tokens in fp32, one model in memory after the other.

    Of an encoder of images, compare what transformers returns first for a random image. A model
    that takes images is given one, in front of the tokens; an encoder and a decoder get tokens
    each.

    Args:
        folder: With config.json and safetensors files.
        length: Of the sequence.
        seed: Of the tokens, or the image.

    Raises:
        ExchangeError: `from_pretrained` refuses the folder.
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

    # The folder is from outside: nothing of the hub, no code of its own, no pickle.
    outside = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    chosen: Any = getattr(transformers, kind)
    theirs = chosen.from_pretrained(folder, dtype=torch.float32, **outside).eval()
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
    """Random tokens, behind an image where the model takes images, as transformers names them."""
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
    """Return the class of transformers that a model was read from."""
    origin = cast("Pretrained", model.origin)
    named = origin.given.get("architectures") or origin.family.architectures
    return next(name for name in named if name in origin.family.architectures)
