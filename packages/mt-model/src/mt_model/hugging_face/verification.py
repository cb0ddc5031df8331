"""Whether a folder computes here what it computes in Hugging Face transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from mt_model.hugging_face.loading import from_pretrained


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Logits of the same tokens, here and there.

    Attributes:
        difference: The largest.
        largest: Size of the largest logit there.
        same: Positions at which the best token is the same.
        positions: How many were compared.
    """

    difference: float
    largest: float
    same: int
    positions: int

    @property
    def relative(self) -> float:
        """The difference relative to the largest logit."""
        return self.difference / max(self.largest, 1e-30)


@torch.inference_mode()
def compare(folder: Path, *, length: int, seed: int = 0) -> Comparison:
    """Compare logits of random tokens in fp32, one model in memory after the other.

    Args:
        folder: With config.json and safetensors files.
        length: Of the sequence.
        seed: Of the tokens.

    Raises:
        ExchangeError: `from_pretrained` refuses the folder.
    """
    ours = from_pretrained(folder, dtype=torch.float32)
    length = min(length, ours.config.max_sequence_length)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, ours.config.vocab_size, (1, length), generator=generator)
    found = ours.logits(tokens)
    del ours
    from transformers import AutoModelForCausalLM

    # The folder is from outside: nothing of the hub, no code of its own, no pickle.
    outside = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **outside).eval()
    expected = theirs(tokens).logits
    return Comparison(
        difference=float((found - expected).abs().max()),
        largest=float(expected.abs().max()),
        same=int((found.argmax(-1) == expected.argmax(-1)).sum()),
        positions=length,
    )
