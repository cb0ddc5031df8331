"""Folders of Hugging Face transformers into mt models, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_hf.family.error import ExchangeError as ExchangeError

if TYPE_CHECKING:
    from mt_hf.commands.upcycling import Upcycling as Upcycling
    from mt_hf.commands.upcycling import upcycle_checkpoint as upcycle_checkpoint
    from mt_hf.family.family import Family as Family
    from mt_hf.family.link import Link as Link
    from mt_hf.gguf.file import GGUFReport as GGUFReport
    from mt_hf.gguf.file import GGUFType as GGUFType
    from mt_hf.gguf.file import TextFormat as TextFormat
    from mt_hf.gguf.file import export_gguf as export_gguf
    from mt_hf.reading.adapted import AdaptedWeights as AdaptedWeights
    from mt_hf.reading.adapted import open_adapted as open_adapted
    from mt_hf.reading.base import base_digest as base_digest
    from mt_hf.reading.description import Description as Description
    from mt_hf.reading.description import describe as describe
    from mt_hf.reading.description import read_description as read_description
    from mt_hf.reading.end_tokens import read_end_tokens as read_end_tokens
    from mt_hf.reading.hub import find_folder as find_folder
    from mt_hf.reading.hub import is_hub_id as is_hub_id
    from mt_hf.reading.loading import from_pretrained as from_pretrained
    from mt_hf.reading.lora import read_lora as read_lora
    from mt_hf.reading.pretrained import Pretrained as Pretrained
    from mt_hf.reading.pretrained import open_pretrained as open_pretrained
    from mt_hf.reading.registry import find_family as find_family
    from mt_hf.reading.registry import known_families as known_families
    from mt_hf.reading.trained_adapter import read_adapter as read_adapter
    from mt_hf.trtllm.checkpoint import TRTLLMReport as TRTLLMReport
    from mt_hf.trtllm.checkpoint import export_trtllm as export_trtllm
    from mt_hf.trtllm.description import TRTLLMType as TRTLLMType
    from mt_hf.writing.adapter import export_adapter as export_adapter
    from mt_hf.writing.beside import files_beside as files_beside
    from mt_hf.writing.checkpoint import export_checkpoint as export_checkpoint
    from mt_hf.writing.checkpoint import import_pretrained as import_pretrained
    from mt_hf.writing.lora import export_lora as export_lora
    from mt_hf.writing.quantizing import quantize_for_folder as quantize_for_folder
    from mt_hf.writing.saving import save_pretrained as save_pretrained
else:
    # What needs torch is resolved at first use: a folder is described without it.
    __getattr__ = resolve_later(__name__)
