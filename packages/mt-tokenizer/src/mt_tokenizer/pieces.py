"""The bytes of text of each token."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from mt_tokenizer.error import TokenizerError

NUM_BYTES = 256
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece's sign for a space
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def piece_decoder(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """Return a function from a token to its bytes in the middle of a text.

    It is exact for byte-level tokenizers. Others may omit or add a space at the beginning of a
    text, and WordPiece tokenizers lose spaces, so their sum over a text only approximates its size.

    Args:
        decoder: The `decoder` of a `tokenizer.json`.

    Raises:
        TokenizerError: This kind of decoder is not supported.
    """
    if decoder is None or decoder.get("type") is None:
        return lambda token: b" " + token.encode()  # without a decoder tokens are joined by spaces
    steps = decoder.get("decoders", []) if decoder["type"] == "Sequence" else [decoder]
    steps = [step for step in steps if step.get("type") not in ("Fuse", "Strip")]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level()
    if kinds == ["WordPiece"]:
        return _word_piece(steps[0].get("prefix", "##"))
    if kinds == ["BPEDecoder"]:
        return _replacing([(steps[0].get("suffix", "</w>"), " ")])
    replaced: list[tuple[str, str]] = []
    for kind, step in zip(kinds, steps, strict=True):
        if kind == "Metaspace":
            replaced.append((step.get("replacement", _SPACE), " "))
        elif kind == "Replace" and isinstance(step.get("pattern", {}).get("String"), str):
            replaced.append((step["pattern"]["String"], step.get("content", "")))
        elif kind != "ByteFallback":
            joined = " joined with others" if len(steps) > 1 else ""
            raise TokenizerError(
                f"the bytes of a token are unknown for a tokenizer that decodes with {kind!r}"
                f"{joined}; supported are ByteLevel, Metaspace, WordPiece and BPEDecoder, and "
                "sequences of Replace, ByteFallback, Fuse, Strip and Metaspace"
            )
    return _replacing(replaced, fallback="ByteFallback" in kinds)


def byte_characters() -> list[str]:
    """Return the printable character of each byte in byte-level BPE, by byte value.

    Printable Latin-1 characters represent themselves; the other 68 bytes use the characters from
    U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(NUM_BYTES)]


def _byte_level() -> Callable[[str], bytes]:
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}

    def decode(token: str) -> bytes:
        values = [byte_of.get(character) for character in token]
        if None in values:  # the library, too, then treats the token as plain text
            return token.encode()
        return bytes(value for value in values if value is not None)

    return decode


def _word_piece(prefix: str) -> Callable[[str], bytes]:
    def decode(token: str) -> bytes:
        if token.startswith(prefix):
            return token.removeprefix(prefix).encode()
        return b" " + token.encode()

    return decode


def _replacing(
    replaced: list[tuple[str, str]], *, fallback: bool = False
) -> Callable[[str], bytes]:
    def decode(token: str) -> bytes:
        if fallback and (found := _BYTE.fullmatch(token)):
            return bytes([int(found[1], 16)])
        for old, new in replaced:
            token = token.replace(old, new)
        return token.encode()

    return decode


space_piece = _replacing([(_SPACE, " ")], fallback=True)  # for sentencepiece
