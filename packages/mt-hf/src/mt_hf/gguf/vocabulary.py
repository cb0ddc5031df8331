"""A tokenizer in the fields of GGUF."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from mt_files import require, shorten

from mt_hf.family.error import ExchangeError
from mt_hf.gguf.splitting import NEAREST, splitting_of

if TYPE_CHECKING:
    from mt_tokenizer import Tokenizer

_ENDS = ("eos", "eot", "eom")  # the fields of tokens that end a text
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class Kind(IntEnum):
    """The kinds of tokens, by their numbers in the format."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What the format says of a tokenizer.

    Attributes:
        model: `gpt2` for byte-level BPE, or `llama` for sentencepiece's BPE.
        tokens: Name and kind of each token, by id.
        rest: Other fields: merges or scores, and the rule for splitting text.
        is_split_alike: Whether llama.cpp has the tokenizer's rule for splitting text.
    """

    model: str
    tokens: Mapping[int, tuple[str, Kind]]
    rest: Mapping[str, Any]
    is_split_alike: bool = True


def vocabulary_fields(
    tokenizer: Tokenizer,
    *,
    rows: int,
    ends: Collection[int],
    begins: str | None = None,
    splitting: str | None = None,
) -> tuple[dict[str, Any], bool]:
    """Return the fields of a tokenizer by key, and whether llama.cpp splits text as it does.

    Args:
        tokenizer: The tokenizer.
        rows: Number of rows of the embedding; ids without a token are unused.
        ends: Tokens that end a text, at most three.
        begins: Name of the token that begins a text, for sentencepiece, whose file has none.
        splitting: llama.cpp's name of the rule by which text is split; None to find it.

    Raises:
        ExchangeError: llama.cpp would make other tokens of a text.
    """
    if tokenizer.suffix == ".model":
        found = _sentencepiece(tokenizer.to_bytes())
    else:
        found = _json(json.loads(tokenizer.to_bytes()), splitting)
    unused = {number: (f"[PAD{number}]", Kind.UNUSED) for number in range(rows)}
    tokens = [token for _, token in sorted({**unused, **found.tokens}.items())]
    fields = {
        "model": found.model,
        "tokens": [name for name, _ in tokens],
        "token_type": [int(kind) for _, kind in tokens],
        **found.rest,
        **_added(tokenizer, begins),
        **_end_fields(tokenizer, ends),
    }
    if "scores" in found.rest:
        fields["scores"] = [found.rest["scores"].get(number, 0.0) for number in range(rows)]
    unknown = (n for n, (_, kind) in found.tokens.items() if kind is Kind.UNKNOWN)
    if (number := next(unknown, None)) is not None:
        fields["unknown_token_id"] = number
    named = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    return named, found.is_split_alike


def _end_fields(tokenizer: Tokenizer, ends: Collection[int]) -> dict[str, int]:
    """Return the fields of the tokens that end a text, the tokenizer's own first."""
    ordered = sorted(ends or {tokenizer.eod_id}, key=lambda each: (each != tokenizer.eod_id, each))
    if len(ordered) > len(_ENDS):
        raise ExchangeError(
            f"{len(ordered)} tokens end a text ({shorten(ordered)}), and a GGUF file names at most "
            f"{len(_ENDS)}; leave eos_token_id of generation_config.json fewer"
        )
    return {f"{name}_token_id": each for name, each in zip(_ENDS, ordered, strict=False)}


def _added(tokenizer: Tokenizer, begins: str | None) -> dict[str, Any]:
    """Return the fields of the tokens before and after a prompt."""
    plain, whole = tokenizer.encode("a"), tokenizer.encode_prompt("a")
    if begins is not None:
        whole = [tokenizer.special_tokens[begins], *whole]
    at = next((n for n in range(3) if whole[n : n + len(plain)] == plain), None)
    before = whole[:at]
    after = [] if at is None else whole[at + len(plain) :]
    if at is None or len(before) > 1 or len(after) > 1:
        raise ExchangeError(
            f"the tokenizer puts the tokens {shorten(whole)} around a text of {shorten(plain)}; a "
            "GGUF file has room for one before and one after it"
        )
    fields: dict[str, Any] = {"add_bos_token": bool(before), "add_eos_token": bool(after)}
    return fields | ({"bos_token_id": before[0]} if before else {})


