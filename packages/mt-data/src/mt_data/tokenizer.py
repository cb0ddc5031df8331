"""Byte-level BPE tokenizers, trained and run by the `tokenizers` library."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mt_data.disk import write_atomic
from mt_data.error import DataError, DataFileError, require

EXTRA = "tokenizers"
NUM_BYTES = 256
DEFAULT_SPECIAL = ("<|eod|>",)
EOD_NAMES = ("<|eod|>", "<|endoftext|>", "<|end_of_text|>", "<eod>", "<eos>", "</s>")
PATTERNS: dict[str, str] = {
    # Words with the space before them, numbers, punctuation runs, blanks. (GPT-2's rule.)
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # A line end joins the punctuation before and the indentation after it, and a word the one sign
    # before it, such as a dot or an underscore: fewer tokens for source code.
    "code": r" ?[^\s\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]*[\r\n]+[ \t]*"
    r"| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}


class Tokenizer:
    """Text to token ids and back.

    `decode(encode(text)) == text` for every text when the tokenizer is byte-level, as the ones
    from `train_tokenizer` are. Special tokens are never produced by `encode`: text that spells
    `<|eod|>` is encoded like any other text.

    Args:
        engine: a `tokenizers.Tokenizer`; this object sets its `encode_special_tokens`.
        eod: name of the special token that ends a document; found by name when None.
    """

    def __init__(self, engine: Any, *, eod: str | None = None) -> None:
        self._engine = engine
        self._engine.encode_special_tokens = True
        self._engine.no_padding()
        self._engine.no_truncation()
        self._vocabulary: dict[str, int] = engine.get_vocab(with_added_tokens=True)
        ids = set(self._vocabulary.values())
        if len(ids) != len(self._vocabulary):
            raise DataError("two tokens of the vocabulary share one id")
        self._added: dict[int, Any] = engine.get_added_tokens_decoder()
        self.special_tokens = {
            token.content: number for number, token in self._added.items() if token.special
        }
        self.vocab_size = max(ids, default=-1) + 1
        self.eod_id = self._find_eod(eod)
        self._piece_table: list[bytes] | None = None

    def _find_eod(self, name: str | None) -> int:
        if not self.special_tokens:
            raise DataError(
                "the tokenizer has no special token, and one must end documents; add one, such as "
                f"{DEFAULT_SPECIAL[0]!r}, with the tokenizers library"
            )
        if name is None:
            known = [known for known in EOD_NAMES if known in self.special_tokens]
            name = (
                known[0]
                if known
                else min(self.special_tokens, key=lambda token: self.special_tokens[token])
            )
        if name not in self.special_tokens:
            raise DataError(
                f"end-of-document token {name!r} is not a special token of this tokenizer; it has "
                f"{sorted(self.special_tokens)}: name one with eod="
            )
        return self.special_tokens[name]

    def __reduce__(self) -> tuple[object, ...]:
        eod = next(name for name, at in self.special_tokens.items() if at == self.eod_id)
        return _from_json, (self.to_json(), eod)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without any special token."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, on all cores."""
        try:
            encodings = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        except (UnicodeEncodeError, TypeError):
            for number, text in enumerate(texts):
                _check_text(text, number)
            raise
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: ArrayLike, *, skip_special: bool = False) -> str:
        """Text of ids; bytes that are not UTF-8 (a cut character) become U+FFFD."""
        numbers = self._checked(ids)
        return self._engine.decode(numbers.tolist(), skip_special_tokens=skip_special)

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """Exact bytes of ids, special tokens giving none; for text that arrives in pieces."""
        pieces = self._pieces()
        return b"".join([pieces[number] for number in self._checked(ids).tolist()])

    @property
    def token_bytes(self) -> NDArray[np.int32]:
        """Text bytes of each token, 0 for special ones.

        `token_bytes[ids].sum()` is the exact size in UTF-8 of the text that ids stand for, which
        is what bits per byte divides by.

        Shape:
            - Output: [vocab_size]
        """
        return np.array([len(piece) for piece in self._pieces()], np.int32)

    def id_of(self, token: str) -> int | None:
        """Id of a token by its exact name in the vocabulary, or None."""
        return self._vocabulary.get(token)

    def to_json(self) -> str:
        """Content of `tokenizer.json`."""
        return self._engine.to_str(pretty=False)

    @property
    def sha256(self) -> str:
        """Digest of `to_json`, recorded beside data that was encoded with this tokenizer."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `tokenizer.json`, all or nothing; `load_tokenizer` gives an equal tokenizer."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, self.to_json().encode())

    def _checked(self, ids: ArrayLike) -> NDArray[np.int64]:
        numbers = np.asarray(ids)
        if numbers.size == 0:
            return np.empty(0, np.int64)
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            raise DataError(
                f"token ids must be one row of integers, got {numbers.dtype.name} of shape "
                f"{numbers.shape}"
            )
        low, high = int(numbers.min()), int(numbers.max())
        if low < 0 or high >= self.vocab_size:
            raise DataError(
                f"token id {low if low < 0 else high} is outside the vocabulary of "
                f"{self.vocab_size}: mask a padded vocabulary before choosing tokens"
            )
        return numbers.astype(np.int64)

    def _pieces(self) -> list[bytes]:
        if self._piece_table is None:
            self._piece_table = self._build_pieces()
        return self._piece_table

    def _build_pieces(self) -> list[bytes]:
        decoder = json.loads(self.to_json()).get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            raise DataError(
                "the bytes of a token are known for byte-level tokenizers only; this one decodes "
                f"with {decoder.get('type', 'no decoder')!r}"
            )
        byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
        pieces = [b""] * self.vocab_size
        for token, number in self._vocabulary.items():
            if number not in self._added:
                pieces[number] = bytes(byte_of[character] for character in token)
            elif not self._added[number].special:
                pieces[number] = token.encode()
        return pieces


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    special: Sequence[str] = DEFAULT_SPECIAL,
    *,
    pattern: str = "gpt2",
) -> Tokenizer:
    """Train a byte-level BPE tokenizer.

    All 256 bytes are in its alphabet, so every text encodes. A small corpus may give fewer tokens
    than asked for; a model's vocabulary is padded by the model.

    Args:
        texts: the corpus, read once.
        vocab_size: at most this many tokens; at least 256 plus the special ones.
        special: special tokens, numbered from 0; the first one ends documents.
        pattern: how text is cut before merging: "gpt2", "code" (3 to 5% fewer tokens on Python
            sources), or a regular expression.
    """
    library = require("tokenizers", EXTRA, "training a tokenizer")
    _check_special(special)
    smallest = NUM_BYTES + len(special)
    if vocab_size < smallest:
        raise DataError(
            f"vocab_size is {vocab_size}; it must be at least {smallest}: 256 bytes and "
            f"{len(special)} special tokens"
        )
    engine = library.Tokenizer(library.models.BPE())
    byte_level = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cut = library.pre_tokenizers.Split(_regex(library, pattern), behavior="isolated")
    engine.pre_tokenizer = library.pre_tokenizers.Sequence([cut, byte_level])
    engine.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(_without(texts, special), trainer=trainer)
    return Tokenizer(engine, eod=special[0])


def load_tokenizer(path: str | os.PathLike[str], *, eod: str | None = None) -> Tokenizer:
    """Load a `tokenizer.json`, ours or any that the `tokenizers` library reads.

    Args:
        path: the file.
        eod: name of the special token that ends a document. When None: `<|eod|>`,
            `<|endoftext|>` or another usual name, else the special token with the lowest id.

    Raises:
        DataFileError: the file is no valid tokenizer.
    """
    library = require("tokenizers", EXTRA, "loading a tokenizer")
    if Path(path).is_dir():
        raise DataFileError(os.fspath(path), "is a folder; give the tokenizer.json in it")
    content = Path(path).read_bytes()
    try:
        engine = library.Tokenizer.from_str(content.decode())
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise DataFileError(
            os.fspath(path),
            f"is not a tokenizer.json ({error}); give one that mt-data or mt-train wrote, or that "
            "of a Hugging Face model",
        ) from None
    try:
        return Tokenizer(engine, eod=eod)
    except DataError as error:
        raise DataFileError(os.fspath(path), str(error)) from None


def _from_json(text: str, eod: str) -> Tokenizer:
    library = require("tokenizers", EXTRA, "loading a tokenizer")
    return Tokenizer(library.Tokenizer.from_str(text), eod=eod)


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte, by byte value.

    Printable Latin-1 characters stand for themselves; the other 68 bytes take the characters from
    U+0100 up, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(NUM_BYTES)]


def _regex(library: Any, pattern: str) -> Any:
    try:
        return library.Regex(PATTERNS.get(pattern, pattern))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise DataError(
            f"pattern {pattern!r} is neither one of {sorted(PATTERNS)} nor a regular expression: "
            f"{error}"
        ) from None


def _check_special(special: Sequence[str]) -> None:
    if not special or len(set(special)) != len(special):
        raise DataError(f"special is {list(special)}; give one or more different names")
    for name in special:
        if len(name) < 2 or not name.isascii() or not name.isprintable():
            raise DataError(
                f"special token {name!r} must be two or more printable ASCII characters, so that "
                "it cannot be mistaken for a byte"
            )


def _without(texts: Iterable[str], special: Sequence[str]) -> Iterator[str]:
    """The texts cut at literal special tokens, which otherwise could be learnt as merges."""
    for number, text in enumerate(texts):
        _check_text(text, number)
        parts = [text]
        for name in special:
            parts = [piece for part in parts for piece in part.split(name)]
        yield from parts


def _check_text(text: object, number: int) -> None:
    if not isinstance(text, str):
        raise DataError(f"text {number} is {type(text).__name__}, not str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"text {number} has a lone surrogate {text[error.start]!r} at position {error.start}, "
            "which is not a character; replace it first"
        ) from None
