"""The rules by which byte-level BPE splits text, by llama.cpp's names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_QWEN2 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_ENDS}"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}"
)
_DIGITS, _OTHER = "one digit at a time", "another rule"
RULES: Mapping[tuple[str, ...], str] = MappingProxyType(
    {
        (_GPT2,): "gpt-2",
        (_DIGITS, _GPT2): "smollm",
        (_QWEN2,): "qwen2",
        (_QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|"),): "llama-bpe",
        (_TEKKEN,): "tekken",
    }
)
NEAREST = "llama-bpe"  # the longest rule, for tokenizers with a rule of their own


def splitting_of(record: Mapping[str, Any]) -> str | None:
    """Return llama.cpp's name of the rule of a tokenizer.json; None if it has no such rule."""
    before = record.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", [before])
    return RULES.get(tuple(rule for step in steps if (rule := _rule(step)) is not None))


def _rule(step: Mapping[str, Any]) -> str | None:
    """Return the rule of a step; None if it splits nothing."""
    kind = step.get("type")
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return _GPT2 if step.get("use_regex", True) else None
    if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        return (step.get("pattern") or {}).get("Regex", _OTHER)
    if kind == "Digits" and step.get("individual_digits"):
        return _DIGITS
    return _OTHER
