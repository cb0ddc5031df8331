"""Checks of a `tokenizer.json` before a library loads it.

The library aborts the process if a normaliser expands a word to megabytes of text, and panics on
some prefixes. Therefore these parts of the file are bounded here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mt_files import shorten

from mt_tokenizer.error import TokenizerError

MAX_VOCABULARY = 1 << 22
MAX_GROWTH = 256
MAX_AFFIX = 32
_SIZE_BYTES = 4


def check_record(record: object) -> None:
    """Check the parts of a `tokenizer.json` that the library does not check itself.

    Raises:
        TokenizerError: The message has the problem and its place in the file.
    """
    if not isinstance(record, dict):
        raise TokenizerError(f"expected a JSON object, found {type(record).__name__}")
    for part in ("normalizer", "decoder"):
        _check_growth(part, record.get(part))
    model = record.get("model")
    if isinstance(model, dict):
        vocabulary = model.get("vocab")  # a list, of some kinds of models
        for token, number in vocabulary.items() if isinstance(vocabulary, dict) else ():
            _check_id(token, number)
        for name in ("continuing_subword_prefix", "end_of_word_suffix", "unk_token"):
            _check_affix(f"model.{name}", model.get(name))
    added = record.get("added_tokens") or []
    if not isinstance(added, list):
        raise TokenizerError(f"added_tokens is {shorten(added)}; it must be a list")
    for token in added:
        if isinstance(token, dict):
            _check_id(token.get("content"), token.get("id"))


def _check_id(token: object, number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < MAX_VOCABULARY:
        raise TokenizerError(
            f"token {shorten(token)} has the id {shorten(number)}; an id must be an integer from 0 "
            f"to {MAX_VOCABULARY - 1}"
        )


def _check_affix(name: str, value: object) -> None:
    """Bound a prefix or suffix of words; the library slices prefixes by bytes, so ASCII only."""
    if not isinstance(value, str):
        return
    if len(value) > MAX_AFFIX or (name.endswith("prefix") and not value.isascii()):
        raise TokenizerError(
            f"{name} is {shorten(value)}; it may have up to {MAX_AFFIX} characters, ASCII in a "
            "prefix"
        )


def _check_growth(part: str, content: object) -> None:
    """Bound the factor by which a normaliser or decoder can lengthen a text."""
    growth = 1.0
    for step in _steps(content):
        growth *= _growth(part, step)
    if growth > MAX_GROWTH:
        raise TokenizerError(
            f"its {part} can make a text {growth:.3g} times as long; up to {MAX_GROWTH} times is "
            "accepted"
        )


def _steps(content: object) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normaliser or decoder, with sequences unfolded."""
    if not isinstance(content, dict):
        return
    inner = [*_list(content.get("normalizers")), *_list(content.get("decoders"))]
    if not inner:
        yield content
    for step in inner:
        yield from _steps(step)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _growth(part: str, step: dict[str, Any]) -> float:
    kind = step.get("type")
    if kind == "Replace":
        content = str(step.get("content", ""))
        pattern = step.get("pattern")
        literal = pattern.get("String") if isinstance(pattern, dict) else None
        if isinstance(literal, str) and literal:
            return max(1.0, len(content.encode()) / len(literal.encode()))
        return 1.0 + len(content.encode())  # a regular expression may match the empty string
    if kind == "Precompiled":
        return _precompiled_growth(step.get("precompiled_charsmap"))
    for name in ("prepend", "prefix", "suffix", "replacement", "pad_token", "word_delimiter_token"):
        _check_affix(f"{part}.{name}", step.get(name))
    return 1.0


def _precompiled_growth(charsmap: object) -> float:
    """Return the longest replacement of a character in a sentencepiece character map."""
    import binascii

    if not isinstance(charsmap, str) or not charsmap:
        return 1.0
    try:
        blob = binascii.a2b_base64(charsmap, strict_mode=True)
    except (binascii.Error, ValueError):
        raise TokenizerError("its precompiled_charsmap is damaged") from None
    size = int.from_bytes(blob[:_SIZE_BYTES], "little")
    if size % 4 or _SIZE_BYTES + size >= len(blob) or blob[-1:] != b"\0":
        raise TokenizerError("its precompiled_charsmap is damaged: sizes do not fit together")
    return max(1.0, *(len(text) for text in blob[_SIZE_BYTES + size :].split(b"\0")))