def _json(record: Mapping[str, Any], splitting: str | None) -> Vocabulary:
    """Return the vocabulary of a tokenizer.json."""
    model = record["model"]
    decoders = (record.get("decoder") or {}).get("decoders") or [record.get("decoder") or {}]
    kinds = {each.get("type") for each in decoders}
    if model.get("type") != "BPE" or not kinds & {"ByteLevel", "ByteFallback"}:
        raise ExchangeError(
            f"the tokenizer is a {model.get('type')} that decodes with {sorted(map(str, kinds))}; "
            "a GGUF file takes byte-level BPE, and sentencepiece's BPE"
        )
    vocab: dict[str, int] = model["vocab"]
    merges = [each.split(" ") if isinstance(each, str) else each for each in model["merges"]]
    tokens = {number: (name, Kind.NORMAL) for name, number in vocab.items()}
    for each in record["added_tokens"]:
        kind = Kind.CONTROL if each["special"] else Kind.USER_DEFINED
        tokens[each["id"]] = (each["content"], kind)
    if "ByteLevel" in kinds:
        joined = [" ".join(pair) for pair in merges]
        rule = splitting or splitting_of(record)
        rest = {"pre": rule or NEAREST, "merges": joined}
        return Vocabulary(model="gpt2", tokens=tokens, rest=rest, is_split_alike=rule is not None)
    for number, (name, kind) in tokens.items():
        if name == model.get("unk_token"):
            tokens[number] = (name, Kind.UNKNOWN)
        elif _BYTE.fullmatch(name) and kind is Kind.NORMAL:
            tokens[number] = (name, Kind.BYTE)
    made = [vocab[first + second] for first, second in merges]
    if made != sorted(made):
        raise ExchangeError(
            "the tokenizer's merges are not in the order of the tokens that they make, by which "
            "llama.cpp merges; export a folder with its tokenizer.model"
        )
    scores = {n: -float(n) for n, (_, kind) in tokens.items() if kind is Kind.NORMAL}
    prefix = _prepends(record)
    return Vocabulary(
        model="llama",
        tokens=tokens,
        rest={"pre": "default", "scores": scores, "add_space_prefix": prefix},
    )


def _prepends(record: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer.json puts a space before a text."""
    normalizer, before = record.get("normalizer") or {}, record.get("pre_tokenizer") or {}
    steps = [*normalizer.get("normalizers", [normalizer]), *before.get("pretokenizers", [before])]
    return any(
        step.get("type") == "Prepend"
        or (step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )


def _sentencepiece(content: bytes) -> Vocabulary:
    """Return the vocabulary of a sentencepiece model."""
    library = require("sentencepiece", "reading a sentencepiece .model")
    model = library.SentencePieceProcessor(model_proto=content)
    numbers = range(model.vocab_size())
    tests = {
        Kind.UNKNOWN: model.is_unknown,
        Kind.CONTROL: model.is_control,
        Kind.UNUSED: model.is_unused,
        Kind.BYTE: model.is_byte,
    }
    tokens = {
        number: (
            model.id_to_piece(number),
            next((kind for kind, holds in tests.items() if holds(number)), Kind.NORMAL),
        )
        for number in numbers
    }
    scores = {number: float(model.get_score(number)) for number in numbers}
    if not _is_bpe([scores[n] for n, (_, kind) in tokens.items() if kind is Kind.NORMAL]):
        raise ExchangeError(
            "the tokenizer is sentencepiece's Unigram; a GGUF file of these families takes its BPE"
        )
    prefix = model.encode("a", out_type=str)[0].startswith(_SPACE)
    rest = {"pre": "default", "scores": scores, "add_space_prefix": prefix}
    return Vocabulary(model="llama", tokens=tokens, rest=rest)


def _is_bpe(scores: Sequence[float]) -> bool:
    """Tell BPE, whose scores are ranks, from Unigram, whose scores are logarithms."""
    return all(score == round(score) for score in scores)
