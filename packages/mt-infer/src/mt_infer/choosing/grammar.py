"""Grammars: the tokens that a JSON schema, a regular expression or a grammar allows next."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from mt_files import FileError, MissingExtraError, parse_json, require
from mt_tokenizer import Tokenizer
from torch import Tensor

from mt_infer.sampling import Sampling

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_COMPILED = 16  # number of grammars that are kept for further requests
_REASON = 300
_NO_WAY = "no token of the model leads on"


class Grammar:
    """The grammar of one continuation.

    Each result is a function of the tokens so far: the matcher first moves to their end, also back
    over rejected guesses.

    Args:
        matcher: A matcher of llguidance at its start.
        tokenizer: Tokenizer of the continuation.
        ends: Tokens that end the continuation.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: Tokenizer, ends: Iterable[int]) -> None:
        self._matcher, self._vocab_size = matcher, tokenizer.vocab_size
        self._ends = {each for each in ends if each < tokenizer.vocab_size}
        self._texts = self._ends.difference(tokenizer.special_tokens.values())
        self._read: list[int] = []

    def allowed(self, tokens: Sequence[int]) -> Tensor:
        """Return which tokens may follow; an end may follow a complete text, or by its name.

        Shape:
            Returns [vocab], bool.
        """
        self._go_to(tokens)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        flags = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        flags[list(self._texts)] = 0  # an end that is a text, too, is none in the middle
        if self._matcher.is_accepting():
            flags[list(self._ends)] = 1
        return torch.from_numpy(flags).bool()

    def is_over(self, tokens: Sequence[int]) -> bool:
        """Return whether nothing may follow."""
        self._go_to(tokens)
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def cut(self, tokens: Sequence[int], drafts: Sequence[int]) -> list[int]:
        """Return guesses of the next tokens up to the first that ends, or that may not follow."""
        self._go_to(tokens)
        first = next((n for n, each in enumerate(drafts) if each in self._ends), len(drafts))
        return list(drafts[: self._matcher.validate_tokens(list(drafts[:first]))])

    @property
    def problem(self) -> str:
        """Why no token may follow, for example at a limit of the matcher; empty if one may."""
        found = _in_one_line(self._matcher.get_error())
        return _NO_WAY if found.startswith("NoExtension") else found

    def _go_to(self, tokens: Sequence[int]) -> None:
        tokens, read = list(tokens), self._read
        same = len(read)
        if tokens[:same] != read:
            pairs = enumerate(zip(read, tokens, strict=False))
            same = next((n for n, (one, other) in pairs if one != other), len(tokens))
        self._matcher.rollback(len(read) - same)
        self._matcher.consume_tokens(tokens[same:])
        self._read = tokens


class Grammars:
    """The grammars of requests to one model.

    Args:
        tokenizer: The model's tokenizer; None for a model of token lists, without grammars.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known = lru_cache(_COMPILED)(self._compiled)

    def of(self, sampling: Sampling, ends: Iterable[int]) -> Grammar | None:
        """Return the grammar of a request, if it has one.

        Args:
            sampling: Parameters of the request.
            ends: Tokens that end its continuation.

        Raises:
            ValueError: llguidance refuses the grammar, the model has no tokenizer, or no token can
                begin the text.
            MissingExtraError: llguidance is not installed.
        """
        field = sampling.grammar_field
        if field is None:
            return None
        if self._tokenizer is None:
            raise ValueError(f"{field}: the model has no tokenizer to read it with; leave it out")
        matcher = self._known(field, _source(field, getattr(sampling, field))).deep_copy()
        grammar = Grammar(matcher, self._tokenizer, ends)
        if not grammar.allowed([]).any():
            raise ValueError(f"{field}: {grammar.problem or _NO_WAY}; use another one")
        return grammar

    def _compiled(self, field: str, source: str) -> LLMatcher:
        """Return the matcher of a grammar, before its first token."""
        library = _library(field)
        read = {
            "json_schema": library.LLMatcher.grammar_from_json_schema,
            "regex": library.LLMatcher.grammar_from_regex,
            "grammar": library.LLMatcher.grammar_from_lark,
        }[field]
        limits = library.LLParserLimits(verbose_errors=False)
        matcher = library.LLMatcher(self._trie, read(source), log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(f"{field}: llguidance refuses it: {_in_one_line(matcher.get_error())}")
        return matcher

    @cached_property
    def _trie(self) -> LLTokenizer:
        """The bytes of all tokens, as llguidance reads them."""
        assert self._tokenizer is not None, "of() has refused"  # noqa: S101
        library = _library("grammar")
        words = _Words(self._tokenizer)
        words.trie = library.LLTokenizer(library.TokenizerWrapper(words))
        return words.trie


class _Words:
    """A tokenizer in llguidance's form: the bytes of each token, and the names of special ones.

    Attributes:
        trie: The tokenizer of llguidance.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.trie = tokenizer, cast("LLTokenizer", None)
        self.tokens = tokenizer.engine.pieces()
        for number, piece in enumerate(self.tokens):
            # Such as sentencepiece's <unk>, which has a name and another text.
            if piece[:1] == b"<" and piece.decode(errors="replace") != tokenizer.decode([number]):
                self.tokens[number] = b""
        for name, number in tokenizer.special_tokens.items():
            self.tokens[number] = name.encode()
        # llguidance's own end is allowed after errors, too, so it is none of the model's tokens.
        self.eos_token_id, self.bos_token_id = len(self.tokens), None
        self.tokens.append(b"end")
        self.special_token_ids = [*tokenizer.special_tokens.values(), self.eos_token_id]

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text that the grammar forces; the first of them is then chosen."""
        # sentencepiece begins each text with a space, so it may be spelled in another way.
        for spell in (self._tokenizer.encode, self.trie.greedy_tokenize):
            found = spell(text)
            if b"".join(self.tokens[each] for each in found) == text.encode():
                return found
        return []


def _source(field: str, given: Mapping[str, Any] | str) -> str:
    """Return the text of a grammar, which is JSON for a schema."""
    try:
        if field == "json_schema":
            schema = parse_json(given, name=field) if isinstance(given, str) else dict(given)
            return json.dumps(schema, allow_nan=False)
        str(given).encode()
    except FileError as error:
        raise ValueError(f"{field}: {error.problem}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{field}: can't be read: {_in_one_line(str(error))}") from error
    return str(given)


def _library(field: str) -> Any:
    try:
        return require("llguidance", field)
    except MissingExtraError as error:
        raise MissingExtraError(f"{field} needs: pip install 'mt-infer[grammar]'") from error


def _in_one_line(text: str) -> str:
    text = " ".join(text.replace("<non-verbose/>", "").split())
    return text if len(text) <= _REASON else f"{text[:_REASON]}..."
