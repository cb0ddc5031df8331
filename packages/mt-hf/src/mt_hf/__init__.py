"""Folders of Hugging Face transformers into mt models, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_hf.family.error import ExchangeError

if TYPE_CHECKING:
    from mt_hf.commands.upcycling import Upcycling, upcycle_checkpoint
    from mt_hf.family.family import Family
    from mt_hf.family.link import Link
    from mt_hf.reading.description import Description, describe, read_description
    from mt_hf.reading.end_tokens import read_end_tokens
    from mt_hf.reading.hub import find_folder, is_hub_id
    from mt_hf.reading.loading import from_pretrained
    from mt_hf.reading.pretrained import Pretrained, open_pretrained
    from mt_hf.reading.registry import find_family, known_families
    from mt_hf.writing.checkpoint import export_checkpoint, import_pretrained
    from mt_hf.writing.lora import export_lora
    from mt_hf.writing.quantizing import quantize_for_folder
    from mt_hf.writing.saving import save_pretrained

__all__ = [
    "Description",
    "ExchangeError",
    "Family",
    "Link",
    "Pretrained",
    "Upcycling",
    "describe",
    "export_checkpoint",
    "export_lora",
    "find_family",
    "find_folder",
    "from_pretrained",
    "import_pretrained",
    "is_hub_id",
    "known_families",
    "open_pretrained",
    "quantize_for_folder",
    "read_description",
    "read_end_tokens",
    "save_pretrained",
    "upcycle_checkpoint",
]

# What needs torch is resolved at first use: a folder is described without it.
__getattr__ = resolve_later(__name__)
