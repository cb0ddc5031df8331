"""Tokenizers: text to token ids and back."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import mt_files
import numpy as np
from mt_files import listed, require, shorten
from numpy.typing import ArrayLike, NDArray

from mt_tokenizer.chat_text import ChatText, Encoded
from mt_tokenizer.cut import PART, cut
from mt_tokenizer.engine import Engine, JsonEngine, ModelEngine
from mt_tokenizer.error import TokenizerError, TokenizerFileError
from mt_tokenizer.foreign import (
    MAX_FILE,
    added_tokens,
    from_ranks,
    from_tekken,
    from_vocabulary,
    from_word_pieces,
    is_ranks,
    is_tekken,
)
from mt_tokenizer.schema import check_record

# Known names of end-of-document tokens. A tokenizer without exactly one of them needs `eod`.
EOD_NAMES = (
    "<|eod|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end_of_document|>",
    "<eod>",
    "<eos>",
    "</s>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek's
    "[EOS]",
    "[SEP]",
)
_PARTS = 8


class Tokenizer:
    """A tokenizer: text to token ids and back.

    For a byte-level tokenizer, such as one from `train_tokenizer`, `decode(encode(text)) == text`
    for every text. `encode` never produces special tokens: the text `<|eod|>` is encoded like any
    other text.

    Args:
        engine: A `tokenizers.Tokenizer`, whose `encode_special_tokens` is then set; or an object
            like `JsonEngine` for another library.
        eod: Name of the special token that ends a document; None means the tokenizer's only token
            among `EOD_NAMES`.

    Raises:
        TokenizerError: `eod` is None, and not exactly one token is known to end documents.
    """

    def __init__(self, engine: Any, *, eod: str | None = None) -> None:
        self._engine: Engine = engine if hasattr(engine, "pieces") else JsonEngine(engine)
        self._vocabulary = self._engine.vocabulary
        ids = set(self._vocabulary.values())
        if len(ids) != len(self._vocabulary):
            raise TokenizerError("two tokens of the vocabulary share one id")
        self.special_tokens = self._engine.special_tokens
        self.vocab_size = max(ids, default=-1) + 1
        self.eod_token = self._find_eod(eod)
        self.eod_id = self.special_tokens[self.eod_token]

    def _find_eod(self, name: str | None) -> str:
        if not self.special_tokens:
            raise TokenizerError(
                "the tokenizer has no special token, and one must end documents; add one, such as "
                "'<|eod|>', with the tokenizers library"
            )
        specials = listed(sorted(self.special_tokens, key=self.special_tokens.__getitem__))
        how = "name it: --eod NAME on the command line, data.eod in a run's YAML file, eod= here"
        if name is not None:
            if name not in self.special_tokens:
                raise TokenizerError(
                    f"end-of-document token {shorten(name)} is not a special token of this "
                    f"tokenizer; it has {specials}"
                )
            return name
        known = [known for known in EOD_NAMES if known in self.special_tokens]
        if not known:
            raise TokenizerError(
                f"no special token is known to end documents; the tokenizer has {specials}: {how}"
            )
        if len(known) > 1:  # BERT's stands between texts, too
            known = [each for each in known if each != "[SEP]"]
        if len(known) > 1:
            raise TokenizerError(
                f"more than one special token may end documents: {listed(known)}; {how}"
            )
        return known[0]

    def __reduce__(self) -> tuple[object, ...]:
        return from_bytes, (self.to_bytes(), self.eod_token)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without any special token."""
        return self.encode_batch([text])[0]

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt for a model, as transformers' tokenizer makes them.

        Names of special tokens in the text stand for these tokens, as a chat template writes them,
        and a `tokenizer.json` may add tokens of its own, such as one for the beginning. A text of
        somebody else is for `encode`, which never makes a special token.
        """
        check_text(text, 0)
        return self._engine.encode_prompt(text)

    def encode_chat(self, chat: ChatText | str) -> list[int]:
        """Return the ids of what `ChatTemplate.write` wrote.

        Special tokens are those that the template wrote; none is added, and none comes of a name
        that stands in the messages. In a `str` every name of a special token stands for the token.
        """
        return self.encode_chat_places(ChatText(text=chat) if isinstance(chat, str) else chat).ids

    def encode_chat_places(self, chat: ChatText) -> Encoded:
        """Return the ids of what a chat template wrote, with their places in its text."""
        check_text(chat.text, 0)
        return self._engine.encode_chat(chat)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts, encoded on all cores.

        A long text is encoded in parts, so that memory is bounded; the ids are the same.

        Raises:
            TokenizerError: A text is not a string, or has megabytes without a place to cut.
        """
        try:
            if all(len(text) <= PART for text in texts):
                rows = self._engine.encode_batch(texts)
            else:
                rows = [self._encode_long(text) for text in texts]
        except (UnicodeEncodeError, TypeError):
            for number, text in enumerate(texts):
                check_text(text, number)
            raise
        return [
            self._encode_literal(text) if self.eod_id in ids else ids
            for text, ids in zip(texts, rows, strict=True)
        ]

    def _encode_literal(self, text: str) -> list[int]:
        """Return the ids of a text that spells the end-of-document token as plain text.

        Some models (Unigram, WordLevel) have special tokens among their words. So the name is cut
        in two; a tokenizer that begins texts with a space then puts one in the middle of it.
        """
        half = len(self.eod_token) // 2
        head, tail = self.eod_token[:half], self.eod_token[half:]
        parts = text.split(self.eod_token)
        last = len(parts) - 1
        parts = [
            (tail if number else "") + part + (head if number < last else "")
            for number, part in enumerate(parts)
        ]
        ids = [number for part in parts for number in self._encode_long(part)]
        if self.eod_id in ids:
            raise TokenizerError(
                f"the tokenizer makes its end-of-document token {shorten(self.eod_token)} of plain "
                "text, which would end documents early; name another with --eod, data.eod or eod="
            )
        return ids

    def _encode_long(self, text: str) -> list[int]:
        parts = cut(text, self._engine.encode_batch)
        ids: list[int] = []
        while batch := list(islice(parts, _PARTS)):  # several parts at once use all cores
            for row in self._engine.encode_batch(batch):
                ids += row
        return ids

    def decode(self, ids: ArrayLike, *, skip_special: bool = False) -> str:
        """Return the text of ids; bytes that are not UTF-8 (a cut character) become U+FFFD."""
        numbers = self._checked(ids)
        return self._engine.decode(numbers.tolist(), skip_special=skip_special)

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """Return the bytes of ids, without special tokens, for streaming text.

        It is exact for byte-level tokenizers; see `token_bytes` for others.
        """
        return b"".join([self._pieces[number] for number in self._checked(ids).tolist()])

    @property
    def token_bytes(self) -> NDArray[np.int32]:
        """Number of text bytes of each token in the middle of a text; 0 for special tokens.

        For byte-level tokenizers `token_bytes[ids].sum()` is the exact size of the ids' text in
        UTF-8. Other kinds may drop or add spaces, and normalise; for them use the size that
        `build_corpus` records.

        Shape:
            - Output: [vocab_size]
        """
        return np.array([len(piece) for piece in self._pieces], np.int32)

    @property
    def word_starts(self) -> NDArray[np.bool_]:
        """Whether each token begins a word, which means that its text begins with white space.

        Shape:
            - Output: [vocab_size]
        """
        return np.array([piece[:1].isspace() for piece in self._pieces], np.bool_)

    @property
    def engine(self) -> Engine:
        """The library's tokenizer."""
        return self._engine

    @property
    def suffix(self) -> str:
        """Ending of its file's name: `.json`, or `.model` for sentencepiece."""
        return self._engine.suffix

    def to_bytes(self) -> bytes:
        """Return the content of its file."""
        return self._engine.to_bytes()

    @cached_property
    def sha256(self) -> str:
        """Digest of `to_bytes`, recorded with every dataset of this tokenizer."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write its file atomically; `load_tokenizer` returns an equal tokenizer."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        mt_files.write_file(target, self.to_bytes())

    def _checked(self, ids: ArrayLike) -> NDArray[np.int64]:
        numbers = np.asarray(ids)
        if numbers.size == 0:
            return np.empty(0, np.int64)
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            raise TokenizerError(
                f"token ids must be one row of integers, got {numbers.dtype.name} of shape "
                f"{numbers.shape}"
            )
        low, high = int(numbers.min()), int(numbers.max())
        if low < 0 or high >= self.vocab_size:
            raise TokenizerError(
                f"token id {low if low < 0 else high} is outside the vocabulary of "
                f"{self.vocab_size}: mask a padded vocabulary before choosing tokens"
            )
        return numbers.astype(np.int64)

    @cached_property
    def _pieces(self) -> list[bytes]:
        return self._engine.pieces()


def load_tokenizer(path: str | os.PathLike[str], *, eod: str | None = None) -> Tokenizer:
    """Load a tokenizer of any of the formats in which models are published.

    These are any `tokenizer.json` that the `tokenizers` library reads, a sentencepiece `.model`,
    Mistral's `tekken.json`, the published files of tiktoken's ranks (GPT-2, GPT-4, GPT-4o, Llama
    3, Qwen), GPT-2's and Qwen's `vocab.json` with `merges.txt`, and BERT's `vocab.txt`. The last
    two are known by their names, the others by their content. All but sentencepiece become a
    `tokenizer.json`, which `save` writes.

    Args:
        path: The file; of several files that make a tokenizer, the vocabulary.
        eod: Name of the special token that ends a document; see `Tokenizer`.

    Raises:
        TokenizerFileError: The file is not a valid tokenizer.
        FileError: The file can't be read; see `mt_files.read_bytes`.
    """
    given = Path(path)
    if given.is_dir():
        raise TokenizerFileError(os.fspath(path), "is a folder; give the tokenizer's file in it")
    try:
        return Tokenizer(_engine(given), eod=eod)
    except TokenizerError as error:
        advice = f"; {_ADVICE}" if "is not a tokenizer.json (" in str(error) else ""
        raise TokenizerFileError(os.fspath(path), f"{error}{advice}") from None


_ADVICE = "give the file of a Hugging Face model, or one written by mt-data or mt-train"


def _engine(path: Path) -> Any:
    """Return the engine for a file."""
    if path.name == "vocab.txt":
        return from_word_pieces(path)
    if path.name == "vocab.json":
        return from_vocabulary(path)
    content = mt_files.read_bytes(path, limit=MAX_FILE)
    if _is_model(content):
        return ModelEngine(content)
    require("tokenizers", "loading a tokenizer")
    if is_ranks(content):
        return from_ranks(content, added_tokens(path.parent))
    try:
        record = mt_files.parse_json(content, name="it")
        if is_tekken(record):
            return from_tekken(record)
        check_record(record)
    except mt_files.FileError as error:
        raise TokenizerError(f"is not a tokenizer.json ({error.problem})") from None
    except TokenizerError as error:
        raise TokenizerError(f"is not a tokenizer.json ({error})") from None
    return JsonEngine.from_bytes(content)


def from_bytes(content: bytes, eod: str) -> Tokenizer:
    """Build a tokenizer from the result of `to_bytes`."""
    kind = ModelEngine if _is_model(content) else JsonEngine.from_bytes
    return Tokenizer(kind(content), eod=eod)


def _is_model(content: bytes) -> bool:
    """Return whether the content is a sentencepiece model, by the tag of its first field."""
    return content[:1] == b"\n" and content.lstrip()[:1] != b"{"


def check_text(text: object, number: int) -> None:
    """Refuse an object that can't be stored as text.

    Raises:
        TokenizerError: It is not a string, or has a lone surrogate.
    """
    if not isinstance(text, str):
        raise TokenizerError(f"text {number} is {type(text).__name__}, not str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"text {number} has a lone surrogate {text[error.start]!r} at position {error.start}, "
            "which is not a character; replace it first"
        ) from None
