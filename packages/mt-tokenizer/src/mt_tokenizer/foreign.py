"""Tokenizers in the files of other libraries, as tokenizers of the `tokenizers` library."""

from __future__ import annotations

import re
from binascii import Error as Base64Error
from binascii import a2b_base64
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mt_files import parse_json, read_bytes, read_json, read_text, require, shorten

from mt_tokenizer.error import TokenizerError
from mt_tokenizer.pieces import byte_characters
from mt_tokenizer.schema import MAX_VOCABULARY

MAX_FILE = 1 << 28
_LINE = re.compile(rb"([A-Za-z0-9+/]+=*) (\d+)")
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_ENDS}"
)
_CL100K = _QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}"
)
_LLAMA3 = (
    *("<|begin_of_text|>", "<|end_of_text|>"),
    *(f"<|reserved_special_token_{n}|>" for n in range(4)),
    *("<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"),
    *(f"<|reserved_special_token_{n}|>" for n in range(5, 251)),
)
_QWEN_NAMES = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|extra_{n}|>" for n in range(205)),
)
# What a file of tiktoken's ranks does not say, by its number of ranks.
_PUBLISHED: dict[int, tuple[str, dict[str, int]]] = {
    50_256: (_GPT2, {"<|endoftext|>": 50_256}),
    100_256: (
        _CL100K,
        {
            "<|endoftext|>": 100_257,
            "<|fim_prefix|>": 100_258,
            "<|fim_middle|>": 100_259,
            "<|fim_suffix|>": 100_260,
            "<|endofprompt|>": 100_276,
        },
    ),
    128_000: (_CL100K, {name: 128_000 + n for n, name in enumerate(_LLAMA3)}),
    151_643: (_QWEN, {name: 151_643 + n for n, name in enumerate(_QWEN_NAMES)}),
    199_998: (_O200K, {"<|endoftext|>": 199_999, "<|endofprompt|>": 200_018}),
}
# Mistral's special tokens in a tekken.json that lists none, by their numbers.
_TEKKEN = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)


def is_ranks(content: bytes) -> bool:
    """Return whether a file holds tiktoken's ranks: lines of a token in base64 and its number."""
    return _LINE.fullmatch(content[: content.find(b"\n") % (len(content) + 1)].strip()) is not None


def is_tekken(record: object) -> bool:
    """Return whether a JSON value is the content of a tekken.json."""
    return isinstance(record, dict) and isinstance(record.get("config"), dict) and "vocab" in record


