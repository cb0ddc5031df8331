"""The libraries that turn text into ids: `tokenizers` and `sentencepiece`."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from typing import Any, TypeAlias

from mt_files import require

from mt_tokenizer.chat_text import ChatText, Encoded, by_parts, pattern_of, rename_tokens, renamed
from mt_tokenizer.error import TokenizerError, is_library_error
from mt_tokenizer.piece_places import piece_places
from mt_tokenizer.pieces import piece_decoder, space_piece
from mt_tokenizer.schema import MAX_VOCABULARY

_REASON = 300


class JsonEngine:
    """A wrapper of `tokenizers.Tokenizer`, which sets its `encode_special_tokens`.

    Attributes:
        suffix: Ending of its file's name.
        vocabulary: Id of each token by name, including special tokens.
        special_tokens: Ids of the special tokens by name.
    """

    suffix = ".json"

    def __init__(self, library_tokenizer: Any) -> None:
        self._inner = library_tokenizer
        self._inner.encode_special_tokens = True
        self._inner.no_padding()
        self._inner.no_truncation()
        self.vocabulary: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        self._added: dict[int, Any] = self._inner.get_added_tokens_decoder()
        self.special_tokens = {
            token.content: number for number, token in self._added.items() if token.special
        }

    @classmethod
    def from_bytes(cls, content: bytes) -> JsonEngine:
        """Build the engine from the content of a `tokenizer.json`."""
        library = require("tokenizers", "loading a tokenizer.json")
        with _reported("is not a tokenizer.json"):
            return cls(library.Tokenizer.from_str(content.decode()))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts, encoded on all cores."""
        with _reported("the tokenizer cannot encode this text"):
            encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a text; special tokens in it are read, and the usual ones added."""
        with _reported("the tokenizer cannot encode this text"):
            return self._for_prompts.encode(text).ids

    def encode_chat(self, chat: ChatText) -> Encoded:
        """Return the ids of what a chat template wrote, in which only its names are tokens."""
        with _reported("the tokenizer cannot encode this text"):
            if not chat.literal:
                found = self._for_prompts.encode(chat.text, add_special_tokens=False)
                begins, ends = zip(*found.offsets, strict=True) if found.offsets else ((), ())
                return Encoded(ids=found.ids, begins=[*begins], ends=[*ends])
            other, names = self._with_other_names
            text, first, last = renamed(chat, self._names, names)
            found = other.encode(text, add_special_tokens=False)
        begins = [
            first[begin] if begin < len(first) else len(chat.text) for begin, _ in found.offsets
        ]
        ends = [last[end - 1] if end else 0 for _, end in found.offsets]
        return Encoded(ids=found.ids, begins=begins, ends=ends)

    @cached_property
    def _names(self) -> re.Pattern[str]:
        return pattern_of(self.special_tokens)

    @cached_property
    def _with_other_names(self) -> tuple[Any, dict[str, str]]:
        """A copy in which special tokens have names that no text can know, and these names."""
        library = require("tokenizers", "encoding a chat")
        secret = secrets.token_hex(8)
        names = {name: f"{secret}{n:08x}z" for name, n in self.special_tokens.items()}
        content = rename_tokens(json.loads(self._inner.to_str()), names)
        copy = library.Tokenizer.from_str(json.dumps(content))
        copy.encode_special_tokens = False
        assert all(copy.token_to_id(names[k]) == n for k, n in self.special_tokens.items())  # noqa: S101
        return copy, names

    @cached_property
    def _for_prompts(self) -> Any:
        """A copy that reads names of special tokens; a switch would also serve other threads."""
        library = require("tokenizers", "encoding a prompt")
        copy = library.Tokenizer.from_str(self._inner.to_str())
        copy.encode_special_tokens = False
        return copy

    def decode(self, ids: list[int], *, skip_special: bool) -> str:
        """Return the text of ids."""
        with _reported("the tokenizer cannot decode these ids"):
            return self._inner.decode(ids, skip_special_tokens=skip_special)

    def pieces(self) -> list[bytes]:
        """Bytes of text of each id."""
        decoder = self._inner.decoder
        state = None if decoder is None else json.loads(decoder.__getstate__())
        piece = piece_decoder(state)
        pieces = [b""] * (max(self.vocabulary.values(), default=-1) + 1)
        for token, number in self.vocabulary.items():
            if number not in self._added:
                pieces[number] = piece(token)
            elif not self._added[number].special:
                pieces[number] = token.encode()
        return pieces

    def to_bytes(self) -> bytes:
        """Return the content of `tokenizer.json`."""
        return self._inner.to_str(pretty=False).encode()


class ModelEngine:
    """A wrapper of a sentencepiece `.model`, with the attributes of `JsonEngine`."""

    suffix = ".model"

    def __init__(self, content: bytes) -> None:
        library = require("sentencepiece", "loading a sentencepiece .model")
        self._content = content
        with _reported("is neither a tokenizer.json nor a sentencepiece .model"):
            self._inner = library.SentencePieceProcessor(model_proto=content)
            size = int(self._inner.vocab_size())
        if not 0 < size < MAX_VOCABULARY:
            raise TokenizerError(f"has {size} tokens; 1 to {MAX_VOCABULARY - 1} are accepted")
        names = [self._inner.id_to_piece(number) for number in range(size)]
        self.vocabulary = {name: number for number, name in enumerate(names)}
        self.special_tokens = {
            name: number for number, name in enumerate(names) if self._inner.is_control(number)
        }

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts."""
        for text in texts:
            if isinstance(text, str):
                text.encode()  # the library would silently drop a lone surrogate
            else:
                raise TypeError(type(text).__name__)
        with _reported("the tokenizer cannot encode this text"):
            return self._inner.encode(list(texts), out_type=int)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a text with special tokens; sentencepiece adds none."""
        return self.encode_chat(ChatText(text=text)).ids

    def encode_chat(self, chat: ChatText) -> Encoded:
        """Return the ids of what a chat template wrote, in which only its names are tokens."""
        names = pattern_of(self.special_tokens)
        return by_parts(chat, names, self.special_tokens, self._with_places)

    def _with_places(self, text: str) -> tuple[list[int], list[int], list[int]]:
        if not text:
            return [], [], []
        with _reported("the tokenizer cannot encode this text"):
            content = self._inner.encode(text, out_type="serialized_proto")
        return piece_places(content, text)

    def decode(self, ids: list[int], *, skip_special: bool) -> str:
        """Return the text of ids; the library itself omits special tokens."""
        with _reported("the tokenizer cannot decode these ids"):
            if skip_special:
                return self._inner.decode(ids)
            parts: list[str] = []
            for special, group in groupby(ids, self._inner.is_control):
                run = list(group)
                names = [self._inner.id_to_piece(number) for number in run]
                parts.append("".join(names) if special else self._inner.decode(run))
            return "".join(parts)

    def pieces(self) -> list[bytes]:
        """Bytes of text of each id."""
        controls = set(self.special_tokens.values())
        return [
            b"" if number in controls else space_piece(name)
            for name, number in sorted(self.vocabulary.items(), key=lambda item: item[1])
        ]

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        return self._content


Engine: TypeAlias = JsonEngine | ModelEngine


@contextmanager
def _reported(problem: str) -> Iterator[None]:
    """Turn any exception of the library, even a panic, into a TokenizerError."""
    try:
        yield
    except (TokenizerError, ImportError, MemoryError, UnicodeEncodeError, TypeError):
        raise
    except BaseException as error:
        if not is_library_error(error):
            raise
        reason = str(error)[:_REASON]
        raise TokenizerError(f"{problem} ({reason})") from None
