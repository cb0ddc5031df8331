"""Encoding with a much faster library, if it gives the same ids."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from mt_files import FileError, read_json, shorten, write_file
from numpy.typing import NDArray

from mt_tokenizer.cut import LONGEST
from mt_tokenizer.engine import Engine, JsonEngine
from mt_tokenizer.error import TokenizerError, is_library_error
from mt_tokenizer.tokenizer import Tokenizer, check_text

Encoded = tuple[NDArray[np.integer], NDArray[np.int64]]
LIBRARIES = ("gigatoken", "fastokens")  # the first one that gives the same ids serves
RENEW_BYTES = 1 << 28
_REASON = 200
_RUN = 64  # characters of a compared text
# Beyond these, a library does not serve at all.
_MOST_AVOIDED, _LOWEST_AVOIDED = 20_000, "\u0100"
_MOST_VERDICT_BYTES = 1 << 24
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
    """A tokenizer of the `tokenizers` library, run by a faster one on all cores or on one.

    gigatoken's cache of words grows without bound, so the encoder is recreated after `RENEW_BYTES`
    of text.

    Args:
        engine: The tokenizer.
        library: Name of the library, one of `LIBRARIES`.
        parallel: Whether gigatoken uses all cores; fastokens follows `RAYON_NUM_THREADS`.
        avoid: Characters whose texts `serves` refuses, in ascending order.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        library: str = LIBRARIES[0],
        parallel: bool = True,
        avoid: str = "",
    ) -> None:
        self.library, self._parallel, self.avoid = library, parallel, avoid
        self._avoided = np.array(sorted(map(ord, avoid)), np.uint32)
        self._json = _without_special_tokens(engine.to_bytes())
        self._seen = 0
        self._inner = _load(self._json, library)

    def serves(self, text: str) -> bool:
        """Return whether a text has none of the characters to avoid."""
        if not self.avoid or text.isascii():
            return True
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        high = codes[codes >= self._avoided[0]]
        places = np.searchsorted(self._avoided, high)
        return not (self._avoided[np.minimum(places, len(self._avoided) - 1)] == high).any()

    def encode_flat(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the concatenated ids of all texts, and the count of each text.

        Shape:
            - Output: [tokens], [len(texts)]
        """
        if not texts:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        self._seen += sum(map(len, texts))
        if self._seen > RENEW_BYTES:
            self._inner, self._seen = _load(self._json, self.library), 0
        if self.library == "fastokens":
            ids, ends = self._inner.encode_batch_flat(list(texts))
            counts = np.diff(np.frombuffer(ends, np.int64))
            return np.frombuffer(ids, np.uint32).astype(np.int64), counts
        awkward = importlib.import_module("awkward")
        rows = self._inner.encode_batch(list(texts), parallel=self._parallel)
        counts = awkward.to_numpy(awkward.num(rows)).astype(np.int64)
        return awkward.to_numpy(awkward.flatten(rows)).astype(np.int64), counts


def fast_encoder(engine: Engine, sample: Sequence[str] = ()) -> FastEncoder | str:
    """Return the first encoder that gives the same ids as a tokenizer, or why none does.

    The libraries may know different versions of Unicode, so all code points are compared. Texts
    with a character that differs are not for the encoder; `serves` says so. The result is kept in
    `~/.cache/mt`, by the digests of the tokenizer and the versions of both libraries.

    Args:
        engine: The tokenizer.
        sample: Texts to compare, besides difficult texts and every character of Unicode.
    """
    if not isinstance(engine, JsonEngine):
        return f"{' and '.join(LIBRARIES)} are used for tokenizer.json files only"
    reasons = []
    for library in LIBRARIES:
        found = _serving(engine, sample, library)
        if isinstance(found, FastEncoder):
            return found
        reasons.append(f"{library} {found}")
    return "; ".join(reasons)


def is_compared(engine: Engine) -> bool:
    """Return whether the verdict on an installed library is kept from before."""
    if not isinstance(engine, JsonEngine):
        return False
    return any(_verdict_file(engine, each).is_file() for each in filter(_is_installed, LIBRARIES))


def _is_installed(library: str) -> bool:
    try:
        importlib.import_module(library)
    except ImportError:
        return False
    return True


def _serving(engine: JsonEngine, sample: Sequence[str], library: str) -> FastEncoder | str:
    """Return the encoder of a library, or why it doesn't serve."""
    if not _is_installed(library):
        return "is not installed: pip install 'mt-tokenizer[fast]'"
    try:
        plain = FastEncoder(engine, library=library)
        avoid = _kept_verdict(engine, library, lambda: "".join(_other_characters(engine, plain)))
        encoder = FastEncoder(engine, library=library, avoid=avoid)
        for text, is_same in _compared(engine, plain, [*_AWKWARD, *sample]):
            if not is_same and encoder.serves(text):
                return f"gives other ids for {shorten(text, _REASON)}"
    except BaseException as error:
        if not is_library_error(error):
            raise
        return f"refuses this tokenizer: {str(error).splitlines()[0][:_REASON]}"
    if len(avoid) > _MOST_AVOIDED or min(avoid, default="\U0010ffff") < _LOWEST_AVOIDED:
        return f"gives other ids for {len(avoid)} characters, such as {min(avoid)!r}"
    return encoder


def _compared(
    engine: JsonEngine, encoder: FastEncoder, texts: Sequence[str]
) -> Iterator[tuple[str, bool]]:
    """Yield each text, and whether both libraries give the same ids."""
    ids, counts = encoder.encode_flat(texts)
    ends = np.cumsum(counts)
    for text, expected, end, count in zip(
        texts, engine.encode_batch(texts), ends, counts, strict=True
    ):
        yield text, ids[end - count : end].tolist() == expected


def _other_characters(engine: JsonEngine, encoder: FastEncoder) -> Iterator[str]:
    """Yield the characters for which the libraries give other ids.

    A character's class shows before `'s`, which is a piece of its own behind a letter or a digit.
    From plane 4 on, where none is assigned but for tags, characters stand together.
    """
    points = [chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    runs = ["".join(points[i : i + _RUN]) for i in range(0, len(points), _RUN)]
    alone = [c for c in points if ord(c) < 0x40000 or 0xE0000 <= ord(c) < 0xE1000]
    apart = ["".join(f"{c}'s " for c in alone[i : i + _RUN]) for i in range(0, len(alone), _RUN)]
    texts = [*(f"{run}'s" for run in runs), *apart]
    found = [text for text, is_same in _compared(engine, encoder, texts) if not is_same]
    suspects = sorted({c for text in found for c in text if not c.isascii()})
    contexts = {f"{c}'s a{c}{c} {c}1 '{c}s  {c}\n": c for c in suspects}
    others = {contexts[t] for t, same in _compared(engine, encoder, list(contexts)) if not same}
    lost = [text for text in found if others.isdisjoint(text)]
    yield from sorted(others.union(*lost))


def _verdict_file(engine: Engine, library: str) -> Path:
    """Return the file of what a comparison found, for these versions of both libraries."""
    digest = hashlib.sha256(engine.to_bytes())
    digest.update(" ".join(map(version, (library, "tokenizers"))).encode())
    return Path(f"~/.cache/mt/{library}/{digest.hexdigest()}.json").expanduser()


def _kept_verdict(engine: Engine, library: str, find: Callable[[], str]) -> str:
    """Return what `find` returns, or what it returned before for the same digests."""
    file = _verdict_file(engine, library)
    try:
        kept = read_json(file, limit=_MOST_VERDICT_BYTES)
    except FileError:
        kept = None
    if isinstance(kept, str):
        return kept
    found = find()
    with suppress(OSError):  # a home that can't be written: it is found again next time
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, json.dumps(found))
    return found


def _without_special_tokens(content: bytes) -> str:
    """Return a tokenizer.json that treats special tokens in texts as plain text, like ours."""
    record = json.loads(content)
    added = record.get("added_tokens") or []
    record["added_tokens"] = [token for token in added if not token.get("special")]
    record["post_processor"] = record["truncation"] = record["padding"] = None
    return json.dumps(record)


def _load(content: str, library: str) -> Any:
    found = importlib.import_module(library).Tokenizer
    load, encode = {
        "gigatoken": ("from_json", "encode_batch"),
        "fastokens": ("from_json_str", "encode_batch_flat"),
    }[library]
    tokenizer = getattr(found, load)(content)
    if not hasattr(tokenizer, encode):
        raise TokenizerError(f"this version of {library} has no {encode}")
    return tokenizer


def encode_flat(tokenizer: Tokenizer, fast: FastEncoder | None, texts: Sequence[str]) -> Encoded:
    """Return the concatenated ids of texts and their counts, by a fast encoder if it is given."""
    if fast is not None and all(len(text) <= LONGEST and fast.serves(text) for text in texts):
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