def from_ranks(content: bytes, special: Mapping[str, int]) -> Any:
    """Return the tokenizer of a file of tiktoken's ranks.

    Args:
        content: The file, such as the `tokenizer.model` of Llama 3 or `qwen.tiktoken`.
        special: Further special tokens.

    Raises:
        TokenizerError: The file is damaged, or is none of the published ones, whose rule for
            splitting text is known.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines()):
        found = _LINE.fullmatch(line.strip())
        if found is None or int(found[2]) != number:
            raise TokenizerError(
                f"line {number + 1} is not a token in base64 and the rank {number}"
            )
        ranks[_decoded(found[1], number)] = number
    if len(ranks) not in _PUBLISHED:
        known = ", ".join(f"{count:,}" for count in _PUBLISHED)
        raise TokenizerError(
            f"has {len(ranks):,} ranks, and the rule for splitting text is known for {known} of "
            "them; convert it into a tokenizer.json with transformers"
        )
    pattern, names = _PUBLISHED[len(ranks)]
    return byte_level(ranks, pattern, {**names, **special})


def from_tekken(record: Mapping[str, Any]) -> Any:
    """Return the tokenizer of Mistral's tekken.json.

    Special tokens have the first numbers, and byte sequences the others, in the order of their
    ranks.

    Raises:
        TokenizerError: The record is damaged.
    """
    config, vocab = record["config"], record["vocab"]
    size, count = (
        _size(config, name) for name in ("default_vocab_size", "default_num_special_tokens")
    )
    if not isinstance(vocab, list) or len(vocab) < size - count:
        raise TokenizerError(f"vocab has not the {size - count} entries that its config asks for")
    ranks: dict[bytes, int] = {}
    for number, entry in enumerate(vocab[: size - count]):
        if not isinstance(entry, dict) or entry.get("rank") != number:
            raise TokenizerError(f"vocab[{number}] has not the rank {number}")
        ranks[_decoded(str(entry.get("token_bytes")).encode(), number)] = number
    listed = record.get("special_tokens")
    names = dict(enumerate(_TEKKEN[:count] if listed is None else ()))
    for entry in listed or ():
        match entry:
            case {"rank": int(number), "token_str": str(name)}:
                names[number] = name
            case _:
                raise TokenizerError(
                    f"special_tokens has {shorten(entry)}; each needs a rank and a token_str"
                )
    special = {names.get(number, f"<SPECIAL_{number}>"): number for number in range(count)}
    return byte_level(ranks, str(config.get("pattern")), special, first=count)


def from_vocabulary(path: Path) -> Any:
    """Return the tokenizer of GPT-2's or Qwen's vocab.json with the merges.txt beside it.

    The folder's tokenizer_config.json says which one it is.

    Raises:
        TokenizerError: It is of another class, or is damaged.
    """
    tokenizers = require("tokenizers", "loading a vocab.json")
    config = _config(path.parent)
    kind = str(config.get("tokenizer_class", "GPT2Tokenizer")).removesuffix("Fast")
    if kind not in ("GPT2Tokenizer", "Qwen2Tokenizer"):
        raise TokenizerError(
            f"belongs to a {kind}, and GPT2Tokenizer and Qwen2Tokenizer are read from such files; "
            "convert it into a tokenizer.json with transformers"
        )
    vocab = read_json(path, limit=MAX_FILE)
    lines = read_text(path.with_name("merges.txt"), limit=MAX_FILE).split("\n")
    merges = [line.split(" ") for line in lines if line.strip() and not line.startswith("#version")]
    if not isinstance(vocab, dict) or any(len(pair) != 2 for pair in merges):
        raise TokenizerError("is no mapping, or merges.txt has a line that is no pair")
    named = [config.get(name) for name in ("eos_token", "bos_token", "unk_token", "pad_token")]
    contents = (each.get("content") if isinstance(each, dict) else each for each in named)
    found = [name for name in contents if isinstance(name, str)] or ["<|endoftext|>"]
    special = {name: vocab[name] for name in found if name in vocab} | _added(config)
    engine = _bpe(tokenizers, dict(vocab), [tuple(pair) for pair in merges], special)
    if kind == "GPT2Tokenizer":
        prefix = bool(config.get("add_prefix_space"))
        engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    else:
        engine.normalizer = tokenizers.normalizers.NFC()
        engine.pre_tokenizer = _split(tokenizers, _QWEN)
    return engine


def from_word_pieces(path: Path) -> Any:
    """Return the tokenizer of BERT's vocab.txt: a token a line.

    Raises:
        TokenizerError: It lacks one of BERT's special tokens.
    """
    tokenizers = require("tokenizers", "loading a vocab.txt")
    config = _config(path.parent)
    words = read_text(path, limit=MAX_FILE).removesuffix("\n").split("\n")
    vocab = {word.rstrip("\r"): number for number, word in enumerate(words)}
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    if missing := [name for name in special if name not in vocab]:
        raise TokenizerError(f"has no {', '.join(missing)}; give the vocab.txt of a BERT model")
    engine = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))  # noqa: S106
    engine.normalizer = tokenizers.normalizers.BertNormalizer(
        lowercase=config.get("do_lower_case", True) is True,
        strip_accents=config.get("strip_accents"),
        handle_chinese_chars=config.get("tokenize_chinese_chars", True) is True,
    )
    engine.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    engine.decoder = tokenizers.decoders.WordPiece()
    engine.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(name, vocab[name]) for name in ("[CLS]", "[SEP]")],
    )
    engine.add_special_tokens(special)
    return engine


def byte_level(
    ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int], *, first: int = 0
) -> Any:
    """Return the byte-level BPE tokenizer that merges the pair of the lowest rank first.

    Args:
        ranks: Rank of each sequence of bytes.
        pattern: Regular expression of the parts of text; merges stay within a part.
        special: Numbers of the special tokens.
        first: Number of the rank 0.
    """
    tokenizers = require("tokenizers", "loading tiktoken's ranks")
    characters = byte_characters()
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise TokenizerError(f"has no token for the byte {missing[0]}")
    names = {token: "".join([characters[byte] for byte in token]) for token in ranks}
    # A token comes of each pair of known parts: whichever pair meets in a text has its rank.
    merges = [
        (names[token[:cut]], names[token[cut:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    vocab = {names[token]: first + rank for token, rank in ranks.items()}
    engine = _bpe(tokenizers, vocab, merges, special, ignore_merges=True)
    engine.pre_tokenizer = _split(tokenizers, pattern)
    return engine


def _bpe(
    tokenizers: Any,
    vocab: dict[str, int],
    merges: Iterable[tuple[str, ...]],
    special: Mapping[str, int],
    **how: Any,
) -> Any:
    largest = max([*vocab.values(), *special.values()], default=0)
    if largest >= MAX_VOCABULARY:
        raise TokenizerError(f"has the id {largest}; up to {MAX_VOCABULARY - 1} are accepted")
    try:
        model = tokenizers.models.BPE(vocab | dict(special), list(merges), **how)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise TokenizerError(f"is damaged: {shorten(str(error))}") from None
    engine = tokenizers.Tokenizer(model)
    engine.decoder = tokenizers.decoders.ByteLevel()
    engine.add_special_tokens(
        [tokenizers.AddedToken(name, normalized=False, special=True) for name in special]
    )
    return engine


def _split(tokenizers: Any, pattern: str) -> Any:
    try:
        regex = tokenizers.Regex(pattern)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise TokenizerError(
            f"pattern {shorten(pattern)} is no regular expression: {error}"
        ) from None
    return tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(regex, behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def added_tokens(folder: Path) -> dict[str, int]:
    """Return the special tokens that a folder's tokenizer_config.json adds."""
    return _added(_config(folder))


def _added(config: Mapping[str, Any]) -> dict[str, int]:
    listed = config.get("added_tokens_decoder")
    found: dict[str, int] = {}
    for number, entry in listed.items() if isinstance(listed, dict) else ():
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise TokenizerError(f"added_tokens_decoder has {shorten(entry)} for {shorten(number)}")
        if number.isascii() and number.isdigit() and entry.get("special"):
            found[entry["content"]] = int(number)
    return found


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / "tokenizer_config.json"
    config = parse_json(read_bytes(path, limit=1 << 26), name=path) if path.exists() else {}
    if not isinstance(config, dict):
        raise TokenizerError(f"{path} is no mapping of fields; restore it")
    return config


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MAX_VOCABULARY:
        raise TokenizerError(f"config.{name} is {shorten(value)}; it must be a size")
    return value


def _decoded(text: bytes, number: int) -> bytes:
    try:
        return a2b_base64(text, strict_mode=True)
    except (Base64Error, ValueError):
        raise TokenizerError(f"the token of rank {number} is not base64") from None
