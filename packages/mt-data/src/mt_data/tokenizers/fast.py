"""Encoding with gigatoken, which is many times faster, if it gives the same ids."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_data.error import DataError, is_library_error, shorten
from mt_data.tokenizers.cut import LONGEST
from mt_data.tokenizers.engine import Engine, JsonEngine
from mt_data.tokenizers.tokenizer import Tokenizer, check_text

Encoded = tuple[NDArray[np.integer], NDArray[np.int64]]
RENEW_BYTES = 1 << 28
_REASON = 200
_SAMPLE_TEXT = 64
_AWKWARD = (
    "I'm we'll they'VE don't it's 'S '",
    "x1y22z333 4444 0x1F 3.14e-10 1_000 ٣٤٥ ² Ⅷ",
    "  two\t\ttabs\r\n\r\n   indented\n\n\nend  \n ",
    "a\u00a0b\u3000c\u2028d\x85e\x00fg\ufeffh",
    "e\u0301\u0323 n\u0303 \u1100\u1161 \ud7a3 \ufb01 \u017f İ ß Ǆ",
    "👩\u200d👩\u200d👧 🏳️\u200d🌈 🎉🎉 ☃️",
    "<|eod|> <|endoftext|> </s> <s> <eos> [SEP] <unk> <pad>",
    "_private __init__ a-b a--b a---b ... !? ?! (x)[y]{z}",
)


class FastEncoder:
    """A tokenizer of the `tokenizers` library, run by gigatoken on all cores or on one.

    gigatoken's cache of words grows without bound, so the encoder is recreated after `RENEW_BYTES`
    of text.
    """

    def __init__(self, engine: Engine, *, parallel: bool = True) -> None:
        self._parallel = parallel
        self._json = _without_special_tokens(engine.to_bytes())
        self._seen = 0
        self._inner = _load(self._json)

    def encode_flat(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the concatenated ids of all texts, and the count of each text.

        Shape:
            - Output: [tokens], [len(texts)]
        """
        if not texts:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        self._seen += sum(map(len, texts))
        if self._seen > RENEW_BYTES:
            self._inner, self._seen = _load(self._json), 0
        awkward = importlib.import_module("awkward")
        rows = self._inner.encode_batch(list(texts), parallel=self._parallel)
        counts = awkward.to_numpy(awkward.num(rows)).astype(np.int64)
        return awkward.to_numpy(awkward.flatten(rows)).astype(np.int64), counts


def fast_obstacle(engine: Engine, sample: Sequence[str] = ()) -> str | None:
    """Return why gigatoken can't replace a tokenizer; None if it gives the same ids.

    Args:
        engine: The tokenizer.
        sample: Texts to compare, besides difficult texts and every character of Unicode.
    """
    if not isinstance(engine, JsonEngine):
        return "gigatoken is used for tokenizer.json files only"
    try:
        importlib.import_module("gigatoken")
    except ImportError:
        return "it is not installed: pip install gigatoken awkward"
    try:
        encoder = FastEncoder(engine)
        for texts in (_AWKWARD, list(_every_character()), sample):
            if difference := _difference(engine, encoder, texts):
                return difference
    except BaseException as error:
        if not is_library_error(error):
            raise
        return f"it refuses this tokenizer: {shorten(str(error).splitlines()[0], _REASON)}"
    return None


def _difference(engine: JsonEngine, encoder: FastEncoder, texts: Sequence[str]) -> str | None:
    ids, counts = encoder.encode_flat(texts)
    ends = np.cumsum(counts)
    for text, expected, end, count in zip(
        texts, engine.encode_batch(texts), ends, counts, strict=True
    ):
        if ids[end - count : end].tolist() != expected:
            return f"it gives other ids for {shorten(repr(text), _REASON)}"
    return None


def _every_character() -> Iterator[str]:
    """Yield texts that together contain every Unicode character known to this Python."""
    import unicodedata

    characters = [
        chr(point)
        for point in range(0x110000)
        if unicodedata.category(chr(point)) not in ("Cn", "Co", "Cs")
    ]
    for start in range(0, len(characters), _SAMPLE_TEXT):
        yield "".join(characters[start : start + _SAMPLE_TEXT])


def _without_special_tokens(content: bytes) -> str:
    """Return a tokenizer.json that treats special tokens in texts as plain text, like ours."""
    record = json.loads(content)
    added = record.get("added_tokens") or []
    record["added_tokens"] = [token for token in added if not token.get("special")]
    record["post_processor"] = record["truncation"] = record["padding"] = None
    return json.dumps(record)


def _load(content: str) -> Any:
    library = importlib.import_module("gigatoken")
    tokenizer = library.Tokenizer.from_json(content)
    if not hasattr(tokenizer, "encode_batch"):
        raise DataError("this version of gigatoken has no encode_batch")
    return tokenizer


def encode_flat(tokenizer: Tokenizer, fast: FastEncoder | None, texts: Sequence[str]) -> Encoded:
    """Return the concatenated ids of texts and their counts, using gigatoken if it is given."""
    if fast is not None and all(len(text) <= LONGEST for text in texts):
        try:
            ids, counts = fast.encode_flat(texts)
        except (UnicodeEncodeError, TypeError):
            for number, text in enumerate(texts):
                check_text(text, number)
            raise
        if not (ids == tokenizer.eod_id).any():  # else a text spells it: see Tokenizer.encode
            return ids, counts
    rows = tokenizer.encode_batch(texts)
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    ids = np.empty(counts.sum(), np.int64)
    start = 0
    for row in rows:
        ids[start : start + len(row)] = row
        start += len(row)
    return ids, counts
